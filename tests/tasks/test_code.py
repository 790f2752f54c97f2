"""HumanEval and MBPP: files in the published formats, and programs that pass or fail."""

import gzip
import json

import pytest

from jdllm.tasks import code

PROMPT = '''from typing import List


def double(xs: List[int]) -> List[int]:
    """ Return each number times two.
    >>> double([1])
    [2]
    """
'''
HUMANEVAL = {
    "task_id": "Own/0",
    "prompt": PROMPT,
    "entry_point": "double",
    "canonical_solution": "    return [2 * x for x in xs]\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n"
    "    assert candidate([]) == []\n",
}
MBPP = {
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\r\n  return a + b",
    "task_id": 11,
    "test_setup_code": "import math",
    "test_list": ["assert add(1, 2) == 3", "assert add(math.inf, 1) == math.inf"],
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "own",
    "task_id": 12,
    "prompt": "Write a function to add two numbers.",
    "code": "def add(a, b):\n  return a + b",
    "test_imports": ["import math"],
    "test_list": ["assert add(1, math.floor(2.5)) == 3"],
}


def passes(program):
    try:
        exec(compile(program, "<test>", "exec"), {"__name__": "__main__"})
    except Exception:
        return False
    return True


@pytest.fixture(params=["plain", "gzip"])
def humaneval(request, tmp_path):
    path = tmp_path / "HumanEval.jsonl.gz"
    content = (json.dumps(HUMANEVAL) + "\n").encode()
    path.write_bytes(gzip.compress(content) if request.param == "gzip" else content)
    (example,) = code.load_humaneval(str(path))
    return example


BODY = "    return [2 * x for x in xs]\n"
RIGHT = {
    "a base model's completion": "    return [2 * x for x in xs]\n",
    "which goes on": "    return [x + x for x in xs]\n\ndef other():\n    broken(\n",
    "with a test": "    return [x + x for x in xs]\n\nprint(undefined)\n",
    "a fenced function": f"Here it is:\n```python\ndef double(xs):\n{BODY}```\nDone.",
    "which needs the prompt's imports": f"```python\ndef double(xs: List[int]):\n{BODY}```",
    "the whole prompt again": f"```python\n{PROMPT}    return [2 * x for x in xs]\n```",
    "a fence that does not end": "```python\ndef double(xs):\n    return [2 * x for x in xs]\n",
    "a plain function": "def double(xs):\n    return [2 * x for x in xs]\n",
    "a fenced body": "```\n    return [2 * x for x in xs]\n```",
    "a body without indent": "```python\nreturn [2 * x for x in xs]\n```",
    "an example beside it": "```python\ndef double(xs):\n    return [2 * x for x in xs]\n```\n"
    "Use it so:\n```python\ndouble([1])\n```",
}
WRONG = {
    "a wrong function": "    return xs\n",
    "nothing": "",
    "words": "I cannot do that.",
    "an early exit in the body": "    return [x for x in xs]\n",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_of_many_forms_pass(humaneval, name):
    assert passes(code.humaneval_program(RIGHT[name], humaneval))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_fail(humaneval, name):
    assert not passes(code.humaneval_program(WRONG[name], humaneval))


def test_prompts_of_humaneval(humaneval):
    assert humaneval.id == "Own/0"
    assert f"```python\n{PROMPT}\n```" in code.build_humaneval_prompt(humaneval)
    assert code.build_humaneval_prompt(humaneval, [humaneval]) == (
        PROMPT + HUMANEVAL["canonical_solution"] + "\n\n" + PROMPT
    )
    assert passes(code.humaneval_program(humaneval.answer, humaneval))


def test_both_files_of_mbpp(tmp_path):
    plain, sanitized = tmp_path / "mbpp.jsonl", tmp_path / "sanitized-mbpp.json"
    plain.write_text(json.dumps(MBPP) + "\n")
    sanitized.write_text(json.dumps([SANITIZED, SANITIZED]))
    (one,) = code.load_mbpp(str(plain))
    (other,) = code.load_mbpp(str(sanitized), 1)
    assert (one.id, other.id) == ("11", "12")
    for example in (one, other):
        prompt = code.build_mbpp_prompt(example)
        assert "add two numbers" in prompt
        assert "assert add(1," in prompt
        assert example.answer in code.build_mbpp_prompt(example, [example])
        assert passes(code.mbpp_program(example.answer, example))
        fenced = f"Sure!\n```python\n{example.answer}\n```\n[DONE]\nmore"
        assert passes(code.mbpp_program(fenced, example))
        assert passes(code.mbpp_program(f"[BEGIN]\n{example.answer}\n[DONE] junk (", example))
        assert not passes(code.mbpp_program("def add(a, b): return a", example))
        assert not passes(code.mbpp_program("", example))


@pytest.mark.parametrize(
    ("load", "row", "words"),
    [
        (code.load_humaneval, HUMANEVAL | {"entry_point": "x; import os"}, "is no name"),
        (code.load_humaneval, {"prompt": "p"}, "'test' must be text"),
        (code.load_mbpp, MBPP | {"test_list": []}, "test_list is empty"),
        (code.load_mbpp, MBPP | {"test_list": "assert True"}, "list of texts"),
        (code.load_mbpp, {"task_id": 1}, "'prompt' must be text"),
    ],
)
def test_a_bad_record_names_field_and_place(tmp_path, load, row, words):
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=words) as error:
        load(str(path))
    assert "record 1" in str(error.value)
