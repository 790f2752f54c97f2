"""Full-canvas models as they are used: streams, infilling, what is told per token, refusals, HTTP.

Tokens are compared with `canvas_engine.one_by_one`, which knows no algorithm of the project, and
what is told with a replay, forward after forward, on whole-sequence logits in numpy.
"""

import contextlib
import json
import threading

import httpx
import numpy as np
import pytest
import uvicorn
from support import canvas_engine
from support.canvas_asks import CONTEXT, MASK, SLOW, VOCAB, Ask
from support.canvas_engine import generate, shared, told
from support.tiny_engine import assert_nothing_held
from support.tiny_engine import make_engine as make_block_engine

from jdllm import errors
from jdllm.engine.start import startup
from jdllm.options import config
from jdllm.server import app, lifecycle, state

pytestmark = pytest.mark.campaign  # two engines, whose programs take long to compile

# One token a forward, the surest of the first open block; Dream's block is the whole canvas.
SUREST = {
    "llada": {"algorithm": "LLaDA", "block_length": 8},
    "dream": {"algorithm": "Dream", "alg": "maskgit_plus", "eps": 0.0},
}
MULTI = {"algorithm": "FullAttnMultiBlock", "block_length": 8, "threshold": 0.8}
every_family = pytest.mark.parametrize("family", SUREST)


def stream_of(one, ask, **options):
    return one.generate(input_ids=ask.prompt, sampling_params=ask.params, stream=True, **options)


# Streams


@pytest.mark.parametrize("cache_mode", ["exact", "delayed", "window"])
def test_a_stream_shows_a_growing_prefix_of_the_answer(cache_mode):
    ask = Ask(prompt=[4] * 6, wanted=48, dllm=MULTI | {"cache_mode": cache_mode})
    (whole,) = generate(shared("llada"), [ask])
    items = list(stream_of(shared("llada"), ask))
    seen = [item["output_ids"] for item in items]
    assert len(seen) >= 4
    assert 0 < len(seen[0]) < 48
    assert all(later[: len(ids)] == ids for ids, later in zip(seen, seen[1:], strict=False))
    assert all(len(later) > len(ids) for ids, later in zip(seen, seen[1:], strict=False))
    assert [item["text"] for item in items] == [canvas_engine.text(ids) for ids in seen]
    forwards = [item["meta_info"]["nfe"] for item in items]
    assert forwards == sorted(set(forwards)), "each piece came with forwards of its own"
    assert items[0]["meta_info"]["finish_reason"] is None
    assert told(items[-1:]) == told([whole])
    assert whole["meta_info"]["dllm"]["cache_mode"] == cache_mode


def test_a_short_request_is_answered_while_a_long_one_runs():
    one = shared("llada")
    asks = [Ask(prompt=[1] * 5, wanted=56, dllm=SLOW), Ask(prompt=[2] * 9, wanted=3, dllm=MULTI)]
    order = []
    for item in one.generate(
        input_ids=[ask.prompt for ask in asks],
        sampling_params=[ask.params for ask in asks],
        stream=True,
    ):
        done = item["meta_info"]["finish_reason"] is not None
        order.append((item["index"], done, len(item["output_ids"])))
    assert order.index((1, True, 3)) < order.index((0, True, 56))
    # The long one had not even come half its way, and went on in pieces.
    after = order[order.index((1, True, 3)) :]
    assert sum(index == 0 for index, _, _ in after) > 4
    before = [length for index, _, length in order[: order.index((1, True, 3))] if index == 0]
    assert max(before, default=0) < 28


def test_a_long_request_that_leaves_lets_the_next_one_in():
    one = shared("llada")
    streams = [stream_of(one, Ask(prompt=[i], wanted=60, dllm=SLOW)) for i in range(4)]
    for stream in streams:
        next(stream)
    ask = Ask(prompt=[9], wanted=8, dllm=MULTI)
    waiting = stream_of(one, ask)
    streams[0].close()
    *_, last = waiting
    assert told([last]) == told(generate(one, [ask]))
    for stream in streams:
        stream.close()
    one._loop.call(lambda: None).result()  # the aborts have been done
    assert_nothing_held(one)


# Infilling


