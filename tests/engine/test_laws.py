"""The laws of the engine on a real (tiny) model: batching, caching, preemption, compiles."""

import asyncio
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from support import hash_engine
from support.tiny_engine import (
    BLOCK,
    GOLDEN,
    alone,
    answers,
    assert_nothing_held,
    make_engine,
    random_prompts,
)
from support.waiting import wait_until

from jdllm import errors
from jdllm.engine import requests


def params_for(i, engine=None):
    """Mixed algorithms, thresholds, lengths and sampling: everything a batch may hold."""
    if engine is not None and "JointThresholdInDel" in engine._built.algorithms:
        return indel_params(i)
    options = [
        {"max_new_tokens": 20},
        {"max_new_tokens": 33, "dllm": {"threshold": 0.9}},
        {"max_new_tokens": 9, "temperature": 1.0, "seed": i, "top_p": 0.9},
        {"max_new_tokens": 26, "dllm": {"algorithm": "JointThreshold", "threshold": 0.4}},
        {
            "max_new_tokens": 17,
            "temperature": 0.7,
            "seed": 7 * i,
            "top_k": 20,
            "dllm": {"algorithm": "JointThreshold", "penalty_lambda": 1.0},
        },
    ]
    return options[i % len(options)]


def indel_params(i):
    """The same for LLaDA2.2; its rule moves tokens, and what is known of them moves along."""
    options = [
        {"max_new_tokens": 20, "return_step_map": True},
        {"max_new_tokens": 33, "dllm": {"threshold": 0.9, "max_post_edit_steps": 3}},
        {"max_new_tokens": 9, "temperature": 1.0, "seed": i, "top_p": 0.9},
        {"max_new_tokens": 17, "frequency_penalty": 0.5, "return_logprob": True,
         "top_logprobs_num": 2},
        {"max_new_tokens": 25, "dllm": {"algorithm": "LowConfidence"}},
        {"max_new_tokens": 30, "dllm": {"edit_threshold": 0.3, "max_post_edit_steps": 0}},
    ]  # fmt: skip
    return options[i % len(options)]


def forwards(results):
    return [r["meta_info"]["nfe"] for r in results]


def test_together_equals_alone_and_hit_equals_miss(engine_of, plain_engine_of):
    engine, plain_engine = engine_of, plain_engine_of
    prompts = random_prompts(1, 15)
    params = [params_for(i, engine) for i in range(15)]
    expected = answers(alone(plain_engine, prompts, params))
    assert engine.flush_cache()
    first = engine.generate(input_ids=prompts, sampling_params=params)
    again = engine.generate(input_ids=prompts, sampling_params=params)
    assert answers(first) == expected
    assert answers(again) == expected
    assert forwards(first) == forwards(again)
    assert sum(r["meta_info"]["cached_tokens"] for r in again) > sum(
        r["meta_info"]["cached_tokens"] for r in first
    )
    assert_nothing_held(engine)


def test_a_fused_commit_saves_one_forward_per_block_and_no_more(engine, plain_engine):
    prompts = random_prompts(5, 10)
    params = [params_for(i) for i in range(10)]
    plain = alone(plain_engine, prompts, params)
    fused = engine.generate(input_ids=prompts, sampling_params=params)
    assert answers(fused) == answers(plain)
    for few, many in zip(fused, plain, strict=True):
        dllm = few["meta_info"]["dllm"]
        # The last block ends its request; JointThreshold's closing forward is its commit.
        saved = dllm["blocks"] - 1 if dllm["algorithm"] == "LowConfidence" else 0
        assert many["meta_info"]["nfe"] - few["meta_info"]["nfe"] == saved


@pytest.mark.campaign
def test_preempted_requests_give_the_text_of_undisturbed_ones(plain_engine_of, model):
    # Two rows are preempted only in a smaller pool.
    pages = 7 if model else 13
    prompts = random_prompts(2, 8, longest=40)
    params = [params_for(i, plain_engine_of) | {"max_new_tokens": 60} for i in range(8)]
    expected = answers(alone(plain_engine_of, prompts, params))
    with make_engine(with_logits=bool(model), max_total_tokens=pages * 16, **model) as small:
        got = small.generate(input_ids=prompts, sampling_params=params)
        assert small.stats().preemptions_total > 0
        assert_nothing_held(small)
    assert answers(got) == expected


def test_nothing_compiles_after_start_up(engine_of):
    engine = engine_of
    # The counter is the process's, and other engines of this session compiled since.
    before = engine.stats().jit_compiles_total
    engine.generate(
        input_ids=random_prompts(3, 10), sampling_params=[params_for(i, engine) for i in range(10)]
    )
    assert engine.stats().jit_compiles_total == before


