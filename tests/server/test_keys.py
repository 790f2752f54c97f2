"""API keys: from files, never shown, and what they open."""

from __future__ import annotations

import logging

import pytest
from support import edge

from jdllm import errors
from jdllm.options import config
from jdllm.server import app, cli, middleware

CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write(tmp_path, text: str | bytes, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return str(path)


def test_every_key_of_a_file_opens_and_no_other_line_does(tmp_path):
    path = write(tmp_path, "# our keys\nalice-key\r\n\n  bob-key  \n#carol\n")
    server = edge.make_state(api_key_file=path)
    for key in ("alice-key", "bob-key"):
        assert edge.call(server, "/v1/models", headers=bearer(key)).status_code == 200
    for key in ("", "#", "#carol", "# our keys", "alice-key\nbob-key", "alice"):
        headers = {"authorization": f"Bearer {key}".replace("\n", " ")}
        assert edge.call(server, "/v1/models", headers=headers).status_code == 401
    assert edge.call(server, "/v1/models").status_code == 401


def test_admin_keys_from_a_file(tmp_path):
    server = edge.make_state(api_key="user", admin_api_key_file=write(tmp_path, "root\nroot2\n"))
    assert edge.call(server, "/flush_cache", headers=bearer("user")).status_code == 403
    for key in ("root", "root2"):
        assert edge.call(server, "/flush_cache", headers=bearer(key)).status_code == 200
        assert edge.call(server, "/v1/models", headers=bearer(key)).status_code == 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no key"),
        ("# only a comment\n\n", "holds no key"),
        ("good\nse cret\n", "line 2"),
        ("s\u00e9cret\n", "line 1"),
        (b"\xff\xfesecret\n", "line 1"),
        (b"x" * (1 << 20) + b"\n", "larger than"),
    ],
)
def test_a_wrong_file_is_an_error_that_shows_no_key(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(errors.ConfigError, match=message) as caught:
        edge.make_state(api_key_file=path)
    assert "cret" not in str(caught.value) and "good" not in str(caught.value)
    assert path in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(errors.ConfigError, match="cannot be read"):
            edge.make_state(admin_api_key_file=str(path))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_may_read_is_warned_about(tmp_path, caplog, mode, warns):
    path = write(tmp_path, "secret\n", mode)
    with caplog.at_level(logging.WARNING):
        edge.make_state(api_key_file=path)
    assert (path in caplog.text) == warns
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"api_key": "secret", "api_key_file": "f"},
        {"admin_api_key": "secret", "admin_api_key_file": "f"},
        {"api_key": ""},
        {"admin_api_key": "secret key"},
        {"api_key": "secret\n"},
        {"metrics_require_api_key": True},
    ],
)
def test_options_that_open_or_contradict_are_refused(options):
    with pytest.raises(errors.ConfigError) as caught:
        config.ServerConfig(**options)
    assert "secret" not in str(caught.value)
    assert next(iter(options)) in str(caught.value)


def test_flags_and_server_info_show_files_but_no_key(tmp_path):
    path = write(tmp_path, "top-secret\n")
    options = cli.parse(["--api-key-file", path, "--admin-api-key", "hush-hush"])
    shown = "\n".join(options.describe())
    assert path in shown and "top-secret" not in shown and "hush-hush" not in shown
    server = edge.make_state(api_key_file=path, admin_api_key="hush-hush")
    text = edge.call(server, "/server_info", headers=bearer("top-secret")).text
    assert path in text and "top-secret" not in text and "hush-hush" not in text
    assert "top-secret" not in repr(server) and "hush-hush" not in repr(server)


def test_metrics_can_be_guarded():
    for options in ({"api_key": "user", "admin_api_key": "root"}, {"admin_api_key": "root"}):
        server = edge.make_state(enable_metrics=True, metrics_require_api_key=True, **options)
        assert edge.call(server, "/metrics").status_code == 401
        assert edge.call(server, "/metrics", headers=bearer("wrong")).status_code == 401
        for key in options.values():
            assert edge.call(server, "/metrics", headers=bearer(key)).status_code == 200
        assert edge.call(server, "/health").status_code == 200


def test_what_is_open_without_a_key_is_a_short_list():
    """Every route but these asks for the key, also one that somebody adds."""
    server = edge.make_state(api_key="secret", enable_metrics=True)
    is_open = set()
    for router in app.ROUTERS:
        for route in router.routes:
            for method in route.methods:
                path = route.path.replace("{model_id:path}", "fake-model")
                if edge.call(server, path, method=method).status_code != 401:
                    is_open.add(path)
    assert is_open == {"/health", "/ready", "/readyz", "/livez", "/ping", "/metrics"}


def test_admin_routes_are_all_guarded():
    """A route of the admin's router is the administrator's, but for aborts, which look closer."""
    paths = {route.path for route in app.admin.router.routes}
    assert paths - {"/abort_request"} == middleware.ADMIN_PATHS
    server = edge.make_state(api_key="user", admin_api_key="root")
    for path in middleware.ADMIN_PATHS:
        assert edge.call(server, path, method="POST").status_code == 401
        assert edge.call(server, path, method="POST", headers=bearer("user")).status_code == 403
