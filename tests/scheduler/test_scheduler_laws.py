"""The law: whatever the traffic, every request gets the tokens it would get alone.

The model is `hash_model.PagedModel`; free pages are overwritten with noise before
every launch.
"""

import collections
import random

import numpy as np
import pytest
from support import causal_hash_model
from support.hash_model import (
    CONTEXT,
    MAX_PREFILL_TOKENS,
    B,
    PagedModel,
    alone,
    build,
    random_request,
)

from jdllm.scheduler.rows import block

NUM_REQUESTS = 80


def check_pages(made):
    """Every page is free, or owned by one node or by one request."""
    owners = collections.Counter()
    locks = collections.Counter()
    for one in made.running:
        shared = len(one.held.prefix_nodes)
        assert [node.page for node in one.held.prefix_nodes] == one.held.pages[:shared]
        owners.update(one.held.pages[shared:])
        locks.update(node.page for node in one.held.prefix_nodes)
    cache, num_evictable = made.pages.prefix_cache, 0
    stack = [] if cache is None else list(cache._top.values())
    while stack:
        node = stack.pop()
        stack += node.children.values()
        owners[node.page] += 1
        num_evictable += node.ref_count == 0
        assert node.ref_count == locks[node.page]
    assert all(count == 1 for count in owners.values())
    assert set(owners) == set(np.flatnonzero(made.pages.allocator.is_used))
    assert num_evictable == (0 if cache is None else cache.num_evictable)
    for one in made.waiting:
        assert one.stay is None
    slots = [one.held.slot for one in made.running] + made.live.free_slots
    assert sorted(slots) == list(range(len(slots)))


