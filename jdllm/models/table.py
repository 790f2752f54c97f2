"""Rows of a weight table that the decoder families have in common; names are the family's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jdllm.checkpoint.weight_table import WeightRow
from jdllm.models import decoder_config

View = Callable[[np.ndarray], np.ndarray]


def outputs(start: int, width: int) -> View:
    """Returns the view of `width` outputs of a linear weight [out, in], or of its bias [out]."""
    return lambda array: array[start : start + width]


def one_after_the_other(part: int, width: int) -> View:
    """Returns the view of gate (`part` 0) or up (1) in [2 * width, in]."""
    return outputs(part * width, width)


def end_rows(
    config: decoder_config.DecoderConfig, *, embedding: str, norm: str, head: str
) -> Iterator[WeightRow]:
    """Yields the embedding, the final norm and, unless it is tied, the LM head."""
    vocab = (config.spec.vocab_size, config.hidden_size)
    yield WeightRow(name=f"{embedding}.weight", shape=vocab, target="word_embeddings")
    yield WeightRow(name=f"{norm}.weight", shape=(config.hidden_size,), target="norm.weight")
    if not config.tie_word_embeddings:
        yield WeightRow(name=f"{head}.weight", shape=vocab, target="lm_head")


def swiglu_rows(
    gate_up: tuple[str, str],
    down: str,
    ours: str,
    *,
    dim: int,
    width: int,
    gate_up_view: Callable[[int, int], View] = one_after_the_other,
) -> Iterator[WeightRow]:
    """Yields gate and up, which share `w_gate_up`, and down of one feed-forward.

    `gate_up_view(part, width)` views gate (0) or up (1).
    """
    for part, name in enumerate(gate_up):
        yield WeightRow(
            name=f"{name}.weight",
            shape=(width, dim),
            target=f"{ours}.w_gate_up",
            view=gate_up_view(part, width),
        )
    yield WeightRow(name=f"{down}.weight", shape=(dim, width), target=f"{ours}.w_down")
