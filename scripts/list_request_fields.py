"""Lists the request fields of SGLang and vLLM, with their defaults, as JSON for the tests.

    python scripts/list_request_fields.py SGLANG_FOLDER VLLM_FOLDER > tests/data/request_fields.json

The folders are those of the unpacked wheels (the ones that hold `srt/` and `entrypoints/`). They
are parsed, not imported. Written are names and defaults, nothing else: a field that has no default,
or one that is no literal, is null. Run it again when a new version of one of them adds fields.
"""

from __future__ import annotations

import ast
import json
import pathlib
import sys
from typing import Any

VERSIONS = {"sglang": "0.5.23", "vllm": "0.33"}
# (kind of body, server, file, class)
CLASSES = (
    ("chat", "sglang", "srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"),
    ("chat", "vllm", "entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
    ("completions", "sglang", "srt/entrypoints/openai/protocol.py", "CompletionRequest"),
    ("completions", "vllm", "entrypoints/openai/completion/protocol.py", "CompletionRequest"),
    ("responses", "sglang", "srt/entrypoints/openai/protocol.py", "ResponsesRequest"),
    ("responses", "vllm", "entrypoints/openai/responses/protocol.py", "ResponsesRequest"),
    ("generate", "sglang", "srt/managers/io_struct.py", "GenerateReqInput"),
    ("sampling_params", "sglang", "srt/sampling/sampling_params.py", "SamplingParams"),
    ("tokenize", "sglang", "srt/entrypoints/openai/protocol.py", "TokenizeRequest"),
    ("tokenize", "vllm", "entrypoints/serve/tokenize/protocol.py", "TokenizeCompletionRequest"),
    ("tokenize", "vllm", "entrypoints/serve/tokenize/protocol.py", "TokenizeChatRequest"),
    ("detokenize", "sglang", "srt/entrypoints/openai/protocol.py", "DetokenizeRequest"),
    ("detokenize", "vllm", "entrypoints/serve/tokenize/protocol.py", "DetokenizeRequest"),
)
# Fields that the server itself fills in; no client sends them.
INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"} | {
    "is_normalized", "ebnf_full_assistant", "http_worker_ipc", "model_config",
}  # fmt: skip


def main() -> None:
    folders = dict(zip(VERSIONS, map(pathlib.Path, sys.argv[1:]), strict=True))
    listed: dict[str, Any] = {"versions": VERSIONS}
    for kind, server, path, name in CLASSES:
        tree = ast.parse((folders[server] / path).read_text(encoding="utf-8"))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        listed.setdefault(kind, {}).setdefault(server, {}).update(fields(classes, name))
    print(json.dumps(listed, indent=1))


def fields(classes: dict[str, ast.ClassDef], name: str) -> dict[str, Any]:
    """Returns the fields of a class and of its bases in the same file."""
    found: dict[str, Any] = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= fields(classes, base.id)
    for node in classes[name].body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        field = node.target.id
        if not field.startswith("_") and field not in INTERNAL:
            found[field] = default(node.value)
    return found


def default(node: ast.expr | None) -> Any:
    """Returns the default that an expression stands for, None if it has none or is no literal."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Field", "field"):
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        factory = getattr(named.get("default_factory"), "id", "")
        if factory in ("list", "dict"):
            return {"list": [], "dict": {}}[factory]
        return default(named.get("default", node.args[0] if node.args else None))
    try:
        value = ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None
    return None if value is ... else value


if __name__ == "__main__":
    main()
