"""The lines of the log about how images share steps."""

import dataclasses
import random

from support import image_fake
from support.image_fake import WIDE, ask, build, run

from jdllm.scheduler.rows.image import batching_log


def test_the_log_says_how_images_share_steps(caplog):
    caplog.set_level("INFO", logger="jdllm.scheduler.rows.image.batching_log")
    core, _ = build(random.Random(0))
    core.scheduler.rows._batching_log = batching_log.BatchingLog()
    core.add([ask(5), ask(5), ask(5, size=WIDE), ask(5, negative=(1,), scale=2.0)])
    run(core)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3, "three groups of 5 steps"
    text = " ".join(lines)
    for part in ("#dispatch: 5", "utilization: ", "wait p95: ", "stop: ", "ready "):
        assert part in lines[0]
    assert "sampling_params.width" in text and "sampling_params.guidance_scale" in text


def test_the_log_says_that_captions_keep_images_apart(caplog):
    caplog.set_level("INFO", logger="jdllm.scheduler.rows.image.batching_log")
    buckets = dataclasses.replace(image_fake.BUCKETS, image_tokens=lambda height, width: 16)
    core, _ = build(random.Random(0), buckets=buckets)
    core.scheduler.rows._batching_log = batching_log.BatchingLog()
    core.add([ask(10, prompt=(1,)), ask(10, prompt=[2] * 30)])
    run(core)
    assert "rejected: prompt_length 5" in caplog.records[1].getMessage()


def test_the_log_names_the_bound_of_a_step(caplog):
    caplog.set_level("INFO", logger="jdllm.scheduler.rows.image.batching_log")
    for bound, options in (
        ("dynamic_disabled", {"rows": (1,)}),
        ("config_cap:2", {"most_requests": lambda height, width: 2}),
        ("max_size", {}),
    ):
        buckets = dataclasses.replace(image_fake.BUCKETS, **options)
        core, _ = build(random.Random(0), buckets=buckets)
        core.scheduler.rows._batching_log = batching_log.BatchingLog()
        core.add([ask(5) for _ in range(6)])
        run(core)
        line = caplog.records[0].getMessage()
        assert f"stop: {bound} 5" in line and f"rejected: {bound} " in line
        caplog.clear()
