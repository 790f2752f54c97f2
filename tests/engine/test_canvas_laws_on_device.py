"""The laws of full-canvas rows on real (tiny) models: batching, launches, windows, ends.

Cached modes are compared with `canvas_engine.decoded`, which runs a row alone in numpy.
"""

from unittest import mock

import numpy as np
import pytest
from support import canvas_engine
from support.canvas_asks import (
    DELAYED,
    DUAL,
    MULTI,
    SLOW,
    WINDOW,
    Ask,
    cached_ask,
    mixed_asks,
)
from support.canvas_engine import alone, generate, launches, shared, told
from support.tiny_engine import assert_nothing_held

from jdllm.options import sampling_params

# The second family, whose logits are shifted, is part of the campaign.
every_family = pytest.mark.parametrize(
    "family", ["llada", pytest.param("dream", marks=pytest.mark.campaign)]
)


def assert_same_logprobs(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(
            canvas_engine.logprobs(one), canvas_engine.logprobs(other), atol=canvas_engine.ATOL
        )


@every_family
def test_a_ragged_batch_gives_what_each_gets_alone(family):
    asks = mixed_asks(family, seed=1)
    single = alone(shared(family), asks)
    together = generate(shared(family), asks)
    turned = generate(shared(family), asks[::-1])[::-1]
    assert told(together) == told(turned) == told(single)
    assert_same_logprobs(together, single)
    assert_nothing_held(shared(family))


@pytest.mark.campaign
def test_noisy_scores_choose_the_same_positions_in_every_bucket():
    """A score that is not equal to itself, computed in two ways, left steps without a write."""
    family = "dream"
    asks = [ask for seed in range(6) for ask in mixed_asks(family, seed) if "alg_temp" in ask.dllm]
    assert len(asks) == 6
    for ask in asks:
        single = told(alone(shared(family), [ask]))
        assert told(generate(shared(family), [ask, ask])) == 2 * single


@every_family
@pytest.mark.parametrize(
    ("steps", "overlaps"),
    [
        pytest.param(1, False, id="plain", marks=pytest.mark.campaign),
        pytest.param(1, True, id="overlap", marks=pytest.mark.campaign),
        pytest.param(64, False, id="whole", marks=pytest.mark.campaign),
    ],
)
def test_how_many_steps_a_launch_has_and_when_the_host_looks_change_nothing(
    family, steps, overlaps
):
    asks = mixed_asks(family, seed=2)
    expected = generate(shared(family), asks)
    with launches(shared(family), steps=steps, overlaps=overlaps):
        results = generate(shared(family), asks)
    assert told(results) == told(expected)
    assert_nothing_held(shared(family))


@every_family
def test_nothing_compiles_after_start_up(family):
    before = shared(family).stats().jit_compiles_total
    generate(shared(family), mixed_asks(family, seed=3))
    assert shared(family).stats().jit_compiles_total == before


@every_family
def test_the_pool_is_never_copied(family):
    runner = shared(family)._built.runner
    pool_bytes = sum(pool.nbytes for pool in runner._memory["pools"])
    for bucket, compiled in runner.compiled.items():
        memory = compiled.memory_analysis()
        assert memory.temp_size_in_bytes < pool_bytes / 10, bucket
        assert memory.alias_size_in_bytes >= pool_bytes, bucket


@every_family
def test_every_window_finds_the_keys_and_hidden_states_that_were_left_for_it(family):
    """Ids, forwards, and which positions were forwarded, against one row at a time in numpy."""
    rng = np.random.default_rng(4)
    asks = [cached_ask(family, rng) for _ in range(12)]
    expected = [canvas_engine.decoded(family, ask) for ask in asks]
    before = shared(family).stats()
    results = generate(shared(family), asks)
    after = shared(family).stats()
    for ask, one, result in zip(asks, expected, results, strict=True):
        assert result["output_ids"] == one.output_ids, ask
        assert result["meta_info"]["nfe"] == one.nfe, ask
    full = after.canvas_full_forwards_total - before.canvas_full_forwards_total
    tokens = after.canvas_forwarded_tokens_total - before.canvas_forwarded_tokens_total
    assert full == sum(one.num_full for one in expected)
    assert tokens == sum(one.num_forwarded for one in expected)
    assert full < sum(one.nfe for one in expected), "nothing was cached"


def launched(engine, asks):
    """Returns the buckets of all launches while each ask is answered alone."""
    runner, seen = engine._built.runner, []

    def launch(batch):
        seen.append((batch.bucket, batch.max_steps))
        return type(runner).launch(runner, batch)

    with mock.patch.object(runner, "launch", launch):
        alone(engine, asks)
    return seen


@every_family
def test_a_row_alone_begins_with_a_launch_of_its_whole_canvas(family):
    """And stays with such where every forward is one; a launch without windows never needs one."""
    engine = shared(family)
    cached = Ask(prompt=canvas_engine.prompt(family), wanted=24, dllm=WINDOW)
    (first, *later) = launched(engine, [cached])
    assert (first[0].is_whole, first[1]) == (True, 1)
    assert later and not any(bucket.is_whole for bucket, _ in later)
    seen = set()
    for ask in mixed_asks(family, seed=5):
        before = engine.stats()
        buckets = {bucket.is_whole for bucket, steps in launched(engine, [ask]) if steps > 1}
        after = engine.stats()
        forwards = after.denoising_steps_total - before.denoising_steps_total
        full = after.canvas_full_forwards_total - before.canvas_full_forwards_total
        options = sampling_params.DllmParams(**ask.dllm)
        is_whole = options.resolve(options).forwards_whole_canvas
        assert buckets <= {is_whole}
        seen |= buckets
        if is_whole:
            guided = 2 if ask.dllm.get("cfg_scale") else 1  # forwards a step
            assert forwards == guided * full
    assert seen == {True, False}


def test_short_canvases_run_in_launches_of_their_own():
    engine = shared("llada")
    short, long = (
        Ask(prompt=canvas_engine.prompt("llada")[:4], wanted=wanted, dllm=WINDOW)
        for wanted in (16, 40)
    )
    sizes = {"short": {24}, "long": {64}}
    for name, ask in (("short", short), ("long", long)):
        buckets = [bucket for bucket, _ in launched(engine, [ask]) if not bucket.is_whole]
        assert {bucket.tokens for bucket in buckets} == sizes[name]
    together = told(generate(engine, [short, short, long]))
    assert together == told(alone(shared("llada"), [short, short, long]))


@pytest.mark.campaign
def test_without_launches_of_a_whole_canvas_the_same_is_said():
    asks = [
        Ask(prompt=canvas_engine.prompt("llada"), wanted=20, dllm=dllm) for dllm in (MULTI, WINDOW)
    ]
    options = {"dllm_algorithm": "FullAttnMultiBlock", "max_running_requests": 1}
    with canvas_engine.make("llada", whole_tokens=(), **options) as engine:
        assert not any(bucket.is_whole for bucket in engine._built.runner.compiled)
        assert told(alone(engine, asks)) == told(alone(shared("llada"), asks))


@every_family
@pytest.mark.parametrize(
    "options",
    [
        {"cache_mode": "delayed", "cache_delay_iter": 1, "refresh_interval": 1},
        {"cache_mode": "delayed", "cache_delay_iter": 10**6, "refresh_interval": 10**6},
        {"cache_mode": "window", "cache_delay_iter": 1, "refresh_interval": 1},
    ],
    ids=["refreshed-always", "delayed-for-ever", "window-refreshed-always"],
)
def test_caches_that_hold_nothing_old_are_exact(family, options):
    asks = [
        Ask(prompt=canvas_engine.prompt(family), wanted=wanted, dllm=MULTI | options)
        for wanted in (32, 13)
    ]
    exact = [Ask(prompt=ask.prompt, wanted=ask.wanted, dllm=MULTI) for ask in asks]
    assert told(generate(shared(family), asks)) == told(generate(shared(family), exact))


@every_family
def test_blocks_that_are_added_when_the_last_is_written_are_one_after_the_other(family):
    threshold = {"threshold": 0.8, "block_length": 8}
    asks = [
        Ask(prompt=canvas_engine.prompt(family), wanted=40, dllm=dllm | threshold)
        for dllm in (
            {"algorithm": "FullAttnMultiBlock", "block_add_threshold": 1.0,
             "decoded_token_threshold": 1.0},
            {"algorithm": "EntropyThreshold"},
        )
    ]  # fmt: skip
    blocks, sequential = generate(shared(family), asks)
    assert told([blocks]) == told([sequential])


def with_an_end(ask, result, place):
    """Returns the ask with the token at `place` of its free run as end token, and where it is."""
    token = result["output_ids"][place]
    changed = Ask(prompt=ask.prompt, wanted=ask.wanted, dllm=ask.dllm, ends=(token,))
    return changed, result["output_ids"].index(token)


@every_family
def test_the_text_up_to_an_end_token_is_that_of_the_full_run(family):
    """With what lies behind left as it is: filling it early is a rule of FullAttnMultiBlock."""
    no_fill = {"early_stop": False}
    options = [MULTI | no_fill, DELAYED | no_fill, WINDOW | no_fill, DUAL]
    prompt = canvas_engine.prompt(family)
    free = [Ask(prompt=prompt, wanted=40, dllm=dllm) for dllm in options]
    full = generate(shared(family), free)
    stopped = [with_an_end(ask, result, 17) for ask, result in zip(free, full, strict=True)]
    results = generate(shared(family), [ask for ask, _ in stopped])
    for (ask, place), whole, cut in zip(stopped, full, results, strict=True):
        assert cut["output_ids"] == whole["output_ids"][: place + 1]
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": ask.ends[0]}
        assert cut["meta_info"]["step_map"] == whole["meta_info"]["step_map"][: place + 1]
        # No forward after the one that settled it.
        assert cut["meta_info"]["nfe"] == max(cut["meta_info"]["step_map"])


@every_family
def test_early_stop_ends_where_the_oracle_does_and_sooner_than_the_full_run(family):
    prompt = canvas_engine.prompt(family)
    free = [Ask(prompt=prompt, wanted=48, dllm=dllm) for dllm in (MULTI, DELAYED, WINDOW)]
    full = generate(shared(family), free)
    asks = [with_an_end(ask, result, 6)[0] for ask, result in zip(free, full, strict=True)]
    results = generate(shared(family), asks)
    for ask, whole, result in zip(asks, full, results, strict=True):
        expected = canvas_engine.decoded(family, ask)
        assert result["output_ids"] == expected.output_ids
        assert result["output_ids"][-1] == ask.ends[0]
        assert result["meta_info"]["nfe"] == expected.nfe < whole["meta_info"]["nfe"]


DRAWS_OF_DREAM = (
    ({"algorithm": "Dream", "steps": 8}, 0.0),
    ({"algorithm": "Dream", "steps": 8, "alg": "topk_margin", "alg_temp": 1.0}, 0.0),
    ({"algorithm": "Dream", "steps": 8, "alg": "entropy"}, 0.8),
)


@pytest.mark.parametrize(
    ("family", "dllm", "temperature"),
    [
        ("llada", WINDOW, 1.5),
        ("llada", {"algorithm": "LLaDA", "block_length": 8, "remasking": "random"}, 0.0),
        *(pytest.param("dream", *one, marks=pytest.mark.campaign) for one in DRAWS_OF_DREAM),
    ],
    ids=["tokens", "random-remasking", "origin", "noisy-order", "tempered"],
)
def test_draws_repeat_with_their_seed_and_differ_without(family, dllm, temperature):
    asks = [
        Ask(prompt=[5, 6, 7], wanted=24, dllm=dllm, temperature=temperature, seed=seed)
        for seed in (1, 2, 1)
    ]
    one, other, again = told(generate(shared(family), asks))
    assert one == again != other


def test_more_requests_than_rows_and_choices_among_them():
    one = shared("llada")
    params = Ask(prompt=[], wanted=20, dllm=WINDOW, temperature=1.0, seed=3).params
    results = one.generate(input_ids=[[i, 2] for i in range(5)], sampling_params=params | {"n": 2})
    assert len(results) == 10
    for i in range(5):
        first, second = results[2 * i : 2 * i + 2]
        assert first["output_ids"] != second["output_ids"]
        single = one.generate(input_ids=[i, 2], sampling_params=params)
        assert told([first]) == told([single])
    assert_nothing_held(one)


def test_a_row_keeps_its_place_among_rows_that_come_and_go():
    """A long request beside short ones that take one another's slots and pages."""
    one, long = shared("llada"), Ask(prompt=[4] * 5, wanted=56, dllm=SLOW)
    shorts = [Ask(prompt=[5, i], wanted=8, dllm=MULTI) for i in range(9)]
    expected = alone(one, [long, *shorts])
    with launches(one, steps=2, overlaps=True):
        assert told(generate(one, [long, *shorts])) == told(expected)
