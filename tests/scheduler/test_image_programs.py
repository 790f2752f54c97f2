"""Programs that are compiled while others run: who waits for them, and who does not."""

import dataclasses
import random

import pytest
from support.image_fake import (
    BUCKETS,
    SMALL,
    Client,
    alone,
    ask,
    build,
    latents_of,
    random_ask,
    run,
)
from support.image_watch import Watch, check_memory, check_products

from jdllm.scheduler.rows.image import buckets, rows

WINDOWS = buckets.Windows(steps=3, by_caption=True)
OTHERS = [(96, 64), (64, 96), (32, 64), (96, 96)]  # sizes that are not compiled at start


class Compiler:
    """Compiles one program at a time, each in a random number of rounds, those of few rows first.

    At most `most_waiting` questions are noted. `programs` is what the device has.
    """

    def __init__(self, rng, programs, *, most_waiting=99, slowest=30):
        self.rng, self.programs = rng, programs
        self.most_waiting, self.slowest = most_waiting, slowest
        self.asked, self.waits, self.left = [], [], 0

    def is_ready(self, bucket):
        if bucket in self.programs:
            return True
        if bucket not in self.waits and len(self.waits) < self.most_waiting:
            self.asked.append(bucket)
            self.waits.append(bucket)
            self.waits.sort(key=lambda one: one.rows)
        return False

    def tick(self):
        """Lets a round pass."""
        if not self.left and self.waits:
            self.left = self.rng.randint(1, self.slowest)
        elif self.left:
            self.left -= 1
            if not self.left:
                self.programs.add(self.waits.pop(0))


def made(rng, *, sizes=(SMALL,), most_waiting=99, **options):
    """Returns (core, device, compiler); the programs of `sizes` are compiled, but for floats."""
    core, device = build(rng, **options)
    device.programs = {
        one
        for one in device.programs
        if one.name == "encode" or (one.name != "modulate" and (one.height, one.width) in sizes)  # pyright: ignore
    }
    compiler = Compiler(rng, device.programs, most_waiting=most_waiting)
    core.scheduler.rows.programs.is_ready = compiler.is_ready
    return core, device, compiler


def has_programs(core, one):
    """Returns whether a request could run alone; asks for nothing."""
    programs = core.scheduler.rows.programs
    asks, programs.is_ready = programs.is_ready, core.runner.programs.__contains__
    programs.end_round()
    try:
        return programs.has_all(one)
    finally:
        programs.is_ready = asks
        programs.end_round()


@pytest.mark.parametrize("most_waiting", [1, 99])
@pytest.mark.parametrize("running", [1, 3, 6])
@pytest.mark.parametrize("seed", range(4))
def test_who_waits_for_a_program_holds_nothing_delays_nobody_and_keeps_the_turn(
    running, most_waiting, seed
):
    rng = random.Random(repr((running, most_waiting, seed)))
    core, device, compiler = made(
        rng,
        running=running,
        num_entries=2 * running,
        most_waiting=most_waiting,
        buckets=dataclasses.replace(
            BUCKETS,
            windows=WINDOWS if seed % 2 else None,
            # Long captions keep steps apart, or do not.
            image_tokens=buckets.one_token_for_16x16 if seed > 1 else BUCKETS.image_tokens,
        ),
    )
    sizes = [SMALL, SMALL, SMALL, *OTHERS]
    asks = [
        random_ask(rng, seed, size=rng.choice(sizes), outputs=("image", "latent", "float"))
        for seed in range(40)
    ]
    watch, client, todo, gone = Watch(core, device), Client(), asks[::-1], set()
    made_, rounds = core.scheduler, 0
    while todo or core.has_work:
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            if todo:
                core.add([todo.pop()])
        if rng.random() < 0.01 and core.requests:
            gone.add(rng.choice(sorted(core.requests)))
            core.abort(max(gone & core.requests.keys()))
        compiler.tick()
        ran = {one.request_id for one in made_.running}
        watch.before()
        waits = [one for one in made_.waiting if has_programs(core, one)]
        if made_.live.num_free_rows:
            assert not waits, "a request that could run waits beside a free place"
        for one in made_.running:
            if one.request_id not in ran:
                assert has_programs(core, one)
                assert not [w for w in waits if w.arrival < one.arrival], "a turn was lost"
        if made_.waiting and not made_.running:
            assert compiler.waits, "nobody compiles what is waited for"
        is_idle = core._in_flight is None and not made_.running
        client.take(core.step())
        watch.after()  # a row that has been admitted is never without a program
        check_memory(core)
        if is_idle and made_.waiting:
            assert core.pause_s == rows.PROGRAM_POLL_S
        rounds += 1
        assert rounds < 30_000
    check_products(asks, client, gone)
    assert len(compiler.asked) > 12 and made_.rows.captions.num_held == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_one_place_serves_compiled_sizes_while_another_is_compiled(overlaps):
    core, device, compiler = made(random.Random(0), running=1, num_entries=2, overlaps=overlaps)
    odd = [ask(2, size=(96, 64), seed=n, name=f"odd{n}") for n in range(3)]
    core.add([*odd, ask(2, name="a"), ask(2, name="b")])
    client = Client()
    for _ in range(12):
        client.take(core.step())
    assert client.products.keys() == {"a", "b"} and core.scheduler.stats().num_queued == 3
    assert core.scheduler.rows.captions.num_held == 0 and core.pause_s == rows.PROGRAM_POLL_S
    # All that one of them needs alone, each once: the caption is known from the others.
    assert [(one.name, one.rows) for one in compiler.asked] == [("step", 1), ("decode", 1)]
    device.programs.update(compiler.asked)
    core.add([ask(2, name="late")])
    run(core, client)
    ended = [b.rows[0].request.request_id for b in device.trace if b.bucket.name == "decode"]
    assert ended == ["a", "b", "odd0", "odd1", "odd2", "late"]
    assert client.products["odd1"] == alone(odd[1])[1]


def test_a_request_asks_for_all_it_needs_at_once_floats_and_previews_too():
    core, _, compiler = made(random.Random(0))
    core.add([ask(4, output="float", partial=1, latents=latents_of(SMALL), size=SMALL)])
    core.step()
    assert [(one.name, one.rows, one.output) for one in compiler.asked] == [("decode", 1, "float")]
    core.add([ask(4, size=(96, 64), output="float", partial=1, latents=latents_of((96, 64)))])
    core.step()
    assert [one.name for one in compiler.asked[1:]] == ["begin", "step", "decode", "decode"]
    assert {one.output for one in compiler.asked[-2:]} == {"float", "image"}


def test_a_call_of_many_sizes_goes_on_with_those_that_are_ready_and_others_have_turns():
    core, device, compiler = made(random.Random(0), running=1, num_entries=2)
    call = [ask(1, size=size, name=f"a{n}") for n, size in enumerate([(96, 64), SMALL, SMALL])]
    for one in call:
        one.group = "a call"
    core.add(call)
    core.add([ask(1, name="b"), ask(1, name="c")])
    client = Client()
    while len(client.products) < 2:
        client.take(core.step())
    device.programs.update(compiler.asked)
    run(core, client)
    ended = [b.rows[0].request.request_id for b in device.trace if b.bucket.name == "decode"]
    # The call's turn went to a1, so b was next; then c, and a0 before a2.
    assert ended == ["a1", "b", "c", "a0", "a2"]
