"""Canvas rows step by step, with results written by hand; blocks of 4, pages of 8, context 64."""

import numpy as np
import pytest
from support.canvas_hash_model import CONTEXT, build

from jdllm import errors
from jdllm.options import sampling_params
from jdllm.scheduler import request
from jdllm.scheduler.batch import CommittedBlock, LaunchResult, RowResult
from jdllm.scheduler.rows import canvas

EOS = 25


def make(**changes):
    made, _ = build(**({"num_pages": 32, "rows": 4, "tokens": 256} | changes))
    return made


def ask(name, prompt, max_new=8, *, suffix=(), given=None, algorithm="FullAttnMultiBlock", **dllm):
    dllm = sampling_params.DllmParams(algorithm=algorithm, **dllm)
    if algorithm != "Dream":
        dllm = dllm.resolve(sampling_params.DllmParams(algorithm=algorithm, block_length=4))
    return request.Request(
        request_id=name,
        prompt_ids=list(prompt),
        suffix_ids=list(suffix),
        given=given or {},
        sampling=sampling_params.SamplingParams(dllm=dllm),
        max_new_tokens=max_new,
        eos_token_ids=(EOS,),
    )


def settled(*tokens, nfe=1, is_invalid=False):
    tokens = np.array(tokens, np.int32)
    block = CommittedBlock(
        tokens=tokens, nfe=nfe, steps=np.ones_like(tokens), logprobs=np.zeros(len(tokens))
    )
    return RowResult(
        committed=(block,) if len(tokens) else (), context_len=0, nfe=nfe, is_invalid=is_invalid
    )


def process(made, batch, *rows):
    return made.process_results(batch, LaunchResult(rows=rows))


