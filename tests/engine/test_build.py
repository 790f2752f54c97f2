"""What is decided at start: sampling defaults, tokenizers, and refusals."""

import dataclasses
import json
import logging
import pathlib
import shutil
import subprocess
import sys

import huggingface_hub
import pytest

import jdllm
from jdllm import errors
from jdllm.checkpoint import source
from jdllm.engine import tokenizer
from jdllm.engine.start import kinds, sampling_defaults, sizing
from jdllm.models import loading
from jdllm.runner import full_forward
from jdllm.scheduler.rows import block, uniform
from jdllm.spec import AttentionPattern

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "llada2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_sampling_keys_that_are_not_honoured_are_named_in_one_warning(caplog):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": None, "min_p": 0.1}
    ignored = {"length_penalty": 1.05, "typical_p": 0.9}
    ids = {"eos_token_id": [1, 5], "mask_token_id": 2, "transformers_version": "4.50"}
    params = sampling_defaults.default_sampling(options | ignored | ids)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 1.0, 20, 0.1)
    (message,) = warnings_of(caplog)
    assert "generation_config.json" in message
    for key, value in ignored.items():
        assert f"{key}={value}" in message
    for key in (*options, *ids):
        assert key not in message


@pytest.mark.parametrize("do_sample", [True, False])
def test_neutral_sampling_keys_give_no_warning(do_sample, caplog):
    neutral = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "num_beams": 1}
    params = sampling_defaults.default_sampling(
        {"do_sample": do_sample, "stop_strings": None} | neutral
    )
    assert params.temperature == float(do_sample)
    assert not warnings_of(caplog)


def test_a_penalty_holds_without_do_sample_too(caplog):
    params = sampling_defaults.default_sampling({"repetition_penalty": 1.2, "min_p": 0.1})
    assert (params.temperature, params.repetition_penalty, params.min_p) == (0.0, 1.2, 0.0)
    assert not warnings_of(caplog)


def test_the_bundled_generation_config_gives_no_warning(caplog):
    bundled = source.read_json(source.bundled_model() / "generation_config.json")
    assert sampling_defaults.default_sampling(bundled).temperature == 0.0
    assert not warnings_of(caplog)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 3),
        ("top_k", 2.5),
    ],
)
def test_wrong_sampling_defaults_name_the_file(key, value, caplog):
    with pytest.raises(errors.ConfigError, match=rf"generation_config\.json.*{key}"):
        sampling_defaults.default_sampling({"do_sample": True, key: value})
    # A greedy request does not use it, and a published file may hold it.
    assert sampling_defaults.default_sampling({"do_sample": False, key: value}).temperature == 0
    (warning,) = warnings_of(caplog)
    assert "without effect" in warning and key in warning


def test_do_sample_is_yes_or_no():
    with pytest.raises(errors.ConfigError, match="do_sample='yes' must be true or false"):
        sampling_defaults.default_sampling({"do_sample": "yes"})


def hub_cache(cache, repo_id, revision, bos_token):
    """Writes a hub cache that holds the bundled tokenizer, marked by its bos token."""
    commit = revision.encode().hex().ljust(40, "0")
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        shutil.copy(source.bundled_model() / name, snapshot)
    options = json.loads((snapshot / "tokenizer_config.json").read_text())
    (snapshot / "tokenizer_config.json").write_text(json.dumps(options | {"bos_token": bos_token}))
    shutil.copy(GOLDEN / "config.json", snapshot)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)


def test_revision_and_download_dir_apply_to_a_tokenizer_from_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for revision, token in (("main", "<|mask|>"), ("v2", "<|role_end|>")):
        hub_cache(tmp_path, "nobody/nothing", revision, token)
    for revision, token_id in ((None, 2), ("v2", 5)):
        loaded = tokenizer.Tokenizer("nobody/nothing", revision=revision, download_dir=tmp_path)
        assert loaded._hf.bos_token_id == token_id
    with pytest.raises(errors.ConfigError, match="nobody/nothing"):
        tokenizer.Tokenizer("nobody/nothing", revision="v3", download_dir=tmp_path)
    with pytest.raises(errors.ConfigError, match="nobody/nothing"):
        tokenizer.Tokenizer("nobody/nothing", revision="v2", download_dir=tmp_path / "other")


