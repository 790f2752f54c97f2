"""JSON that a client can get wrong: bodies with wrong values, and text that is no JSON."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

from support.fuzz import asks


@dataclasses.dataclass(frozen=True)
class Raw:
    """JSON as it stands, also such as no library writes."""

    text: str


def dumps(value: Any) -> bytes:
    return _text(value).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    match value:
        case Raw():
            return value.text
        case dict():
            inner = (f"{json.dumps(name)}: {_text(item)}" for name, item in value.items())
            return "{" + ", ".join(inner) + "}"
        case list():
            return "[" + ", ".join(map(_text, value)) + "]"
        case _:
            return json.dumps(value)


# Values that are wrong for a field, as JSON.
WRONG_INTEGER = (
    '"5"', "1.5", "true", "false", "[]", "[1]", "{}", '""', "1e30", "9" * 25, "-" + "9" * 25,
    '{"a": null}', "1e-5", '"\\u0000"',
)  # fmt: skip
WRONG_NUMBER = ('"0.5"', "true", "[]", "[0]", "{}", '""', "1e300", "-1e300", "-1", "9" * 30)
WRONG_FLAG = ('"true"', "1", "0", "1.0", "[]", "{}", '""', "[true]")
WRONG_TEXT = ("5", "true", "1.5", "[]", '["a"]', "{}", '{"a": "b"}')
WRONG_OBJECT = ("5", '"x"', "true", "[]", "[{}]", '""')
WRONG_LIST = ("5", '"x"', "true", "{}", "[5]", "[[]]", '""')
WRONG_PROMPT = ("5", "true", "{}", "[]", "[[]]", "[null]", '[5, "a"]', '["a", 5]', "[1.5]", "[-1]",
                "[99999999]", "[" + "9" * 30 + "]", "[[5], []]", "[true]")  # fmt: skip
WRONG_MESSAGES = (
    "5", '"x"', "true", "[]", "{}", "[5]", "[[]]", '[{"role": 5, "content": "a"}]',
    '[{"role": "user"}]', '[{"content": "a"}]', '[{"role": "user", "content": 5}]',
    '[{"role": "user", "content": []}]', '[{"role": "user", "content": [{"type": "image"}]}]',
    '[{"role": "user", "content": "a", "tool_calls": 5}]',
    '[{"role": "x\\n\\u2028", "content": ""}]', '[{"role": "user", "content": "a", "zzz": 1}]',
    '[{"role": "user", "content": "a"}, null]',
)  # fmt: skip
WRONG_STOP = ("5", "true", "{}", "[5]", '[""]', "[null]", '""', "[[]]", json.dumps(["a"] * 33),
              json.dumps("a" * 2049), "false")  # fmt: skip
WRONG_IDS = ("5", '"x"', "{}", '["a"]', "[1.5]", "[-1]", "[true]", "[[]]", "[" + "9" * 25 + "]")
WRONG_DLLM = (
    "5", '"x"', "[]", '""', '{"zzz": 1}', '{"threshold": "a"}', '{"threshold": 1e300}',
    '{"threshold": true}', '{"algorithm": ["x"]}', '{"algorithm": "zzz"}',
    '{"algorithm": 5}', '{"threshold": -1}', '{"algorithm": {"a": 1}}', '{"": 1}', "false",
)  # fmt: skip
WRONG_RID = ('""', "5", "true", "{}", json.dumps("r" * 257), "[]")

SAMPLING = {
    "temperature": WRONG_NUMBER,
    "top_p": (*WRONG_NUMBER, "1.0001"),
    "top_k": (*WRONG_INTEGER, "-2", "1000000000000"),
    "seed": WRONG_INTEGER,
    "stop": WRONG_STOP,
    "dllm": WRONG_DLLM,
    "min_p": (*WRONG_NUMBER, "1.5"),
    "frequency_penalty": (*WRONG_NUMBER[:-2], "2.5"),
    "presence_penalty": (*WRONG_NUMBER[:-2], "-2.5"),
}
# Options that only the server's own names have.
OWN = {
    "logit_bias": ("5", '"x"', '{"a": 1}', '{"5": "x"}', '{"5": 1e9}', '{"5": true}', '{"-1": 1}'),
    "repetition_penalty": (*WRONG_NUMBER, "0"),
    "stop_token_ids": WRONG_IDS,
    "ignore_eos": WRONG_FLAG,
    "skip_special_tokens": WRONG_FLAG,
}
LIMIT = (*WRONG_INTEGER, "-1", "513", "1000000")
COMMON = {"model": WRONG_TEXT, "stream": WRONG_FLAG}
OPENAI = SAMPLING | OWN | COMMON | {
    "n": (*WRONG_INTEGER, "-1", "129", "1000000"),
    "no_stop_trim": WRONG_FLAG,
    "max_tokens": LIMIT,
    "stream_options": ("5", "[]", '""', '{"include_usage": 1}', '{"zzz": 1}', "true"),
    "rid": WRONG_RID,
    "return_cached_tokens_details": WRONG_FLAG,
    "user": WRONG_TEXT,
    "metadata": ("5", "[]", '"x"', "true"),
    "best_of": ("7", *WRONG_INTEGER[:4]),
    "response_format": ('{"type": "json_object"}', "5", '{"type": "json_schema"}'),
    "regex": ('"a+"', "5"),
    "bad_words": ("5", "true", "[5]", '[""]', "{}"),
    "allowed_token_ids": ("5", '"x"', "[true]", '["a"]', "[-1]", "[99999999]", "{}"),
    "logprobs": ('"x"', "[1]", '{"a": 1}', "-1", "1.5", "1000"),
    "min_tokens": (*WRONG_INTEGER[:4], "-1"),
}  # fmt: skip
TOOLS = ("5", "[5]", '"x"', "{}", '[{"type": "function"}]')
FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    asks.CHAT: OPENAI | {
        "messages": WRONG_MESSAGES,
        "max_completion_tokens": LIMIT,
        "chat_template_kwargs": (*WRONG_OBJECT, '{"messages": []}', '{"self": 1}'),
        "add_generation_prompt": WRONG_FLAG,
        "continue_final_message": WRONG_FLAG,
        "add_special_tokens": WRONG_FLAG,
        "escape_special_tokens": WRONG_FLAG,
        "tools": TOOLS,
        "tool_choice": ('"required"', "5", '{"a": 1}'),
    },
    asks.TEXT: OPENAI | {"prompt": WRONG_PROMPT, "suffix": ("5", "[]", "{}", '"x"'),
                         "echo": WRONG_FLAG, "add_special_tokens": WRONG_FLAG,
                         "escape_special_tokens": WRONG_FLAG[:4]},
    asks.GENERATE: {
        "stream": WRONG_FLAG,
        "add_special_tokens": WRONG_FLAG,
        "rid": WRONG_RID,
        "return_logprob": WRONG_FLAG,
        "return_step_map": WRONG_FLAG,
        "logprob_start_len": ("5", *WRONG_INTEGER[:4]),
        "sampling_params": ("5", '"x"', "true", "[5]", "[{}, {}, {}, {}, {}]", '""'),
        **{f"sampling_params.{name}": wrong for name, wrong in (SAMPLING | OWN).items()},
        "sampling_params.n": (*WRONG_INTEGER, "0", "-1", "129"),
        "sampling_params.max_new_tokens": LIMIT,
        "top_logprobs_num": (*WRONG_INTEGER, "-1", "21"),
        "sampling_params.regex": ('"a+"', "5"),
        "sampling_params.zzz": ("5", '"x"', "[1]"),
    },
    asks.RESPONSES: SAMPLING | OWN | COMMON | {
        "input": ("5", "true", "[]", "{}", '""', "[5]", '[{"role": "user"}]', '[{"type": "zzz"}]',
                  '[{"role": "user", "content": [{"type": "input_image"}]}]',
                  '[{"role": "x", "content": "a"}]', '[{"type": ["a"]}]',
                  '[{"role": "user", "content": [5]}]'),
        "instructions": WRONG_TEXT,
        "escape_special_tokens": WRONG_FLAG,
        "max_output_tokens": (*LIMIT, "0"),
        "stream_options": ("5", "[]", '""', '{"include_usage": 1}', '{"zzz": 1}'),
        "metadata": ("5", "[]", '"x"', "true"),
        "include": ("5", '"x"', "{}", "[5]", '["zzz"]'),
        "text": ("5", "[]", '"x"', '{"format": {"type": "json_object"}}'),
        "reasoning": ("5", "[]", '"x"', '{"effort": "high"}'),
        "tools": TOOLS[:3],
        "tool_choice": ('"required"', "5", '{"a": 1}'),
        "rid": WRONG_RID,
        "previous_response_id": ('"resp_1"', "5"),
        "background": ("true", "1"),
        "truncation": ('"auto"', "5"),
    },
}  # fmt: skip
_OLLAMA = COMMON | {
    **{f"options.{name}": wrong for name, wrong in SAMPLING.items()},
    "options": WRONG_OBJECT[:4],
    "options.num_predict": (*WRONG_INTEGER[:3], "0", "-3", "1e-5"),
    "options.num_ctx": WRONG_INTEGER,
    "options.numa": WRONG_FLAG,
    "options.zzz": ("5", '"x"'),
    "keep_alive": ("true", "[]", "{}"),
    "add_special_tokens": WRONG_FLAG,
    "escape_special_tokens": WRONG_FLAG,
    "format": ('"json"', '{"type": "object"}'),
    "think": ("true", '"high"'),
}
FIELDS[asks.OLLAMA_CHAT] = _OLLAMA | {
    "messages": (*WRONG_MESSAGES[:3], *WRONG_MESSAGES[4:7], '[{"role": 5}]', '[{"role": "x"}]',
                 '[{"role": "user", "content": 5}]', '[{"role": "user", "tool_calls": [{}]}]'),
    "tools": TOOLS[:3],
}  # fmt: skip
FIELDS[asks.OLLAMA_GENERATE] = _OLLAMA | {
    "prompt": WRONG_TEXT,
    "system": WRONG_TEXT,
    "raw": WRONG_FLAG,
    "context": ("[5]", "5", '"x"'),
}
EMPTY = ('""', "[]", "{}", "false")  # ask for nothing in an optional field of another type
MEANT = ("messages", "prompt", "input", "allowed_token_ids")  # but in these
for _path, _wrong in FIELDS.items():
    for _name in {*_wrong} - ({*MEANT} if _path != asks.OLLAMA_GENERATE else set()):
        _wrong[_name] = tuple(value for value in _wrong[_name] if value not in EMPTY)
    _wrong |= {"zzz": ("5", "0", '"x"', "[1]", '{"a": 1}', "true"), "k" * 70: ("1", '"x"')}

# Text that is no JSON, or no object. `%s` stands for a body without its first brace.
NO_OBJECT = (
    "", " ", "null", "5", '"x"', "[]", "[{}]", "true", "{", "}", "{}}", "{'a': 1}", "\ufeff{}",
    '{"a": NaN, %s', '{"a": Infinity, %s', '{"a": -Infinity, %s', '{"a": 1e999, %s', "{,%s",
    '{"a": ' + "9" * 400 + ", %s", '{"a": "\\ud800", %s', '{"\\udfff": null, %s', '{"a": 01, %s',
    '{"a": "\x01", %s', '{"a": "\ud800", %s', '{"a": +1, %s', '{"a": .5, %s', '{"a": 0x1, %s',
    '// no comment\n{%s', '{"a": undefined, %s', '{"a": "\\x41", %s', "{%s,", "{%s{}",
)  # fmt: skip


def without_object(body: dict[str, Any], rng: random.Random) -> bytes:
    """Returns something that no parser may take for the body of a request."""
    text = rng.choice(NO_OBJECT)
    if "%s" in text:
        return text.replace("%s", _text(body)[1:]).encode("utf-8", "surrogatepass")
    return text.encode()


def with_wrong_field(path: str, body: dict[str, Any], rng: random.Random) -> tuple[dict, str]:
    """Returns the body with one value that is wrong, and the name of its field."""
    name = rng.choice([*FIELDS[path]])
    value = Raw(rng.choice(FIELDS[path][name]))
    parent, _, last = name.rpartition(".")
    if parent:
        return body | {parent: body[parent] | {last: value}}, name
    return body | {name: value}, name


def with_field_twice(body: dict[str, Any], rng: random.Random) -> bytes:
    """Returns the body with a wrong value first, which the right one behind it replaces."""
    name = rng.choice([*body])
    wrong = rng.choice(["5", '"x"', "[[]]", "{}", "null"])
    return f"{{{json.dumps(name)}: {wrong}, ".encode() + dumps(body)[1:]


def in_floats(value: Any) -> Any:
    """Returns a value with its integers written as floats."""
    match value:
        case dict():
            return {name: in_floats(item) for name, item in value.items()}
        case list():
            return [in_floats(item) for item in value]
        case int() if not isinstance(value, bool):
            return float(value)
        case _:
            return value


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Returns the bytes with some of them changed, lost or doubled."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        place, other = rng.randrange(len(found) + 1), rng.randrange(len(found) + 1)
        new, lost = rng.choice(
            [
                (bytes([rng.randrange(256)]), 1),
                (b"", rng.randint(1, 8)),
                (bytes([rng.choice(b'{}[],:"\\0123456789-.eE\x00\xff ')]), 0),
                (found[other : other + 20], 0),
            ]
        )
        found[place : place + lost] = new
    return bytes(found)


def anything(rng: random.Random, depth: int = 4) -> Any:
    """Returns a value of JSON of any kind."""
    kind = rng.randrange(12 if depth else 8)
    match kind:
        case 0:
            return None
        case 1:
            return rng.random() < 0.5
        case 2:
            return rng.choice([0, 1, -1, 2**31, 2**63, -(2**63), 10**18, rng.randrange(600)])
        case 3:
            return rng.choice([0.0, -0.0, 0.5, 1.0, 1e308, 5e-324, -1e-9, rng.random() * 3])
        case 4 | 5:
            return _string(rng)
        case 6:
            return Raw(rng.choice(["1E400", "-0", "1e-400", "9" * 40, "0.1e1", '"\\ud83c\\udf4e"']))
        case 7:
            return rng.choice([[], {}, ""])
        case 8 | 9:
            return [anything(rng, depth - 1) for _ in range(rng.randrange(5))]
        case _:
            return {_string(rng): anything(rng, depth - 1) for _ in range(rng.randrange(5))}


def _string(rng: random.Random) -> str:
    pool = (
        "a", "user", "\n", "\x00", "\x1b[31m", "\u2028", "\u202e", "\u00e9", "\U0001f34e",
        "<|mask|>", "<|endoftext|>", "{{ 7 * 7 }}", "{% for %}", "%s",
        "../", '"', "\\", " ", "None",
    )  # fmt: skip
    return "".join(rng.choices(pool, k=rng.randrange(5)))


def large(rng: random.Random) -> Any:
    """Returns a value of some 10 to 300 KB, or one that is nested deeply."""
    size = rng.choice([1000, 10_000, 100_000])
    depth = rng.choice([50, 63, 70, 2000])
    return rng.choice(
        [
            lambda: "a" * 3 * size,
            lambda: "ab " * size,
            lambda: "\U0001f34e" * (size // 2),
            lambda: ["a"] * (size // 4),
            lambda: [5] * size,
            lambda: [[]] * (size // 4),
            lambda: [{}] * (size // 10),
            lambda: {f"key{i}": None for i in range(size // 20)},
            lambda: Raw("[" * depth + "]" * depth),
            lambda: Raw('{"a":' * depth + "1" + "}" * depth),
            lambda: Raw("9" * size),
            lambda: [{"role": "user", "content": "a"}] * (size // 40),
            lambda: Raw('"' + "\\" * 2 * size + '"'),
        ]
    )()
