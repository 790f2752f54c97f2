"""A family that lacks a piece, or whose pieces do not fit, fails where it is declared."""

import dataclasses
import subprocess
import sys

import pytest

from jdllm.models import decoder_config, family, key_rules, registry
from jdllm.models.families import dream, llada2

PIECES = {
    field.name: getattr(dream.FAMILY, field.name) for field in dataclasses.fields(dream.FAMILY)
}


def declare(**changes):
    return family.Family(**(PIECES | changes))


def with_rows(old, new):
    """Returns Dream's table with one text in place of another."""
    assert old in dream.WEIGHTS.rows
    return dataclasses.replace(dream.WEIGHTS, rows=dream.WEIGHTS.rows.replace(old, new))


def test_a_whole_family_is_declared_without_an_error():
    assert declare() == dream.FAMILY


@pytest.mark.parametrize(
    "piece", ["rules", "defaults", "read", "weights", "end_of_turn", "example"]
)
def test_a_piece_that_is_left_out_is_an_error(piece):
    pieces = {name: value for name, value in PIECES.items() if name != piece}
    with pytest.raises(TypeError, match=piece):
        family.Family(**pieces)


def test_a_family_may_say_that_no_token_ends_its_turns():
    assert declare(end_of_turn=None).end_of_turn is None
    with pytest.raises(ValueError, match="DreamModel is no complete family: end_of_turn"):
        declare(end_of_turn="")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    model.norm.weight  ", "", "is no row"),
        ("[up]", "[upwards]", "no part 'upwards'"),
        ("w_gate_up[up]", "w_gate_up[gate]", "do not fill every part of layers.0.mlp.w_gate_up"),
        ("norm.weight\n    lm_head", "gone.weight\n    lm_head", "no parameter is called gone"),
        ("{layer}.attention.w_out", "layers.0.attention.w_out", "placeholders on both sides"),
        ("{layer}.self_attn.o_proj.weight           {layer}.attention.w_out\n", "\n",
         "no row fills layers.0.attention.w_out"),
    ],
    ids=["no-row", "no-part", "twice", "no-parameter", "one-side", "not-filled"],
)  # fmt: skip
def test_a_table_that_does_not_fit_the_model_is_an_error(old, new, message):
    with pytest.raises(ValueError, match=message):
        declare(weights=with_rows(old, new))


def test_a_form_must_fill_its_parameters_too():
    table = llada2.WEIGHTS
    forms = {**table.forms, "fused": "{layer}.mlp.w2 {layer}.mlp.experts.w_down[{expert}]"}
    with pytest.raises(ValueError, match="placeholders"):
        dataclasses.replace(llada2.FAMILY, weights=dataclasses.replace(table, forms=forms))
    forms = {**table.forms, "merged": "{layer}.mlp.up {layer}.mlp.experts.w_gate_up[moe_up]"}
    with pytest.raises(ValueError, match="form 'merged' do not fill every part of layers.1.mlp"):
        dataclasses.replace(llada2.FAMILY, weights=dataclasses.replace(table, forms=forms))


def test_the_example_must_have_every_parameter_that_the_table_names():
    example = {key: value for key, value in llada2.FAMILY.example.items() if "shared" not in key}
    with pytest.raises(ValueError, match="no parameter is called .*shared_experts"):
        dataclasses.replace(llada2.FAMILY, example=example)


def test_the_rules_and_the_defaults_must_fit_the_example():
    rules = key_rules.KeyRules(
        architecture="Odd", model_type="odd", only={"hidden_act": ("gelu",)}, neutral={}
    )
    with pytest.raises(ValueError, match="Odd is no complete family: .*hidden_act"):
        declare(rules=rules, example={"hidden_act": "silu"})
    with pytest.raises(ValueError, match="mask_token_id=None"):
        declare(defaults=dataclasses.replace(dream.DEFAULTS, mask_token_id=None))


def test_every_layer_is_described():
    def read(hf, diffusion) -> decoder_config.DecoderConfig:
        config = dream.FAMILY.read(hf, diffusion)
        return dataclasses.replace(config, layers=config.layers[:1])

    with pytest.raises(ValueError, match="read gives 1 of 2 layers"):
        declare(read=read)


def test_families_are_registered_under_their_own_names():
    for name, one in registry.FAMILIES.items():
        assert one.rules.architecture == name


def test_registration_asks_for_no_device():
    # The import must not start JAX's backend: flags and devices are chosen after it.
    program = (
        "from jdllm.models import registry\nfrom jax._src import xla_bridge\n"
        "assert registry.FAMILIES and not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
