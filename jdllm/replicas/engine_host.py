"""What runs in the process of a replica: an engine, and its side of the messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from jdllm import errors
from jdllm.engine import requests
from jdllm.engine.engine import Engine
from jdllm.replicas import messages

logger = logging.getLogger(__name__)

# A launch of the largest bucket takes seconds on a slow device; after this long, it is stuck.
HEARTBEAT_LIMIT_S = 120.0


class EngineHost:
    """Serves one engine to an ingress in another process."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._is_closing = False

    def facts(self) -> messages.Facts:
        engine = self._engine
        lengths = [engine.default_max_new_tokens(i) for i in range(engine.context_length + 1)]
        return messages.Facts(
            config=engine.config,
            device=engine.device,
            spec=engine.spec,
            model_name=engine.model_name,
            context_length=engine.context_length,
            max_running_requests=engine.max_running_requests,
            default_lengths=np.array(lengths, np.int32),
            server_info=engine.server_info(),
            model_info=engine.model_info(),
        )

    def report(self) -> messages.Report:
        return messages.Report(
            host=socket.gethostname(),
            pid=os.getpid(),
            stats=self._engine.stats(),
            is_alive=self._engine.is_alive,
            heartbeat_age_s=self._engine.heartbeat_age_s(),
        )

    def check_health(self) -> None:
        """Raises if only a new process helps."""
        age_s = self._engine.heartbeat_age_s()
        if not self._engine.is_alive:
            raise RuntimeError("the engine thread has ended")
        if age_s > HEARTBEAT_LIMIT_S:
            raise RuntimeError(f"the engine has made no round for {age_s:.0f} s")

    async def stream(self, call: messages.Call) -> AsyncGenerator[messages.Item, None]:
        """Yields what the engine gives; an error is the last item, and is not raised."""
        try:
            events = self._engine.stream(
                call.prompts,
                call.params,
                request_ids=call.request_ids,
                suffix=call.suffix,
                priority=call.priority,
            )
            async with contextlib.aclosing(events):
                async for generation in events:
                    finish = generation.finish_reason
                    if self._is_closing and finish is not None and finish["type"] == "abort":
                        raise errors.EngineStopped("the replica stopped before this request ended")
                    yield generation
        except errors.RequestError as error:
            yield messages.Refusal(error)
        except requests.EngineFault as error:
            yield messages.Fault(str(error))
        except Exception as error:
            logger.exception("a request failed")
            yield messages.Fault(f"{type(error).__name__}: {error}")

    async def abort(self, request_ids: Sequence[str], *, abort_all: bool) -> int:
        return await asyncio.to_thread(self._engine.abort, request_ids, abort_all=abort_all)

    async def flush_cache(self) -> bool:
        return await asyncio.to_thread(self._engine.flush_cache)

    def close(self, drain_timeout_s: float) -> None:
        """Lets the running requests end, aborts what is left, and frees the device."""
        self._is_closing = True
        self._engine.stop_admitting()
        if not self._engine.drain(drain_timeout_s):
            aborted = self._engine.abort(abort_all=True)
            logger.warning("aborted %d requests after %.0f s", aborted, drain_timeout_s)
        self._engine.shutdown()
