"""Nemotron-Labs-Diffusion behind the HTTP app: its three modes, each asked for by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import canvas_engine, edge, nemotron_adapter, nemotron_oracle
from support.nemotron_asks import AR, DIFFUSION, MASK, SPEC, make

pytestmark = pytest.mark.campaign  # an engine of its own, whose programs take long to compile

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODES = [
    {"algorithm": AR},
    {"algorithm": SPEC},
    {"algorithm": SPEC, "block_length": 4, "threshold": 0.2},
    {"algorithm": DIFFUSION, "threshold": 0.3},
    {"algorithm": DIFFUSION, "seed_first": True},
]
LENGTH = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = nemotron_adapter.write(tmp_path_factory.mktemp("served") / "model")
    canvas_engine.write_tokenizer(folder, vocab_size=96)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with make(folder, f"{DIFFUSION},{AR},{SPEC}", skip_tokenizer_init=False) as engine:
        yield edge.make_state(engine)


@pytest.fixture(scope="module")
def oracle(folder):
    return nemotron_oracle.Model(folder, folder / "linear_spec_lora")


def prompt(seed=0):
    return np.random.default_rng(seed).integers(0, MASK, 25).tolist()


def expected(oracle, ids, dllm):
    settings = {key: value for key, value in dllm.items() if key != "algorithm"}
    match dllm["algorithm"]:
        case "Autoregressive":
            return nemotron_oracle.autoregressive(oracle, ids, LENGTH)
        case "LinearSpec":
            settings = {"block_length": 8} | settings
            return nemotron_oracle.linear_spec(oracle, ids, LENGTH, **settings)
    settings = {"block": 8, "policy": "confidence_threshold", "threshold": 0.9} | settings
    return nemotron_oracle.masked_diffusion(oracle, ids, LENGTH, **settings)


def asked(ids, dllm, **fields):
    text = canvas_engine.text(ids)
    return {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "dllm": dllm,
    } | fields  # fmt: skip


@pytest.mark.parametrize("dllm", MODES, ids=json.dumps)
def test_a_chat_and_its_stream_are_the_oracle_s_in_each_mode(dllm, server, oracle):
    ids = prompt()
    output, nfe = expected(oracle, ids, dllm)
    answer = edge.call(server, CHAT, asked(ids, dllm)).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == canvas_engine.text(output)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), LENGTH)
    assert (usage["dllm"]["algorithm"], usage["dllm"]["nfe"]) == (dllm["algorithm"], nfe)
    assert usage["dllm"]["tpf"] == pytest.approx(LENGTH / nfe, abs=1e-3)
    stream = asked(ids, dllm, stream=True, stream_options={"include_usage": True})
    parts = edge.frames(edge.call(server, CHAT, stream))
    deltas = [one["delta"].get("content") or "" for part in parts for one in part["choices"]]
    assert "".join(deltas) == canvas_engine.text(output)
    assert parts[-1]["usage"]["dllm"] == usage["dllm"]


def test_one_call_writes_its_prompts_as_single_calls_do(server, oracle):
    prompts = [prompt(seed) for seed in range(3)]
    body = {
        "prompt": [canvas_engine.text(ids) for ids in prompts],
        "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "dllm": {"algorithm": SPEC},
    }  # fmt: skip
    answer = edge.call(server, TEXT, body).json()
    found = [expected(oracle, ids, {"algorithm": SPEC}) for ids in prompts]
    texts = [canvas_engine.text(output) for output, _ in found]
    assert [one["text"] for one in answer["choices"]] == texts
    assert answer["usage"]["dllm"]["nfe"] == sum(nfe for _, nfe in found)


def test_ids_and_log_probabilities_of_drafted_text_are_those_of_the_causal_forward(server, oracle):
    ids = prompt(1)
    body = {
        "input_ids": ids, "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
            "dllm": {"algorithm": SPEC},
        },
    }  # fmt: skip
    answer = edge.call(server, "/generate", body).json()
    output, nfe = expected(oracle, ids, {"algorithm": SPEC})
    assert answer["output_ids"] == output
    assert answer["meta_info"]["nfe"] == nfe
    logits = oracle.forward([*ids, *output[:-1]])[len(ids) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    np.testing.assert_allclose(found, logprobs[np.arange(LENGTH), output], atol=1e-4)


@pytest.mark.parametrize("name", [AR, SPEC])
def test_modes_whose_text_a_causal_forward_decides_have_no_steps_to_show(name, server):
    show = {"algorithm": name, "stream_mode": "denoise"}
    response = edge.call(server, CHAT, asked(prompt(), show, stream=True))
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == "dllm.stream_mode"


@pytest.mark.parametrize(
    ("dllm", "named"),
    [
        ({"algorithm": AR, "threshold": 0.5}, "threshold"),
        ({"algorithm": SPEC, "seed_first": True}, "seed_first"),
        ({"algorithm": SPEC, "block_length": 0}, "block_length"),
        ({"algorithm": "HierarchyBlock"}, "algorithm"),
        ({"algorithm": SPEC, "draft_adapter": "linear_spec_lora"}, "draft_adapter"),
    ],
)
def test_what_a_mode_does_not_know_is_a_400_that_names_it(dllm, named, server):
    response = edge.call(server, CHAT, asked(prompt(), dllm))
    assert response.status_code == 400
    assert edge.error_of(response)["param"] == f"dllm.{named}"


def test_the_server_says_what_it_was_started_with(server):
    info = edge.call(server, "/server_info").json()
    assert info["dllm_algorithm"] == f"{DIFFUSION},{AR},{SPEC}"
    assert info["disable_draft_adapter"] is False
