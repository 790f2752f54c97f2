"""The device side of rows of full-attention models: a paged pool, and one program over it."""

from __future__ import annotations

import functools

from flax import nnx

from jdllm.device import facts
from jdllm.kv_cache import pool
from jdllm.runner.canvas import asked, inputs, loop, results, state
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import program
from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows import canvas
from jdllm.scheduler.rows.canvas import CanvasBucket


class CanvasKind:
    """Programs of one loaded model; `graphdef` is static."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: StepConfig,
        device: facts.DeviceFacts,
    ):
        self._graphdef = graphdef
        self._config = config
        self._has_coarse_sizes = device.is_cpu

    def create_memory(self) -> program.Memory:
        """Returns an empty pool, and row states with arbitrary values."""
        config = self._config
        return {
            "pools": pool.create(config.pool),
            "slots": state.empty_slots(config.num_slots, config),
            "logit_slots": asked.empty_slots(config.num_slots, config),
        }

    def program(self, bucket: Bucket) -> program.Program:
        """Returns the program of a launch of canvases."""
        assert isinstance(bucket, CanvasBucket), f"{bucket=} is not a bucket of canvases"
        config, sizes, with_logits = self._config, (bucket.tokens,), bucket.with_logits
        if not bucket.is_whole:
            # Few launches have rows that need their logits: they make do with few sizes.
            sizes = canvas.forward_sizes(
                bucket.rows, bucket.tokens, is_coarse=self._has_coarse_sizes or with_logits
            )
        return program.Program(
            step=functools.partial(loop.canvas_launch, self._graphdef, config, sizes),
            uses=("pools", "slots", *(["logit_slots"] if with_logits else [])),
            inputs=lambda batch, interrupt: inputs.build(
                batch, config, interrupt, with_logits=with_logits
            ),
            results=functools.partial(results.of_canvases, mask_token_id=config.mask_token_id),
        )
