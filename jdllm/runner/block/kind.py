"""The device side of rows that write block after block: a paged pool, and two programs over it."""

from __future__ import annotations

import functools

from flax import nnx

from jdllm.device import facts
from jdllm.kv_cache import pool
from jdllm.runner import packed
from jdllm.runner.block import asked, forward, inputs, loop, results, state
from jdllm.runner.config import StepConfig
from jdllm.runner.launch import program
from jdllm.scheduler.batch import Bucket
from jdllm.scheduler.rows.block import DecodeBucket, PrefillBucket


class BlockKind:
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
            "logit_slots": asked.empty_slots(config.num_slots, config),
        }

    def program(self, bucket: Bucket) -> program.Program:
        """Returns the program of a prefill launch or of a denoise launch."""
        graphdef, config = self._graphdef, self._config
        match bucket:
            case PrefillBucket():
                return program.Program(
                    step=functools.partial(forward.prefill_step, graphdef, config),
                    uses=("pools",),
                    inputs=lambda batch, _: packed.pack(batch, config, tile=config.block_size),
                    results=results.of_prefill,
                )
            case DecodeBucket():
                with_logits = bucket.with_logits
                return program.Program(
                    step=functools.partial(loop.denoise_launch, graphdef, config),
                    uses=("pools", "slots", *(["logit_slots"] if with_logits else [])),
                    inputs=lambda batch, interrupt: inputs.build_denoise(
                        batch, config, interrupt, with_logits=with_logits
                    ),
                    results=functools.partial(results.of_denoise, block_size=config.block_size),
                )
        raise AssertionError(f"{bucket=} is not a bucket of block rows")
