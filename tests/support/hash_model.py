"""A computable model over a paged store, and what a request gets from it alone.

`PagedModel` obeys the Runner protocol over a paged store of numbers. The "K,V" of
a block hashes its tokens and all K,V before it, read back from the pages; what a
step writes hashes the context and the block, also read back. Hence a wrong page, a
stale or unpersisted K,V, a wrong context length or a lost step changes the output.
Free pages are overwritten with noise before every launch.

Kinds of models: `persist` needs a forward for the K,V of a final block, `edit` does not, and
`shift` is `persist` with shifted logits: that forward also gives the next block's first token.

The oracle `alone` has no pages, batches or scheduler: one list of numbers.
"""

import numpy as np

from jdllm.options import sampling_params
from jdllm.scheduler import request, scheduler
from jdllm.scheduler.batch import CommittedBlock, LaunchResult, RowResult
from jdllm.scheduler.rows import interface
from jdllm.scheduler.rows.block import BlockRows

B, VOCAB, MASK, EOS, STOP_ID = 4, 26, 3, 25, 24
CONTEXT = 64
MAX_PREFILL_TOKENS = 7 * B
PLACE = np.random.default_rng(0).integers(0, 2**63, CONTEXT + 8 * B, dtype=np.uint64) | 1


def scramble(x):
    """Returns uniform 64-bit hashes of a uint64 array (splitmix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def block_kv(context, tokens, start):
    """Returns one block's K,V; a masked position looks like a literal mask id, as in a model."""
    places = PLACE[start : start + B]
    parts = [context * PLACE[:start], (tokens.astype(np.uint64) + np.uint64(1)) * places]
    return scramble(np.concatenate(parts).sum() + places)


def step(kind, visible, block_tokens, masked, editable, seed, num_steps):
    """One denoising step from all visible K,V: (tokens, masked, is_final, is_done, edits)."""
    tokens, masked = block_tokens.copy(), masked.copy()
    if kind != "edit" and not masked.any():
        return tokens, masked, True, True, 0
    seen = (visible * PLACE[: len(visible)]).sum()
    salt = np.arange(3 * B, dtype=np.uint64) + np.uint64((seed * 10_000 + num_steps * 100) % 2**64)
    draw = scramble(seen + salt).reshape(3, B)
    new = 4 + (draw[0] % np.uint64(VOCAB - 4)).astype(np.int32)
    written = masked & (draw[1] % np.uint64(2) == 0)
    if masked.any() and not written.any():
        written[np.argmax(masked)] = True
    edited = np.zeros(B, bool)
    if kind == "edit" and num_steps < 10:
        edited = editable & ~masked & (draw[2] % np.uint64(8) == 0)
    is_done = kind == "edit" and not (written | edited).any()
    tokens[written | edited] = new[written | edited]
    masked &= ~written
    is_final = is_done if kind == "edit" else not masked.any()
    return tokens, masked, is_final, is_done, int(edited.sum())


def next_token(visible):
    """Returns the token that follows the block at the end of all visible K,V."""
    draw = scramble((visible * PLACE[: len(visible)]).sum(keepdims=True))[0]
    return 4 + int(draw % np.uint64(VOCAB - 4))