@every_family
def test_what_stands_before_a_suffix_is_written_with_it_in_sight(family):
    prompt = canvas_engine.prompt(family)
    asks = [
        Ask(prompt=prompt, wanted=16, dllm=SUREST[family], suffix=suffix)
        for suffix in ((), (17, 3, 200, MASK, 5), tuple(range(30)))
    ]
    results = generate(shared(family), asks)
    for ask, result in zip(asks, results, strict=True):
        assert result["output_ids"] == canvas_engine.one_by_one(family, ask)
        assert result["meta_info"]["prompt_tokens"] == len(prompt) + len(ask.suffix)
        assert result["meta_info"]["nfe"] == result["meta_info"]["completion_tokens"] == 16
    assert results[0]["output_ids"] != results[1]["output_ids"], "the suffix was not seen"


@every_family
def test_given_tokens_stay_and_are_seen(family):
    prompt, given = canvas_engine.prompt(family), {0: 11, 5: 12, 6: 241, 15: 14}
    asks = [
        Ask(prompt=prompt, wanted=16, dllm=SUREST[family], given=given, suffix=suffix)
        for suffix in ((), (8, 9))
    ]
    for ask, result in zip(asks, generate(shared(family), asks), strict=True):
        assert result["output_ids"] == canvas_engine.one_by_one(family, ask)
        assert {place: result["output_ids"][place] for place in given} == given
        assert result["meta_info"]["nfe"] == 12
        assert [result["meta_info"]["step_map"][place] for place in given] == [0] * 4


@every_family
@pytest.mark.parametrize("dllm", [MULTI, SLOW, {"algorithm": "FastDLLM", "block_length": 8}],
                         ids=lambda dllm: dllm["algorithm"])  # fmt: skip
def test_nothing_to_write_takes_no_forward(family, dllm):
    """All of it given; and given as far as it is shown, the rest of the last block open."""
    given = {place: 3 * place for place in range(16)}
    asks = [
        Ask(prompt=[1, 2], wanted=16, dllm=dllm, given=given),
        Ask(prompt=[1, 2], wanted=16, dllm=dllm, given=given, suffix=(5,)),
        Ask(prompt=[1, 2], wanted=13, dllm=dllm, given={p: 3 * p for p in range(13)}),
    ]
    for ask, result in zip(asks, generate(shared(family), asks), strict=True):
        assert result["output_ids"] == list(given.values())[: ask.wanted]
        assert result["meta_info"]["nfe"] == 0
        assert result["meta_info"]["tpf"] == 0.0
        assert result["meta_info"]["finish_reason"]["type"] == "length"
    assert_nothing_held(shared(family))


def test_a_given_end_token_ends_the_output():
    ask = Ask(prompt=[1, 2], wanted=24, dllm=MULTI, given={9: 77}, ends=(77,))
    (result,) = generate(shared("llada"), [ask])
    assert result["output_ids"] == canvas_engine.decoded("llada", ask).output_ids
    assert result["output_ids"].index(77) == len(result["output_ids"]) - 1 <= 9


def test_texts_are_infilled_too():
    """`suffix` and `given` as text, the tokenizer being the engine's own."""
    one, text = shared("llada"), canvas_engine.text
    ids = Ask(prompt=[5, 6, 7], wanted=16, dllm=SUREST["llada"], suffix=(40, 41), given={2: 9})
    answer = one.generate(
        text(ids.prompt), ids.params, suffix=text(ids.suffix), given={2: text([9])}
    )
    assert answer["text"] == text(canvas_engine.one_by_one("llada", ids))
    assert told([answer]) == told(generate(one, [ids]))


# Guidance


@pytest.mark.parametrize("cfg_scale", [0.5, 2.0])
def test_guidance_moves_logits_away_from_those_without_a_prompt(cfg_scale):
    prompt = canvas_engine.prompt("llada")
    plain = Ask(prompt=prompt, wanted=16, dllm=SUREST["llada"])
    guided = Ask(prompt=prompt, wanted=16, dllm=plain.dllm | {"cfg_scale": cfg_scale}, suffix=(9,))
    beside, result = generate(shared("llada"), [plain, guided])
    assert result["output_ids"] == canvas_engine.one_by_one("llada", guided, cfg_scale=cfg_scale)
    assert result["meta_info"]["nfe"] == 32, "each step takes two forwards"
    assert beside["output_ids"] == canvas_engine.one_by_one("llada", plain)
    assert beside["meta_info"]["nfe"] == 16


# What is told about each token

