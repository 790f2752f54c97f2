"""Blocks as rules see them, with options by name."""

import numpy as np

from jdllm.algorithms import lookup
from jdllm.decoding.block import interface


def make_block(tokens, masked, editable, *, extra=(), done=None, **options):
    rows = tokens.shape[0]
    full = lookup.padding(lookup.BLOCK, rows)
    for name, value in ({"threshold": 0.5, "max_post_edit_steps": 16} | options).items():
        full[name] = np.broadcast_to(np.asarray(value, full[name].dtype), (rows,))
    return interface.BlockState(
        tokens=tokens,
        masked=masked,
        editable=editable,
        done=np.zeros(rows, bool) if done is None else done,
        params=interface.BlockParams(**full),
        extra=extra,
    )


def make_proposal(tokens, prob, **changes):
    """Returns a greedy proposal with these probabilities; `changes` replace single arrays."""
    logprob = np.log(np.maximum(prob, 1e-30))
    arrays = {
        "best": tokens,
        "best_prob": prob,
        "is_drawn": np.zeros(tokens.shape[0], bool),
        "logprob": logprob,
        "best_logprob": logprob,
        "draw_prob": prob,
        "entropy": -logprob,
    }
    return interface.Proposal(tokens=tokens, prob=prob, **(arrays | changes))