@pytest.mark.parametrize(
    "one,canvas,end",
    [
        (ask("a", [7, 8], 5), [7, 8, *[None] * 8], 10),
        (ask("a", [7, 8], 8), [7, 8, *[None] * 8], 10),
        (ask("a", [7] * 60, 3), [7] * 60 + [None] * 4, 64),
        (ask("a", [7] * 61, 2), [7] * 61 + [None] * 3, 64),
        (ask("a", [7], 5, suffix=[8, 9]), [7, *[None] * 5, 8, 9], 6),
        (ask("a", [7], 3, given={0: 5, 2: 6}), [7, 5, None, 6, None], 5),
        (ask("a", [7], 5, algorithm="Dream"), [7, *[None] * 5], 6),
    ],
    ids=["rounded", "whole blocks", "to the end", "short block", "suffix", "given", "no blocks"],
)
def test_canvas_is_prompt_whole_blocks_and_suffix(one, canvas, end):
    made = make()
    made.add_request(one)
    (row,) = made.schedule().rows
    assert (one.held.canvas_ids, one.held.canvas_end) == (canvas, end)
    assert (row.start, row.num_tokens, row.is_fresh) == (0, len(canvas), True)
    assert len(one.held.pages) == -(-len(canvas) // 8)


def test_one_launch_holds_all_rows_and_only_the_first_is_fresh():
    made = make(decode_steps=4)
    for name in "ab":
        made.add_request(ask(name, [7]))
    batch = made.schedule()
    assert [row.request.request_id for row in batch.rows] == ["a", "b"]
    assert (type(batch.bucket), batch.bucket.rows) == (canvas.CanvasBucket, 4)
    assert (batch.max_steps, batch.max_finished) == (4, None)
    assert [row.is_fresh for row in batch.rows] == [True, True]
    made.add_request(ask("c", [7]))
    assert [row.is_fresh for row in made.schedule().rows] == [False, False, True]


def test_settled_tokens_stream_and_the_surplus_of_the_last_block_is_dropped():
    made = make()
    one = ask("a", [7], 6)
    made.add_request(one)
    (output,) = process(made, made.schedule(), settled(4, 5, 6, nfe=3))
    assert (output.new_token_ids, output.nfe, output.num_blocks) == ([4, 5, 6], 3, 1)
    assert process(made, made.schedule(), settled(nfe=2)) == []
    (output,) = process(made, made.schedule(), settled(7, 8, 9, 10, 11, nfe=1))
    assert (output.new_token_ids, output.nfe, output.num_blocks) == ([7, 8, 9], 6, 2)
    assert (output.finish.kind, output.num_discarded) == ("length", 2)
    assert one.output_ids == [4, 5, 6, 7, 8, 9] and len(one.output_steps) == 6
    assert not made.has_work() and made.stats().num_used_pages == 0


def test_an_end_token_ends_the_row_and_what_follows_is_dropped():
    made = make()
    one = ask("a", [7], 8)
    made.add_request(one)
    (output,) = process(made, made.schedule(), settled(4, EOS, 6))
    assert (output.finish.kind, one.output_ids) == ("stop", [4, EOS])


def test_what_an_early_stop_fills_is_neither_a_block_nor_discarded():
    made = make()
    one = ask("a", [7], 40)
    made.add_request(one)
    (output,) = process(made, made.schedule(), settled(4, 5, *[EOS] * 38))
    assert (output.finish.kind, one.output_ids) == ("stop", [4, 5, EOS])
    assert (one.num_blocks, one.num_discarded) == (1, 0)


def test_given_tokens_are_output_like_written_ones():
    made = make()
    one = ask("a", [7], 2, given={0: EOS + 1})
    made.add_request(one)
    (output,) = process(made, made.schedule(), settled(EOS + 1, 4, 5, 6))
    assert (output.new_token_ids, output.finish.kind) == ([EOS + 1, 4], "length")


def test_results_of_a_row_that_left_change_nothing():
    made = make()
    one, two = ask("a", [7]), ask("b", [7])
    made.add_request(one)
    made.add_request(two)
    batch = made.schedule()
    made.abort("a")
    outputs = process(made, batch, settled(4), settled(5))
    assert [output.request for output in outputs] == [two] and one.output_ids == []


def test_a_row_whose_statistics_are_no_numbers_is_given_up():
    made = make()
    one, two = ask("a", [7]), ask("b", [7])
    made.add_request(one)
    made.add_request(two)
    outputs = process(made, made.schedule(), settled(4, is_invalid=True), settled(5))
    assert [output.new_token_ids for output in outputs] == [[4], [], [5]]
    assert outputs[1].finish.kind == "abort" and "NaN" in outputs[1].finish.message
    assert made.running == [two]


def test_after_a_loss_committed_tokens_are_given_and_not_committed_twice():
    made = make()
    one = ask("a", [7], 8)
    made.add_request(one)
    process(made, made.schedule(), settled(4, 5, 6))
    made.drop_kv()
    assert (one.stay, list(made.waiting)) == (None, [one])
    (row,) = made.schedule().rows
    assert row.is_fresh and one.held.canvas_ids == [7, 4, 5, 6, *[None] * 5]
    # The row begins anew, and so does what it reports.
    assert process(made, made.schedule(), settled(4, 5)) == []
    (output,) = process(made, made.schedule(), settled(6, 9))
    assert output.new_token_ids == [9] and one.output_ids == [4, 5, 6, 9]


def test_admission_counts_the_tokens_of_a_forward_and_nobody_overtakes():
    made = make(tokens=64)
    for name, prompt, new in (("a", 20, 4), ("b", 30, 4), ("c", 2, 4)):
        made.add_request(ask(name, [7] * prompt, new))
    batch = made.schedule()  # 24 and 40 fill 64 tokens, the 8 of c are too many
    assert [row.request.request_id for row in batch.rows] == ["a", "b"]
    assert batch.max_finished == 0
    made.abort("a")
    assert [row.request.request_id for row in made.schedule().rows] == ["b", "c"]


def test_admission_takes_the_pages_of_the_whole_canvas():
    made = make(num_pages=10)
    for name, prompt in (("a", 30), ("b", 50), ("c", 2)):
        made.add_request(ask(name, [7] * prompt, 4))
    assert [row.request.request_id for row in made.schedule().rows] == ["a"]
    assert made.stats().num_used_pages == 5
    made.abort("b")
    assert [row.request.request_id for row in made.schedule().rows] == ["a", "c"]


@pytest.mark.parametrize(
    "wrong,param,words",
    [
        (ask("x", []), "prompt", "empty"),
        (ask("x", [7] * 40, 25), "max_new_tokens", "64 tokens.*65"),
        (ask("x", [7] * 40, 20, suffix=[1] * 5), "max_new_tokens", "64 tokens.*suffix 5.*65"),
        (ask("x", [7] * 30, 29), "max_new_tokens", "8 KV pages.*has 7"),
        (ask("x", [7], 4, given={4: 1}), "given", "place 4.*0 to 3"),
        (ask("x", [7], 4, given={-1: 1}), "given", "place -1"),
        (ask("x", [7], 16, algorithm="LLaDA", steps=6), "dllm.steps", "6.*4 blocks"),
        (ask("x", [7], 16, algorithm="LLaDA", steps=2), "dllm.steps", "2.*4 blocks"),
        (ask("x", [7], 24, algorithm="FastDLLM", steps=5), "dllm.steps", "5.*6 blocks"),
        (ask("x", [7], 8, algorithm="Dream", steps=65), "dllm.steps", "65.*64"),
        (ask("x", [7], 6, suffix=[1], algorithm="LLaDA"), "max_new_tokens", "6.*whole blocks"),
        (ask("x", [7] * 41, 13, suffix=[1], algorithm="LLaDA"), "max_new_tokens", "13"),
    ],
    ids=[
        "empty", "context", "suffix", "pool", "given", "before",
        "steps", "few", "uneven", "endless", "part", "rest",
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_at_once(wrong, param, words):
    made = make(num_pages=7)
    with pytest.raises(errors.RequestError, match=words) as raised:
        made.add_request(wrong)
    assert raised.value.param == param and not made.has_work()


def test_a_context_that_ends_inside_a_block_is_refused_by_algorithms_of_whole_blocks():
    made = make()
    with pytest.raises(errors.RequestError, match="end of context or pool"):
        made.add_request(ask("x", [7] * 61, 2, algorithm="LLaDA"))
    made.add_request(ask("y", [7] * 60, 2, algorithm="LLaDA", steps=4))


def test_a_canvas_of_the_whole_context_runs():
    made = make(num_pages=CONTEXT // 8, rows=1, tokens=8)
    made.add_request(ask("a", [7] * 10, CONTEXT - 10))
    assert made.schedule().bucket.tokens == CONTEXT


def test_rounding_stops_at_the_end_of_the_pool():
    made = make(num_pages=2)
    one = ask("a", [7] * 6, 9, block_length=32)
    made.add_request(one)
    made.schedule()
    assert len(one.held.canvas_ids) == 16
    with pytest.raises(errors.RequestTooLong, match="3 KV pages"):
        made.add_request(ask("b", [7] * 6, 11))


def test_canvases_share_no_prefixes():
    with pytest.raises(errors.ConfigError, match="prefixes"):
        make(has_prefix_cache=True)