class PagedModel:
    """Executes batches on a store of `num_pages` pages exactly as the rows say.

    It knows no end of a request: what follows in the launch is surplus for the scheduler.
    `fuses`: a forward that persists a block also runs the first step of the next.
    `interrupts`, a `random.Random`: some launches end early, as when the host asks for it.
    """

    def __init__(self, kind, num_pages, page_size, fuses=False, interrupts=None):
        self.interrupts, self.num_asked = interrupts, 0
        self.kind, self.page_size, self.fuses = kind, page_size, fuses and kind != "shift"
        self.store = np.zeros((num_pages, page_size), np.uint64)
        self.blocks = {}

    def slots(self, one, start, stop):
        positions = np.arange(start, stop)
        pages = np.asarray(one.stay.pages)[positions // self.page_size]
        return pages, positions % self.page_size

    def write_block(self, one, start, tokens):
        """Writes K,V of one block in place and returns all that its queries see."""
        assert start // self.page_size >= len(one.stay.prefix_nodes), "wrote a shared page"
        context = self.store[self.slots(one, 0, start)]
        self.store[self.slots(one, start, start + B)] = block_kv(context, tokens, start)
        return self.store[self.slots(one, 0, start + B)]

    def launch(self, batch):
        """Runs the launch at once, as its place in the order of launches demands."""
        return Done(self.execute(batch))

    def begin_round(self):
        pass

    def interrupt(self):
        self.num_asked += 1

    def execute(self, batch):
        if batch.bucket.denoises:
            num_steps = batch.max_steps
            if self.interrupts and self.interrupts.random() < 0.3:
                num_steps = self.interrupts.randint(1, num_steps)
            rows = tuple(self.decode(row, num_steps) for row in batch.rows)
            return LaunchResult(rows=rows, num_steps=num_steps)
        for row in batch.rows:
            self.prefill(row)
        return LaunchResult(rows=(RowResult(),) * len(batch.rows))

    def prefill(self, row):
        for start in range(row.start, row.start + row.num_tokens, B):
            tokens = np.array(row.request.token_ids[start : start + B])
            self.write_block(row.request, start, tokens)

    def decode(self, row, max_steps):
        """Runs up to `max_steps` forwards of a row, block after block while pages last."""
        one = row.request
        if row.is_fresh:
            head = one.tokens(row.start, one.num_tokens)
            self.blocks[one.stay.slot] = Block(one.request_id, row.start, head)
        block, committed, nfe, num_edited = self.blocks[one.stay.slot], [], 0, 0
        assert block.owner == one.request_id, "another row's slot"
        capacity = len(one.stay.pages) * self.page_size
        while nfe < max_steps and block.start + B <= capacity:
            nfe += 1
            if block.is_final and self.fuses and block.start + 2 * B <= capacity:
                self.write_block(one, block.start, block.tokens)
                block = Block(one.request_id, block.start + B, [])
            visible = self.write_block(one, block.start, block.tokens)
            if block.is_final and self.kind == "shift":
                block = Block(one.request_id, block.start + B, [next_token(visible)])
                continue
            was_final = block.is_final
            block.tokens, block.masked, block.is_final, is_done, edits = step(
                self.kind,
                visible,
                block.tokens,
                block.masked,
                block.editable,
                one.seed,
                block.step,
            )
            num_edited += edits
            block.step += not was_final
            if block.is_final and not was_final:
                committed.append(committed_block(block.tokens, nfe))
            if is_done:
                block = Block(one.request_id, block.start + B, [])
        self.blocks[one.stay.slot] = block
        return RowResult(
            committed=tuple(committed), context_len=block.start, nfe=nfe, num_edited=num_edited
        )


def committed_block(tokens, nfe):
    count = len(tokens)
    return CommittedBlock(
        tokens=tokens, nfe=nfe, steps=np.ones(count, np.int32), logprobs=np.zeros(count, np.float32)
    )


class Done:
    def __init__(self, outcome):
        self.outcome = outcome

    def is_ready(self):
        return True

    def result(self):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Block:
    """The block in flight of a slot."""

    def __init__(self, owner, start, head):
        self.owner, self.start, self.step, self.is_final = owner, start, 0, len(head) == B
        self.tokens = np.full(B, MASK, np.int32)
        self.tokens[: len(head)] = head
        self.masked = np.arange(B) >= len(head)
        self.editable = self.masked


def decode_text(ids):
    return "".join(chr(ord("a") + i) for i in ids)


def ends_at(output, one):
    """Returns how many tokens are kept once some rule holds, scanning one by one."""
    ends = set(one.sampling.stop_token_ids)
    if not one.sampling.ignore_eos:
        ends |= set(one.eos_token_ids)
    for length in range(1, len(output) + 1):
        stopped = any(s in decode_text(output[:length]) for s in one.sampling.stop)
        if stopped or output[length - 1] in ends or length == one.max_new_tokens:
            return length
    return None


def alone(kind, one):
    """Returns (output ids, forwards) of a request served by itself."""
    committed, kv, forwards = list(one.prompt_ids), np.zeros(0, np.uint64), 0
    while True:
        start = len(kv)
        tokens = np.array((committed + [MASK] * B)[start : start + B])
        masked = np.arange(start, start + B) >= len(committed)
        editable, is_done = masked, not masked.any()
        count, was_final = 0, is_done
        while not is_done:
            visible = np.concatenate([kv, block_kv(kv, tokens, start)])
            tokens, masked, is_final, is_done, _ = step(
                kind, visible, tokens, masked, editable, one.seed, count
            )
            count, forwards = count + 1, forwards + 1
            if is_final and not was_final:
                committed[start:] = tokens.tolist()
                output = committed[len(one.prompt_ids) :]
                length = ends_at(output, one)
                if length is not None:
                    return output[:length], forwards
            was_final = is_final
        kv = np.concatenate([kv, block_kv(kv, tokens, start)])
        if kind == "shift" and len(committed) == len(kv):
            forwards += start < len(one.prompt_ids) == len(kv)  # of the prompt's last block
            committed.append(next_token(kv))


def random_request(rng, name):
    some = rng.randint(1, 40)
    length = rng.choice([1, B - 1, B, B + 1, 2 * B, 3 * B, 3 * B + 2, 9 * B, 9 * B, some, some])
    # Two common beginnings that part inside a block, and one of mask ids only.
    shared = rng.choice([[5] * 22, [5] * 9 + [6] * 13, [MASK] * 40])
    shared = shared[: rng.choice([0, 6, 22, 40, 40])]
    prompt = (shared + [rng.choice([MASK, 4, 5, 6]) for _ in range(length)])[:length]
    stop = tuple("".join(rng.choices("efgh", k=2)) for _ in range(rng.choice([0, 0, 1, 2])))
    return request.Request(
        request_id=name,
        prompt_ids=prompt,
        sampling=sampling_params.SamplingParams(
            stop=stop,
            stop_token_ids=rng.choice([(), (STOP_ID,)]),
            ignore_eos=rng.random() < 0.5,
        ),
        max_new_tokens=rng.choice([1, 2, B, rng.randint(1, 24), CONTEXT - length, 20]),
        eos_token_ids=(EOS,),
        seed=rng.randint(0, 3),
    )


def build(
    page_size,
    with_cache,
    policy,
    num_pages,
    rows,
    decode_steps=1,
    launches_ahead=0,
    is_shifted=False,
    is_causal=False,
):
    """Returns a scheduler and its buckets."""
    config = interface.RowConfig(
        block_size=B,
        page_size=page_size,
        num_pages=num_pages,
        max_running_requests=rows,
        context_length=CONTEXT,
        prefill_token_budget=5 * B,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        has_prefix_cache=with_cache,
        detokenize=decode_text,
        decode_steps=decode_steps,
        launches_ahead=launches_ahead,
        is_shifted=is_shifted,
        is_causal=is_causal,
    )
    made = scheduler.Scheduler(BlockRows.build(config), policy=policy)
    return made, made.rows.buckets()
