"""The scheduler step by step, with results written by hand; block and page are 4 by default."""

import pytest
from support.hand_written import MASK, B, ask, make, names, results_of, round_of, write, written

from jdllm import errors
from jdllm.scheduler.rows import block


def test_prompt_remainder_heads_the_first_block_and_stays():
    made = make()
    made.add_request(ask("a", [7, MASK, 8, 9, 7, MASK], max_new=3))
    batch, _ = round_of(made)
    assert not batch.bucket.denoises
    assert (batch.rows[0].start, batch.rows[0].num_tokens) == (0, 4)
    batch = made.schedule()
    (row,) = batch.rows
    assert batch.bucket.denoises and (row.start, row.is_fresh) == (4, True)
    # The literal mask id of the prompt is data: it is no output, and what the row wrote is.
    outputs = made.process_results(batch, results_of([write(row.request)]))
    assert outputs[0].new_token_ids == [5, 5]
    assert not made.schedule().rows[0].is_fresh


def test_short_prompt_needs_no_prefill():
    made = make()
    made.add_request(ask("a", [7, 8, 9]))
    assert made.schedule().bucket.denoises


def test_block_is_committed_once_then_persisted_then_followed():
    made = make()
    one = ask("a", [7], max_new=8)
    made.add_request(one)
    batch = made.schedule()
    made.process_results(batch, results_of([write(one, is_final=False)]))
    assert (one.nfe, one.output_ids) == (1, [])
    _, outputs = round_of(made)
    assert outputs[0].new_token_ids == one.output_ids == [5, 5, 5]
    assert (one.nfe, one.held.context_len, one.num_blocks) == (2, 0, 1)
    batch, outputs = round_of(made, is_done=True)
    assert batch.bucket.denoises and outputs == []
    assert (one.held.context_len, one.output_ids) == (4, [5, 5, 5])
    assert (one.nfe, one.num_blocks) == (3, 1)
    batch = made.schedule()
    assert batch.rows[0].start == 4 and not batch.rows[0].is_fresh


def test_finished_request_leaves_at_once_and_surplus_is_counted():
    made = make()
    one = ask("a", [7, 8], max_new=1)
    made.add_request(one)
    _, outputs = round_of(made)
    assert outputs[0].new_token_ids == one.output_ids == [5]
    assert (outputs[0].finish.kind, outputs[0].finish.finished_len) == ("length", 1)
    assert one.num_discarded == 1
    assert not made.has_work() and made.schedule() is None
    assert made.stats().num_used_pages == 0


def test_final_and_done_at_once_needs_no_persist_round():
    made = make()
    one = ask("a", [7], max_new=8)
    made.add_request(one)
    _, outputs = round_of(made, is_done=True)
    assert outputs[0].new_token_ids == [5, 5, 5] and one.held.context_len == 4
    batch, outputs = round_of(made, is_done=True)
    assert outputs[0].new_token_ids == [5, 5, 5, 5] and one.num_blocks == 2


def test_context_can_be_used_to_the_last_token():
    made = make(context_length=10, num_pages=3)
    one = ask("a", [7] * 9, max_new=1)
    made.add_request(one)
    round_of(made)
    _, outputs = round_of(made)
    assert outputs[0].finish.kind == "length" and one.output_ids == [5]


@pytest.mark.parametrize(
    "wrong,error,words",
    [
        (ask("x", []), errors.RequestError, ["empty"]),
        (ask("x", [7], max_new=0), errors.RequestError, ["max_new_tokens=0"]),
        (ask("x", [7] * 30, max_new=35), errors.RequestTooLong, ["65", "64", "30", "35"]),
        (ask("x", [7] * 20, max_new=21), errors.RequestTooLong, ["11 KV pages", "has 10"]),
        (ask("x", [7], stop=["a"]), errors.RequestError, ["stop"]),
        (ask("a", [7]), errors.RequestError, ["'a'", "in use"]),
    ],
    ids=["empty", "no tokens", "context", "pool", "stop without tokenizer", "duplicate"],
)
def test_what_can_never_run_is_refused_at_once(wrong, error, words):
    made = make(num_pages=10)
    made.add_request(ask("a", [7]))
    with pytest.raises(error) as caught:
        made.add_request(wrong)
    assert all(word in str(caught.value) for word in words)
    assert made.stats().num_queued == 1


@pytest.mark.parametrize(
    "name,value", [("suffix", {"suffix_ids": [5]}), ("given", {"given": {0: 5}})]
)
def test_rows_of_blocks_refuse_what_needs_later_tokens(name, value):
    made, one = make(), ask("a", [7])
    for field, wanted in value.items():
        setattr(one, field, wanted)
    with pytest.raises(errors.RequestError, match=f"^{name} needs.*full attention") as caught:
        made.add_request(one)
    assert caught.value.param == name and not made.has_work()


