"""`suffix` and `given` of the offline API: the real scheduler over a runner that can be computed.

The runner writes at position p a letter that follows from p and from every fixed token of the
canvas, so a test knows each output; it commits four tokens a launch.
"""

import asyncio
import dataclasses
import pathlib

import numpy as np
import pytest

import jdllm
from jdllm import errors
from jdllm.device import facts
from jdllm.engine import core, llm
from jdllm.engine.start import build, sizing
from jdllm.options import config, sampling_params
from jdllm.scheduler.batch import CommittedBlock, LaunchResult, RowResult
from jdllm.scheduler.rows import interface
from jdllm.scheduler.rows.canvas import CanvasBucket, CanvasRows
from jdllm.scheduler.scheduler import Scheduler
from jdllm.spec import AttentionPattern, DiffusionSpec, ModelSpec

BLOCK, PAGE, CONTEXT, ROWS, VOCAB = 8, 16, 128, 3, 256
STRIDE = 4
SPEC = ModelSpec(
    architecture="LLaDAModelLM",
    model_type="llada",
    vocab_size=VOCAB,
    hidden_size=1,
    num_layers=1,
    num_query_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=CONTEXT,
    diffusion=DiffusionSpec(
        block_size=BLOCK,
        mask_token_id=None,
        eos_token_ids=(0,),
        attention_pattern=AttentionPattern.FULL,
    ),
    rotary_dim=1,
)
OPTIONS = {"algorithm": "FullAttnMultiBlock", "block_length": BLOCK}
BOS = 1


def written(canvas, place):
    """Returns the token at `place` of a canvas with None where it is to be written."""
    if canvas[place] is not None:
        return canvas[place]
    return 97 + (sum(token for token in canvas if token is not None) + place) % 26


def expected(prompt, count, suffix="", given=()):
    """Returns the text of `count` tokens after `prompt`; without a suffix whole blocks are seen."""
    whole = count if suffix else -(-count // BLOCK) * BLOCK
    prompt = [BOS, *prompt.encode()]
    places = [dict(given).get(place) for place in range(whole)]
    canvas = [*prompt, *places, *suffix.encode()]
    return bytes(written(canvas, len(prompt) + i) for i in range(count)).decode()


class ByteTokenizer:
    """One token per UTF-8 byte; a text begins with BOS."""

    eos_token_id = 0

    def encode(self, text, *, add_special_tokens=True):
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids, *, skip_special_tokens=True):
        return bytes(i for i in ids if i != BOS).decode(errors="replace")


