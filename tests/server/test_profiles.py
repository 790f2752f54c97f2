"""/start_profile and /stop_profile: whose, where, how long (the fake engine and a real trace)."""

from __future__ import annotations

import pathlib

import pytest
from support import edge, fake_engine, hash_engine, waiting

from jdllm import errors


def test_a_trace_is_taken_and_written(tmp_path):
    with hash_engine.make_engine() as engine:
        server = edge.make_state(engine, profile_dir=str(tmp_path))
        started = edge.call(server, "/start_profile", method="POST")
        assert started.status_code == 200, started.text
        folder = pathlib.Path(started.json()["output_dir"])
        assert folder.parent == tmp_path
        again = edge.call(server, "/start_profile", {"output_dir": "other"})
        assert again.status_code == 400
        assert edge.error_of(again)["code"] == "profile_running"
        assert list(tmp_path.iterdir()) == [folder]
        engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 4})
        stopped = edge.call(server, "/stop_profile", method="POST")
        assert stopped.json() == {"success": True, "output_dir": str(folder)}
        assert list(folder.rglob("*.xplane.pb"))
        assert edge.call(server, "/stop_profile", method="POST").status_code == 400


def test_a_trace_ends_by_itself_after_its_launches(tmp_path):
    with hash_engine.make_engine() as engine:
        engine.start_profile(str(tmp_path), num_steps=2, with_stack=False)
        with pytest.raises(errors.RequestError, match="being taken"):
            engine.start_profile(str(tmp_path))
        engine.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 40})
        waiting.wait_until(lambda: any(tmp_path.rglob("*.xplane.pb")))
        with pytest.raises(errors.RequestError, match="no profile"):
            engine.stop_profile()
        engine.start_profile(str(tmp_path))  # is ended by the shutdown
    with hash_engine.make_engine() as engine:
        engine.start_profile(str(tmp_path))
        engine.stop_profile()


def test_fields_reach_the_engine(tmp_path):
    engine = fake_engine.FakeEngine()
    server = edge.make_state(engine, profile_dir=str(tmp_path))
    # What SGLang's load generator sends with --profile.
    body = {
        "activities": ["CPU", "GPU"],
        "num_steps": 5,
        "profile_by_stage": False,
        "profile_stages": None,
        "output_dir": str(tmp_path / "1700000000.5"),
        "profile_prefix": None,
        "with_stack": False,
    }
    assert edge.call(server, "/start_profile", body).status_code == 200
    folder = tmp_path / "1700000000.5"
    assert engine.profiles == [(str(folder), {"num_steps": 5, "with_stack": False})]
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": "5"}, "num_steps"),
        ({"activities": ["MEM"]}, "activities"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"record_shapes": True}, "record_shapes"),
        ({"start_step": 3}, "start_step"),
        ({"profile_prefix": "x"}, "profile_prefix"),
        ({"output_dir": "/"}, "output_dir"),
        ({"output_dir": "../x"}, "output_dir"),
        ({"output_dir": "a/../../x"}, "output_dir"),
        ({"output_dir": "link/x"}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"output_dir": "x" * 100_000}, "output_dir"),
        ({"output_dir": "/" + "x" * 100_000}, "output_dir"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_what_is_refused(tmp_path, body, param):
    (tmp_path / "link").symlink_to("/")
    engine = fake_engine.FakeEngine()
    server = edge.make_state(engine, profile_dir=str(tmp_path))
    response = edge.call(server, "/start_profile", body)
    assert response.status_code == 400, response.text
    assert edge.error_of(response)["param"] == param
    assert len(response.text) < 1000
    assert engine.profiles == []
    assert not (tmp_path.parent / "x").exists()
