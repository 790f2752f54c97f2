"""Text encoders of images as functions of rows of ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from jdllm.models import loading

Encode = Callable[[Sequence[np.ndarray], int], np.ndarray]


def compiled(graphdef, params) -> Encode:
    """Returns what gives the embeddings [B, bucket, D] of rows; other ids stand behind them."""

    @jax.jit
    def run(ids, lens):
        return loading.merge(graphdef, params).encode(ids, lens)

    def encode(rows, bucket):
        ids = np.full((len(rows), bucket), 7, np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return np.asarray(run(ids, np.array([len(row) for row in rows], np.int32)))

    return encode