REPLAYED = {
    "multi-block": ("llada", MULTI, 0.0),
    "blocks": ("llada", SLOW | {"threshold": 1.0}, 0.0),
    "fast": ("llada", {"algorithm": "FastDLLM", "block_length": 16, "threshold": 0.4}, 0.0),
    "drawn": ("llada", {"algorithm": "LLaDA", "block_length": 8}, 1.3),
    "shifted": ("dream", MULTI, 0.0),
    "dream": ("dream", {"algorithm": "Dream", "steps": 6, "alg": "entropy"}, 0.0),
    "tempered": ("dream", {"algorithm": "Dream", "steps": 9}, 0.7),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_the_step_map_replays_the_decoding(name):
    family, dllm, temperature = REPLAYED[name]
    ask = Ask(prompt=canvas_engine.prompt(family), wanted=32, dllm=dllm, temperature=temperature)
    (result,) = generate(shared(family), [ask])
    info, ids = result["meta_info"], np.array(result["output_ids"])
    steps, logprobs = np.array(info["step_map"]), canvas_engine.logprobs(result)
    assert len(ids) == len(steps) == len(logprobs) == 32
    assert [entry[1] for entry in info["output_token_logprobs"]] == ids.tolist()
    # Dream draws from softmax(logits / temperature), and says so.
    scale = temperature if temperature and dllm["algorithm"] == "Dream" else 1.0
    start = len(ask.prompt)
    for step in range(1, info["nfe"] + 1):
        canvas = np.concatenate([ask.prompt, np.where(steps >= step, MASK, ids)])
        logits = canvas_engine.model(family).aligned_logits(canvas)[start:]
        written = np.flatnonzero(steps == step)
        expected = canvas_engine.log_softmax(logits / scale)[written, ids[written]]
        np.testing.assert_allclose(logprobs[written], expected, atol=canvas_engine.ATOL)
        if not temperature:
            best = canvas_engine.statistics(logits)["tokens"]
            assert ids[written].tolist() == best[written].tolist()
    assert set(steps.tolist()) <= set(range(1, info["nfe"] + 1))
    assert MASK not in ids


def test_nothing_is_told_that_was_not_asked_for():
    info = shared("llada").generate(
        input_ids=[1, 2], sampling_params={"max_new_tokens": 3, "dllm": MULTI}
    )["meta_info"]
    assert "step_map" not in info and "output_token_logprobs" not in info
    assert info["dllm"]["algorithm"] == "FullAttnMultiBlock"


# Refusals

FINE = {"max_new_tokens": 16}


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"sampling_params": FINE | {"top_p": 0.5}}, "top_p"),
        ({"sampling_params": FINE | {"top_k": 5}}, "top_k"),
        ({"sampling_params": FINE | {"dllm": {"algorithm": "LowConfidence"}}}, "dllm.algorithm"),
        ({"sampling_params": FINE | {"dllm": {"algorithm": "Dream"}}}, "dllm.algorithm"),
        (
            {"sampling_params": FINE | {
                "dllm": {"algorithm": "LLaDA", "block_length": 8, "steps": 7}}},
            "dllm.steps",
        ),
        (
            {"sampling_params": {"max_new_tokens": 13, "dllm": SUREST["llada"]}, "suffix": [1]},
            "max_new_tokens",
        ),
        (
            {"sampling_params": FINE | {
                "dllm": {"algorithm": "FastDLLM", "factor": 1.0, "threshold": 0.5}}},
            "dllm.factor",
        ),
        ({"sampling_params": FINE | {"dllm": {"cache_mode": "dual"}}}, "dllm.cache_mode"),
        ({"sampling_params": FINE | {"dllm": {"edit_threshold": 0.5}}}, "dllm.edit_threshold"),
        ({"sampling_params": {"max_new_tokens": CONTEXT}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 60}, "suffix": [1] * 9}, "max_new_tokens"),
        ({"sampling_params": FINE, "suffix": [VOCAB]}, "suffix"),
        ({"sampling_params": FINE, "given": {16: 1}}, "given"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_by_name_and_harm_nobody(kwargs, param):
    with pytest.raises(errors.RequestError) as raised:
        shared("llada").generate(input_ids=[1, 2], **kwargs)
    assert raised.value.param == param
    assert raised.value.status == 400
    assert_nothing_held(shared("llada"))


@pytest.mark.parametrize(
    ("make", "algorithm"),
    [(make_block_engine, "LLaDA"), (lambda **o: canvas_engine.make("llada", **o), "LowConfidence")],
    ids=["canvas-algorithm", "block-algorithm"],
)
def test_an_algorithm_for_another_kind_of_model_is_refused_at_start(make, algorithm):
    with pytest.raises(errors.ConfigError, match=f"cannot run dllm_algorithm '{algorithm}'"):
        make(dllm_algorithm=algorithm)


def test_the_context_can_be_used_to_its_last_token():
    one = shared("llada")
    ask = Ask(prompt=[3] * (CONTEXT - 9), wanted=9, dllm=SLOW)
    (result,) = generate(one, [ask])
    assert result["output_ids"] == canvas_engine.decoded("llada", ask).output_ids
    assert len(result["output_ids"]) == 9


# HTTP


@pytest.fixture(scope="module")
def http():
    """A client of a real server, on a port of its own, around the engine of all tests."""
    server = state.ServerState(
        server_config=config.ServerConfig(enable_metrics=True), progress=startup.StartupProgress()
    )
    server.loaded_engine, server.phase = shared("llada"), "ready"
    listener = lifecycle.bind("127.0.0.1", 0)
    options = uvicorn.Config(app.create_app(server), log_config=None, lifespan="off")
    serving = lifecycle.QuietServer(options)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60
        ) as client:
            yield client
    finally:
        serving.should_exit = True
        thread.join(timeout=30)
        with contextlib.suppress(OSError):
            listener.close()