class ComputableRunner:
    """Obeys `batch_lib.Runner`; a launch is done when it is asked for."""

    def __init__(self):
        self._rows = {}  # request id -> (canvas, tokens settled so far)

    def launch(self, batch):
        assert isinstance(batch.bucket, CanvasBucket)
        return Done([self._row(row) for row in batch.rows])

    def begin_round(self):
        pass

    def interrupt(self):
        pass

    def _row(self, row):
        request = row.request
        if row.is_fresh:
            self._rows[request.request_id] = (row.stay.canvas_ids, 0)
        canvas, settled = self._rows[request.request_id]
        begin = len(request.prompt_ids) + settled
        end = min(begin + STRIDE, row.stay.canvas_end)
        tokens = np.array([written(canvas, place) for place in range(begin, end)], np.int32)
        self._rows[request.request_id] = (canvas, settled + len(tokens))
        block = CommittedBlock(
            tokens=tokens, nfe=1, steps=np.ones(len(tokens), np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
        )  # fmt: skip
        return RowResult(committed=(block,), nfe=1)

    def reset(self):
        raise AssertionError("no launch fails here")

    def release(self):
        self._rows = {}


@dataclasses.dataclass
class Done:
    rows: list

    def is_ready(self):
        return True

    def result(self):
        return LaunchResult(rows=tuple(self.rows), num_steps=1)


def built(tokenizer):
    """Returns what `build.build` returns, with the runner above and no weights."""
    runner = ComputableRunner()
    pages = ROWS * CONTEXT // PAGE
    rows = interface.RowConfig(
        block_size=BLOCK,
        page_size=PAGE,
        num_pages=pages,
        max_running_requests=ROWS,
        context_length=CONTEXT,
        prefill_token_budget=ROWS * CONTEXT,
        max_prefill_tokens=CONTEXT,
        detokenize=None if tokenizer is None else tokenizer.decode,
    )
    scheduler = Scheduler(CanvasRows.build(rows), max_queued_requests=16)
    sizes = sizing.Sizes(
        context_length=CONTEXT, max_running_requests=ROWS, page_size=PAGE,
        prefill_token_budget=CONTEXT, max_prefill_tokens=CONTEXT, num_pages=pages, weight_bytes=0,
        kv_bytes=0,
    )  # fmt: skip
    defaults = sampling_params.DllmParams()
    return build.Built(
        config=config.EngineConfig(max_queued_requests=16),
        device=facts.DeviceFacts(platform="cpu", device_kind="cpu"),
        core=core.EngineCore(scheduler, runner, max_total_tokens=pages * PAGE),
        runner=runner,
        model=None,
        model_dir=pathlib.Path(),
        spec=SPEC,
        tokenizer=tokenizer,
        default_sampling=sampling_params.SamplingParams(temperature=0.0, top_p=1.0, top_k=-1),
        default_dllm=sampling_params.DllmParams(**OPTIONS).resolve(defaults),
        algorithms=("FullAttnMultiBlock",),
        eos_token_ids=(0,),
        sizes=sizes,
        startup_s=0.0,
        compiles_at_ready=0,
    )


@pytest.fixture
def make(monkeypatch):
    """Returns a maker of engines and LLMs over the computable runner; shuts them down."""
    engines = []

    def make(kind=jdllm.Engine, tokenizer=ByteTokenizer()):  # noqa: B008
        monkeypatch.setattr(build, "build", lambda *_: built(tokenizer))
        engines.append(kind())
        return engines[-1]

    yield make
    for one in engines:
        one.shutdown()


def length(count):
    return {"max_new_tokens": count}


def test_the_text_is_what_stands_between_prompt_and_suffix(make):
    answer = make().generate("ab", length(5), suffix="yz")
    assert answer["text"] == expected("ab", 5, "yz")
    assert answer["meta_info"]["prompt_tokens"] == len("ab") + 1 + len("yz")
    assert answer["meta_info"]["completion_tokens"] == 5


def test_given_tokens_are_part_of_the_text(make):
    answer = make().generate("ab", length(6), given={0: ord("Q"), 4: "R"})
    assert answer["text"] == expected("ab", 6, given={0: ord("Q"), 4: ord("R")})
    assert (answer["text"][0], answer["text"][4]) == ("Q", "R")


def test_suffix_and_given_together(make):
    answer = make().generate("ab", length(6), suffix="yz", given={2: "R"})
    assert answer["text"] == expected("ab", 6, "yz", {2: ord("R")})


@pytest.mark.parametrize(
    ("suffix", "wanted"),
    [
        ("yz", ["yz", "yz", "yz"]),
        ([121, 122], ["yz", "yz", "yz"]),
        (np.array([121, 122]), ["yz", "yz", "yz"]),
        (["y", [122], None], ["y", "z", ""]),
        ([np.array([121]), "", ()], ["y", "", ""]),
        (None, ["", "", ""]),
        ("", ["", "", ""]),
        ([], ["", "", ""]),
    ],
    ids=["text", "ids", "array", "each", "each-array", "none", "empty", "no-ids"],
)
def test_one_suffix_for_all_prompts_or_one_for_each(make, suffix, wanted):
    prompts = ["a", "bc", "def"]
    answers = make().generate(prompts, length(9), suffix=suffix)
    assert [answer["text"] for answer in answers] == [
        expected(prompt, 9, one) for prompt, one in zip(prompts, wanted, strict=True)
    ]


def test_one_mapping_for_all_prompts_or_one_for_each(make):
    engine, q = make(), {1: ord("Q")}
    for given, wanted in ((q, [q, q]), ([q, None], [q, {}]), ([{}, {np.int64(1): "Q"}], [{}, q])):
        answers = engine.generate(["a", "b"], length(9), given=given)
        assert [answer["text"] for answer in answers] == [
            expected(prompt, 9, given=one) for prompt, one in zip("ab", wanted, strict=True)
        ]


def test_every_choice_has_the_suffix(make):
    answers = make().generate("ab", length(5) | {"n": 3}, suffix="yz", given={2: "R"})
    assert [answer["text"] for answer in answers] == [expected("ab", 5, "yz", {2: ord("R")})] * 3


def test_streams_and_batches_take_the_same(make):
    engine = make()
    wanted = expected("ab", 10, "yz", {2: ord("R")})
    fixed = {"suffix": "yz", "given": {2: "R"}}
    steps = [step["text"] for step in engine.generate("ab", length(10), stream=True, **fixed)]
    assert steps[-1] == wanted
    assert len(steps) > 2
    assert all(later.startswith(earlier) for earlier, later in zip(steps, steps[1:], strict=False))
    params = sampling_params.SamplingParams(max_new_tokens=10)
    ids = engine.encode("ab")
    *_, last = engine.iterate([ids], [params], **fixed)
    assert last.text == wanted

    async def streamed():
        async for generation in engine.stream([ids], params, **fixed):
            yield generation.delta_text

    async def both():
        answer = await engine.async_generate("ab", length(10), **fixed)
        return answer["text"], "".join([text async for text in streamed()])

    assert asyncio.run(both()) == (wanted, wanted)


def test_llm(make):
    model = make(llm.LLM)
    fixed = {"suffix": ["yz", None], "given": [None, {1: "R"}]}
    results = model.generate(["ab", "c"], length(9), use_tqdm=False, **fixed)
    assert [result.outputs[0].text for result in results] == [
        expected("ab", 9, "yz"), expected("c", 9, given={1: ord("R")}),
    ]  # fmt: skip
    assert [result.prompt for result in results] == ["ab", "c"]
    plain = model.generate("ab", length(9), use_tqdm=False)
    assert plain[0].outputs[0].text == expected("ab", 9)


def test_without_a_tokenizer_ids_do(make):
    engine = make(tokenizer=None)
    ids = [BOS, *b"ab"]
    fixed = {"suffix": [121, 122], "given": {2: 82}}
    answer = engine.generate(input_ids=ids, sampling_params=length(5), **fixed)
    assert bytes(answer["output_ids"]).decode() == expected("ab", 5, "yz", {2: 82})
    for name, value in (("suffix", "yz"), ("given", {0: "R"})):
        with pytest.raises(errors.RequestError, match="needs a tokenizer") as raised:
            engine.generate(input_ids=ids, **{name: value})
        assert raised.value.param == name


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"suffix": 5}, "text or a list of token ids"),
        ({"suffix": [True]}, "text or a list of token ids"),
        ({"suffix": [[1, "a"]]}, "text or a list of token ids"),
        ({"suffix": ["a", "b"]}, "2 entries of suffix for 1 prompts"),
        ({"suffix": [VOCAB]}, f"{VOCAB}, not a token id"),
        ({"suffix": [-1]}, "-1, not a token id"),
        ({"given": 5}, "must map offsets"),
        ({"given": {"0": 1}}, "must map offsets"),
        ({"given": {True: 1}}, "must map offsets"),
        ({"given": [{0: 1}, {0: 1}]}, "2 entries of given for 1 prompts"),
        ({"given": [5]}, "must map offsets"),
        ({"given": {0: VOCAB}}, f"{VOCAB}, not a token id"),
        ({"given": {0: -1}}, "-1, not a token id"),
        ({"given": {0: None}}, "None, not a token id"),
        ({"given": {0: "ab"}}, "'ab', which is 2 tokens"),
        ({"given": {0: ""}}, "'', which is 0 tokens"),
        ({"given": {4: 1}}, "0 to 3"),
        ({"given": {-1: 1}}, "0 to 3"),
    ],
)
def test_what_cannot_be_fixed_is_refused_by_name(make, fixed, message):
    engine = make()
    with pytest.raises(errors.RequestError, match=message) as raised:
        engine.generate("ab", length(4), **fixed)
    assert [raised.value.param] == list(fixed)
    assert engine.generate("ab", length(4))["text"] == expected("ab", 4)


