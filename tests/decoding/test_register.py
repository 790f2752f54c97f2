"""Rules of a user's own: they run batched like ours, and wrong ones are refused by name."""

import dataclasses

import jax.numpy as jnp
import pytest
from support import canvas_engine, tiny_engine

import jdllm
from jdllm import decoding
from jdllm.algorithms import lookup

PROMPTS = [list(range(3, 3 + length)) for length in (5, 9, 14, 22)]


@pytest.fixture(autouse=True, scope="module")
def _only_here():
    """Takes the registered names out again: other tests read the tables."""
    yield
    for name in ("Sure", "FirstTwo", "Probable", "Again"):
        if name in lookup.TABLE:
            decoding.unregister(name)


@dataclasses.dataclass(frozen=True)
class Sure(jdllm.BlockRule):
    """What LowConfidence is, written as a user would."""

    def choose(self, block, proposal):
        return proposal.prob > block.params.threshold[:, None]


@dataclasses.dataclass(frozen=True)
class FirstTwo(jdllm.BlockRule):
    """Writes the first two masked positions, whatever the model thinks of them."""

    def choose(self, block, proposal):
        return jnp.cumsum(block.masked, axis=1) <= 2


@dataclasses.dataclass(frozen=True)
class Probable(jdllm.CanvasRule):
    """Writes by probability what EntropyThreshold writes by entropy."""

    def choose(self, canvas, proposal):
        return proposal.prob > canvas.params.threshold[:, None]


def ask(engine, prompts, **dllm):
    params = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.0, "dllm": dllm}
    return [
        (one["output_ids"], one["meta_info"]["dllm"]["nfe"])
        for one in engine.generate(input_ids=prompts, sampling_params=params)
    ]


@pytest.mark.campaign
def test_block_rules_run_batched_beside_ours():
    jdllm.register_algorithm("Sure", Sure(), options={"threshold": 0.3})
    jdllm.register_algorithm("FirstTwo", FirstTwo())
    options = {"dllm_algorithm": "LowConfidence,Sure,FirstTwo", "max_running_requests": 2}
    with tiny_engine.make_engine(**options) as engine:
        ours = ask(engine, PROMPTS)
        assert ask(engine, PROMPTS, algorithm="Sure") == ours
        assert ask(engine, PROMPTS, algorithm="Sure", threshold=0.9) != ours
        together = ask(engine, PROMPTS, algorithm="FirstTwo")
        assert together == [ask(engine, [one], algorithm="FirstTwo")[0] for one in PROMPTS]
        # Two positions a step, and a forward that persists a block: by arithmetic.
        for prompt, (ids, nfe) in zip(PROMPTS, together, strict=True):
            head = len(prompt) % tiny_engine.BLOCK
            first = tiny_engine.BLOCK - head
            assert len(ids) == 24
            assert nfe >= -(-first // 2) + 8
        with pytest.raises(ValueError, match="FirstTwo has no option"):
            ask(engine, PROMPTS[:1], algorithm="FirstTwo", threshold=0.5)
        tiny_engine.assert_nothing_held(engine)


@pytest.mark.campaign  # an engine of its own takes half a minute to compile
def test_a_canvas_rule_runs_batched():
    jdllm.register_algorithm("Probable", Probable(), options={"threshold": 0.2})
    engine = canvas_engine.make("llada", dllm_algorithm="EntropyThreshold,Probable")
    with engine:
        options = {"algorithm": "Probable", "block_length": 8}
        together = ask(engine, PROMPTS, **options)
        assert together == [ask(engine, [one], **options)[0] for one in PROMPTS]
        assert all(3 <= nfe <= 24 for _, nfe in together)
        every = ask(engine, PROMPTS, **{**options, "threshold": 1.0})
        assert {nfe for _, nfe in every} == {24}, "one position a step"


def test_a_name_can_be_registered_again_but_not_taken_from_us():
    jdllm.register_algorithm("Again", Sure(), options={"threshold": 0.3})
    jdllm.register_algorithm("Again", FirstTwo())
    assert decoding.BLOCK_ALGORITHMS["Again"] == FirstTwo()
    assert lookup.TABLE["Again"].options == ()
    jdllm.register_algorithm("Again", Probable())
    assert "Again" not in decoding.BLOCK_ALGORITHMS
    assert lookup.TABLE["Again"].kind == lookup.CANVAS
    with pytest.raises(ValueError, match="is an algorithm of jdllm"):
        jdllm.register_algorithm("LowConfidence", Sure())


@pytest.mark.parametrize(
    ("name", "rule", "options", "said"),
    [
        ("a b", Sure(), {}, "identifier"),
        ("Mine", Sure, {}, "give an instance"),
        ("Mine", object(), {}, "no rule"),
        ("Mine", Sure(), {"treshold": 0.5}, "treshold"),
        ("Mine", Sure(), {"threshold": 7}, "threshold"),
        ("Mine", Sure(), {"cache_mode": "exact"}, "cache_mode"),
    ],
)
def test_wrong_rules_are_refused_by_name(name, rule, options, said):
    with pytest.raises(ValueError, match=said):
        jdllm.register_algorithm(name, rule, options=options)
    assert name not in lookup.TABLE


def test_an_engine_without_the_rule_names_it():
    with pytest.raises(ValueError, match="unknown dllm_algorithm 'Absent'"):
        tiny_engine.make_engine(dllm_algorithm="Absent")
