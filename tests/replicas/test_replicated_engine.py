"""The server in front of replicas: answers, retries, aborts and numbers, with fake engines."""

import asyncio
import contextlib

import httpx
import pytest
from support import edge, fake_engine, fake_replicas

from jdllm import errors
from jdllm.options import config, sampling_params
from jdllm.server import app

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def params(count=12):
    return sampling_params.SamplingParams(max_new_tokens=count)


def stream(engine, rid="r", prompt=PROMPT, count=12):
    return engine.stream([prompt], [params(count)], request_ids=[rid])


async def collect(events):
    return [one async for one in events]


def fake(**options):
    engine_config = config.EngineConfig(max_queued_requests=4)
    return fake_engine.FakeEngine(engine_config=engine_config, **options)


def two(**options):
    return fake_replicas.FakeReplicas(a=fake(**options), b=fake(**options))


def run(scenario, **options):
    """Runs `scenario(replicas, engine)` with two replicas."""

    async def main():
        replicas = two(**options)
        await scenario(replicas, await fake_replicas.connect(replicas))

    asyncio.run(main())


def test_a_stream_is_that_of_one_engine():
    async def scenario(replicas, engine):
        got = await collect(stream(engine))
        alone = await collect(stream(fake_engine.FakeEngine()))
        assert [one.delta_ids for one in got] == [one.delta_ids for one in alone]
        assert got[-1].output_ids == fake_engine.expected_ids(PROMPT, 12)
        assert engine.default_max_new_tokens(5) == fake_engine.CONTEXT - 5
        assert engine.default_max_new_tokens(10**6) == 1

    run(scenario)


def test_requests_spread_and_prefixes_stay():
    async def scenario(replicas, engine):
        await asyncio.gather(*(collect(stream(engine, f"r{i}", [i] * 8)) for i in range(6)))
        assert {name for name, _ in replicas.calls} == {"a", "b"}
        homes = dict((rid, name) for name, rid in replicas.calls)
        for i in range(6):
            await collect(stream(engine, f"again{i}", [*[i] * 8, 99]))
            assert replicas.calls[-1] == (homes[f"r{i}"], f"again{i}")

    run(scenario, block_s=0.001)


def test_a_request_that_has_not_begun_is_tried_elsewhere_and_others_go_on():
    async def scenario(replicas, engine):
        tasks = {
            f"r{i}": asyncio.create_task(collect(stream(engine, f"r{i}", [i] * 8)))
            for i in range(8)
        }
        await asyncio.sleep(0.02)  # all wait for their first block
        lost = {rid for name, rid in replicas.calls if name == "a"}
        assert 0 < len(lost) < 8
        replicas.kill("a")
        for i, task in enumerate(tasks.values()):
            assert (await task)[-1].output_ids == fake_engine.expected_ids([i] * 8, 12)
        assert sorted(rid for name, rid in replicas.calls[8:]) == sorted(lost)
        assert {name for name, _ in replicas.calls[8:]} == {"b"}

    run(scenario, block_s=0.2)


def test_a_stream_that_has_begun_ends_with_an_error_and_others_go_on():
    async def scenario(replicas, engine):
        streams = [stream(engine, f"r{i}", [i] * 8) for i in range(2)]
        firsts = [await anext(one) for one in streams]
        assert all(one.delta_ids for one in firsts)
        replicas.kill(replicas.calls[0][0])
        with pytest.raises(errors.ReplicaLost, match="lost before the request ended"):
            await anext(streams[0])
        rest = await collect(streams[1])
        assert rest[-1].output_ids == fake_engine.expected_ids([1] * 8, 12)

    run(scenario, block_s=0.01)


def test_a_request_is_tried_twice_at_most():
    """Or a request that kills its replica would kill them all."""

    async def main():
        names = ("a", "b", "c")
        replicas = fake_replicas.FakeReplicas(**{name: fake(block_s=0.05) for name in names})
        engine = await fake_replicas.connect(replicas)
        task = asyncio.create_task(collect(stream(engine)))
        for _ in range(2):
            await asyncio.sleep(0.01)  # it waits for its first block
            replicas.kill(replicas.calls[-1][0])
        with pytest.raises(errors.ReplicaLost):
            await task
        assert len({name for name, _ in replicas.calls}) == 2

    asyncio.run(main())