def test_a_suffix_counts_for_the_context(make):
    engine, room = make(), CONTEXT - len("ab") - 1 - len("yz")
    assert engine.generate("ab", length(room), suffix="yz")["text"] == expected("ab", room, "yz")
    with pytest.raises(errors.RequestTooLong, match="suffix"):
        engine.generate("ab", length(room + 1), suffix="yz")
    (answer,) = {
        generation.meta_info["completion_tokens"]
        for generation in engine.iterate(
            [engine.encode("ab")], [sampling_params.SamplingParams()], suffix="yz"
        )
        if generation.finish_reason is not None
    }
    assert answer == room // BLOCK * BLOCK


@pytest.mark.parametrize("prompt_len", [1, 7, 8, CONTEXT - BLOCK, CONTEXT - BLOCK + 1, CONTEXT - 1])
def test_the_default_length_is_whole_blocks_of_what_remains(make, prompt_len):
    remains = CONTEXT - prompt_len
    wanted = remains - remains % BLOCK if remains >= BLOCK else remains
    assert make().default_max_new_tokens(prompt_len) == wanted


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "value"), [("suffix", [1]), ("given", {0: 1})])
def test_a_block_causal_model_refuses_both_by_name(engine, name, value):
    params = {"max_new_tokens": 4}
    with pytest.raises(errors.RequestError, match="full attention") as raised:
        engine.generate(input_ids=[1, 2], sampling_params=params, **{name: value})
    assert raised.value.param == name
    empty = {"suffix": [], "given": {}}
    assert engine.generate(input_ids=[1, 2], sampling_params=params, **empty)["output_ids"]