def test_loading_a_tokenizer_says_nothing(tmp_path):
    # As published: a family that transformers does not know, with RoPE keys it renamed.
    for name in TOKENIZER_FILES:
        shutil.copy(source.bundled_model() / name, tmp_path)
    hf = json.loads((GOLDEN / "config.json").read_text())
    assert "rope_scaling" in hf
    (tmp_path / "config.json").write_text(json.dumps(hf))
    code = (
        "import sys; from jdllm.engine import tokenizer;"
        "t = tokenizer.Tokenizer(sys.argv[1]); print(t.eos_token_id, t.has_chat_template)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "default::FutureWarning", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("1 True\n", "")


def test_one_bundled_model_for_engine_and_full_forward():
    directory = source.bundled_model()
    assert (directory / "config.json").is_file()
    assert full_forward.load_model().model.path == directory


@pytest.mark.parametrize("pattern", AttentionPattern)
def test_models_without_a_mask_token_need_a_causal_context(pattern):
    spec = loading.read_spec(GOLDEN, block_size=8)
    assert kinds.kind_of(spec).rows is block.BlockRows
    diffusion = dataclasses.replace(spec.diffusion, attention_pattern=pattern, mask_token_id=None)
    maskless = dataclasses.replace(spec, diffusion=diffusion)
    if pattern is AttentionPattern.CAUSAL:
        assert kinds.kind_of(maskless).rows is uniform.UniformRows
    else:
        with pytest.raises(errors.ConfigError, match=f"mask token with {pattern.value} attention"):
            kinds.kind_of(maskless)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"page_size": 12}, "page_size"),
        ({"context_length": 100_000}, "max_position_embeddings"),
        ({"max_total_tokens": 3}, "page"),
        ({"chunked_prefill_size": 4}, "chunked_prefill_size"),
        ({"tokenizer_path": "/"}, "tokenizer"),
        ({"chat_template": "/nope.jinja"}, "chat_template"),
    ],
)
def test_options_are_refused_before_weights_are_read(options, match, tmp_path):
    for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        shutil.copy(source.bundled_model() / name, tmp_path / name)
    (tmp_path / "model.safetensors").write_bytes(b"torn: reading it would be another error")
    with pytest.raises(errors.ConfigError, match=match):
        jdllm.Engine(model_path=str(tmp_path), **options)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", {"torch_dtype": "float33"}, r"config\.json: torch_dtype='float33' is none"),
        ("config.json", {"dtype": ["bfloat16"]}, r"config\.json: dtype=\['bfloat16'\] is none of"),
        (
            "generation_config.json",
            {"do_sample": True, "top_p": 3},
            r"generation_config\.json: top_p=3 is outside",
        ),
        ("chat_template.jinja", " \n", r"chat_template\.jinja: the chat template is empty"),
        (
            "special_tokens_map.json",
            {"eos_token": "<|nowhere|>"},
            r"they do not .*special_tokens_map\.json: eos_token='<\|nowhere\|>' has the id 1536",
        ),
    ],
)
def test_a_wrong_file_is_refused_before_weights_are_read(name, content, match, tmp_path):
    for copied in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        shutil.copy(source.bundled_model() / copied, tmp_path / copied)
    file = tmp_path / name
    if isinstance(content, dict):
        content = json.dumps(source.read_optional_json(file) | content)
    file.write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"torn: reading it would be another error")
    with pytest.raises(errors.ConfigError, match=match):
        jdllm.Engine(model_path=str(tmp_path))


@pytest.mark.campaign
def test_dummy_weights_need_no_tokenizer(tmp_path, caplog):
    shutil.copy(GOLDEN / "config.json", tmp_path / "config.json")
    with jdllm.Engine(
        model_path=str(tmp_path),
        load_format="dummy",
        context_length=64,
        max_running_requests=1,
        chunked_prefill_size=32,
    ) as engine:
        assert engine.tokenizer is None and engine.config.skip_tokenizer_init
        result = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 3})
        assert len(result["output_ids"]) == 3
    assert "no tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("pool_tokens", "context_length", "rows"),
    [
        (1 << 20, 32768, 64),  # memory for a thousand rows: the most that are compiled
        (40 * 1024, 32768, 32),  # a power of two, as buckets are
        (1500, 4096, 1),
        (100, 4096, 1),  # a pool smaller than one row's share still serves one
        (1024, 128, 8),  # contexts shorter than the share
    ],
)
def test_default_rows_follow_the_memory(pool_tokens, context_length, rows):
    assert sizing.rows_that_fit(pool_tokens, context_length, 64) == rows


@pytest.mark.parametrize(
    ("in_use", "step", "limit", "message"),
    [
        (
            80,
            21,
            100,
            r"mem-fraction-static 0.79 or less, --max-total-tokens 501 or fewer, a small",
        ),
        # 5 GB of the device are neither weights nor KV.
        (
            85,
            16,
            100,
            r"mem-fraction-static 0.79 or less, --max-total-tokens 501 or fewer, a small",
        ),
        (80, 80, 100, r"device gives 100.00 GB: use a smaller --chunked-prefill-size or fewer"),
        (80, 200, 100, r"device gives 100.00 GB: use a smaller --chunked-prefill-size or fewer"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused_with_what_would(in_use, step, limit, message):
    giga = 10**9
    sizes = sizing.Sizes(
        context_length=128, max_running_requests=4, page_size=1, prefill_token_budget=128,
        max_prefill_tokens=128, num_pages=512, weight_bytes=30 * giga, kv_bytes=50 * giga,
        step_bytes=step * giga,
    )  # fmt: skip
    sizing.check_memory(sizes, None)
    sizing.check_memory(sizes, (limit * giga - sizes.step_bytes, limit * giga))
    with pytest.raises(errors.ConfigError, match=message):
        sizing.check_memory(sizes, (in_use * giga, limit * giga))
