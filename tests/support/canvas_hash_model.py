"""A computable full-attention model over a store of pages, and what a request gets from it alone.

`CanvasModel` obeys the Runner protocol. A token is a hash of prompt, seed, position and how often
its row has begun; which masked positions a step writes is random. Each row stamps its pages, and
finds its own stamps there in the next launch, or the pages are another's. The oracle
`expected` has no pages, batches or scheduler.
"""

import zlib

import numpy as np
from support.hash_model import EOS, MASK, STOP_ID, VOCAB, Done, decode_text

from jdllm.options import sampling_params
from jdllm.scheduler import request, scheduler
from jdllm.scheduler.batch import CommittedBlock, LaunchResult, RowResult
from jdllm.scheduler.rows import canvas, interface
from jdllm.scheduler.rows.canvas import CanvasBucket, CanvasBuckets, CanvasRows

CONTEXT, PAGE, BLOCK = 64, 8, 4


def token_of(one, position, epoch):
    """Returns what the model writes at a position of the canvas."""
    words = repr((one.prompt_ids, one.suffix_ids, one.seed, position, epoch)).encode()
    return 4 + zlib.crc32(words) % (VOCAB - 4)


def expected(one, stays):
    """Returns all tokens of the output's places, uncut.

    `stays`: (epoch, output tokens when it began) of each stay in a row.
    """
    output = []
    for (epoch, begin), (_, end) in zip(stays, [*stays[1:], (0, one.max_new_tokens)], strict=True):
        assert begin == len(output)
        for place in range(begin, end):
            position = len(one.prompt_ids) + place
            output.append(one.given.get(place, token_of(one, position, epoch)))
    return output


class Row:
    """A canvas in its slot."""

    def __init__(self, one):
        stay = one.stay
        self.owner, self.stay, self.epoch = one.request_id, stay, one.num_preemptions
        self.is_finished = False
        self.tokens = np.array([MASK if token is None else token for token in stay.canvas_ids])
        self.masked = np.array([token is None for token in stay.canvas_ids])
        self.start, self.end = len(one.prompt_ids), stay.canvas_end
        assert stay.canvas_ids[self.start : one.num_tokens] == one.output_ids, (
            "committed, not given"
        )
        assert not self.masked[: self.start].any() and not self.masked[self.end :].any()
        self.settled = self.start
        self.steps = np.zeros(len(self.tokens), np.int32)
        self.num_steps = 0


class CanvasModel:
    """Executes canvas launches exactly as their rows say; `rng` decides what settles when."""

    def __init__(self, num_pages, shapes, rng):
        self.shapes, self.rng = shapes, rng
        self.store = np.zeros((num_pages, PAGE), np.int64)
        self.rows = {}
        self.num_launches = 0
        self.fails = set()

    def launch(self, batch):
        """Runs the launch at once, as its place in the order of launches demands."""
        self.num_launches += 1
        if self.num_launches in self.fails:
            return Done(RuntimeError("device fault"))
        return Done(self.execute(batch))

    def begin_round(self):
        """Nothing."""

    def interrupt(self):
        """Nothing: which launches end early is drawn."""

    def reset(self):
        self.rows.clear()
        self.store[:] = self.rng.getrandbits(62)

    def execute(self, batch):
        self.check_bucket(batch)
        for row in batch.rows:
            self.begin(row)
        states = [self.rows[row.request.stay.slot] for row in batch.rows]
        before = [state.settled for state in states]
        nfe = np.zeros(len(states), int)
        used = num_steps = 0
        # Some launches end early, as when the host asks for it.
        most = self.rng.choice([batch.max_steps, batch.max_steps, 1])
        limit = len(states) if batch.max_finished is None else batch.max_finished
        while num_steps < most and not all(state.is_finished for state in states):
            num_steps += 1
            for i, (row, state) in enumerate(zip(batch.rows, states, strict=True)):
                if not state.is_finished:
                    self.step(row.request, state)
                    nfe[i] += 1
                    used += len(state.tokens)
            if sum(state.is_finished for state in states) > limit:
                break
        results = [
            RowResult(committed=committed(state, begin, count), nfe=int(count))
            for state, begin, count in zip(states, before, nfe, strict=True)
        ]
        return LaunchResult(
            rows=tuple(results), num_steps=num_steps, computed_tokens=used, real_tokens=used
        )

    def check_bucket(self, batch):
        assert isinstance(batch.bucket, CanvasBucket)
        tokens = sum(canvas.packed_len(row.num_tokens) for row in batch.rows)
        assert tokens <= batch.bucket.tokens, "more tokens than a forward holds"
        is_whole, first = batch.bucket.is_whole, batch.rows[0]
        fitting = [
            bucket
            for bucket in self.shapes.all()
            if bucket.is_whole == is_whole
            and bucket.rows >= len(batch.rows)
            and bucket.tokens >= tokens
        ]
        assert batch.bucket == min(fitting, key=lambda bucket: (bucket.rows, bucket.tokens))
        always = first.request.sampling.dllm.algorithm == "Dream"
        assert is_whole == (len(batch.rows) == 1 and (always or first.is_fresh))
        if is_whole and first.is_fresh:
            assert batch.max_steps == 1, "a window in a launch without"
        pages = [page for row in batch.rows for page in row.request.stay.pages]
        assert len(set(pages)) == len(pages), "two rows share a page"

    def begin(self, row):
        one = row.request
        assert (row.start, row.num_tokens) == (0, len(one.stay.canvas_ids))
        assert len(one.stay.pages) == -(-row.num_tokens // PAGE), (
            "not the pages of the whole canvas"
        )
        stamp = zlib.crc32(f"{one.request_id} {one.num_preemptions}".encode())
        if row.is_fresh:
            self.rows[one.stay.slot] = Row(one)
        else:
            assert (self.store[one.stay.pages] == stamp).all(), "another wrote to its pages"
        state = self.rows[one.stay.slot]
        assert state.owner == one.request_id and state.stay is row.stay, "another row's slot"
        self.store[one.stay.pages] = stamp

    def step(self, one, state):
        """Writes some masked positions, anywhere; the row ends early at a settled end token."""
        state.num_steps += 1
        masked = np.flatnonzero(state.masked)
        count = min(len(masked), self.rng.choice([1, 1, 2, 3, 6]))
        chosen = self.rng.sample(masked.tolist(), count)
        if self.rng.random() < 0.5:
            chosen = masked[:count].tolist()
        for position in chosen:
            state.tokens[position] = token_of(one, position, state.epoch)
            state.masked[position] = False
            state.steps[position] = state.num_steps
        rest = np.flatnonzero(state.masked)
        state.settled = int(rest[0]) if len(rest) else state.end
        ended = set(state.tokens[state.start : state.settled].tolist()) & set(one.end_token_ids)
        shown = state.start + one.max_new_tokens
        state.is_finished = not len(rest) or bool(ended) or state.settled >= shown