@pytest.mark.campaign
def test_the_pool_is_never_copied():
    with make_engine(
        with_logits=True, max_total_tokens=512 * 1024, max_running_requests=1
    ) as large:
        runner = large._built.core.runner
        pool_bytes = sum(pool.nbytes for pool in runner._memory["pools"])
        for bucket, compiled in runner.compiled.items():
            memory = compiled.memory_analysis()
            assert memory.temp_size_in_bytes < pool_bytes / 10, bucket
            assert memory.alias_size_in_bytes >= pool_bytes, bucket
        launch_bytes = large.stats().launch_memory_usage_gb * 1e9
        assert 0 < launch_bytes < pool_bytes / 10


def test_max_new_tokens_is_exact_and_counts(engine):
    for wanted in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        result = engine.generate(
            input_ids=[5] * 11,
            sampling_params={"max_new_tokens": wanted, "ignore_eos": True},
        )
        assert len(result["output_ids"]) == wanted
        info = result["meta_info"]
        assert info["finish_reason"] == {"type": "length", "length": wanted}
        assert info["completion_tokens"] == wanted
        # The first block holds the prompt's tail (11 mod 8 = 3 tokens).
        blocks = -(-(3 + wanted) // BLOCK)
        assert info["dllm"]["blocks"] == blocks
        assert info["dllm"]["discarded_tokens"] == blocks * BLOCK - 3 - wanted


def test_the_context_can_be_used_to_its_last_token(engine):
    result = engine.generate(input_ids=[3] * 119, sampling_params={"max_new_tokens": 9})
    assert len(result["output_ids"]) == 9
    with pytest.raises(errors.RequestTooLong, match=r"length is 128 .*119.*=10"):
        engine.generate(input_ids=[3] * 119, sampling_params={"max_new_tokens": 10})


def test_choices_differ_by_seed_and_repeat_with_it(engine):
    params = {"max_new_tokens": 12, "temperature": 2.0, "seed": 4, "n": 3}
    first = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    second = engine.generate(input_ids=[1, 2, 3], sampling_params=params)
    single = engine.generate(input_ids=[1, 2, 3], sampling_params=params | {"n": 1})
    texts = [r["output_ids"] for r in first]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [r["output_ids"] for r in second]
    assert single["output_ids"] == texts[0]


def test_stop_token_ends_the_output_and_is_its_last_id(engine):
    free = engine.generate(input_ids=[9] * 5, sampling_params={"max_new_tokens": 24})
    target = free["output_ids"][10]
    at = free["output_ids"].index(target)
    stopped = engine.generate(
        input_ids=[9] * 5, sampling_params={"max_new_tokens": 24, "stop_token_ids": [target]}
    )
    assert stopped["output_ids"] == free["output_ids"][: at + 1]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": target}


def test_streaming_shows_a_growing_prefix_of_the_final_answer(engine):
    params = {"max_new_tokens": 30, "ignore_eos": True}
    whole = engine.generate(input_ids=[4] * 6, sampling_params=params)
    seen = [
        item["output_ids"]
        for item in engine.generate(input_ids=[4] * 6, sampling_params=params, stream=True)
    ]
    assert len(seen) >= 4
    assert all(later[: len(ids)] == ids for ids, later in zip(seen, seen[1:], strict=False))
    assert seen[-1] == whole["output_ids"]


def test_leaving_a_stream_early_frees_everything(engine):
    stream = engine.generate(
        input_ids=[4] * 6, sampling_params={"max_new_tokens": 100}, stream=True
    )
    next(stream)
    stream.close()
    wait_until(lambda: not engine.stats().num_running_reqs)
    assert_nothing_held(engine)


def test_a_stream_dropped_before_its_first_item_is_aborted(engine):
    before = engine.stats().num_aborted_requests_total
    engine.generate(
        input_ids=[4] * 6,
        sampling_params={"max_new_tokens": 100, "ignore_eos": True},
        stream=True,
    ).close()
    wait_until(lambda: engine.stats().num_aborted_requests_total > before)
    assert engine.stats().num_aborted_requests_total == before + 1
    assert_nothing_held(engine)


def test_closing_a_finished_stream_spares_a_new_request_of_the_same_id(engine):
    params = {"max_new_tokens": 100, "ignore_eos": True}
    first = engine.generate(
        input_ids=[1], sampling_params={"max_new_tokens": 1}, rid="X", stream=True
    )
    wait_until(lambda: not engine._built.core.requests)
    second = engine.generate(input_ids=[4] * 6, sampling_params=params, rid="X", stream=True)
    first.close()
    *_, last = second
    assert last["meta_info"]["finish_reason"]["type"] == "length"


def test_async_generate_refuses_all_prompts_together(engine):
    before = engine.stats().num_requests_total
    with pytest.raises(errors.RequestTooLong):
        asyncio.run(engine.async_generate(input_ids=[[1], [1] * 500]))
    assert engine.stats().num_requests_total == before
    results = asyncio.run(
        engine.async_generate(input_ids=[[1], [2]], sampling_params={"max_new_tokens": 5})
    )
    expected = engine.generate(input_ids=[[1], [2]], sampling_params={"max_new_tokens": 5})
    assert answers(results) == answers(expected)


def test_offline_lists_are_not_bounded_by_the_servers_queue():
    count = hash_engine.ROWS + 2 * hash_engine.QUEUE
    with hash_engine.make_engine() as engine:
        prompts = [[i % hash_engine.VOCAB] for i in range(count)]
        results = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1})
    assert len(results) == count


