"""The memory of images: exact where it can be, and what fits for launches."""

from __future__ import annotations

import pytest
from support import golden_images as golden

from jdllm import errors
from jdllm.runner.image import kind, sizes
from jdllm.scheduler.rows.image import buckets

MB = 1 << 20
BUCKETS = buckets.ImageBuckets(
    sizes=((512, 512), (1024, 1024)),
    most_rows=buckets.rows_by_pixels(16 * 512 * 512),
    most_decode_rows=buckets.rows_by_pixels(8 * 512 * 512),
)


def measured(step_bytes_per_pixel, decode_bytes_per_pixel, overhead=0):
    """Returns bytes of every program, in proportion to the pixels of its rows."""
    found = {}
    for bucket in BUCKETS.all():
        match bucket:
            case buckets.StepBucket():
                passes = 2 if bucket.is_guided else 1
                pixels = bucket.rows * passes * bucket.height * bucket.width
                found[bucket] = overhead + step_bytes_per_pixel * pixels
            case buckets.DecodeBucket():
                pixels = bucket.rows * bucket.height * bucket.width
                found[bucket] = decode_bytes_per_pixel * pixels
            case _:
                found[bucket] = 100 * MB
    return found


def test_bytes_of_slots_and_entries_are_those_of_the_arrays():
    pipeline, config = golden.pipeline().pipeline, golden.CONFIG
    memory = kind.ImageKind(pipeline, config).create_memory()
    slots = memory["slots"]
    assert slots.latents.shape == (config.num_slots, 16 * 32 * 32)  # of 256 x 256 pixels
    per_slot = sizes.slot_bytes(pipeline, config.max_pixels)
    assert config.num_slots * per_slot == slots.latents.nbytes + slots.clean.nbytes
    per_entry = sizes.entry_bytes(pipeline, config.max_tokens)
    assert config.num_entries * per_entry == memory["captions"].entries.nbytes


def test_a_slot_holds_every_size_of_so_many_pixels():
    pipeline = golden.pipeline().pipeline
    most = kind.latent_elements(pipeline, 96 * 96)
    for height, width in ((96, 96), (16, 576), (48, 192), (128, 64)):
        channels, h, w = pipeline.latent_shape(height, width)
        assert channels * h * w <= most


def test_entries_are_bounded_and_two_at_least():
    pipeline = golden.pipeline().pipeline
    per_entry = sizes.entry_bytes(pipeline, 96)
    assert sizes.entries_that_fit(pipeline, 96, 10 * per_entry + 1) == 10
    assert sizes.entries_that_fit(pipeline, 96, 0) == 2
    assert sizes.entries_that_fit(pipeline, 96, 1 << 50) == sizes.MOST_ENTRIES


def test_launches_that_do_not_fit_are_left_out_and_no_others():
    programs = measured(40, 100)
    free = 40 * 4 * 1024 * 1024 + 1  # a step of four large images, a decode of one and a half
    fitting = sizes.fitted(BUCKETS, programs, free)
    assert fitting.step_sizes(1024, 1024, is_guided=False) == (1, 2, 4)
    assert fitting.step_sizes(1024, 1024, is_guided=True) == (1, 2)
    assert fitting.decode_sizes(1024, 1024) == (1,)
    assert fitting.decode_sizes(512, 512) == (1, 2, 4)
    left = set(fitting.all())
    assert left < set(BUCKETS.all())
    assert all(programs[one] <= free for one in left if one.name in ("step", "decode"))
    # A size that was not measured counts by its pixels, and one row is always tried.
    assert fitting.step_sizes(2048, 2048, is_guided=False) == (1,)
    assert fitting.step_sizes(2048, 2048, is_guided=True) == (1,)
    assert fitting.step_sizes(256, 256, is_guided=False) == BUCKETS.rows


def test_much_memory_changes_nothing_and_fixed_costs_of_small_launches_count_little():
    plenty = sizes.fitted(BUCKETS, measured(40, 100), 1 << 50)
    assert plenty.all() == BUCKETS.all()
    overhead = sizes.fitted(BUCKETS, measured(40, 100, 100 * MB), 40 * 16 * 512 * 512 + 250 * MB)
    assert overhead.step_sizes(512, 512, is_guided=False) == BUCKETS.rows
    assert sizes.fitted(BUCKETS, {}, 1).all() == BUCKETS.all(), "nothing is known"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": 40}, "multiple of 32"),
        ({"max_tokens": 1024}, "at most 992"),  # axes_lens has 1024 positions
        ({"max_pixels": 255}, "max_pixels=255"),
        ({"num_slots": 0}, "num_slots=0"),
        ({"num_entries": 0}, "num_entries=0"),
    ],
)
def test_memory_that_cannot_serve_is_refused_by_name(changes, named):
    options = {"num_slots": 1, "num_entries": 2, "max_pixels": 256, "max_tokens": 32} | changes
    with pytest.raises(errors.ConfigError, match=named):
        kind.ImageKind(golden.pipeline().pipeline, kind.ImageKindConfig(**options))
