"""The device side of rows that denoise random tokens: a paged pool, and two programs over it."""

from __future__ import annotations

import functools

from flax import nnx

from jdllm.device import facts
from jdllm.kv_cache import pool
from jdllm.runner import packed
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import program
from jdllm.runner.uniform import forward, inputs, loop, results, state
from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows import uniform
from jdllm.scheduler.rows.uniform import EncodeBucket, NoiseBucket


class UniformKind:
    """Programs of one loaded model; `graphdef` is static."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        config: StepConfig,
        device: facts.DeviceFacts,
    ):
        del device  # every device gets the same programs
        self._graphdef = graphdef
        self._config = config

    def create_memory(self) -> program.Memory:
        """Returns an empty pool, and row states with arbitrary values."""
        config = self._config
        return {
            "pools": pool.create(config.pool),
            "slots": state.empty_slots(config.num_slots, config),
        }

    def program(self, bucket: Bucket) -> program.Program:
        """Returns the program of an encode launch or of a denoise launch."""
        graphdef, config = self._graphdef, self._config
        match bucket:
            case EncodeBucket():
                return program.Program(
                    step=functools.partial(forward.encode_step, graphdef, config),
                    uses=("pools",),
                    inputs=lambda batch, _: packed.pack(
                        batch, config, tile=uniform.tile_of(config.block_size)
                    ),
                    results=results.of_encode,
                )
            case NoiseBucket():
                return program.Program(
                    step=functools.partial(loop.denoise_launch, graphdef, config),
                    uses=("pools", "slots"),
                    inputs=lambda batch, interrupt: inputs.build_canvas(batch, config, interrupt),
                    results=functools.partial(results.of_canvas, block_size=config.block_size),
                )
        raise AssertionError(f"{bucket=} is not a bucket of these rows")
