"""Which algorithms a family compiles, its default options, sizes and counters."""

import pathlib

import pytest

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.device import facts
from jdllm.engine import stats
from jdllm.engine.start import algorithm_defaults, kinds, sampling_defaults, sizing
from jdllm.models import loading
from jdllm.options import config, sampling_params
from jdllm.scheduler.batch import LaunchResult, RowResult, ScheduleBatch
from jdllm.scheduler.rows import canvas

CPU = facts.DeviceFacts(platform="cpu", device_kind="cpu")

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens"
FAMILIES = {"llada2": False, "llada": True, "dream": True}
KINDS = {False: lookup.BLOCK, True: lookup.CANVAS}


def choose(family, generation_config=None, **options):
    spec = loading.read_spec(GOLDENS / family)
    return algorithm_defaults.choose(config.EngineConfig(**options), generation_config or {}, spec)


@pytest.mark.parametrize("family,has_canvas", FAMILIES.items())
def test_default_follows_the_attention(family, has_canvas):
    names, default = choose(family)
    assert names == ("FullAttnMultiBlock" if has_canvas else "LowConfidence",)
    assert default.algorithm == names[0] and default.threshold is not None


@pytest.mark.parametrize("family,has_canvas", FAMILIES.items())
@pytest.mark.parametrize(
    "name",
    [name for name, one in lookup.TABLE.items() if not (one.moves_tokens or one.drafts)],
)
def test_an_algorithm_of_the_other_kind_is_refused_with_the_right_ones(family, has_canvas, name):
    fits = name in lookup.of_kind(KINDS[has_canvas])
    right = "FullAttnMultiBlock.*FastDLLM"
    if not has_canvas:
        right = "LowConfidence, JointThreshold, .*MaskedDiffusion, HierarchyBlock$"
    first = "LLaDA" if has_canvas else "LowConfidence"
    named = {"dllm_algorithm": f"{first},{name}"}, {"generation_config": {"dllm": {}}}
    recommended = {}, {"generation_config": {"dllm": {"algorithm": name}}}
    for options, generation in (named, recommended):
        if fits:
            assert choose(family, **generation, **options)[0][-1] == name
        else:
            with pytest.raises(errors.ConfigError, match=f"'{name}'; it runs.*{right}"):
                choose(family, **generation, **options)


def test_models_with_edit_tokens_insert_and_delete_by_default_and_others_cannot():
    assert choose("llada22")[0] == ("JointThresholdInDel",)
    assert choose("llada22", dllm_algorithm="LowConfidence")[0] == ("LowConfidence",)
    recommended = {"dllm": {"algorithm": "JointThreshold"}}
    assert choose("llada22", recommended)[0] == ("JointThreshold",)
    with pytest.raises(errors.ConfigError, match="InDel.*no delete_token_id and split_token_id"):
        choose("llada2", dllm_algorithm="LowConfidence,JointThresholdInDel")


def test_causal_families_run_rules_that_draft_and_others_do_not():
    names = "LowConfidence, SDAR, MaskedDiffusion, Autoregressive, LinearSpec$"
    assert choose("nemotron_diffusion")[0] == ("MaskedDiffusion",)
    for name in ("LinearSpec", "Autoregressive", "SDAR"):
        assert choose("nemotron_diffusion", dllm_algorithm=name)[0] == (name,)
    for name in ("JointThreshold", "JointThresholdInDel", "HierarchyBlock", "LLaDA"):
        with pytest.raises(errors.ConfigError, match=f"causal attention, .*'{name}'; .*{names}"):
            choose("nemotron_diffusion", dllm_algorithm=name)
    for name in ("LinearSpec", "Autoregressive"):
        with pytest.raises(errors.ConfigError, match=f"block_causal attention, .*'{name}'"):
            choose("stable_diffcoder", dllm_algorithm=name)


def test_only_a_causal_context_gives_a_block_its_first_token():
    options = {"dllm_algorithm": "MaskedDiffusion", "dllm_algorithm_config": {"seed_first": True}}
    assert choose("nemotron_diffusion", **options)[1].seed_first
    with pytest.raises(errors.ConfigError, match="seed_first"):
        choose("stable_diffcoder", **options)


def test_a_least_number_of_tokens_is_refused_where_deletes_move_end_tokens():
    moving = sampling_params.DllmParams(algorithm="JointThresholdInDel")
    sampling_params.SamplingParams(dllm=moving, min_new_tokens=0)
    with pytest.raises(errors.RequestError, match="min_new_tokens=2 .*JointThresholdInDel"):
        sampling_params.SamplingParams(dllm=moving, min_new_tokens=2)


def test_the_user_s_options_come_on_top_of_the_checkpoint_s():
    recommended = {
        "dllm": {"algorithm": "FullAttnMultiBlock", "threshold": 0.4, "early_stop": False}
    }
    _, default = choose("dream", recommended, dllm_algorithm_config={"threshold": 1.5})
    assert (default.threshold, default.early_stop) == (1.5, False)
    with pytest.raises(errors.ConfigError, match=r"dLLM options of FastDLLM: .*\[0, 1\]"):
        choose("dream", dllm_algorithm="FastDLLM", dllm_algorithm_config={"threshold": 1.5})
    with pytest.raises(errors.ConfigError, match="block_size.*block_length"):
        choose("dream", dllm_algorithm_config={"block_size": 8})


