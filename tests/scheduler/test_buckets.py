"""Buckets are few and sorted, and a launch gets the smallest one that fits."""

import pytest

from jdllm import errors
from jdllm.scheduler import sizes
from jdllm.scheduler.rows import block, canvas


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 48, 64, 100])
@pytest.mark.parametrize("budget", [1, 32, 100, 2048, 8192])
def test_defaults_cover_limits_with_few_shapes(rows, budget):
    made = block.BlockBuckets.default(rows, budget, 32)
    assert made.decode_rows[0] == 1 and made.decode_rows[-1] == rows
    assert made.prefill_tokens[-1] == max(32, budget // 32 * 32)
    assert all(tokens % 32 == 0 for tokens in made.prefill_tokens)
    assert made.prefill_rows == rows
    assert len(made.prefill_tokens) <= max(2, (budget // sizes.FEW_TOKENS).bit_length())
    assert len(made.decode_rows) <= rows.bit_length() + 1
    assert len(set(made.all())) == len(made.all())


def test_padding_less_than_doubles_a_large_prefill():
    made = block.BlockBuckets.default(4, 8192, 32)
    assert made.prefill_tokens == (512, 1024, 2048, 4096, 8192)
    for tokens in range(sizes.FEW_TOKENS, 8193, 32):
        assert tokens <= made.prefill(1, tokens).tokens < 2 * tokens


def test_blocks_may_be_longer_than_few_tokens():
    assert block.BlockBuckets.default(8, 8192, 1024).prefill_tokens == (1024, 2048, 4096, 8192)


def test_where_padding_is_cheap_there_are_fewer_row_buckets():
    made = block.BlockBuckets.default(100, 8192, 32, padding_is_cheap=True)
    assert made.decode_rows == (1, 4, 16, 32, 64, 100)
    assert made.prefill_tokens == (512, 1024, 2048, 4096, 8192)
    assert block.BlockBuckets.default(2, 8192, 32, padding_is_cheap=True).decode_rows == (1, 2)


def test_smallest_that_fits():
    made = block.BlockBuckets(
        decode_rows=(1, 2, 6), prefill_tokens=(8, 32), prefill_rows=6, block_size=4
    )
    for rows in range(1, 7):
        bucket = made.decode(rows)
        assert bucket.rows == min(r for r in (1, 2, 6) if r >= rows)
        assert bucket.tokens == bucket.rows * 4 and type(bucket) is block.DecodeBucket
        assert bucket in made.all()
    for tokens in range(4, 33, 4):
        bucket = made.prefill(2, tokens)
        assert (bucket.rows, bucket.tokens) == (6, 8 if tokens <= 8 else 32)
        assert type(bucket) is block.PrefillBucket and bucket in made.all()
    with pytest.raises(ValueError, match="exceed the largest bucket"):
        made.decode(7)
    with pytest.raises(ValueError, match="exceed the largest bucket"):
        made.prefill(1, 36)


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode_rows": ()},
        {"decode_rows": (2, 1)},
        {"decode_rows": (0, 1)},
        {"prefill_tokens": (6,)},
        {"prefill_rows": 0},
    ],
)
def test_wrong_sizes_are_config_errors(wrong):
    right = {"decode_rows": (1,), "prefill_tokens": (4,), "prefill_rows": 1, "block_size": 4}
    with pytest.raises(errors.ConfigError):
        block.BlockBuckets(**(right | wrong))


def sizes_of(made, *, with_logits=False):
    found = [bucket for bucket in made.all() if bucket.with_logits == with_logits]
    return [(bucket.rows, bucket.tokens) for bucket in found]


def test_launches_with_logits_have_every_other_size():
    for rows, expected in ((1, (1,)), (2, (2,)), (4, (1, 4)), (8, (2, 8)), (100, (2, 8, 32, 100))):
        made = block.BlockBuckets.default(rows, 512, 4)
        assert made.logit_rows == expected
        found = [made.decode(n, with_logits=True) for n in range(1, rows + 1)]
        assert {bucket.rows for bucket in found} == set(expected)
        assert all(bucket.with_logits and bucket in made.all() for bucket in found)


def test_canvas_buckets_hold_their_rows_up_to_the_tokens_of_a_forward():
    made = canvas.CanvasBuckets.default(16, 8192, 4096)
    assert sizes_of(made) == [(1, 4096), (4, 8192), (16, 8192)]
    assert sizes_of(made, with_logits=True) == [(16, 8192)]
    assert made.with_logits(1) == made.with_logits(16) == made.all()[-1]
    assert made.canvas(5, 8192) == made.canvas(16, 16) == made.all()[2]
    assert {type(bucket) for bucket in made.all()} == {canvas.CanvasBucket}
    # The longest canvas fits whatever the budget, and no more is compiled than rows can use.
    made = canvas.CanvasBuckets.default(6, 8, 20)
    assert sizes_of(made) == [(1, 24), (4, 24), (6, 24)]
    made = canvas.CanvasBuckets.default(2, 512, 20)
    assert sizes_of(made) == [(1, 24), (2, 48)]
    with pytest.raises(ValueError, match="3 rows"):
        made.canvas(3, 24)
    with pytest.raises(ValueError, match="56 tokens"):
        made.canvas(2, 56)


def test_short_canvases_have_launches_without_the_sizes_of_longer_ones():
    made = canvas.CanvasBuckets.default(16, 8192, 4096, short_row_tokens=512)
    assert sizes_of(made) == [(1, 512), (1, 4096), (4, 2048), (4, 8192), (16, 8192)]
    asked = {(1, 512): (1, 512), (1, 520): (1, 4096), (3, 2048): (4, 2048), (2, 2056): (4, 8192)}
    for (rows, tokens), expected in asked.items():
        found = made.canvas(rows, tokens)
        assert (found.rows, found.tokens) == expected and found in made.all()
    # Where hardly a size would be left out there is one bucket.
    made = canvas.CanvasBuckets.default(1, 512, 1024, short_row_tokens=512)
    assert sizes_of(made) == [(1, 1024)]


def test_a_whole_canvas_has_the_smallest_size_that_holds_it():
    made = canvas.CanvasBuckets.default(4, 512, 256, whole_tokens=(64, 128, 256))
    plain = [bucket for bucket in made.all() if not bucket.with_logits]
    assert [b.is_whole for b in plain] == [False, False, True, True, True]
    found = [made.whole_canvas(tokens) for tokens in (1, 64, 65, 256)]
    assert [(b.rows, b.tokens) for b in found] == [(1, 64), (1, 64), (1, 128), (1, 256)]
    assert all(bucket in made.all() and bucket.is_whole for bucket in found)
    with pytest.raises(errors.ConfigError, match="longest canvas"):
        canvas.CanvasBuckets.default(4, 512, 256, whole_tokens=(64, 128))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": (4, 1)},
        {"tokens": 16},
        {"row_tokens": 20},
        {"short_row_tokens": 12},
        {"tokens": 25},
        {"whole_tokens": (32, 24)},
        {"whole_tokens": (16,)},
    ],
)
def test_wrong_canvas_sizes_are_refused(wrong):
    with pytest.raises(errors.ConfigError):
        canvas.CanvasBuckets(**({"rows": (1, 4), "tokens": 48, "row_tokens": 24} | wrong))