def test_queue_limit_counts_only_requests_that_find_no_row():
    made = make(max_running_requests=2, max_queued_requests=1)
    for i in range(3):
        made.add_request(ask(str(i), [7]))
    with pytest.raises(errors.QueueFull) as caught:
        made.add_request(ask("3", [7]))
    assert caught.value.status == 503
    made.schedule()
    with pytest.raises(errors.QueueFull):
        made.add_request(ask("3", [7]))
    assert made.abort("2")
    made.add_request(ask("3", [7]))


def test_a_refused_id_can_be_used_again_after_the_end():
    made = make()
    made.add_request(ask("a", [7], max_new=1))
    round_of(made)
    made.add_request(ask("a", [7], max_new=1))


def test_prefill_is_chunked_by_budget_and_takes_turns_with_decode():
    made = make()
    made.add_request(ask("short", [7], max_new=32))
    round_of(made, is_final=False)
    made.add_request(ask("long", [7] * 40))
    made.add_request(ask("next", [7] * 9))
    seen = []
    for _ in range(7):
        batch, _ = round_of(made, is_final=False)
        seen.append((batch.bucket.name, [(r.request.request_id, r.num_tokens) for r in batch.rows]))
    assert seen == [
        ("prefill", [("long", 16)]),
        ("decode", [("short", 4)]),
        ("prefill", [("long", 16)]),
        ("decode", [("short", 4)]),
        ("prefill", [("long", 8), ("next", 8)]),
        ("decode", [("short", 4), ("long", 4), ("next", 4)]),
        ("decode", [("short", 4), ("long", 4), ("next", 4)]),
    ]


def test_abort_in_every_phase_frees_pages_and_late_results_change_nothing():
    for rounds in range(5):
        made = make(max_running_requests=1, has_prefix_cache=True)
        one, two = ask("a", [7] * 20), ask("b", [8])
        made.add_request(one)
        made.add_request(two)
        for _ in range(rounds):
            round_of(made)
        batch = made.schedule()
        results = written(batch)
        assert made.abort("b") and not made.abort("b")
        committed = list(one.output_ids)
        assert made.abort("a") and not made.abort("a")
        assert made.process_results(batch, results) == []
        assert (one.output_ids, one.stay) == (committed, None)
        assert made.stats().num_used_pages == 0 and not made.has_work()
        assert made.flush_cache() and made.pages.allocator.num_free == 32


def test_youngest_is_preempted_keeps_tokens_and_comes_back_first():
    made = make(num_pages=4, max_running_requests=2)
    old, young, late = ask("old", [7], 15), ask("young", [7], 15), ask("late", [7], 1)
    for one in (old, young, late):
        made.add_request(one)
    for _ in range(4):
        batch, _ = round_of(made, is_done=True)
        if young.num_preemptions:
            break
    assert names(batch) == ["old"]
    assert young.output_ids == [5] * 7 and young.num_preemptions == 1
    assert young.stay is None
    assert list(made.waiting) == [young, late]
    assert made.stats().total_preemptions == 1
    while made.has_work():
        round_of(made, is_done=True)
    assert old.output_ids == young.output_ids == [5] * 15 and late.output_ids == [5]


def test_a_question_that_runs_is_not_preempted_for_each_member_of_an_older_list():
    """Two requests of this size find pages only at first, so one is preempted again and again."""
    made = make(num_pages=4, max_running_requests=2)
    members = [ask(f"list {i}", [7], 15) for i in range(8)]
    for one in members:
        one.group = "list"
        made.add_request(one)
    round_of(made)
    question = ask("question", [7], 15)
    made.add_request(question)
    ends = []
    while made.has_work():
        _, outputs = round_of(made, is_done=True)
        ends += [output.request for output in outputs if output.finish]
    assert made.stats().total_preemptions >= 8 and question.num_preemptions <= 1
    assert ends.index(question) <= 4


def test_preempted_between_commit_and_persist_commits_no_token_twice():
    made = make(num_pages=4, max_running_requests=2)
    old, young = ask("old", [7] * 7, 9), ask("young", [7], 8)
    made.add_request(old)
    made.add_request(young)
    round_of(made)  # prefill of old
    batch = made.schedule()
    assert names(batch) == ["old", "young"]
    results = results_of([write(old, is_done=True), write(young)])
    made.process_results(batch, results)  # young is final, not persisted
    assert (young.output_ids, young.held.context_len) == ([5, 5, 5], 0)
    round_of(made, is_done=True)
    while made.has_work():
        round_of(made, is_done=True)
    assert young.num_preemptions >= 1 and young.output_ids == [5] * 8
    assert old.output_ids == [5] * 9 and young.num_blocks == 3


