"""Full-canvas rows in trouble: aborts, NaN, failed launches, lost pages. No other row notices."""

import jax.numpy as jnp
import pytest
from support.canvas_asks import DELAYED, MULTI, SLOW, Ask, mixed_asks
from support.canvas_engine import alone, generate, launches, shared, told
from support.tiny_engine import assert_nothing_held
from support.waiting import wait_until

from jdllm.engine import requests

pytestmark = pytest.mark.campaign  # engines of its own, whose programs take long to compile

# The second family, whose logits are shifted, is part of the campaign.
every_family = pytest.mark.parametrize(
    "family", ["llada", pytest.param("dream", marks=pytest.mark.campaign)]
)


@every_family
def test_what_pages_held_before_does_not_matter(family):
    asks = mixed_asks(family, seed=5)
    expected = generate(shared(family), asks)
    runner = shared(family)._built.runner

    def poison():
        pools = runner._memory["pools"]
        runner._memory["pools"] = [jnp.full_like(pool, jnp.nan) for pool in pools]

    shared(family)._loop.call(poison).result()
    results = generate(shared(family), asks)
    shared(family)._loop.call(runner.reset).result()
    assert told(results) == told(expected)


@every_family
def test_an_abort_between_launches_frees_pages_and_changes_no_neighbour(family, monkeypatch):
    one, core = shared(family), shared(family)._built.core
    asks = [Ask(prompt=[9, 8, i], wanted=56, dllm=SLOW) for i in range(2)]
    expected = alone(one, asks)
    step = core.step

    def waits_for_the_abort():
        leaving = core.requests.get("leaves")
        if leaving is not None and leaving.output_ids:
            wait_until(lambda: one._loop._calls)
        return step()

    monkeypatch.setattr(core, "step", waits_for_the_abort)
    with launches(one, steps=1, overlaps=True):
        stream = one.generate(
            input_ids=[ask.prompt for ask in asks],
            sampling_params=[ask.params for ask in asks],
            rid=["leaves", "stays"],
            stream=True,
        )
        next(item for item in stream if item["meta_info"]["id"] == "leaves")
        assert one.abort("leaves") == 1
        last = {item["meta_info"]["id"]: item for item in stream}
    left = last["leaves"]
    assert left["meta_info"]["finish_reason"]["type"] == "abort"
    assert left["output_ids"] == expected[0]["output_ids"][: len(left["output_ids"])]
    assert len(left["output_ids"]) < 56
    assert told([last["stays"]]) == told(expected[1:])
    assert_nothing_held(one)


@pytest.mark.parametrize("name", ["word_embeddings", "lm_head"])
@every_family
def test_numbers_that_are_none_end_their_request_and_no_other(family, name):
    """An embedding of one prompt; all requests' logits."""
    runner = shared(family)._built.runner
    whole = runner._params
    broken = whole | {name: whole[name].at[7, 3].set(jnp.nan)}
    asks = [Ask(prompt=[1, token, 3], wanted=16, dllm=DELAYED) for token in (7, 8)]
    expected = generate(shared(family), asks)
    shared(family)._loop.call(lambda: setattr(runner, "_params", broken)).result()
    try:
        bad, good = generate(shared(family), asks)
    finally:
        shared(family)._loop.call(lambda: setattr(runner, "_params", whole)).result()
    assert bad["meta_info"]["finish_reason"]["type"] == "abort"
    assert "NaN" in bad["meta_info"]["finish_reason"]["message"]
    assert bad["output_ids"] == []
    if name == "word_embeddings":
        assert told([good]) == told(expected[1:])
    assert_nothing_held(shared(family))
    assert told(generate(shared(family), asks)) == told(expected)


def streams(family, asks, names):
    return [
        shared(family).generate(
            input_ids=ask.prompt, sampling_params=ask.params, rid=name, stream=True
        )
        for ask, name in zip(asks, names, strict=True)
    ]


@pytest.mark.parametrize("is_late", [False, True], ids=["at-launch", "when-read"])
def test_a_failed_launch_ends_its_requests_and_no_other(monkeypatch, is_late):
    """A canvas launch holds all that runs: the others are those that wait, or came just after."""
    one, runner = shared("llada"), shared("llada")._built.runner
    bad = [Ask(prompt=[7, i], wanted=40, dllm=SLOW) for i in range(3 if is_late else 4)]
    good = [Ask(prompt=[8, i], wanted=24, dllm=dllm) for i, dllm in enumerate((MULTI, DELAYED))]
    expected = alone(one, good)
    names = [f"bad-{i}" for i in range(len(bad))]
    launch, failed = runner.launch, []

    class Fails:
        def is_ready(self):
            return True

        def result(self):
            raise RuntimeError("device fault")

    def fail_once(batch):
        launched = launch(batch)  # consumes the donated pool, as a real fault would
        ids = {row.request.request_id for row in batch.rows}
        if failed or ids != set(names):
            return launched
        wait_until(lambda: one._loop._calls)  # a good one, for the launch behind this one
        failed.append(ids)
        if is_late:
            return Fails()
        raise RuntimeError("device fault")

    monkeypatch.setattr(runner, "launch", fail_once)
    preempted = one.stats().preemptions_total
    failing = streams("llada", bad, names)
    healthy = streams("llada", good, ["good-0", "good-1"])
    for stream in failing:
        with pytest.raises(requests.EngineFault, match="device fault"):
            list(stream)
    assert told([list(stream)[-1] for stream in healthy]) == told(expected)
    assert failed
    assert (one.stats().preemptions_total > preempted) == is_late
    assert_nothing_held(one)


@every_family
def test_rows_that_lost_their_pages_begin_anew_from_what_they_committed(family, monkeypatch):
    one, core = shared(family), shared(family)._built.core
    asks = [Ask(prompt=[3, i], wanted=56, dllm=dllm) for i, dllm in enumerate((SLOW, DELAYED))]
    kept, step = {}, core.step

    def loses():
        outputs = {name: list(request.output_ids) for name, request in core.requests.items()}
        if not kept and len(outputs.get("0", [])) > 9:
            kept.update(outputs)
            core.scheduler.drop_kv()
            core.runner.reset()
        return step()

    monkeypatch.setattr(core, "step", loses)
    with launches(one, steps=1, overlaps=True):
        results = [list(stream)[-1] for stream in streams(family, asks, ["0", "1"])]
    for i, (ask, result) in enumerate(zip(asks, results, strict=True)):
        # What had ended by then stays as it is.
        begun = kept.get(str(i), result["output_ids"])
        given = dict(enumerate(begun))
        again = Ask(prompt=ask.prompt, wanted=ask.wanted, dllm=ask.dllm, given=given)
        assert result["output_ids"][: len(begun)] == begun
        assert result["output_ids"] == alone(one, [again])[0]["output_ids"]
        assert len(result["output_ids"]) == len(result["meta_info"]["step_map"]) == 56
    assert 9 < len(kept["0"]) < 56
    assert_nothing_held(one)
