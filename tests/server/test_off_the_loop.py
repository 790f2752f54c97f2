"""What takes long or grows runs in threads, so that no request waits for a scrape or a page."""

from __future__ import annotations

import threading

import fastapi
import pytest
from support import edge, fake_engine, fake_images

ENGINES = (fake_engine.FakeEngine, fake_images.FakeImageEngine)


@pytest.fixture
def threads(monkeypatch):
    """The threads that make the schema of the routes, or read statistics."""
    seen = []

    def watch(owner, name):
        made = getattr(owner, name)

        def watched(self):
            seen.append(threading.current_thread())
            return made(self)

        monkeypatch.setattr(owner, name, watched)

    watch(fastapi.FastAPI, "openapi")
    for engine in ENGINES:
        watch(engine, "stats")
    return seen


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", ["/metrics", "/docs", "/openapi.json"])
def test_no_page_that_grows_is_made_on_the_event_loop(threads, path, engine):
    response = edge.call(edge.make_state(engine(), enable_metrics=True), path)
    assert response.status_code == 200 and response.content
    assert threads and threading.main_thread() not in threads
