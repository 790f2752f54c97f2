"""The training run: data in, steps, curve, checkpoints, evaluation, export.

The loop reads metrics from the device only every `log_every` steps. So the host runs ahead, and
the accelerator never waits for it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import time

import jax

from jdllm import errors, progress
from jdllm.checkpoint import source
from jdllm.train import checkpoints, evaluate, examples, export, question_noise, step
from jdllm.train.config import TrainConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunPaths:
    """Where a run writes, and the weights from which it starts, if any."""

    output_dir: pathlib.Path
    import_state: pathlib.Path | None = None
    export_state: pathlib.Path | None = None
    is_resumed: bool = True


def train(config: TrainConfig, paths: RunPaths) -> dict[str, float]:
    """Trains until `num_steps` or `max_minutes`; returns the last evaluation's numbers."""
    began = time.monotonic()
    model_path = source.resolve(config.model_path)
    hf_config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    network = step.build_network(hf_config, config.compute_dtype)
    layout = examples.Layout(
        sequence_length=config.sequence_length,
        block_size=network.config.spec.diffusion.block_size,
        answer_blocks=config.answer_blocks,
    )
    noise = step.noise_config(network, config)
    chat = examples.ChatFormat(model_path)
    evaluate_now = evaluate.evaluator(network, config, chat, layout, noise)
    paths.output_dir.mkdir(parents=True, exist_ok=True)
    saved = checkpoints.manager(paths.output_dir / "checkpoints")
    state = _first_state(config, network, paths, saved)
    problems = examples.ProblemBatches(
        chat,
        layout,
        batch_size=config.batch_size,
        seed=config.seed,
        length=config.num_steps,
        variety=examples.variety(config),
    )
    curve = Curve(paths.output_dir / "curve.jsonl", began=began, batch_size=config.batch_size)
    question = question_noise.of_chat(
        chat,
        config,
        vocab_size=network.config.spec.vocab_size,
        mask_token_id=network.mask_token_id,
    )
    run_step = step.train_step(network, config, noise, question)
    number = int(state.step)
    logger.info("training from step %d to %d", number, config.num_steps)
    batches = examples.batches(
        problems,
        start_step=number,
        num_threads=config.data_threads,
        num_workers=config.data_workers,
        prefetch=config.prefetch_batches,
    )
    bar = progress.bar(total=config.num_steps, initial=number, desc="training", unit="step")
    while number < config.num_steps and not _is_over(config, began):
        state, metrics = run_step(state, jax.device_put(next(batches)))
        number += 1
        bar.update()
        if number % config.log_every == 0:
            numbers = {key: float(value) for key, value in metrics.items()}
            curve.write(number, numbers)
            bar.set_postfix(loss=f"{numbers['loss']:.4f}", refresh=False)
        if number % config.checkpoint_every == 0:
            checkpoints.save(saved, state)
        if number % config.eval_every == 0 and number < config.num_steps:
            _save_now(saved, state)
            curve.write(number, evaluate_now(state.average))
    bar.close()
    batches.close()
    _save_now(saved, state)
    final = evaluate_now(state.average)
    curve.write(number, final)
    export.write_hf(network, state.average, model_path, paths.output_dir / "hf")
    if paths.export_state is not None:
        checkpoints.export_parts(state, paths.export_state)
    saved.close()
    logger.info("stopped at step %d after %.1f min", number, (time.monotonic() - began) / 60)
    return final


def _first_state(
    config: TrainConfig,
    network: step.Network,
    paths: RunPaths,
    saved: checkpoints.ocp.CheckpointManager,
) -> step.TrainState:
    params = step.init_params(network, config.seed)
    fresh = step.init_state(config, params, average=params, step=0)
    restored = checkpoints.restore(saved, fresh) if paths.is_resumed else None
    if restored is not None:
        return restored
    if paths.import_state is not None:
        imported = checkpoints.import_parts(config, paths.import_state)
        _check_shapes(network, imported.params, paths.import_state)
        return imported
    return fresh


def _check_shapes(network: step.Network, params: step.Params, stem: pathlib.Path) -> None:
    wrong = [
        f"{path} is {params[path].shape if path in params else 'missing'}, not {wanted.shape}"
        for path, wanted in network.shapes.items()
        if path not in params or params[path].shape != wanted.shape
    ]
    if wrong:
        raise errors.ConfigError(
            f"{stem}: {len(wrong)} arrays do not fit the model (linear weights are [out, in]): "
            + "; ".join(wrong[:3])
        )


def _save_now(saved: checkpoints.ocp.CheckpointManager, state: step.TrainState) -> None:
    # An evaluation takes minutes. A run that is stopped during it must not lose earlier steps.
    checkpoints.save(saved, state)
    saved.wait_until_finished()


def _is_over(config: TrainConfig, began: float) -> bool:
    minutes = (time.monotonic() - began) / 60
    return config.max_minutes is not None and minutes >= config.max_minutes


class Curve:
    """A file with one JSON line per event: the step, seconds since the start, and numbers."""

    def __init__(self, path: pathlib.Path, *, began: float, batch_size: int):
        self.path = path
        self.began = began
        self.batch_size = batch_size
        self.last: tuple[int, float] | None = None

    def write(self, number: int, numbers: dict[str, float]) -> None:
        now = time.monotonic()
        line = {"step": number, "seconds": round(now - self.began, 1), **numbers}
        if "loss" in numbers:
            if self.last is not None:
                rate = (number - self.last[0]) / (now - self.last[1])
                line["problems_per_second"] = round(rate * self.batch_size, 1)
            self.last = (number, now)
        else:
            logger.info("step %d %s", number, json.dumps(numbers))
            # The next rate must not count the time of an evaluation.
            self.last = None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
