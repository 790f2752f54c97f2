"""Questions with one right answer each: greedy, or with a seed. Every route can ask them.

The answers are those that the server gives when it has nothing else to do. Whatever runs beside
them, and on whatever route they are asked, they must come back to the byte.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE = "/v1/responses", "/api/chat", "/api/generate"
ROUTES = (CHAT, TEXT, GENERATE, RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE)
WITHOUT_CHOICES = (RESPONSES, OLLAMA_CHAT, OLLAMA_GENERATE)
NUM_PROMPTS = (1, 1, 1, 1, 1, 1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Ask:
    """A question in a chat, or a text to continue, with the engine's options as JSON."""

    prompt: str
    is_chat: bool
    options_json: str

    @property
    def options(self) -> dict[str, Any]:
        return json.loads(self.options_json)

    @property
    def routes(self) -> tuple[str, ...]:
        """The routes that can ask this."""
        routes = ROUTES if self.is_chat else (TEXT, GENERATE, OLLAMA_GENERATE)
        if "ignore_eos" in self.options:
            routes = tuple(route for route in routes if not route.startswith("/api/"))
        return routes


def ask(prompt: str, limit: int, *, is_chat: bool = True, **options: Any) -> Ask:
    options = {"max_new_tokens": limit, "temperature": 0} | options
    return Ask(prompt=prompt, is_chat=is_chat, options_json=json.dumps(options))


# Answers of few steps, as a campaign asks tens of thousands of them.
AT_ONCE = {"threshold": 0}
PEARS = "Ann has 9 pears. She sells 4 pears. How many are left?"
ASKS = (
    ask("Tom has 7 apples. He buys 5 more apples. How many apples does he have now?", 24),
    ask(PEARS, 9),
    ask(PEARS, 1),
    ask("What is 2 + 3?", 5, dllm={"algorithm": "JointThreshold"}),
    ask("What is 2 + 3?", 12, dllm={"threshold": 0.5}),
    ask("Zw\u00f6lf \U0001f34e \u2028 und 30?", 3, stop=["\n", "zzz"], dllm=AT_ONCE),
    ask("Hello", 6, temperature=5, seed=3, dllm=AT_ONCE),
    ask("Tom has", 16, is_chat=False),
    ask("Tom has", 40, is_chat=False, ignore_eos=True, dllm=AT_ONCE),
    ask("Ann has 3 pears and", 2, is_chat=False, ignore_eos=True, temperature=5, seed=11),
    ask("x\ty\n", 4, is_chat=False, ignore_eos=True, dllm=AT_ONCE),
)
# How often each is asked.
WEIGHTS = (1, 1, 3, 2, 3, 3, 3, 1, 3, 0.2, 3)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A body that asks an `Ask`; each of its choices says `before` and then the answer."""

    path: str
    body: dict[str, Any]
    num_choices: int = 1
    before: str = ""

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream", self.path.startswith("/api/"))


def wrap(one: Ask, route: str, rng: random.Random, prompt_ids: list[int]) -> Asked:
    """Returns a body for `one`, with other fields as clients send them."""
    options = one.options
    num_prompts = num_choices = 1
    before = ""
    body: dict[str, Any] = {"model": rng.choice(["m", "any/thing", "gpt-4o"])}
    if rng.random() < 0.5:
        body["stream"] = rng.random() < 0.7
    if route not in WITHOUT_CHOICES and "seed" not in options and rng.random() < 0.1:
        num_choices = rng.randint(2, 3)
        options["n"] = num_choices
    turns = [{"role": "user", "content": one.prompt}]
    match route:
        case "/v1/chat/completions":
            body |= {"messages": turns}
        case "/v1/completions":
            num_prompts = rng.choice(NUM_PROMPTS)
            prompt = prompt_ids if one.is_chat or rng.random() < 0.3 else one.prompt
            body["prompt"] = prompt if num_prompts == 1 else [prompt] * num_prompts
            if isinstance(prompt, str) and rng.random() < 0.2:
                body["echo"], before = True, prompt
        case "/generate":
            num_prompts = rng.choice(NUM_PROMPTS)
            is_ids = one.is_chat or rng.random() < 0.3
            prompt = prompt_ids if is_ids else one.prompt
            name = "input_ids" if is_ids else "text"
            body[name] = prompt if num_prompts == 1 else [prompt] * num_prompts
        case "/v1/responses":
            long = [{"type": "message", **turns[0]}]
            body["input"] = rng.choice([one.prompt, turns, long])
        case "/api/chat":
            body["messages"] = turns
        case "/api/generate":
            body |= {"prompt": one.prompt} | ({} if one.is_chat else {"raw": True})
    if route == GENERATE:
        body["sampling_params"] = options
    elif route.startswith("/api/"):
        options["num_predict"] = options.pop("max_new_tokens")
        body["options"] = options
    else:
        limit = options.pop("max_new_tokens")
        name = {RESPONSES: "max_output_tokens"}.get(route, "max_tokens")
        if route == CHAT and rng.random() < 0.5:
            name = "max_completion_tokens"
        body |= {name: limit} | options
    if body.get("stream") and route in (CHAT, TEXT) and rng.random() < 0.5:
        names = ("include_usage", "continuous_usage_stats")
        body["stream_options"] = {name: rng.random() < 0.5 for name in names}
    body |= _neutral(route, rng)
    return Asked(path=route, body=body, num_choices=num_choices * num_prompts, before=before)


def _neutral(route: str, rng: random.Random) -> dict[str, Any]:
    """Returns fields that ask for nothing."""
    empty: list[Any] = [None, "", [], {}]
    choices: list[dict[str, Any]] = [
        {},
        {"user": "me\nand \x1b[31mmyself \u2028"},
        {f"unknown_{rng.randrange(1000)}": rng.choice(empty)},
        {"audio": None, "regex": None},
        {"metadata": {"key": "value"}},
    ]
    # Who asks for log-probabilities gets the same text.
    logprobs: dict[str, dict[str, Any]] = {
        CHAT: {"logprobs": True, "top_logprobs": rng.randrange(3)},
        GENERATE: {"return_logprob": True, "top_logprobs_num": rng.randrange(3)},
    }
    choices.append(logprobs.get(route, {}))
    if not route.startswith("/api/"):
        choices += [{"tools": []}, {"rid": _rid(rng)}, {"dllm": None} if route == CHAT else {}]
    fields = rng.choice(choices)
    return {} if "dllm" in fields else fields


def _rid(rng: random.Random) -> str:
    """Returns a name that no other request has, and that log lines and JSON must survive."""
    start = rng.choice(["r", "a b", "\n[x] ERROR", "\u00fc\x1b[2J", "-0"])
    return f"{start}{rng.getrandbits(64)}"