def test_an_alternative_of_the_user_s_replaces_that_of_the_checkpoint():
    recommended = {"dllm": {"algorithm": "FastDLLM", "threshold": 0.8}}
    _, default = choose("dream", recommended, dllm_algorithm_config={"factor": 1.5})
    assert (default.factor, default.threshold) == (1.5, None)
    entropy = {"algorithm": "SDAR", "remasking_strategy": "entropy_bounded", "eb_threshold": 0.2}
    other = {"remasking_strategy": "sequential"}
    _, default = choose("sdar", {"dllm": entropy}, dllm_algorithm_config=other)
    assert (default.remasking_strategy, default.eb_threshold) == ("sequential", None)


@pytest.mark.parametrize(
    ("dllm", "words"),
    [
        ({"threshold": 7}, "threshold=7"),
        ({"thresold": 0.5}, "'thresold'"),
        ({"algorithm": "LowConfidense"}, "'LowConfidense'"),
    ],
)
def test_a_wrong_option_of_the_checkpoint_names_its_file(dllm, words):
    for given in ({}, {"edit_threshold": 2}):  # an option of the user's beside it
        pattern = rf"^generation_config\.json: dLLM options of .*{words}"
        with pytest.raises(errors.ConfigError, match=pattern):
            choose("llada2", {"dllm": dllm}, dllm_algorithm_config=given)
    with pytest.raises(errors.ConfigError, match=r"^dLLM options of .*threshold=7"):
        choose("llada2", {"dllm": {"threshold": 0.5}}, dllm_algorithm_config={"threshold": 7})


@pytest.mark.parametrize("do_sample", [True, False])
def test_filters_of_the_checkpoint_are_left_out_with_one_line(do_sample, caplog):
    options = {"do_sample": do_sample, "temperature": 0.3, "top_p": 0.95, "top_k": None}
    params = sampling_defaults.default_sampling(options, filters=False)
    assert (params.temperature, params.top_p, params.top_k) == (0.3 * do_sample, 1.0, 0)
    assert sampling_defaults.default_sampling(options).top_p == (0.95 if do_sample else 1.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == do_sample
    assert all("top_p=0.95" in message and "top_k" not in message for message in messages)


@pytest.mark.parametrize("family,has_canvas", FAMILIES.items())
def test_canvas_rows_are_few_and_their_context_bounded(family, has_canvas):
    spec = loading.read_spec(GOLDENS / family)
    defaults = kinds.kind_of(spec).rows.defaults
    shapes = sizing.choose_shapes(config.EngineConfig(), spec, defaults, CPU)
    assert shapes.max_running_requests == (4 if has_canvas else 8)
    longest = spec.max_position_embeddings
    assert shapes.context_length == (min(longest, 4096) if has_canvas else longest)
    wanted = config.EngineConfig(context_length=longest)
    asked = sizing.choose_shapes(wanted, spec, defaults, CPU)
    assert asked.context_length == longest


def test_canvas_launches_count_tokens():
    counters = stats.Counters()
    rows = tuple(RowResult(nfe=nfe) for nfe in (3, 1))
    bucket = canvas.CanvasBucket(rows=4, tokens=96)
    launch = LaunchResult(
        rows=rows,
        num_steps=3,
        computed_tokens=192,
        real_tokens=96,
        denoised_tokens=96,
        canvas_tokens=96,
        num_full=2,
    )
    counters.count_launch(ScheduleBatch(rows=(), bucket=bucket), launch)
    assert (counters.denoising_steps, counters.decode_steps, counters.decode_launches) == (4, 3, 1)
    assert (counters.canvas_positions, counters.canvas_forwarded_tokens) == (96, 96)
    assert counters.canvas_full_forwards == 2
    assert counters.padding_fraction == 0.5 and counters.batch_occupancy == 4 / 12


def test_a_checkpoint_s_own_keys_are_the_defaults_of_models_without_a_mask_token():
    names, default = choose("diffusion_gemma")
    assert names == ("Gemma4Renoise",)
    assert (default.max_denoising_steps, default.entropy_bound) == (48, 0.1)
    generation = {
        "max_denoising_steps": 20,
        "t_max": None,
        "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.3},
        "dllm": {"t_min": 0.5},
    }
    _, default = choose("diffusion_gemma", generation, dllm_algorithm_config={"t_min": 0.6})
    assert (default.max_denoising_steps, default.entropy_bound) == (20, 0.3)
    assert (default.t_max, default.t_min) == (0.8, 0.6)
    for sampler in ({"mode": "greedy"}, {"_cls_name": "OtherSamplerConfig"}, 3):
        with pytest.raises(errors.ConfigError, match="sampler_config"):
            choose("diffusion_gemma", {"sampler_config": sampler})
    with pytest.raises(errors.ConfigError, match="max_denoising_steps"):
        choose("diffusion_gemma", {"max_denoising_steps": 0})
