"""Training renders a checkpoint's chat template in the sandbox, as serving does."""

from __future__ import annotations

import json
import pathlib
import shutil

import pytest
from support import chat_templates

from jdllm import errors
from jdllm.engine import tokenizer
from jdllm.train import examples

NANO = pathlib.Path(examples.__file__).parents[1] / "assets" / "jdllm-nano"
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


@pytest.fixture
def folder(tmp_path):
    for name in FILES:
        shutil.copy(NANO / name, tmp_path)
    return tmp_path


def chat_format(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    return examples.ChatFormat(folder)


@pytest.mark.parametrize(
    "program",
    [
        "{{ cycler.__init__.__globals__.os.system('touch ' ~ path) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__.__builtins__.open(path, 'w') }}",
    ],
)
def test_a_template_runs_no_program(folder, program):
    ran = folder / "ran"
    source = f"{{% set path = '{ran}' %}}" + program + "{{ messages[0].content }}"
    with pytest.raises(errors.ConfigError, match="unsafe|undefined"):
        chat_format(folder, source)
    assert not ran.exists()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('not for questions') }}", "not for questions"),
        ("{{ messages[0].content * 2 }}", "once"),
        ("nothing", "once"),
    ],
)
def test_a_template_that_cannot_ask_is_a_configuration_error(folder, template, reason):
    with pytest.raises(errors.ConfigError, match=reason):
        chat_format(folder, template)


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_training_asks_as_serving_does(folder, name):
    """Also with blocks on lines of their own, which a plain Jinja environment writes otherwise."""
    template = chat_templates.ALL[name]
    prompts = chat_format(folder, template).prompts(["How many?"])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["bos_token"]
    served = tokenizer.Tokenizer(folder)
    assert prompts == [served.apply_chat_template([{"role": "user", "content": "How many?"}])]