def test_a_full_or_draining_replica_passes_a_request_on():
    async def scenario(replicas, engine):
        replicas.engines["a"].stop_admitting()
        for i in range(4):
            await collect(stream(engine, f"r{i}", [i] * 8))
        assert {name for name, rid in replicas.calls} >= {"b"}
        replicas.engines["b"].stop_admitting()
        with pytest.raises(errors.EngineStopped):
            await collect(stream(engine, "last"))

    run(scenario)


def test_refusals_and_faults_arrive_as_from_one_engine():
    async def scenario(replicas, engine):
        with pytest.raises(errors.RequestTooLong) as caught:
            await collect(stream(engine, count=fake_engine.CONTEXT))
        assert caught.value.param == "max_new_tokens"
        assert len(replicas.calls) == 1, "another replica would say the same"
        with pytest.raises(RuntimeError, match="secret detail"):
            await collect(stream(engine, prompt=[0, 255]))

    run(scenario)


def test_closing_a_stream_frees_its_replica_and_an_abort_finds_its_request():
    async def scenario(replicas, engine):
        events = stream(engine, "closed")
        await anext(events)
        held = [len(one.open_requests) for one in replicas.engines.values()]
        assert sorted(held) == [0, 1]
        await events.aclose()
        assert not any(one.open_requests for one in replicas.engines.values())
        task = asyncio.create_task(collect(stream(engine, "aborted", count=400)))
        await asyncio.sleep(0.03)
        assert await asyncio.to_thread(engine.abort, ["aborted", "unknown"]) == 1
        assert (await task)[-1].finish_reason["type"] == "abort"

    run(scenario, block_s=0.01)


def test_numbers_are_sums_and_each_replica_has_its_own():
    async def scenario(replicas, engine):
        for i, count in enumerate((4, 8, 12)):
            await collect(stream(engine, f"r{i}", [i] * 8, count))
        await engine.poll()
        own = {name: one.stats() for name, one in replicas.engines.items()}
        assert engine.stats_per_replica() == own
        assert engine.stats().generation_tokens_total == 24
        assert [one["replica"] for one in engine.server_info()["internal_states"]] == ["a", "b"]
        server = edge.make_state(engine, enable_metrics=True)
        text = server.metrics.render().decode()
        for name, stats in own.items():
            labels = f'{{model_name="fake-model",replica="{name}"}}'
            value = float(stats.generation_tokens_total)
            assert f"jdllm:generation_tokens_total{labels} {value}" in text

    run(scenario)


def test_ready_while_one_replica_lives():
    async def scenario(replicas, engine):
        for name, is_alive in (("a", True), ("b", False)):
            replicas.kill(name)
            await engine.poll()
            assert engine.is_alive is is_alive
            assert name not in engine.stats_per_replica()
        replicas.bury("a")
        await engine.poll()
        assert engine.stats().num_running_reqs == 0

    run(scenario)


def test_places_are_those_of_one_replica():
    async def scenario(replicas, engine):
        places = 8 + engine.config.max_queued_requests
        engine.check_places(places)
        with pytest.raises(errors.RequestError, match="can never fit"):
            engine.check_places(places + 1)
        with engine._router.hold("a", 1), engine._router.hold("b", places):
            engine.check_places(places - 1)
            with pytest.raises(errors.QueueFull):
                engine.check_places(places)

    run(scenario)


@contextlib.asynccontextmanager
async def client_of(engine):
    transport = httpx.ASGITransport(app.create_app(edge.make_state(engine)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def test_an_answer_that_is_not_streamed_is_made_again():
    """Some of it has come, but none of it has been sent."""

    async def scenario(replicas, engine):
        body = {"model": "m", "prompt": "hello", "max_tokens": 40}
        async with client_of(engine) as client:
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            while not replicas.calls and not asked.done():
                await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            replicas.kill(replicas.calls[0][0])
            answer = await asked
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == fake_engine.expected_text("hello", 40)
        assert len({name for name, _ in replicas.calls}) == 2

    run(scenario, block_s=0.04)


def test_with_no_replica_left_the_answer_says_so():
    async def scenario(replicas, engine):
        for name in ("a", "b"):
            replicas.kill(name)
        body = {"model": "m", "prompt": "hello", "max_tokens": 4}
        async with client_of(engine) as client:
            answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert "replica" in edge.error_of(answer)["message"]

    run(scenario)
