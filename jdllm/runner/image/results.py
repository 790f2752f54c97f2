"""Turns the outputs of image launches, as arrays on the host, into a `LaunchResult`.

Positions count as tokens do: those of the transformer in a step, of the text encoder in an encode
launch. Decode launches have none.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jdllm.pipelines import interface
from jdllm.runner.image import programs
from jdllm.scheduler.batch import Frame, LaunchResult, RowResult, ScheduleBatch
from jdllm.scheduler.rows.image import buckets, stay


def of_encode(outputs: programs.Outputs, batch: ScheduleBatch) -> LaunchResult:
    """Returns for each caption whether it is invalid."""
    return LaunchResult(
        rows=_rows(outputs, batch, nfe=0),
        computed_tokens=batch.bucket.rows * batch.bucket.tokens,
        real_tokens=sum(row.num_tokens for row in batch.rows),
    )


def of_begin(outputs: programs.Outputs, batch: ScheduleBatch) -> LaunchResult:
    """Returns rows without output."""
    return LaunchResult(rows=_rows(outputs, batch, nfe=0))


def of_modulate(outputs: programs.Outputs, batch: ScheduleBatch) -> LaunchResult:
    """Returns rows without output."""
    return LaunchResult(rows=_rows(outputs, batch, nfe=0))


def of_step(
    pipeline: interface.Pipeline, outputs: programs.Outputs, batch: ScheduleBatch
) -> LaunchResult:
    """Returns one forward for each row; that of a guided row counts once, a skipped one, too."""
    bucket = batch.bucket
    assert isinstance(bucket, buckets.StepBucket)
    # The transformer does not see the prefix of captions.
    tokens = pipeline.image_tokens(bucket.height, bucket.width) - pipeline.prefix_tokens
    captions = [ids for row in batch.rows for ids in stay.captions_of(row.request)]
    rows = _rows(outputs, batch, nfe=1)
    if outputs.is_skipped is not None:
        rows = tuple(
            dataclasses.replace(row, num_skipped=int(is_skipped))
            for row, is_skipped in zip(rows, outputs.is_skipped)
        )
    return LaunchResult(
        rows=rows,
        num_steps=1,
        computed_tokens=bucket.rows * (1 + bucket.is_guided) * (tokens + bucket.tokens),
        real_tokens=sum(tokens + len(ids) for ids in captions),
    )


def of_decode(outputs: programs.Outputs, batch: ScheduleBatch) -> LaunchResult:
    """Returns frames and products: images uint8 or float32 [H, W, 3], or latents float32."""
    bucket = batch.bucket
    assert isinstance(bucket, buckets.DecodeBucket) and outputs.value is not None
    rows = []
    for row, value, is_invalid in zip(batch.rows, outputs.value, outputs.is_invalid):
        assert isinstance(row, buckets.DecodeRow)
        value = np.array(value)  # a copy: the outputs of the other rows need not live as long
        if bucket.output == "image":
            value = value.view(np.uint8).reshape(bucket.height, bucket.width, 3)
        frame = Frame(step=row.step, value=value)
        rows.append(
            RowResult(
                frames=() if row.is_final else (frame,),
                product=value if row.is_final else None,
                is_invalid=bool(is_invalid),
            )
        )
    return LaunchResult(rows=tuple(rows))


def _rows(outputs: programs.Outputs, batch: ScheduleBatch, *, nfe: int) -> tuple[RowResult, ...]:
    return tuple(
        RowResult(nfe=nfe, is_invalid=bool(is_invalid))
        for _, is_invalid in zip(batch.rows, outputs.is_invalid)
    )
