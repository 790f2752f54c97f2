"""Steps that reuse residuals: against a plain loop, alone and among others."""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import numpy as np
import pytest
from support import golden_pipelines, image_launches, jaxprs, step_cache_oracle
from support.image_launches import NEGATIVE, PROMPTS, ROWS

from jdllm import errors
from jdllm.device import devices
from jdllm.runner import model_runner
from jdllm.runner.image import sizes
from jdllm.runner.image.kind import ImageKind
from jdllm.scheduler.batch import ScheduleBatch

STEPS = 6
ATOL_LATENTS = 6e-4  # that of test_golden_runs.py
ATOL_ALONE = 5e-5  # that of test_step_launches.py
LEAST_MARGIN = 1e-4  # of a change to a threshold: rounding must not decide


@functools.cache
def small(golden):
    """Returns a pipeline with as many slots as the tests here need: residuals are large."""
    config = dataclasses.replace(golden.config, num_slots=6, num_entries=12, has_step_cache=True)
    return dataclasses.replace(golden, config=config)


@functools.cache
def runner(golden):
    model, size, config = golden.pipeline(), golden.sizes[0], small(golden).config
    made = model_runner.ModelRunner(
        model.params, ImageKind(model.pipeline, config), device=devices.facts()
    )
    step = functools.partial(image_launches.step_bucket, size, tokens=golden.tokens)
    buckets = [
        image_launches.encode_bucket(ROWS, golden.tokens),
        image_launches.begin_bucket(size),
        *golden.modulate_buckets,
        *(step(is_guided=guided, is_cached=True) for guided in (False, True)),
        step(1, is_cached=True),
        step(),
        image_launches.decode_bucket(size, "latent"),
    ]
    made.compile(buckets)
    return made


def device(golden, rng=None):
    return small(golden).device(rng, runner(golden))


def ask(golden, j, threshold, *, negative=None):
    size = golden.sizes[0]
    return golden.ask(
        PROMPTS[j],
        size=size,
        steps=STEPS,
        negative=negative,
        latents=golden.initial(size, j),
        residual_diff_threshold=threshold,
    )


@functools.cache
def threshold_of(golden, j, negative=None):
    """Returns a threshold with which some steps after the first are skipped, others are not."""
    request = ask(golden, j, 1e-9, negative=negative)
    changes = sorted(step_cache_oracle.run(golden, request).changes)
    for low, high in zip(changes, changes[1:], strict=False):
        run = step_cache_oracle.run(golden, request, (low + high) / 2)
        margin = min(abs(change - (low + high) / 2) for change in run.changes)
        if margin > LEAST_MARGIN and 0 < sum(run.skipped) < STEPS - 1:
            return (low + high) / 2
    raise AssertionError(f"no threshold divides the changes {changes}")


def steps_of(row, device, *others, **options):
    """Returns the latents of a row after each step that it takes with others, and its skips."""
    latents, skipped = [], []
    while not row.is_done:
        (result, *_) = device.step(row, *(one for one in others if not one.is_done), **options)
        latents.append(device.latents(row))
        skipped.append(bool(result.num_skipped))
    return latents, skipped


@golden_pipelines.of_few
@pytest.mark.parametrize(
    "negative",
    [None, pytest.param(NEGATIVE, marks=pytest.mark.campaign)],
    ids=["plain", "guided"],
)
def test_decisions_and_latents_are_those_of_a_plain_loop(golden, negative):
    request = ask(golden, 1, threshold_of(golden, 1, negative), negative=negative)
    expected = step_cache_oracle.run(golden, request)
    on_device = device(golden)
    (row,) = on_device.enter(request)
    latents, skipped = steps_of(row, on_device)
    assert skipped == expected.skipped and 0 < sum(skipped) < STEPS - 1
    for found, wanted in zip(latents, expected.latents, strict=True):
        np.testing.assert_allclose(found, wanted, atol=ATOL_LATENTS)
    computed = step_cache_oracle.run(golden, request, 0.0)
    assert np.abs(latents[-1] - computed.latents[-1]).max() > 10 * ATOL_LATENTS


@golden_pipelines.of_few
def test_rows_that_skip_are_alone_what_they_are_among_rows_that_compute(golden):
    """In any slots, at different steps, beside a row that never skips and one that always does."""
    asked = [
        ask(golden, 1, threshold_of(golden, 1)),
        ask(golden, 2, threshold_of(golden, 2)),
        ask(golden, 0, 1e-9),
        ask(golden, 0, 100.0),
    ]
    alone = []
    for request in asked:
        on_device = device(golden)
        (row,) = on_device.enter(image_launches.ask_again(request))
        # The first is computed in launches of one row.
        alone.append(steps_of(row, on_device, bucket_rows=ROWS if alone else 1))
    assert [sum(skipped) for _, skipped in alone[2:]] == [0, STEPS - 1]
    rng = random.Random(3)
    on_device = device(golden, rng)
    rows = on_device.enter(*asked)
    found = {id(row): ([], []) for row in rows}
    num_mixed = 0
    while any(not row.is_done for row in rows):
        running = [row for row in rows if not row.is_done]
        members = rng.sample(running, rng.randint(1, len(running)))
        results = on_device.step(*members)
        num_mixed += len({result.num_skipped for result in results}) > 1
        for row, result in zip(members, results, strict=True):
            found[id(row)][0].append(on_device.latents(row))
            found[id(row)][1].append(bool(result.num_skipped))
    assert num_mixed > 0, "no launch had a row that skips and one that computes"
    for row, (latents, skipped) in zip(rows, alone, strict=True):
        assert found[id(row)][1] == skipped
        np.testing.assert_allclose(found[id(row)][0], latents, atol=ATOL_ALONE)


