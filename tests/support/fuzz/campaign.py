"""Runs a campaign against a server: attackers, a client that must notice nothing, and a probe.

The attackers have one key, the client another one. The administrator's key tells afterwards what
is left of it all.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from support import resources
from support.fuzz import asks, bodies, cases, checks, hostile_http, wire

ATTACKER, CLIENT, ADMIN = "attacker-key", "client-key", "admin-key"
NUM_THREADS = 6
PROBE_EVERY_S = 0.02
CONTROL_EVERY_S = 0.2  # a client that never waits would keep the device busy alone
PROBE_PATHS = ("/health", "/health", "/ready", "/livez")
IDLE_S = 60.0
MAX_SHOWN = 50
OWN_NAMES = tuple(f"client-{index}" for index in range(4))
STATE = ("num_running_reqs", "num_queue_reqs", "num_used_tokens")


@dataclasses.dataclass
class Report:
    """What a campaign has found. `wrong` are the first broken laws, with what replays them."""

    seed: int
    statuses: collections.Counter[tuple[str, int]] = dataclasses.field(
        default_factory=collections.Counter
    )
    wrong: list[str] = dataclasses.field(default_factory=list)
    num_wrong: int = 0
    num_right: int = 0
    num_control: int = 0
    longest_probe_s: float = 0.0
    beside_it: list[str] = dataclasses.field(default_factory=list)  # cases during that probe
    num_probes: int = 0
    longest_control_s: float = 0.0
    resident_bytes: list[int] = dataclasses.field(default_factory=list)
    took_s: float = 0.0

    def note(self, what: str) -> None:
        self.num_wrong += 1
        if len(self.wrong) < MAX_SHOWN:
            self.wrong.append(what)

    def summary(self) -> Iterator[str]:
        """Yields lines for a reader."""
        total = sum(self.statuses.values())
        yield f"seed {self.seed}: {total} requests in {self.took_s:.0f} s, {self.num_wrong} wrong"
        yield f"{self.num_right} answers compared, {self.num_control} of the client beside them"
        by_status: collections.Counter[int] = collections.Counter()
        for (_, status), count in self.statuses.items():
            by_status[status] += count
        yield f"statuses {dict(sorted(by_status.items()))} (0: none was read)"
        probe = f"longest of {self.num_probes} probes {self.longest_probe_s:.3f} s"
        yield f"{probe}, longest answer of the client {self.longest_control_s:.2f} s"
        yield f"beside the longest probe {self.beside_it}"
        yield f"resident MB {[size >> 20 for size in self.resident_bytes]}"
        yield from self.wrong


class Campaign:
    """One run of cases `first` to `last` against the server at `port`."""

    def __init__(self, port: int, process_id: int, seed: int):
        self._port = port
        self._process_id = process_id
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._in_flight: dict[int, str] = {}
        self.report = Report(seed)
        self._admin = wire.Client(port)
        self.prompt_ids = {one: self._ids(one) for one in asks.ASKS}
        self.answers = {one: self._answer(one) for one in asks.ASKS}
        self.maker = cases.Maker(seed, self.prompt_ids, key=ATTACKER, names=OWN_NAMES)

    def run(self, numbers: range) -> Report:
        """Sends the cases of these numbers from several threads; returns what was found."""
        began = time.monotonic()
        left, step = iter(numbers), max(1, len(numbers) // 10)
        beside = [threading.Thread(target=self._probe), threading.Thread(target=self._control)]
        attackers = [
            threading.Thread(target=self._attack, args=(left, step)) for _ in range(NUM_THREADS)
        ]
        for thread in (*beside, *attackers):
            thread.start()
        for thread in attackers:
            thread.join()
        self._ended.set()
        for thread in beside:
            thread.join()
        self.report.took_s += time.monotonic() - began
        self._check_rest()
        self.report.resident_bytes.append(self._resident_bytes())
        return self.report

    def _attack(self, left: Iterator[int], step: int) -> None:
        client = wire.Client(self._port)
        while True:
            with self._lock:
                number = next(left, None)
                if number is None:
                    break
                if number % step == 0:
                    self.report.resident_bytes.append(self._resident_bytes())
            case = self.maker.case(number)
            self._in_flight[threading.get_ident()] = f"{number} {case.kind} {case.path[:40]}"
            try:
                statuses = self.send(client, case)
            except Exception as error:
                client.close()
                shown = "".join(traceback.format_exception_only(error)).strip()
                body = case.body[:300]
                what = f"{case.kind} {case.method} {case.path[:80]} {body!r} {case.sent!r:.300}"
                with self._lock:
                    self.report.note(f"seed {self.report.seed} case {number}: {shown}\n    {what}")
                statuses = [0]
            with self._lock:
                for status in statuses:
                    self.report.statuses[case.kind, status] += 1
        client.close()

    def send(self, client: wire.Client, case: cases.Case) -> list[int]:
        """Sends one case and checks what comes back; returns the statuses."""
        if case.sent is not None:
            replies = hostile_http.send(self._port, case.sent)
            for reply in replies:
                checks.shape(reply, None, "GET")
            return [reply.status for reply in replies] or [0]
        if case.leaves_after is not None:
            with client.opened(case.raw(), case.method) as response:
                checks.need(response.status in case.statuses, f"status {response.status}")
                response.read(case.leaves_after)
                return [response.status]
        reply = (
            client.ask(case.raw(), case.method)
            if case.aborts is None
            else self._abort(client, case)
        )
        path = case.path.partition("?")[0]
        error = checks.shape(reply, path, case.method)
        checks.need(reply.status in case.statuses, f"{reply.status}: {reply.body[:300]!r}")
        if error is not None and reply.status == 400 and case.params:
            checks.names(error, case.params, path)
        if reply.status == 200 and case.ask is not None and case.asked is not None:
            found = checks.choices(case.asked.path, reply, is_stream=bool(case.asked.is_stream))
            checks.right(found, self.answers[case.ask], case.asked)
            self.report.num_right += 1
        return [reply.status]

    def _abort(self, client: wire.Client, case: cases.Case) -> wire.Reply:
        """Returns the answer to a request that is ended as soon as it has begun."""
        other = wire.Client(self._port)
        headers = {name: case.headers[name] for name in ("Authorization", "Content-Type")}
        body = bodies.dumps({"rid": case.aborts})
        with client.opened(case.raw(), case.method) as response:
            ended = other.ask(wire.request_bytes("POST", "/abort_request", body, headers))
            other.close()
            checks.need(ended.status == 200, f"abort: {ended.status} {ended.body!r}")
            return wire.Reply(response.status, wire.headers_of(response), response.read())

    def _control(self) -> None:
        """Asks as if nobody else was there; nothing ends its requests, nothing changes them."""
        client = wire.Client(self._port)
        headers = cases.JSON | {"Authorization": f"Bearer {CLIENT}"}
        for index in itertools.cycle(range(len(asks.ASKS))):
            if self._ended.is_set():
                break
            if index == 0:  # what is cached may go at any time
                flushed = self.admin("POST", "/flush_cache")
                checks.need(flushed.status in (200, 400), f"flush: {flushed.status}")
            one, began = asks.ASKS[index], time.monotonic()
            body = {
                "input_ids": self.prompt_ids[one],
                "sampling_params": one.options,
                "rid": OWN_NAMES[index % len(OWN_NAMES)],
            }
            raw = wire.request_bytes("POST", asks.GENERATE, json.dumps(body).encode(), headers)
            reply = client.ask(raw)
            self.report.longest_control_s = max(
                self.report.longest_control_s, time.monotonic() - began
            )
            if reply.status == 503:
                self._ended.wait(CONTROL_EVERY_S)
                continue
            found = self._whole(reply)
            with self._lock:
                self.report.num_control += 1
                if found != self.answers[one]:
                    self.report.note(f"the client got {found}, not {self.answers[one]}")
            self._ended.wait(CONTROL_EVERY_S)
        client.close()

    def _probe(self) -> None:
        """Asks for the health of the server all the time."""
        client = wire.Client(self._port)
        for path in itertools.cycle(PROBE_PATHS):
            if self._ended.wait(PROBE_EVERY_S):
                break
            began = time.monotonic()
            reply = client.ask(wire.request_bytes("GET", path), "GET")
            took_s = time.monotonic() - began
            self.report.num_probes += 1
            if took_s > self.report.longest_probe_s:
                self.report.longest_probe_s = took_s
                self.report.beside_it = [*self._in_flight.values()]
            if reply.status != 200:
                with self._lock:
                    self.report.note(f"{path}: {reply.status} {reply.body!r}")
        client.close()

    def _check_rest(self) -> None:
        """Checks that nothing runs, waits or holds a page once all clients have gone."""
        deadline = time.monotonic() + IDLE_S
        while time.monotonic() < deadline:
            flushed = self.admin("POST", "/flush_cache")
            (state,) = json.loads(self.admin("GET", "/server_info").body)["internal_states"]
            left = {name: state[name] for name in STATE}
            if flushed.status == 200 and not any(left.values()):
                return
            time.sleep(0.1)
        self.report.note(f"left over: {left}")

    def _resident_bytes(self) -> int:
        return resources.resident_bytes(str(self._process_id))

    def admin(self, method: str, path: str, body: Any = None) -> wire.Reply:
        """Returns an answer to the administrator."""
        headers = cases.JSON | {"Authorization": f"Bearer {ADMIN}"}
        content = b"" if body is None else bodies.dumps(body)
        return self._admin.ask(wire.request_bytes(method, path, content, headers), method)

    def _ids(self, one: asks.Ask) -> list[int]:
        turns = [{"role": "user", "content": one.prompt}]
        body = {"messages": turns} if one.is_chat else {"prompt": one.prompt}
        reply = self.admin("POST", "/tokenize", body)
        return json.loads(reply.body)["tokens"]

    def _answer(self, one: asks.Ask) -> checks.Choice:
        body = {"input_ids": self.prompt_ids[one], "sampling_params": one.options}
        return self._whole(self.admin("POST", asks.GENERATE, body))

    @staticmethod
    def _whole(reply: wire.Reply) -> checks.Choice:
        checks.need(reply.status == 200, f"{reply.status} {reply.body!r}")
        (found,) = checks.choices(asks.GENERATE, reply, is_stream=False)
        return found


def series(metrics: str) -> set[str]:
    """Returns the names of all series in Prometheus' text, with their labels."""
    return {line.rpartition(" ")[0] for line in metrics.splitlines() if not line.startswith("#")}
