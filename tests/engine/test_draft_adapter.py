"""LinearSpec with the adapter beside Nemotron's weights, served, against the oracle with it."""

from unittest import mock

import numpy as np
import pytest
from support import nemotron_adapter, nemotron_oracle
from support.nemotron_asks import AR, BLOCK, DIFFUSION, MASK, SPEC, make, random_case, sampled
from support.tiny_engine import alone, answers, assert_nothing_held

from jdllm import errors
from jdllm.models import loading

campaign = pytest.mark.campaign  # engines of its own, whose programs take long to compile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return nemotron_adapter.write(tmp_path_factory.mktemp("adapter") / "model")


@pytest.mark.parametrize(
    ("algorithms", "options", "expected"),
    [
        (SPEC, {}, True),
        (f"{DIFFUSION},{SPEC}", {}, True),
        (f"{DIFFUSION},{AR}", {}, False),
        (SPEC, {"disable_draft_adapter": True}, False),
        (SPEC, {"load_format": "dummy"}, False),
    ],
)
def test_the_adapter_is_loaded_where_it_is_used(algorithms, options, expected, folder):
    with (
        mock.patch.object(loading, "load", side_effect=errors.ConfigError("stop")) as load,
        pytest.raises(errors.ConfigError, match="stop"),
    ):
        make(folder, algorithms, **options)
    assert load.call_args.kwargs["config"].has_draft_adapter == expected


def test_an_adapter_that_cannot_be_applied_is_refused_before_weights_are_read(tmp_path):
    folder = nemotron_adapter.write(tmp_path / "model", {"use_dora": True})
    with (
        mock.patch.object(loading, "load") as load,
        pytest.raises(errors.ConfigError, match="use_dora=True.*disable_draft_adapter"),
    ):
        make(folder, SPEC)
    assert not load.called


@pytest.fixture(scope="module")
def engine(folder):
    with make(folder, f"{DIFFUSION},{AR},{SPEC}") as engine:
        yield engine


@campaign
def test_requests_together_give_the_oracle_s_tokens_and_forwards_and_so_do_hits(engine, folder):
    oracle = nemotron_oracle.Model(folder, folder / "linear_spec_lora")
    plain = nemotron_oracle.Model(folder)
    rng = np.random.default_rng(0)
    cases = [random_case(rng, i) for i in range(20)]
    shared = rng.integers(0, MASK, 40).tolist()
    cases += [([*shared, i], params, answer) for i, (_, params, answer) in enumerate(cases[:8])]
    prompts = [prompt for prompt, _, _ in cases]
    params = [one for _, one, _ in cases]
    compiles = engine.stats().jit_compiles_total
    assert engine.flush_cache()
    first = engine.generate(input_ids=prompts, sampling_params=params)
    again = engine.generate(input_ids=prompts[-8:], sampling_params=params[-8:])
    forwards = {True: 0, False: 0}
    for (prompt, one, (function, settings)), result in zip(cases, first, strict=True):
        asked = prompt, one["max_new_tokens"]
        expected, nfe = function(oracle, *asked, **settings)
        assert result["output_ids"] == expected, one
        assert result["meta_info"]["nfe"] == nfe, one
        without, forwards_without = function(plain, *asked, **settings)
        assert without == expected, "an adapter of drafts changes no token"
        if function is not nemotron_oracle.linear_spec:
            assert forwards_without == nfe, "only drafts have the adapter"
            continue
        forwards[True] += nfe
        forwards[False] += forwards_without
    assert forwards[True] != forwards[False], "the adapter changes what is drafted"
    assert answers(again) == answers(first[-8:])
    assert min(one["meta_info"]["cached_tokens"] for one in again) == 32
    assert answers(alone(engine, prompts[:8], params[:8])) == answers(first[:8])
    assert engine.stats().jit_compiles_total == compiles
    assert_nothing_held(engine)


@campaign
def test_drawn_text_is_that_of_autoregressive_decoding(engine):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, MASK, 20 + i).tolist() for i in range(4)]
    plain, drafts = (
        engine.generate(
            input_ids=prompts, sampling_params=[sampled(i, algorithm=name) for i in range(4)]
        )
        for name in (AR, SPEC)
    )
    for one, other in zip(plain, drafts, strict=True):
        assert other["output_ids"] == one["output_ids"]
    assert sum(one["meta_info"]["dllm"]["blocks"] for one in drafts) < 4 * 40, "some were accepted"


@campaign
def test_without_the_adapter_drafts_are_those_of_the_weights_alone(tmp_path):
    folder = nemotron_adapter.write(tmp_path / "model", {"use_dora": True})
    prompt = np.random.default_rng(2).integers(0, MASK, 30).tolist()
    with make(folder, SPEC, disable_draft_adapter=True, max_running_requests=1) as engine:
        params = {"max_new_tokens": 48, "ignore_eos": True}
        result = engine.generate(input_ids=prompt, sampling_params=params)
    plain = nemotron_oracle.Model(folder)
    expected = nemotron_oracle.linear_spec(plain, prompt, 48, block_length=BLOCK)
    assert (result["output_ids"], result["meta_info"]["nfe"]) == expected