def check_batch(made, batch, prefilled, shapes):
    """`prefilled`: tokens, padding included, of prefill launches since the last decode launch."""
    served = [row.request for row in batch.rows]
    waits = {type(batch.bucket)} | {
        block.PrefillBucket
        if one.held.is_fresh and one.held.context_len < made.pages.prefix_len(one)
        else block.DecodeBucket
        for one in made.running
        if one not in served
    }
    if len(waits) == 2:
        is_due = prefilled >= MAX_PREFILL_TOKENS
        expected = block.DecodeBucket if is_due else block.PrefillBucket
        assert type(batch.bucket) is expected, "one phase starves the other"
    tokens = sum(-(-row.num_tokens // B) * B for row in batch.rows)
    is_causal = made.pages._unit == 1
    fitting = [
        s
        for s in shapes
        if type(s) is type(batch.bucket) and s.rows >= len(batch.rows) and s.tokens >= tokens
    ]
    assert batch.bucket == min(fitting, key=lambda bucket: bucket.tokens)
    assert len({row.request.request_id for row in batch.rows}) == len(batch.rows)
    for row in batch.rows:
        is_prefill = not batch.bucket.denoises
        assert row.start + is_prefill * row.num_tokens == row.stay.context_len
        assert (row.num_tokens % B == 0 or is_causal) and row.stay.slot is not None
        assert len(row.stay.pages) * made.pages._page_size >= row.start + row.num_tokens


def serve(made, shapes, model, rng, todo, launches_ahead):
    """Drives random arrivals and aborts; returns streamed tokens, finished ids, round count.

    Results are read when `launches_ahead` later launches have been planned and started.
    """
    streamed, finished, aborted = collections.defaultdict(list), {}, set()
    todo, live, prefilled, rounds = list(todo), [], 0, 0
    in_flight = collections.deque()
    while todo or made.has_work() or in_flight:
        for _ in range(rng.choice([0, 0, 1, 2, 7])):
            if todo:
                live.append(todo.pop())
                made.add_request(live[-1])
        batch = made.schedule()
        if batch is None:
            assert not made.has_work()
        else:
            check_batch(made, batch, prefilled, shapes)
            is_decode, rounds = batch.bucket.denoises, rounds + 1
            prefilled = 0 if is_decode else prefilled + batch.bucket.tokens
            free = ~made.pages.allocator.is_used
            model.store[free] = rng.getrandbits(63)
            in_flight.append((batch, model.launch(batch)))
        if live and rng.random() < 0.01:
            victim = rng.choice(live).request_id
            if made.abort(victim):
                aborted.add(victim)
        if not in_flight or (batch is not None and len(in_flight) <= launches_ahead):
            continue
        oldest, launch = in_flight.popleft()
        for output in made.process_results(oldest, launch.result()):
            name = output.request.request_id
            assert name not in aborted and name not in finished
            streamed[name] += output.new_token_ids
            if output.finish is not None:
                finished[name] = output.finish
        if rounds % 5 == 0:
            check_pages(made)
        assert rounds < 20_000, made.stats()
    return streamed, finished, aborted, rounds


PRODUCT = [
    (kind, page, cache, policy, tight, steps, fuses, ahead)
    for steps, fuses, ahead in ((1, False, 0), (1, True, 1), (3, True, 1), (10, False, 3))
    for kind in ("persist", "edit", "shift", "causal")
    for page in (B // 2, B, 2 * B, 4 * B)
    for cache in ("cache", "nocache")
    for policy in ("fcfs", "lpm")
    for tight in ("tight", "roomy")
]
CASES = [
    pytest.param(
        *case,
        id="{}-page{}-{}-{}-{}-{}steps-fused{}-ahead{}".format(*case),
        # The eleventh part of the product still has every pair of values.
        marks=[pytest.mark.campaign if i % 3 == 0 else pytest.mark.long] if i % 11 else [],
    )
    for i, case in enumerate(PRODUCT)
]


@pytest.mark.parametrize(
    "kind,page_size,cache,policy,pool,decode_steps,fuses,launches_ahead", CASES
)
def test_every_request_gets_the_tokens_it_gets_alone(
    kind, page_size, cache, policy, pool, decode_steps, fuses, launches_ahead
):
    rng = random.Random(repr((kind, page_size, cache, policy, pool)))
    # Tight: one request of full context fits and little more.
    # Behind a causal context a block may begin at the last token.
    longest = CONTEXT + (B - 1 if kind == "causal" else 0)
    num_pages = -(-longest // page_size) + (1 if pool == "tight" else 400 // page_size)
    rows = 6 if pool == "tight" else rng.choice([1, 3, 8])
    made, shapes = build(
        page_size,
        cache == "cache",
        policy,
        num_pages,
        rows,
        decode_steps,
        launches_ahead,
        is_shifted=kind == "shift",
        is_causal=kind == "causal",
    )
    model = (causal_hash_model.CausalModel if kind == "causal" else PagedModel)(
        kind, num_pages, page_size, fuses=fuses, interrupts=rng
    )
    todo = [random_request(rng, str(i)) for i in range(NUM_REQUESTS)]
    calls = random.Random(0)  # lists of several requests, alone, and with priorities
    for one in todo:
        one.group = calls.choice(["list", "other list", one.group, one.group])
        one.priority_class = calls.choice([0, 0, 0, -1])
    streamed, finished, aborted, rounds = serve(made, shapes, model, rng, todo, launches_ahead)
    work = 0
    for one in todo:
        is_causal = kind == "causal"
        output, forwards = causal_hash_model.alone(one) if is_causal else alone(kind, one)
        work += forwards + len(one.prompt_ids) // (5 * B) + 1
        got = streamed[one.request_id]
        assert got == one.output_ids == output[: len(got)]
        if one.request_id in aborted:
            continue
        assert got == output and finished[one.request_id].finished_len == len(output)
        if one.num_preemptions == 0 and not fuses:
            assert one.nfe == forwards
        if one.num_preemptions == 0 and fuses:
            assert one.nfe <= forwards
    assert set(finished) | aborted == {one.request_id for one in todo}
    assert rounds <= 4 * work, "requests hinder one another"
    check_pages(made)
    assert made.stats().num_used_pages == 0 and made.flush_cache()
    assert made.pages.allocator.num_free == num_pages
    if pool == "tight":
        assert made.stats().total_preemptions > 0
    if cache == "cache":
        assert made.stats().total_cached_tokens > 0
