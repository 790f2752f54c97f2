"""An engine for the server that runs nothing itself: replicas in other processes do.

Requests go where the router says. A request of which nothing has been passed on is tried elsewhere
when its replica is lost, or refuses it for want of room; one that has begun ends with
`ReplicaLost`. After one loss a request gets one more try, because it may itself be the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any, Literal

from jdllm import errors, spec
from jdllm.engine import generations, requests, tokenizer
from jdllm.engine.stats import EngineStats
from jdllm.options import sampling_params
from jdllm.replicas import messages, routing, summed_stats

logger = logging.getLogger(__name__)

POLL_S = 1.0
# A report that takes longer says that the replica is busy or gone; the next poll asks again.
REPORT_LIMIT_S = 15.0
CONTROL_LIMIT_S = 60.0
LOSSES_PER_REQUEST = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """The last report of a replica, and when it came."""

    report: messages.Report
    at_s: float

    def heartbeat_age_s(self) -> float:
        return self.report.heartbeat_age_s + time.monotonic() - self.at_s


class ReplicatedEngine:
    """Obeys `TextServing`. Made and used on one asyncio loop; what may block is for other threads.

    Statistics may be asked for on any thread: they copy in one go what the loop changes.
    `watch` must run for as long as the engine is used.
    """

    output_modality: Literal["text"] = "text"

    def __init__(
        self,
        replicas: messages.Replicas,
        facts: messages.Facts,
        *,
        tokenizer: tokenizer.Tokenizer | None,
        affinity_margin: int | None = None,
    ):
        self.config = facts.config
        self.device = facts.device
        self.spec = facts.spec
        self.tokenizer = tokenizer
        self.model_name = facts.model_name
        self.context_length = facts.context_length
        self._facts = facts
        self._replicas = replicas
        self._event_loop = asyncio.get_running_loop()
        margin = max(1, facts.max_running_requests // 2)
        self._router = routing.Router(
            page=_shared_page(facts), margin=margin if affinity_margin is None else affinity_margin
        )
        self._seen: dict[str, Seen] = {}
        self._lost: set[str] = set()
        self._last_seen_s = time.monotonic()
        self._is_admitting = True
        self._num_open = 0

    # Generation

    async def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[sampling_params.SamplingParams],
        *,
        request_ids: Sequence[str],
        suffix: Sequence[int] = (),
        priority: int | None = None,
    ) -> AsyncGenerator[generations.Generation, None]:
        """Does what `TextServing.stream` says, on one replica."""
        call = messages.Call(
            prompts=prompts,
            params=params,
            request_ids=request_ids,
            suffix=suffix,
            priority=priority,
        )
        tried: set[str] = set()
        problem: errors.RequestError = errors.EngineStopped("no replica serves at the moment")
        losses = 0
        while losses < LOSSES_PER_REQUEST:
            if not self._is_admitting:
                raise errors.EngineStopped("the server is draining")
            name = self._router.choose(call.prompts[0], self._live() - tried)
            if name is None:
                break
            tried.add(name)
            has_begun = False
            items = self._on(name, call)
            try:
                async with contextlib.aclosing(items):
                    async for generation in items:
                        has_begun = True
                        yield generation
                return
            except messages.Lost as error:
                logger.warning("replica %s is lost: %s", name, error)
                self._lost.add(name)
                self._router.forget(name)
                losses += 1
                problem = errors.ReplicaLost(
                    "the replica that ran this request was lost before the request ended"
                )
            except (errors.QueueFull, errors.EngineStopped) as error:
                problem = error
            if has_begun:
                break
        raise problem

    async def _on(
        self, name: str, call: messages.Call
    ) -> AsyncGenerator[generations.Generation, None]:
        """Yields what one replica gives; its errors are raised."""
        with self._router.hold(name, call.num_choices):
            self._num_open += 1
            try:
                async with contextlib.aclosing(self._replicas.stream(name, call)) as items:
                    async for item in items:
                        match item:
                            case messages.Refusal(error):
                                raise error
                            case messages.Fault(message):
                                raise requests.EngineFault(message)
                            case _:
                                yield item
            finally:
                self._num_open -= 1

    def check_places(self, num_choices: int, num_prompts: int = 1) -> None:
        """Raises if no replica could ever take so many choices, or `QueueFull` for now."""
        assert self.config.max_queued_requests is not None, "a replica's engine gives it a value"
        places = self._facts.max_running_requests + self.config.max_queued_requests
        if num_choices > places:
            raise errors.RequestError(
                f"{errors.described_choices(num_choices, num_prompts)} can never fit: "
                f"max_running_requests and max_queued_requests allow {places} on one replica",
                param="n" if num_prompts == 1 else "prompt",
            )
        live = self._live()
        if live and all(self._router.load(name) + num_choices > places for name in live):
            raise errors.QueueFull(
                f"the queues of all {len(live)} replicas are full; try again later"
            )

    def default_max_new_tokens(self, prompt_len: int) -> int:
        lengths = self._facts.default_lengths
        return int(lengths[min(prompt_len, len(lengths) - 1)])

    # Information

    @property
    def is_alive(self) -> bool:
        """Whether the engine of some replica runs."""
        return any(one.report.is_alive for one in self._reports().values())

    def heartbeat_age_s(self) -> float:
        """Returns the age of the freshest sign of life of any replica's engine."""
        ages = [one.heartbeat_age_s() for one in self._reports().values() if one.report.is_alive]
        return min(ages, default=time.monotonic() - self._last_seen_s)

    def stats(self) -> EngineStats:
        """Returns the sum over the replicas, a second old."""
        return summed_stats.add([one.report.stats for one in self._reports().values()])

    def stats_per_replica(self) -> Mapping[str, EngineStats]:
        return {name: one.report.stats for name, one in self._reports().items()}

    def server_info(self) -> dict[str, Any]:
        """Returns what one replica says, with an entry of `internal_states` for each of them."""
        states = [
            {
                "replica": name,
                "host": one.report.host,
                "pid": one.report.pid,
                "heartbeat_age_s": round(one.heartbeat_age_s(), 1),
            }
            | dataclasses.asdict(one.report.stats)
            for name, one in self._reports().items()
        ]
        return self._facts.server_info | {"num_replicas": len(states), "internal_states": states}

    def model_info(self) -> dict[str, Any]:
        return self._facts.model_info

    # Control; from other threads than that of the loop

    def abort(self, request_ids: str | Collection[str] = (), *, abort_all: bool = False) -> int:
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        if not ids and not abort_all:
            return 0
        return sum(self._ask_all(lambda name: self._replicas.abort(name, ids, abort_all=abort_all)))

    def flush_cache(self) -> bool:
        return all(self._ask_all(self._replicas.flush_cache))

    def start_profile(
        self, output_dir: str, *, num_steps: int | None = None, with_stack: bool = True
    ) -> None:
        del output_dir, num_steps, with_stack
        raise errors.RequestError(
            "profiles are taken of one engine, and this server runs replicas; start one without "
            "--replicas for that"
        )

    def stop_profile(self) -> str:
        raise errors.RequestError("no profile is being taken: this server runs replicas")

    def stop_admitting(self) -> None:
        self._is_admitting = False

    def drain(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._num_open:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def shutdown(self) -> None:
        """Refuses requests; the replicas are stopped by what started them."""
        self.stop_admitting()

    # Watching

    async def watch(self) -> None:
        """Asks every replica for a report each second; never returns."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Asks every replica for a report once, and forgets those that are gone."""
        names = list(self._replicas.names())
        for name in self._seen.keys() - names:
            del self._seen[name]
            self._router.forget(name)
        self._lost &= set(names)
        await asyncio.gather(*(self._poll_one(name) for name in names))

    async def _poll_one(self, name: str) -> None:
        try:
            report = await asyncio.wait_for(self._replicas.report(name), REPORT_LIMIT_S)
        except (messages.Lost, TimeoutError):
            self._lost.add(name)
            return
        self._lost.discard(name)
        self._seen[name] = Seen(report, time.monotonic())
        self._last_seen_s = time.monotonic()

    def _live(self) -> set[str]:
        return set(self._replicas.names()) - self._lost

    def _reports(self) -> dict[str, Seen]:
        live = self._live()
        return {name: seen for name, seen in sorted(self._seen.items()) if name in live}

    def _ask_all(self, ask: Any) -> list[Any]:
        """Returns what each replica answers; those that are lost answer nothing."""

        async def ask_one(name: str) -> Any:
            try:
                return await ask(name)
            except messages.Lost:
                return None

        async def ask_each() -> list[Any]:
            return await asyncio.gather(*(ask_one(name) for name in self._live()))

        pending: futures.Future[list[Any]] = asyncio.run_coroutine_threadsafe(
            ask_each(), self._event_loop
        )
        return [one for one in pending.result(CONTROL_LIMIT_S) if one is not None]


def _shared_page(facts: messages.Facts) -> int:
    """Returns of how many tokens replicas share K,V, 0 if they share none.

    In models with full attention K,V of a prompt depend on what follows it. In a page smaller than
    a block, K,V depend on the whole block.
    """
    is_full = facts.spec.diffusion.attention_pattern is spec.AttentionPattern.FULL
    if is_full or facts.config.disable_radix_cache:
        return 0
    return max(facts.config.page_size or 1, facts.spec.diffusion.block_size)