def test_completions_with_a_suffix_over_http(http):
    ask = Ask(prompt=[5, 6, 7], wanted=16, dllm=SUREST["llada"], suffix=(40, 41))
    answer = http.post(
        "/v1/completions",
        json={
            "prompt": canvas_engine.text(ask.prompt),
            "suffix": canvas_engine.text(ask.suffix),
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "dllm": ask.dllm,
        },
    ).json()
    (choice,) = answer["choices"]
    assert choice["text"] == canvas_engine.text(canvas_engine.one_by_one("llada", ask))
    assert choice["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 16)
    assert answer["usage"]["dllm"]["nfe"] == 16


def test_a_stream_over_http(http):
    ask = Ask(prompt=[4] * 6, wanted=48, dllm=MULTI | {"cache_mode": "delayed"})
    (whole,) = generate(shared("llada"), [ask])
    body = {"input_ids": ask.prompt, "sampling_params": ask.params, "stream": True}
    with http.stream("POST", "/generate", json=body) as response:
        frames = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert frames.pop() == "[DONE]"
    items = [json.loads(frame) for frame in frames]
    assert len(items) >= 4
    assert 0 < len(items[0]["output_ids"]) < 48
    assert items[-1]["output_ids"] == whole["output_ids"]
    assert items[-1]["text"] == whole["text"] == canvas_engine.text(whole["output_ids"])
    assert items[-1]["meta_info"]["step_map"] == whole["meta_info"]["step_map"]


def test_refusals_over_http(http):
    body = {"prompt": canvas_engine.text([1, 2]), "max_tokens": 16}
    for wrong, param in (
        ({"top_p": 0.5}, "top_p"),
        ({"dllm": {"algorithm": "LLaDA", "steps": 3, "block_length": 8}}, "dllm.steps"),
        ({"dllm": {"algorithm": "JointThreshold"}}, "dllm.algorithm"),
    ):
        response = http.post("/v1/completions", json=body | wrong)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


def test_metrics_count_forwards_and_positions(http):
    def values():
        lines = http.get("/metrics").text.splitlines()
        return {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if "model_name" in line
        }

    before = values()
    (result,) = generate(shared("llada"), [Ask(prompt=[1] * 8, wanted=32, dllm=MULTI)])
    after = values()
    changed = {name: after[name] - before.get(name, 0) for name in after}
    nfe = result["meta_info"]["nfe"]
    assert changed["jdllm:dllm_denoising_steps_total"] == nfe
    assert changed["jdllm:generation_tokens_total"] == 32
    assert changed["jdllm:jit_compiles_total"] == 0
    assert [value for name, value in changed.items() if "full_forwards" in name] == [nfe]
    assert [value for name, value in changed.items() if "forwarded_tokens" in name] == [40 * nfe]
