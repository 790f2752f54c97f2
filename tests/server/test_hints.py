"""An unknown option is answered by what is served instead: sent as the hint says, it is served.

Hints are read from the errors themselves, so whatever a table says, its effect is tested.
"""

from __future__ import annotations

import functools
import random
import re
import string
from typing import Any

import pytest
from support import edge, fake_engine, fake_images

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.foreign import names as foreign_names
from jdllm.foreign.names import Row
from jdllm.server import app

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4}
IMAGE: dict[str, Any] = {"prompt": "a cat", "guidance_scale": 1.5}  # a negative prompt counts
# kind -> (path, the least that it needs, where in the body the names are, a row's table)
KINDS: dict[str, tuple[str, dict[str, Any], str, tuple[Row, ...]]] = {
    "chat": ("/v1/chat/completions", CHAT, "", foreign_names.TEXT),
    "completions": ("/v1/completions", {"prompt": "hi"}, "", foreign_names.TEXT),
    "responses": ("/v1/responses", {"input": "hi"}, "", foreign_names.TEXT),
    "generate": ("/generate", {"text": "hi"}, "", foreign_names.TEXT),
    "sampling_params": ("/generate", {"text": "hi"}, "sampling_params", foreign_names.TEXT),
    "dllm": ("/v1/completions", {"prompt": "hi"}, "dllm", foreign_names.TEXT),
    "ollama": ("/api/chat", {"messages": MESSAGES, "stream": False}, "", foreign_names.TEXT),
    "options": ("/api/generate", {"prompt": "hi", "stream": False}, "options", foreign_names.TEXT),
    "images": ("/v1/images/generations", IMAGE, "", foreign_names.IMAGES),
    "diffusers_kwargs": (
        "/v1/images/generations", IMAGE, "diffusers_kwargs", foreign_names.IMAGES,
    ),
}  # fmt: skip
# Values that are served; those of the algorithms' options come from their table.
VALUES: dict[str, Any] = {
    "algorithm": "LowConfidence", "guidance_scale": 1.5, "height": 64, "instructions": "be",
    "input": "ho", "max_sequence_length": 32, "messages": MESSAGES, "n": 2,
    "negative_prompt": "fog", "num_inference_steps": 2, "output_compression": 100,
    "output_format": "png", "prompt": "ho", "response_format": "b64_json", "seed": 5,
    "size": "64x64", "stop": ["x"], "stop_token_ids": [250], "stream_mode": "block",
    "system": "be", "temperature": 0.5, "text": "ho", "true_cfg_scale": 1.0, "width": 64,
}  # fmt: skip
NUMBERS: dict[str, Any] = dict.fromkeys(
    ("max_new_tokens", "max_tokens", "max_output_tokens", "num_predict", "top_k"), 4
)
NUMBERS |= dict.fromkeys(("min_new_tokens", "min_tokens", "top_p", "min_p"), 1)
NUMBERS |= dict.fromkeys(("repetition_penalty", "repeat_penalty"), 1.1)
WRITE = re.compile(r"; (?:.*; )?(?:write|use) ([a-z_.0-9]+)(?: (?:beside|outside of) (\w+))?")
# The server's own model has one algorithm; what the error says of it is right.
OF_ANOTHER_ALGORITHM = re.compile(r"LowConfidence has no option '\w+'; it has threshold")
MOST_CHARACTERS = 360


def sample(name: str) -> Any:
    for algorithm in lookup.TABLE.values():
        option = algorithm.option(name)
        if option is not None:
            return option.low or 1 if option.default is None else option.default
    return NUMBERS.get(name, VALUES.get(name))


def body_with(kind: str, path: str, value: Any) -> dict[str, Any]:
    """Returns the least body of a kind with a value at `a.b.c`."""
    body: dict[str, Any] = {**KINDS[kind][1]}
    if path.endswith(("max_completion_tokens", "max_tokens")):
        body.pop("max_tokens", None)
    place = body
    *above, name = path.split(".")
    for one in above:
        place[one] = {}
        place = place[one]
    place[name] = value
    return body


def answer(kind: str, path: str, value: Any):
    return edge.send(application(kind), KINDS[kind][0], body_with(kind, path, value))


@functools.cache
def application(kind: str):
    is_image = KINDS[kind][3] is foreign_names.IMAGES
    engine: Any = fake_images.FakeImageEngine() if is_image else fake_engine.FakeEngine()
    return app.create_app(edge.make_state(engine))


def refusal(kind: str, path: str, value: Any) -> str | None:
    """Returns the message of a refusal, None if the body is served."""
    response = answer(kind, path, value)
    if response.status_code == 200:
        return None
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "\n" not in message and len(message) <= MOST_CHARACTERS, message
    return message


