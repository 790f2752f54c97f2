"""Measures a model on held-out problems: loss, solved share and tokens per forward."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jdllm.tasks import arithmetic, example
from jdllm.train import denoise, examples, step
from jdllm.train.config import TrainConfig

logger = logging.getLogger(__name__)

ONE_TOKEN_PER_STEP = 2.0  # a threshold that no probability passes


def evaluator(
    network: step.Network,
    config: TrainConfig,
    chat: examples.ChatFormat,
    layout: examples.Layout,
    noise: step.Noise,
) -> Callable[[step.Params], dict[str, float]]:
    """Returns `evaluate(params) -> numbers`.

    The function compiles at its first call, and every call uses the same problems.
    """
    problems, rows_to_solve = examples.heldout(chat, layout, config.eval_problems)
    batch = jax.device_put(rows_to_solve)
    stop_ids = (chat.pad_id, chat.turn_end_id)
    run = denoise.denoiser(network, length=layout.sequence_length, stop_ids=stop_ids)

    @jax.jit
    def heldout_loss(params: step.Params) -> jax.Array:
        noisy = step.noisy_batch(jax.random.key(0), batch, noise)
        return step.loss(network, params, noisy)[0]

    @jax.jit
    def cast(params: step.Params) -> step.Params:
        return network.cast(params)

    def evaluate(params: step.Params) -> dict[str, float]:
        numbers = {"heldout_loss": float(heldout_loss(params))}
        in_compute = cast(params)
        thresholds = (ONE_TOKEN_PER_STEP, *config.eval_thresholds)
        for i, threshold in enumerate(thresholds, start=1):
            name = "one_token" if threshold == ONE_TOKEN_PER_STEP else f"{threshold:g}"
            logger.info(
                "evaluation %d of %d: %d problems @%s", i, len(thresholds), len(problems), name
            )
            rows = run(in_compute, batch["tokens"], batch["prompt_lens"], jnp.float32(threshold))
            scored = _score(rows, problems, chat, stop_ids)
            numbers |= {f"{key}@{name}": value for key, value in scored.items()}
        return numbers

    return evaluate


def _score(
    rows: denoise.Denoised,
    problems: Sequence[arithmetic.Problem],
    chat: examples.ChatFormat,
    stop_ids: tuple[int, ...],
) -> dict[str, float]:
    tokens, forwards = np.asarray(rows.tokens), np.asarray(rows.forwards)
    prompt_lens = np.asarray(rows.prompt_lens)
    cut = functools.partial(_until_stop, stop_ids=stop_ids)
    outputs = [cut(row[start:]) for row, start in zip(tokens, prompt_lens, strict=True)]
    solved = [
        example.score(chat.decode(ids), problem.gold).is_correct
        for ids, problem in zip(outputs, problems, strict=True)
    ]
    lengths = np.array([len(ids) for ids in outputs])
    kinds = sorted({problem.kind for problem in problems})
    return {
        "accuracy": float(np.mean(solved)),
        **{
            f"accuracy_{kind}": float(
                np.mean([ok for ok, p in zip(solved, problems, strict=True) if p.kind == kind])
            )
            for kind in kinds
        },
        "tpf": float(lengths.sum() / forwards.sum()),
        "forwards": float(forwards.mean()),
    }


def _until_stop(ids: Int[np.ndarray, " S"], *, stop_ids: tuple[int, ...]) -> list[int]:
    stops = np.flatnonzero(np.isin(ids, stop_ids))
    return ids[: stops[0] if stops.size else len(ids)].tolist()