@golden_pipelines.of_few
def test_a_row_begins_without_the_residuals_of_the_one_before_it_in_its_slot(golden):
    on_device = device(golden)
    slot = on_device._slots[-1]
    for leaf_name in ("first", "rest"):
        held = on_device.runner._memory["residuals"]
        filled = jax.tree.map(lambda leaf: leaf.at[2 * slot].set(float("nan")), held)
        on_device.runner._memory["residuals"] = dataclasses.replace(
            held, **{leaf_name: getattr(filled, leaf_name)}
        )
    request = ask(golden, 1, threshold_of(golden, 1))
    (row,) = on_device.enter(request)
    assert row.stay.slot == slot
    latents, _ = steps_of(row, on_device)
    wanted = step_cache_oracle.run(golden, request).latents[-1]
    np.testing.assert_allclose(latents[-1], wanted, atol=ATOL_LATENTS)


@golden_pipelines.of_few
def test_a_row_that_never_skips_is_the_row_without_a_cache(golden):
    plain, cached = (ask(golden, 2, threshold) for threshold in (0.0, 1e-9))
    products = []
    for request in (plain, cached):
        on_device = device(golden)
        products += on_device.finish(*on_device.enter(request), output="latent")
    np.testing.assert_allclose(products[1], products[0], atol=ATOL_ALONE)


@golden_pipelines.of_few
def test_a_launch_in_which_every_row_skips_leaves_the_other_blocks_out(golden):
    """The blocks stand in one branch of a conditional, and the other branch has no product."""
    made = runner(golden)
    bucket = image_launches.step_bucket(golden.sizes[0], tokens=golden.tokens, is_cached=True)
    program = made._kind.program(bucket)
    inputs = program.inputs(_empty(bucket), None)
    memory = {name: made._memory[name] for name in program.uses}
    jaxpr = jax.make_jaxpr(program.step)(made._params, memory, inputs).jaxpr
    (found,) = [one for one in jaxprs.equations(jaxpr) if one.primitive.name == "cond"]
    in_branches = [_products(branch.jaxpr) for branch in found.params["branches"]]
    assert min(in_branches) == 0 < max(in_branches)
    # The cache neither adds a product nor moves one out of the branch.
    plain = image_launches.step_bucket(golden.sizes[0], tokens=golden.tokens)
    program = made._kind.program(plain)
    memory = {name: made._memory[name] for name in program.uses}
    without = program.inputs(_empty(plain), None)
    total = _products(jax.make_jaxpr(program.step)(made._params, memory, without).jaxpr)
    assert _products(jaxpr) == total


def _products(jaxpr):
    return sum(one.primitive.name == "dot_general" for one in jaxprs.equations(jaxpr))


def _empty(bucket):
    return ScheduleBatch(rows=(), bucket=bucket)


@golden_pipelines.of_few
def test_programs_without_a_cache_have_neither_its_inputs_nor_its_memory(golden):
    made = runner(golden)
    bucket = image_launches.step_bucket(golden.sizes[0], tokens=golden.tokens)
    program = made._kind.program(bucket)
    assert "residuals" not in program.uses and program.inputs(_empty(bucket), None).cache is None
    plain = ImageKind(golden.pipeline().pipeline, golden.config).create_memory()
    assert "residuals" not in plain
    held = made._memory["residuals"]
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(held))
    config, pipeline = small(golden).config, golden.pipeline().pipeline
    assert num_bytes == config.num_slots * sizes.residual_bytes(pipeline, config.max_pixels)
    # Two passes, two arrays, float32, a token for each 16 x 16 pixels.
    tokens = config.max_pixels // 256
    assert num_bytes == config.num_slots * 2 * 2 * 4 * tokens * pipeline.transformer_width


@golden_pipelines.of_each
def test_a_pipeline_without_a_cache_refuses_it(golden, monkeypatch):
    pipeline = golden.pipeline().pipeline
    options = dataclasses.replace(pipeline.options, has_step_cache=False)
    monkeypatch.setattr(type(pipeline), "options", options)
    config = dataclasses.replace(golden.config, has_step_cache=True)
    with pytest.raises(errors.ConfigError, match="enable_step_cache"):
        ImageKind(pipeline, config)


def test_a_step_cache_that_does_not_fit_names_what_to_lower():
    sizes.check_residuals(4, 1000, None)
    sizes.check_residuals(4, 1000, 4000)
    with pytest.raises(errors.ConfigError, match="max_running_requests=4 images of max_image_pix"):
        sizes.check_residuals(4, 1000, 3999)