@pytest.mark.campaign
def test_the_default_length_fits_a_pool_that_ends_inside_a_block():
    with make_engine(page_size=4, max_total_tokens=5 * 4, max_running_requests=1) as engine:
        wanted = engine.default_max_new_tokens(3)
        result = engine.generate(input_ids=[1] * 3, sampling_params={"max_new_tokens": wanted})
        assert len(result["output_ids"]) == wanted == 13


def test_abort_ends_the_named_requests_with_their_partial_output(engine):
    stream = engine.generate(
        input_ids=[[4] * 6, [5] * 6],
        sampling_params={"max_new_tokens": 100, "ignore_eos": True},
        rid=["job-a", "job-b"],
        stream=True,
    )
    next(stream)
    assert engine.abort("job-") == engine.abort("job") == engine.abort() == 0
    assert engine.abort("job-a") == 1
    assert engine.abort(["job-a", "job-b", "job-c"]) == 1
    last = {}
    for item in stream:
        last[item["meta_info"]["id"]] = item["meta_info"]["finish_reason"]
    assert {reason["type"] for reason in last.values()} == {"abort"}
    assert_nothing_held(engine)


def test_a_failed_launch_ends_its_requests_and_no_other(engine, plain_engine, monkeypatch):
    core, runner = engine._built.core, engine._built.core.runner
    launch, failed = runner.launch, []

    def fail_on_row(batch):
        if any(row.request.request_id == "bad" for row in batch.rows) and not failed:
            failed.append(batch)
            launch(batch)  # consumes the donated pool, as a real fault would
            raise RuntimeError("device fault")
        good = core.requests.get("good")
        if not failed and good is not None and good.output_ids:
            # "good" must still run when "bad" comes.
            wait_until(lambda: engine._loop._calls or "bad" in core.requests)
        return launch(batch)

    monkeypatch.setattr(runner, "launch", fail_on_row)
    slow = {"max_new_tokens": 60, "dllm": {"threshold": 1.0}}  # a token a step
    healthy = engine.generate(input_ids=[8] * 30, sampling_params=slow, rid="good", stream=True)
    next(healthy)
    scheduler = engine._built.core.scheduler
    # Only prefill rounds of "bad" alone fail, so that "good" is in another launch.
    with pytest.raises(requests.EngineFault, match="device fault"):
        engine.generate(input_ids=[7] * 40, sampling_params={"max_new_tokens": 8}, rid="bad")
    *_, last = healthy
    expected = plain_engine.generate(input_ids=[8] * 30, sampling_params=slow)
    assert last["output_ids"] == expected["output_ids"]
    assert scheduler.stats().total_preemptions > 0
    assert_nothing_held(engine)


@pytest.mark.campaign
def test_not_a_number_in_the_context_ends_the_request_too(tmp_path):
    tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
    tensors["model.word_embeddings.weight"][7] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "config.json", tmp_path / "config.json")
    with make_engine(model_path=str(tmp_path), max_running_requests=2) as engine:
        params = {"max_new_tokens": 8}
        bad, good = engine.generate(
            input_ids=[[1, 2, 7] + [3] * 40, [1, 2, 8]], sampling_params=params
        )
        assert bad["meta_info"]["finish_reason"]["type"] == "abort"
        assert good["meta_info"]["finish_reason"]["type"] == "length"
        assert engine.stats().num_aborted_requests_total == 1


@pytest.mark.campaign
def test_shutdown_frees_the_device_and_refuses_further_work():
    live_before = sum(array.nbytes for array in jax.live_arrays())
    engine = make_engine(max_running_requests=1)
    engine.generate(input_ids=[1], sampling_params={"max_new_tokens": 2})
    engine.shutdown()
    assert sum(array.nbytes for array in jax.live_arrays()) <= live_before
    with pytest.raises(errors.EngineStopped):
        engine.generate(input_ids=[1])


@pytest.mark.campaign
def test_logits_that_are_no_numbers_end_the_request_and_say_so(tmp_path):
    tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
    tensors["lm_head.weight"][5, 3] = np.nan
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "config.json", tmp_path / "config.json")
    with make_engine(model_path=str(tmp_path), max_running_requests=1) as engine:
        result = engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 4})
        reason = result["meta_info"]["finish_reason"]
        assert reason["type"] == "abort" and "NaN" in reason["message"]
        assert reason["status_code"] == 500
        assert result["output_ids"] == []
        assert_nothing_held(engine)
