"""Which programs of image rows a start compiles before the first request, and which follow it."""

from __future__ import annotations

import dataclasses

from jdllm.pipelines import interface
from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows.image.buckets import ImageBuckets


def at_start(buckets: ImageBuckets, pipeline: interface.Pipeline) -> list[Bucket]:
    """Returns what is compiled before the first request: no guided steps, or only these."""
    # The other option asks for guidance only together with a negative prompt.
    is_switch = pipeline.options.cfg_switch == "guidance_scale"
    is_guided = is_switch and (pipeline.defaults.guidance_scale or 0.0) > 0
    return _programs(buckets, pipeline, is_guided=is_guided)


def after_start(buckets: ImageBuckets, pipeline: interface.Pipeline) -> list[Bucket]:
    """Returns what follows: guided steps, where requests need only a negative prompt for them."""
    is_switch = pipeline.options.cfg_switch == "true_cfg_scale"
    if not is_switch or (pipeline.defaults.true_cfg_scale or 0.0) <= 1:
        return []
    known = set(at_start(buckets, pipeline))  # guided requests share all programs but some
    return [one for one in _programs(buckets, pipeline, is_guided=True) if one not in known]


def _programs(
    buckets: ImageBuckets, pipeline: interface.Pipeline, *, is_guided: bool
) -> list[Bucket]:
    """Returns the programs of requests that are guided, or of those that are not.

    Where captions are padded, most are as long as the default.
    """
    buckets = dataclasses.replace(buckets, guided=(is_guided,))
    if pipeline.pads_captions:
        length = min(
            pipeline.prefix_tokens + pipeline.defaults.max_sequence_length, buckets.tokens[-1]
        )
        buckets = dataclasses.replace(buckets, tokens=(buckets.tokens_of(length),))
    return buckets.all()
