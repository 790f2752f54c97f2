"""Which programs of image rows a start compiles, and which follow it, on an accelerator."""

import dataclasses
from types import SimpleNamespace

import pytest

from jdllm.engine.start.images import start_programs
from jdllm.scheduler.rows.image.buckets import ImageBuckets, StepBucket

BUCKETS = ImageBuckets(rows=(1, 2, 4), tokens=(64, 128), sizes=((512, 512), (1024, 1024)))


def pipeline(cfg_switch, **defaults):
    """Returns what a start asks a pipeline."""
    return SimpleNamespace(
        options=SimpleNamespace(cfg_switch=cfg_switch),
        defaults=SimpleNamespace(**({"guidance_scale": None, "true_cfg_scale": None} | defaults)),
        pads_captions=False,
    )


def guided(programs):
    return {one.is_guided for one in programs if isinstance(one, StepBucket)}


@pytest.mark.parametrize(
    ("switch", "defaults", "first", "then"),
    [
        ("guidance_scale", {"guidance_scale": 0.0}, {False}, set()),  # Z-Image-Turbo
        ("guidance_scale", {"guidance_scale": 2.0}, {True}, set()),
        # FLUX.1
        ("true_cfg_scale", {"guidance_scale": 3.5, "true_cfg_scale": 1.0}, {False}, set()),
        ("true_cfg_scale", {"true_cfg_scale": 4.0}, {False}, {True}),  # Qwen-Image
        (None, {"guidance_scale": 3.5}, {False}, set()),
    ],
)
def test_guided_steps_come_first_or_follow_where_they_are_usual(switch, defaults, first, then):
    one = pipeline(switch, **defaults)
    at_start = start_programs.at_start(BUCKETS, one)
    after = start_programs.after_start(BUCKETS, one)
    assert (guided(at_start), guided(after)) == (first, then)
    together = [*at_start, *after]
    assert len(set(together)) == len(together), "no program is compiled twice"
    if then:
        assert set(together) == set(dataclasses.replace(BUCKETS, guided=(False, True)).all())
