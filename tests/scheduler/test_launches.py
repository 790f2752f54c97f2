"""Launches of many steps: limits of a batch, pages taken ahead, results of several blocks."""

import numpy as np
from support.hand_written import ask, make, results_of, round_of, write
from support.hash_model import committed_block

from jdllm.options import sampling_params
from jdllm.scheduler.batch import RowResult
from jdllm.scheduler.rows import block


def test_several_blocks_of_one_launch_are_one_output():
    made = make(decode_steps=4)
    one = ask("a", [7, 7], max_new=8)
    made.add_request(one)
    batch = made.schedule()
    assert batch.max_steps == 4 and len(one.held.pages) == 3, "pages for the blocks that may follow"
    blocks = [[7, 7, 5, 5], [5, 5, 5, 5], [5, 5, 5, 5], [5, 5, 5, 5]]
    committed = tuple(
        committed_block(np.array(tokens), nfe)
        for tokens, nfe in zip(blocks, (1, 2, 3, 4), strict=True)
    )
    result = RowResult(committed=committed, context_len=8, nfe=4)
    outputs = made.process_results(batch, results_of([result]))
    (out,) = outputs
    assert out.new_token_ids == [5] * 8 and out.finish.kind == "length"
    # The forward that ended it was the third; the block after it was for nothing.
    assert (out.num_output, out.nfe, out.num_blocks, out.num_discarded) == (8, 3, 3, 2 + 4)
    assert made.stats().num_used_pages == 0


def test_all_persisted_blocks_of_the_last_launch_enter_the_prefix_cache():
    made = make(decode_steps=4, has_prefix_cache=True)
    one = ask("a", [7, 7], max_new=10)
    made.add_request(one)
    batch = made.schedule()
    committed = tuple(committed_block(np.array([5] * 4), nfe) for nfe in (1, 2, 3))
    result = RowResult(committed=committed, context_len=8, nfe=3)
    made.process_results(batch, results_of([result]))
    assert made.stats().num_cached_pages == 2  # not the last block, which nobody persisted


def test_decode_goes_one_step_at_a_time_while_a_prompt_waits_for_its_prefill():
    made = make(decode_steps=4, prefill_token_budget=4)
    made.add_request(ask("a", [7]))
    assert made.schedule().max_steps == 4
    made.add_request(ask("b", [8] * 20))
    assert not made.schedule().bucket.denoises
    assert made.schedule().max_steps == 1


def test_decode_has_a_turn_after_so_many_prefilled_tokens():
    made = make(decode_steps=4, prefill_token_budget=4, max_prefill_tokens=12)
    made.add_request(ask("a", [7]))
    made.schedule()
    made.add_request(ask("b", [8] * 40))
    phases = [type(made.schedule().bucket) for _ in range(11)]
    prefill, decode = block.PrefillBucket, block.DecodeBucket
    assert phases == [*[prefill] * 3, decode] * 2 + [*[prefill] * 3]


def test_looking_ahead_is_fair_and_leaves_pages_to_others():
    made = make(decode_steps=8, num_pages=20, has_prefix_cache=True, max_running_requests=2)
    made.add_request(ask("old", [1] * 16, max_new=1))
    while made.has_work():
        round_of(made)
    one, two = ask("a", [7], max_new=60), ask("b", [7], max_new=60)
    made.add_request(one)
    made.add_request(two)
    made.schedule()
    assert made.pages.num_available >= 2 and abs(len(one.held.pages) - len(two.held.pages)) <= 1
    assert len(one.held.pages) > 5


def test_a_row_that_shows_its_steps_shares_the_program_of_the_others():
    shown = {"dllm": sampling_params.DllmParams(stream_mode="denoise")}
    for sampling, with_logits in (({}, False), (shown, False), ({"logit_bias": {5: 1.0}}, True)):
        made = make(max_running_requests=2)
        made.add_request(ask("a", [7]))
        made.add_request(ask("b", [7], **sampling))
        assert made.schedule().bucket.with_logits == with_logits


def test_a_launch_is_asked_to_end_early_only_when_someone_waits():
    made = make(max_running_requests=1)
    made.add_request(ask("a", [7]))
    assert made.schedule().max_finished is None
    made.add_request(ask("b", [7]))
    assert made.schedule().max_finished == 0


def test_results_of_an_earlier_stay_are_dropped():
    made = make(has_prefix_cache=True)
    one = ask("a", [7])
    made.add_request(one)
    stale = made.schedule()
    made.drop_kv()  # a launch failed elsewhere; the request comes back
    assert made.schedule().rows[0].is_fresh
    assert made.process_results(stale, results_of([write(one)])) == []
    assert one.output_ids == [] and one.nfe == 0