def within(kind: str, name: str) -> str:
    return f"{KINDS[kind][2]}.{name}" if KINDS[kind][2] else name


def beside(kind: str, path: str) -> str:
    """Returns the place of what a hint names; it leaves out the object that holds the field."""
    return path if path.startswith(f"{KINDS[kind][2]}.") else within(kind, path)


def names_of(kind: str) -> list[str]:
    names = [name for row in KINDS[kind][3] for name in row.names.split()]
    return [*names, *(lookup.option_names() if KINDS[kind][3] is foreign_names.TEXT else ())]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hint_says_is_served(kind):
    hinted = 0
    for name in dict.fromkeys(names_of(kind)):
        message = refusal(kind, within(kind, name), {"asks": 7})
        assert message is not None, name
        if (
            "unknown parameter" not in message
            and "unknown dLLM option" not in message
            and "is not supported" not in message
        ):
            continue  # a served field, with a wrong value
        written = WRITE.search(message)
        if written is None:
            assert "did you mean" not in message and "known:" not in message, message
            continue
        hinted += 1
        path, outside_of = written.groups()
        path = path if outside_of else beside(kind, path)
        told = refusal(kind, path, sample(path.rpartition(".")[2]))
        assert told is None or OF_ANOTHER_ALGORITHM.fullmatch(told), (name, message, told)
    assert hinted > 15


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        ("chat", "steps", "; write dllm.steps"),
        ("chat", "threshold", "; write dllm.threshold"),
        ("chat", "block_length", "; write dllm.block_length"),
        ("chat", "gen_length", "; write max_tokens"),
        ("completions", "max_length", "; write max_tokens"),
        ("responses", "max_tokens", "; write max_output_tokens"),
        ("generate", "temperature", "; write sampling_params.temperature"),
        ("generate", "steps", "; write sampling_params.dllm.steps"),
        ("sampling_params", "num_steps", "; write dllm.steps"),
        ("dllm", "gen_length", "; write max_tokens beside dllm"),
        ("dllm", "temperature", "; write temperature beside dllm"),
        ("ollama", "num_predict", "; write options.num_predict"),
        ("options", "max_tokens", "; write num_predict"),
        ("options", "cfg_scale", "; write dllm.cfg_scale"),
        ("images", "steps", "; write num_inference_steps"),
        ("images", "num_images", "; write n"),
        ("images", "num_images_per_prompt", "; write n"),
        ("images", "batch_size", "; write n"),
        ("images", "cfg_scale", "; write guidance_scale"),
        ("images", "image_size", "; write size"),
        ("images", "strength", "; images are made of text alone; leave it out"),
        ("images", "scheduler", "; the pipeline's folder sets how it samples; leave it out"),
        ("images", "temperature", "; it is for text, and this model makes images; leave it out"),
        ("diffusers_kwargs", "num_images_per_prompt", "; write n beside diffusers_kwargs"),
        ("chat", "temprature", "; did you mean 'temperature'?"),
        ("chat", "stpo", "; did you mean 'stop'?"),
        ("chat", "quux", ""),
    ],
)
def test_hints(kind, name, hint):
    message = refusal(kind, within(kind, name), 7)
    assert message is not None
    assert message.endswith(hint or f"unknown parameter {name!r}")


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_name_the_message_is_a_line_and_names_what_is_served(kind):
    rng = random.Random(kind)
    served = [*sorted(VALUES), *NUMBERS, *lookup.option_names(), *names_of(kind)]
    letters = string.ascii_lowercase + "_-.\n\N{BLACK STAR}"
    asked = ["".join(rng.choices(letters, k=rng.choice((1, 4, 9, 300)))) for _ in range(40)]
    for name in rng.sample(served, 40):
        i = rng.randrange(len(name))
        asked += [name[:i] + name[i + 1 :], name[:i] + rng.choice(letters[:27]) + name[i:]]
    for name in asked:
        if "." in name:
            continue
        message = refusal(kind, within(kind, name), 7)
        near = re.search(r"did you mean '(\w+)'", message or "")
        value = None if near is None else sample(near[1])
        if near is not None and value is not None and (kind, near[1]) != ("responses", "text"):
            told = refusal(kind, within(kind, near[1]), value)
            assert told is None or OF_ANOTHER_ALGORITHM.fullmatch(told), (message, told)


def test_a_list_of_known_names_is_at_most_a_line():
    many = [f"name_{i}" for i in range(110)]
    for name in ("quux", "x" * 1000, "name_"):
        assert len(errors.nearest(name, many)) <= errors.HINT_CHARACTERS
    assert errors.nearest("quux", many) == ""
    assert errors.nearest("quux", ["b", "a"]) == "; known: a, b"
