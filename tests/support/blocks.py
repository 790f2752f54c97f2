"""Blocks as rules see them, with options by name."""

import numpy as np

from jdllm.decoding.block import interface


def make_block(tokens, masked, editable, *, extra=(), done=None, **options):
    rows = tokens.shape[0]
    params = {
        "threshold": 0.5,
        "edit_threshold": 0.0,
        "max_post_edit_steps": 16,
        "penalty_lambda": 0.0,
    } | options
    full = {name: np.broadcast_to(np.float32(value), (rows,)) for name, value in params.items()}
    full["max_post_edit_steps"] = full["max_post_edit_steps"].astype(np.int32)
    return interface.BlockState(
        tokens=tokens,
        masked=masked,
        editable=editable,
        done=np.zeros(rows, bool) if done is None else done,
        params=interface.BlockParams(**full),
        extra=extra,
    )
