"""The host ends launches under way: what that does to tokens (nothing), and how it is asked."""

import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from support import canvas_engine, hash_model, tiny_engine
from support.canvas_asks import mixed_asks

import pallas_kernels
from jdllm.device import devices
from jdllm.engine import loop
from jdllm.runner.launch import executables, interrupts


@pytest.fixture(scope="module")
def canvases():
    return canvas_engine.shared("llada")


@pytest.fixture
def asked_at_random(monkeypatch):
    """Lets compiled loops see at random that the host has asked; returns what each poll saw."""
    rng, seen = np.random.default_rng(0), []

    def say(count):
        seen.append(bool(rng.random() < 0.4))
        return np.int32(np.asarray(count) + seen[-1])

    def poll(self, after, **_):
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return io_callback(lambda count, _: say(count), shape, self.count, after)

    monkeypatch.setattr(interrupts.Interrupt, "poll", poll)
    return seen


def prompts_and_params():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 40, 9)
    prompts = [rng.integers(4, tiny_engine.VOCAB, length).tolist() for length in lengths]
    params = [
        {"max_new_tokens": int(new), "ignore_eos": True, "dllm": {"threshold": float(threshold)}}
        for new, threshold in zip(rng.integers(1, 60, 9), rng.choice([0.0, 0.3, 0.95], 9))
    ]
    return {"input_ids": prompts, "sampling_params": params}


def num_launches(engine):
    return engine._built.core.counters.decode_launches


@pytest.mark.campaign
def test_launches_that_end_early_lose_no_token(engine, asked_at_random):
    def told(one):
        before = num_launches(one)
        results = one.generate(**prompts_and_params())
        tokens = [(r["output_ids"], r["meta_info"]["nfe"]) for r in results]
        return tokens, num_launches(one) - before

    undisturbed, seldom = told(engine)
    assert asked_at_random == []
    with tiny_engine.make_engine() as often_asked:
        disturbed, often = told(often_asked)
        tiny_engine.assert_nothing_held(often_asked)
    assert {True, False} <= set(asked_at_random)
    assert disturbed == undisturbed
    assert often > seldom


@pytest.mark.campaign
def test_launches_of_canvases_that_end_early_lose_no_token(canvases, asked_at_random):
    asks = mixed_asks("llada", seed=9)
    asks = [ask for ask in asks if ask.dllm["algorithm"] == "FullAttnMultiBlock"]
    assert len(asks) > 3

    def told(one):
        before = num_launches(one)
        tokens = canvas_engine.told(canvas_engine.generate(one, asks))
        return tokens, num_launches(one) - before

    undisturbed, seldom = told(canvases)
    assert asked_at_random == []
    with canvas_engine.make("llada", dllm_algorithm="FullAttnMultiBlock") as often_asked:
        disturbed, often = told(often_asked)
    assert {True, False} <= set(asked_at_random)
    assert disturbed == undisturbed
    assert often > seldom


class PlanningCore:
    """Plans until the host has asked, then runs a launch that ends when asked, or never."""

    pause_s = 0.0

    def __init__(self):
        self.interrupts, self.given = interrupts.Interrupts(implementation="xla"), None
        self.runner, self.requests = (
            self,
            {"one": hash_model.random_request(random.Random(0), "one")},
        )
        self.has_work, self.is_planning, self.is_asked = True, threading.Event(), threading.Event()

    def begin_round(self):
        self.given = self.interrupts.current()

    def interrupt(self):
        self.interrupts.request_stop()
        self.is_asked.set()

    def abort(self, name):
        self.has_work = False
        self.requests.pop(name)

    def step(self):
        self.is_planning.set()
        assert self.is_asked.wait(60)
        deadline = time.monotonic() + 60
        while not self.given.stop_requested(self.interrupts._words[0]):
            assert time.monotonic() < deadline, "the launch goes on"
        return []

    def settle(self):
        return []


def test_who_asks_while_a_launch_is_planned_ends_it_too():
    core = PlanningCore()
    engine = loop.EngineLoop(core)
    assert core.is_planning.wait(60)
    assert engine.abort().result(timeout=60) == 1
    engine.stop()
    assert not engine.is_alive


@pytest.mark.campaign
def test_a_round_is_for_one_launch(engine):
    runner = engine._built.runner

    def counts_of_two_rounds():
        runner.begin_round()
        runner.interrupt()
        return [int(runner._next_interrupt().count) for _ in range(2)]

    counts = engine._loop.call(counts_of_two_rounds).result()
    assert counts[1] == counts[0] + 1


def test_asking_ends_what_was_planned_before_and_nothing_later():
    host = interrupts.Interrupts(implementation="xla")
    host._words[0] = np.iinfo(np.int32).max  # and it wraps around
    before = host.current()
    assert not before.stop_requested(host._words[0])
    host.request_stop()
    later = host.current()
    assert before.stop_requested(host._words[0]) and not later.stop_requested(host._words[0])
    assert int(later.count) == np.iinfo(np.int32).min


def test_without_a_kernel_nothing_is_ever_asked():
    host = interrupts.Interrupts(implementation="xla")
    given = host.current()
    host.request_stop()
    word = given.poll(jnp.zeros((3,), jnp.int32), implementation="xla")
    assert not bool(given.stop_requested(word)) and not given.address.any()


@pytest.mark.gpu
@pytest.mark.skipif(
    pallas_kernels.choose_read_cancel_flag().implementation == "xla", reason="needs a Hopper GPU"
)
def test_the_host_ends_a_running_loop():
    host = interrupts.Interrupts()
    x = jnp.full((4096, 4096), 1e-3, jnp.bfloat16)

    def run(interrupt, most):
        def goes_on(carry):
            count, _, word = carry
            return (count < most) & ~interrupt.stop_requested(word)

        def body(carry):
            count, y, _ = carry
            y = jnp.tanh(x @ y)
            return count + 1, y, interrupt.poll(y, implementation="auto")

        return jax.lax.while_loop(goes_on, body, (jnp.int32(0), x, interrupt.count))[0]

    def planned():
        return jax.tree.map(jnp.asarray, host.current())

    lowered = jax.jit(run).lower(planned(), jnp.int32(1))
    # XLA makes no graph of so few kernels by itself; without one the host reads each condition.
    options = executables.compiler_options(devices.facts()) | {"xla_gpu_graph_min_graph_size": "1"}
    loop = lowered.compile(compiler_options=options)
    assert int(loop(planned(), jnp.int32(100))) == 100
    given, many = planned(), jnp.int32(2 * 10**5)
    running = [loop(given, many), loop(given, many)]
    time.sleep(0.5)
    assert not running[0].is_ready()
    host.request_stop()
    first, second = (int(count) for count in running)
    assert 1 < first < 10**5 and second == 1  # which had not begun
