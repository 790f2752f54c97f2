"""Who may abort what: exact names, and only what one's own key began (the real engine)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from unittest import mock

import httpx
import pytest
from support import edge, hash_engine, waiting

from jdllm.server import app
from jdllm.server.edge import request_context

ROW = [3, 5]


@pytest.fixture
def engine() -> Iterator:
    with hash_engine.make_engine() as engine:
        yield engine


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def ask(rid, prompts=1, n=1, key=None):
    """Returns the arguments of a POST to /generate, for long answers."""
    options = {"max_new_tokens": 40, "ignore_eos": True, "n": n}
    ids = ROW if prompts == 1 else [ROW] * prompts
    body = {"input_ids": ids, "rid": rid, "sampling_params": options}
    return {"url": "/generate", "json": body, "headers": bearer(key)}


def endings(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    parts = reply.json() if isinstance(reply.json(), list) else [reply.json()]
    return [part["meta_info"]["finish_reason"]["type"] for part in parts]


def abort_while_running(engine, asks, body, key=None, **options):
    """Runs `asks`, aborts with `body` while all run; returns (abort's answer, endings of each)."""
    server = edge.make_state(engine, **options)
    loop, model = engine._loop, engine._built.runner
    abort_loop, is_queued = loop.abort, threading.Event()

    def noted_abort(matches):
        queued = abort_loop(matches)
        is_queued.set()
        return queued

    async def run():
        transport = httpx.ASGITransport(app.create_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            # The first launch is held until the engine thread has been told of everything.
            model.hold()
            with (
                mock.patch.object(loop, "submit", wraps=loop.submit) as submit,
                mock.patch.object(loop, "abort", noted_abort),
            ):
                works = [asyncio.create_task(client.post(**one)) for one in asks]
                while submit.call_count < len(asks):
                    await asyncio.sleep(0.001)
                abort = client.post("/abort_request", json=body, headers=bearer(key))
                abort = asyncio.create_task(abort)
                while not (abort.done() or is_queued.is_set()):
                    await asyncio.sleep(0.001)
                model.go_on()
                replies = await asyncio.gather(*works)
            return await abort, [endings(reply) for reply in replies]

    result = asyncio.run(run())
    assert server.live._by_name == {}
    waiting.wait_until(lambda: not engine._built.core.requests)
    return result


def test_a_name_is_exact_and_no_prefix(engine):
    asks = [ask("c"), ask("chatcmpl-1"), ask("c-1"), ask("cc")]
    reply, ends = abort_while_running(engine, asks, {"rid": "c"})
    assert reply.json() == {"success": True, "num_aborted": 1}
    assert ends == [["abort"], ["length"], ["length"], ["length"]]


def test_the_name_of_a_list_aborts_its_prompts_and_a_prompts_name_one(engine):
    reply, ends = abort_while_running(engine, [ask("x", prompts=3)], {"rid": "x"})
    assert reply.json()["num_aborted"] == 3 and ends == [["abort"] * 3]
    asks = [ask("x", prompts=3), ask("x-3")]
    reply, ends = abort_while_running(engine, asks, {"rid": "x-1"})
    assert reply.json()["num_aborted"] == 1
    assert ends == [["length", "abort", "length"], ["length"]]


def test_the_name_of_a_prompt_aborts_its_choices_and_a_choices_name_one(engine):
    reply, ends = abort_while_running(engine, [ask("x", n=3)], {"rid": "x"})
    assert reply.json()["num_aborted"] == 3 and ends == [["abort"] * 3]
    reply, ends = abort_while_running(engine, [ask("x", n=3)], {"rid": "x-2"})
    assert reply.json()["num_aborted"] == 1 and ends == [["length", "length", "abort"]]


def test_names_of_one_key_are_not_those_of_another(engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    asks = [ask("mine", key="alice"), ask("list", prompts=2, key="alice"), ask("other", key="bob")]
    options = {"api_key_file": str(path), "admin_api_key": "root"}
    for rid, key, aborted in (
        ("mine", "bob", 0),
        ("list", "bob", 0),
        ("list-1", "bob", 0),
        ("mine", "alice", 1),
        ("list", "alice", 2),
        ("other", "alice", 0),
        ("list", "root", 2),
    ):
        reply, ends = abort_while_running(engine, asks, {"rid": rid}, key, **options)
        assert reply.json()["num_aborted"] == aborted, (rid, key)
        assert sum(end.count("abort") for end in ends) == aborted


def test_abort_all_is_the_administrators(engine, tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice\nbob\n")
    asks = [ask("a", key="alice"), ask("b", key="bob")]
    everything = {"abort_all": True}
    admin = {"api_key_file": str(path), "admin_api_key": "root"}
    reply, ends = abort_while_running(engine, asks, everything, "alice", **admin)
    assert reply.status_code == 403 and ends == [["length"], ["length"]]
    reply, ends = abort_while_running(engine, asks, everything, "root", **admin)
    assert reply.json()["num_aborted"] == 2 and ends == [["abort"], ["abort"]]
    # Nobody is above the others: each key has its own requests.
    reply, ends = abort_while_running(engine, asks, everything, "bob", api_key_file=str(path))
    assert reply.json()["num_aborted"] == 1 and ends == [["length"], ["abort"]]


@pytest.mark.parametrize("options", [{}, {"api_key": "alice"}])
def test_one_class_of_callers_may_abort_all(engine, options):
    key = options.get("api_key")
    asks = [ask("a", key=key), ask("b", n=2, key=key)]
    reply, _ = abort_while_running(engine, asks, {"abort_all": True}, key, **options)
    assert reply.json()["num_aborted"] == 3


def test_a_finished_name_is_free_for_others(engine):
    """The list still runs when another request takes the name of its finished prompt."""
    server = edge.make_state(engine)
    with server.live.hold(["x-0", "x-1"], [1, 1]) as live:
        live.end("x-0")
        caller = request_context.ANONYMOUS
        assert server.live.named("x", caller) == {"x-1"}
        assert server.live.named("x-0", caller) == set()
    assert server.live.all_of(caller) == set()
