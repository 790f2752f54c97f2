"""Options of the denoising algorithms: words, bounds that depend on the algorithm, exclusions."""

import dataclasses

import pytest

from jdllm import errors
from jdllm.algorithms import lookup
from jdllm.options.sampling_params import DllmParams, SamplingParams

SERVER = DllmParams(algorithm="FullAttnMultiBlock").resolve(DllmParams())


def test_defaults_are_filled_in_and_nothing_else():
    assert SERVER.algorithm == "FullAttnMultiBlock"
    assert SERVER.options == {
        "threshold": 0.5,
        "block_add_threshold": 0.1,
        "decoded_token_threshold": 0.95,
        "early_stop": True,
        "cache_mode": "exact",
        "cache_delay_iter": 2,
        "refresh_interval": 3,
        "block_length": 32,
    }


@pytest.mark.parametrize("algorithm", list(lookup.TABLE))
def test_resolved_options_resolve_to_themselves(algorithm):
    resolved = DllmParams(algorithm=algorithm).resolve(SERVER)
    assert resolved.resolve(SERVER) == resolved == resolved.resolve(resolved)


def test_every_word_of_an_option_is_taken_and_has_its_default_among_them():
    for algorithm, declared in lookup.TABLE.items():
        for option in declared.options:
            assert option.type != "word" or option.default == option.words[0]
            for word in option.words:
                params = DllmParams(algorithm=algorithm, **{option.name: word}).resolve(SERVER)
                assert getattr(params, option.name) == word


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"cache_mode": "windw"}, "dllm.cache_mode", "did you mean 'window'"),
        ({"cache_mode": 3}, "dllm.cache_mode", "3"),
        ({"cache_mode": "dual"}, "dllm.cache_mode", "known: delayed, exact, window"),
        ({"algorithm": "Dream", "alg": "entropi"}, "dllm.alg", "did you mean 'entropy'"),
        ({"algorithm": "LLaDA", "remasking": "rand"}, "dllm.remasking", "'random'"),
        ({"algorithm": "Dream", "remasking": "random"}, "dllm.remasking", "no option"),
        ({"algorithm": "Dreem"}, "dllm.algorithm", "did you mean 'Dream'"),
        ({"early_stop": 1}, "dllm.early_stop", "true or false"),
        ({"threshold": -0.1}, "dllm.threshold", "outside"),
        ({"block_add_threshold": 1.1}, "dllm.block_add_threshold", "outside"),
        ({"decoded_token_threshold": -1}, "dllm.decoded_token_threshold", "outside"),
        ({"cache_delay_iter": -1}, "dllm.cache_delay_iter", "between"),
        ({"refresh_interval": 0}, "dllm.refresh_interval", "between"),
        ({"block_length": 0}, "dllm.block_length", "between"),
        ({"algorithm": "LLaDA", "steps": 0}, "dllm.steps", "between"),
        ({"algorithm": "LLaDA", "cfg_scale": -0.5}, "dllm.cfg_scale", "outside"),
        ({"algorithm": "Dream", "alg_temp": -1}, "dllm.alg_temp", "outside"),
        ({"algorithm": "Dream", "eps": 2}, "dllm.eps", "outside"),
        ({"algorithm": "FastDLLM", "factor": 0}, "dllm.factor", "outside"),
        ({"algorithm": "FastDLLM", "factor": 1, "steps": 4}, "dllm.factor", "exclude"),
        ({"algorithm": "FastDLLM", "threshold": 0.5, "steps": 4}, "dllm.steps", "exclude"),
        ({"algorithm": "EntropyThreshold", "cache_mode": "exact"}, "dllm.cache_mode", "no option"),
    ],
)
def test_a_bad_option_is_refused_by_name(options, param, words):
    with pytest.raises(errors.RequestError, match=words) as raised:
        DllmParams.from_mapping(options).resolve(SERVER)
    assert raised.value.param == param


@pytest.mark.parametrize("algorithm", list(lookup.TABLE))
def test_only_entropies_exceed_one(algorithm):
    """The algorithm may be the server's default, which a request alone does not know."""
    server, asked = DllmParams(algorithm=algorithm).resolve(DllmParams()), DllmParams(threshold=1.5)
    if "threshold" not in lookup.TABLE[algorithm].defaults:
        with pytest.raises(errors.RequestError, match="no option 'threshold'"):
            asked.resolve(server)
    elif algorithm in ("FullAttnMultiBlock", "EntropyThreshold"):
        assert asked.resolve(server).threshold == 1.5
    else:
        with pytest.raises(errors.RequestError, match=r"outside \[0, 1\]") as raised:
            asked.resolve(server)
        assert raised.value.param == "dllm.threshold"


@pytest.mark.parametrize("given", [{"factor": 1.0}, {"steps": 8}, {"threshold": 0.7}, {}])
@pytest.mark.parametrize("server", [{"factor": 2.0}, {"steps": 4}, {"threshold": 0.8}, {}])
def test_of_options_that_exclude_one_another_the_request_s_holds(given, server):
    default = DllmParams(algorithm="FastDLLM", **server).resolve(DllmParams())
    resolved = DllmParams(**given).resolve(default)
    names = ("factor", "steps", "threshold")
    held = {name: getattr(resolved, name) for name in names if getattr(resolved, name) is not None}
    assert held == (given or server or {"threshold": 0.9})


@pytest.mark.parametrize("name,value", [("top_p", 0.9), ("top_k", 5), ("top_k", 1)])
def test_canvas_algorithms_refuse_filters_by_name(name, value):
    for algorithm in lookup.TABLE:
        dllm = DllmParams(algorithm=algorithm)
        has_own = lookup.TABLE[algorithm].has_own_temperature
        temperature = 1 if has_own else 0.7
        neutral = SamplingParams(dllm=dllm, top_p=1.0, top_k=0, temperature=temperature, seed=1)
        if has_own:
            with pytest.raises(errors.RequestError, match="temperature=0.7.*t_max to t_min"):
                dataclasses.replace(neutral, temperature=0.7)
        if algorithm in lookup.of_kind(lookup.BLOCK):
            assert getattr(dataclasses.replace(neutral, **{name: value}), name) == value
            continue
        with pytest.raises(errors.RequestError, match=f"{name}={value}.*{algorithm}") as raised:
            dataclasses.replace(neutral, **{name: value})
        assert raised.value.param == name


@pytest.mark.parametrize("name", ["self", "cls", "given", "options", "thresholds"])
def test_unknown_names_are_refused_by_name(name):
    """Names of our own parameters and fields, too."""
    with pytest.raises(errors.RequestError, match=name) as raised:
        DllmParams.from_mapping({name: 1})
    assert raised.value.param == f"dllm.{name}"


def test_options_read_as_they_are_given():
    given = DllmParams(algorithm="LowConfidence", threshold=0.5)
    assert repr(given) == "DllmParams(algorithm='LowConfidence', threshold=0.5)"
