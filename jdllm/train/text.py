"""The recipe of diffusion language models: masked answers of generated problems."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Mapping

import jax
import numpy as np

from jdllm.checkpoint import source
from jdllm.models import loading
from jdllm.train import (
    clock,
    evaluate,
    examples,
    export,
    question_noise,
    recipe,
    step,
    stop_request,
)
from jdllm.train.config import TrainConfig


class TextBatches:
    """Batches on the device, of threads or of `num_workers` processes."""

    def __init__(self, ahead: examples.grain.DatasetIterator[examples.Batch], *, num_workers: int):
        self._ahead, self._num_workers = ahead, num_workers

    def __next__(self) -> dict[str, jax.Array]:
        # The first batch starts the processes.
        hides = stop_request.unseen_by_children if self._num_workers else contextlib.nullcontext
        with hides():
            batch = next(self._ahead)
        return jax.device_put(batch)

    def close(self) -> None:
        self._ahead.close()


class TextRecipe:
    """See `recipe.Recipe`."""

    unit = "problems"

    def __init__(self, config: TrainConfig, output_dir: pathlib.Path):
        del output_dir
        self._config = config
        self._ends = contextlib.ExitStack()
        self._model_path = source.resolve_text(config.model_path)
        hf_config = json.loads((self._model_path / "config.json").read_text(encoding="utf-8"))
        self._network = step.build_network(hf_config, config.compute_dtype)
        self._layout = examples.Layout(
            sequence_length=config.sequence_length,
            block_size=self._network.config.spec.diffusion.block_size,
            answer_blocks=config.answer_blocks,
        )
        noise = step.noise_config(self._network, config)
        self._chat = examples.ChatFormat(self._model_path)
        self._evaluate = evaluate.evaluator(self._network, config, self._chat, self._layout, noise)
        question = question_noise.of_chat(
            self._chat,
            config,
            vocab_size=self._network.config.spec.vocab_size,
            mask_token_id=self._network.mask_token_id,
        )
        self._step = step.train_step(self._network, config, noise, question)

    @property
    def batch_size(self) -> int:
        return self._config.batch_size

    def first_state(self) -> step.TrainState:
        params = step.init_params(self._network, self._config.seed)
        return step.init_state(self._config, params, average=params, step=0)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: array.shape for path, array in self._network.shapes.items()}

    def weights_of(self, folder: pathlib.Path) -> recipe.Weights:
        weights = loading.load(folder, dtype="float32", show_progress=False).params
        return recipe.Weights(step=0, params=weights, average=weights)

    def adopt(self, weights: recipe.Weights) -> step.TrainState:
        return step.init_state(
            self._config, weights.params, average=weights.average, step=weights.step
        )

    def batches(self, state: step.TrainState, passed: clock.Passed) -> TextBatches:
        config = self._config
        self._number = int(state.step)
        self._clock = clock.Clock(
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_share=config.decay_share,
            first=int(state.start_step),
            last=config.num_steps,
            seconds=None if config.max_minutes is None else 60 * config.max_minutes,
            began=time.monotonic() - passed.run,  # a run has one stage
        )
        problems = examples.ProblemBatches(
            self._chat,
            self._layout,
            batch_size=config.batch_size,
            seed=config.seed,
            length=config.num_steps,
            variety=examples.variety(config),
        )
        batches = TextBatches(
            examples.batches(
                problems,
                start_step=int(state.step),
                num_threads=config.data_threads,
                num_workers=config.data_workers,
                prefetch=config.prefetch_batches,
            ),
            num_workers=config.data_workers,
        )
        self._ends.callback(batches.close)
        return batches

    def passed(self) -> clock.Passed:
        seconds = self._clock.passed()
        return clock.Passed(run=seconds, stage=seconds)

    def is_over(self, number: int) -> bool:
        return self._clock.share(number) >= 1

    def step(
        self, state: step.TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[step.TrainState, dict[str, jax.Array]]:
        rate = self._clock.rate(self._number)
        self._number += 1
        return self._step(state, batch, np.float32(rate))

    def evaluate(self, state: step.TrainState) -> dict[str, float]:
        return self._evaluate(state.average)

    def export(self, state: step.TrainState, output_dir: pathlib.Path) -> None:
        export.write_hf(self._network, state.average, self._model_path, output_dir / "hf")

    def close(self) -> None:
        self._ends.close()