@pytest.mark.parametrize("page_size,hit", [(2, 8), (4, 8), (8, 8), (16, 0)])
def test_prefix_hit_is_cut_to_whole_pages_and_whole_blocks(page_size, hit):
    made = make(page_size=page_size, has_prefix_cache=True, num_pages=64 // page_size)
    first = ask("a", range(10, 23), max_new=1)
    made.add_request(first)
    while made.has_work():
        round_of(made, is_done=True)
    # 10 common tokens: with pages of 2 the tree matches five pages, of which four are blocks.
    second = ask("b", [*range(10, 20), 50, 51, 52], max_new=1)
    made.add_request(second)
    batch, _ = round_of(made)
    assert second.cached_tokens == hit and batch.rows[0].start == hit
    assert made.stats().total_cached_tokens == hit
    assert made.stats().total_prompt_tokens == 26


def test_whole_prompt_hit_goes_straight_to_decode():
    made = make(has_prefix_cache=True)
    for name in "ab":
        made.add_request(ask(name, range(10, 18), max_new=1))
        batch = made.schedule()
        while made.has_work():
            made.process_results(batch, written(batch))
            batch = made.schedule() or batch
    assert batch.bucket.denoises and batch.rows[0].start == 8


def test_pages_of_simultaneous_twins_reach_the_tree_when_they_leave():
    made = make(has_prefix_cache=True, prefill_token_budget=32)
    one, two = ask("a", range(10, 18), max_new=9), ask("b", range(10, 18), max_new=8)
    made.add_request(one)
    made.add_request(two)
    batch, _ = round_of(made)
    assert names(batch) == ["a", "b"]
    assert [len(r.held.prefix_nodes) for r in (one, two)] == [2, 0]
    assert made.stats().num_used_pages == 6
    while made.has_work():
        round_of(made, is_done=True)
    assert made.stats().num_cached_pages == 4 and made.stats().num_used_pages == 0


def test_longest_cached_prefix_first_under_lpm():
    made = make(has_prefix_cache=True, policy="lpm", max_running_requests=1)
    made.add_request(ask("warm", range(10, 22), max_new=1))
    while made.has_work():
        round_of(made, is_done=True)
    for name, prompt in [
        ("none", [1] * 12),
        ("some", [*range(10, 14), *[1] * 8]),
        ("all", range(10, 22)),
        ("none too", [2] * 12),
    ]:
        made.add_request(ask(name, prompt, max_new=1))
    order = []
    while made.has_work():
        batch, outputs = round_of(made, is_done=True)
        order += [output.request.request_id for output in outputs]
    assert order == ["all", "some", "none", "none too"]


def test_flush_waits_for_running_requests():
    made = make(has_prefix_cache=True)
    made.add_request(ask("a", [7] * 8, max_new=1))
    round_of(made)
    assert not made.flush_cache()
    round_of(made)
    assert made.stats().num_cached_pages == 2
    assert made.flush_cache() and made.stats().num_cached_pages == 0


def test_drop_kv_sends_every_running_request_through_prefill_again():
    made = make(has_prefix_cache=True)
    one = ask("a", [7] * 8, max_new=8)
    made.add_request(one)
    round_of(made)
    round_of(made, is_done=True)
    made.drop_kv()
    assert made.pages.allocator.num_free == 32 and made.stats().num_cached_pages == 0
    batch, _ = round_of(made)
    assert not batch.bucket.denoises and batch.rows[0].num_tokens == 12
    round_of(made)
    assert one.output_ids == [5] * 8 and not made.has_work()


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 6},
        {"max_running_requests": 9, "buckets": block.BlockBuckets.default(8, 16, B)},
        {"buckets": block.BlockBuckets.default(4, 16, 2 * B)},
    ],
    ids=["page and block", "rows", "bucket block"],
)
def test_sizes_that_do_not_fit_are_config_errors(wrong):
    with pytest.raises(errors.ConfigError):
        make(**wrong)


def test_a_page_smaller_than_a_block_is_shared_only_with_its_whole_block():
    """K,V of the first page of a block depends on the block's later tokens."""
    made = make(page_size=2, has_prefix_cache=True)
    pages = {}
    for name, prompt in [("a", [1, 2, 3, 4, 8]), ("b", [1, 2, 5, 6, 8]), ("c", [1, 2, 5, 6, 9])]:
        one = ask(name, prompt, max_new=1)
        made.add_request(one)
        while made.has_work():
            batch = made.schedule()
            pages[name] = one.held.pages[:2]
            made.process_results(batch, written(batch))
    assert one.cached_tokens == 4 and pages["c"] == pages["b"]
    assert not set(pages["a"]) & set(pages["b"])


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages():
    made = make(num_pages=6)
    for name, length in [("running", 13), ("large", 9), ("small", 1)]:
        made.add_request(ask(name, [7] * length, max_new=1))
    round_of(made)
    assert [one.request_id for one in made.running] == ["running"]
    assert made.stats().num_used_pages == 4
    while made.has_work():
        batch, _ = round_of(made)
        assert "running" not in names(batch) or names(batch) == ["running"]