def committed(state, begin, nfe):
    if begin == state.settled:
        return ()
    settled = slice(begin, state.settled)
    return (
        CommittedBlock(
            tokens=state.tokens[settled].copy(),
            nfe=int(nfe),
            steps=state.steps[settled].copy(),
            logprobs=-state.tokens[settled].astype(np.float32),
        ),
    )


def random_request(rng, name):
    """Returns a request with or without suffix and given tokens, for any algorithm."""
    length = rng.choice([1, 3, BLOCK, 9, rng.randint(1, 40)])
    suffix = [rng.choice([MASK, 4, 5]) for _ in range(rng.choice([0, 0, 0, 1, 7]))]
    room = CONTEXT - length - len(suffix)
    wanted = min(room, rng.choice([1, 2, BLOCK, rng.randint(1, 24), room]))
    given = {place: rng.randrange(VOCAB) for place in rng.sample(range(wanted), wanted // 5)}
    stop = tuple("".join(rng.choices("efgh", k=2)) for _ in range(rng.choice([0, 0, 1])))
    dllm = rng.choice(
        [
            {"algorithm": "FullAttnMultiBlock", "block_length": rng.choice([3, BLOCK, 32])},
            {"algorithm": "Dream"},
        ]
    )
    return request.Request(
        request_id=name,
        prompt_ids=[rng.choice([MASK, 4, 5, 6]) for _ in range(length)],
        suffix_ids=suffix,
        given=given,
        sampling=sampling_params.SamplingParams(
            stop=stop,
            stop_token_ids=rng.choice([(), (STOP_ID,)]),
            ignore_eos=rng.random() < 0.5,
            dllm=sampling_params.DllmParams(**dllm),
        ),
        max_new_tokens=wanted,
        eos_token_ids=(EOS,),
        seed=rng.randint(0, 3),
    )


def build(num_pages, rows, tokens, **changes):
    """Returns a scheduler of canvases and its buckets."""
    shapes = CanvasBuckets.default(
        rows, tokens, CONTEXT, short_row_tokens=16, whole_tokens=(16, 40, CONTEXT)
    )
    options = {
        "block_size": BLOCK,
        "page_size": PAGE,
        "num_pages": num_pages,
        "max_running_requests": rows,
        "context_length": CONTEXT,
        "prefill_token_budget": tokens,
        "max_prefill_tokens": tokens,
        "detokenize": decode_text,
    }
    config = interface.RowConfig(**(options | changes))
    return scheduler.Scheduler(CanvasRows(config, shapes)), shapes
