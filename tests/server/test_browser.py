"""The page at `/` in a real browser, on the bundled models: what a person does, and what they see.

Needs playwright (`pip install '.[browser]'`) and a Chromium of the system; `.ci/run` runs it where
there is one. The servers run in this process, so that a test can ask the engines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from unittest import mock

import httpx
import pytest
from support import socket_server
from support.waiting import wait_until

import jdllm
from jdllm.engine.start import startup
from jdllm.options import config
from jdllm.scheduler.rows import canvas
from jdllm.server import state

sync_api = pytest.importorskip("playwright.sync_api", reason="needs pip install '.[browser]'")
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome found"),
]

QUESTION = "Ann has 9 pears. She sells 4 pears. How many are left?"
TOKENS = 64  # of an answer; with a prompt they fit into the context
WAIT_MS = 300_000  # machines that test are often busy
QUIET = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextlib.contextmanager
def served(engine, **options):
    """Yields the address of a server around a running engine."""
    server = state.ServerState(
        server_config=config.ServerConfig(**options), progress=startup.StartupProgress()
    )
    server.loaded_engine, server.phase = engine, "ready"
    with engine, socket_server.serving(server) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def text_engine():
    """One token a step, so that an answer has many frames; one short row, so that it is fast."""
    with mock.patch.object(canvas.CanvasBuckets, "logit_rows", ()):
        return jdllm.Engine(
            model_path="jdllm-nano-canvas",
            dllm_algorithm="LLaDA",
            context_length=128,
            max_running_requests=1,
        )


@pytest.fixture(scope="module")
def text_url(text_engine):
    with served(text_engine) as url:
        yield url


@pytest.fixture(scope="module")
def image_url():
    engine = jdllm.ImageEngine(model_path="jdllm-nano-image", max_running_requests=1)
    with served(engine, api_key="page-key") as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()  # Chromium refuses it to root
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=BROWSER, args=[*QUIET, *sandbox])
        yield made
        made.close()


@pytest.fixture
def page(browser):
    """A page that fails the test for anything in its console."""
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    made, said = context.new_page(), []
    made.on("console", lambda message: said.append(message.text))
    made.on("pageerror", lambda error: said.append(str(error)))
    made.said = said
    yield made
    context.close()


def open_chat(page, url):
    page.goto(url)
    page.wait_for_selector("#chat:not([hidden])")
    page.get_by_label("Most tokens").first.fill(str(TOKENS))


def send(page, text):
    page.fill("#question", text)
    page.press("#question", "Enter")


def done(page, control="#send"):
    page.wait_for_selector(f"{control}:not([hidden])")


def cells(page):
    """Returns for each position of the last answer whether it is written."""
    return page.locator(".lane .canvas").last.evaluate(
        "view => [...view.querySelectorAll('.cell')].map(c => c.classList.contains('decided'))"
    )


def shown_text(page):
    return page.locator(".lane .canvas").last.evaluate("view => view.textContent")


def scrub(page, frame):
    page.locator(".lane .replay input").last.evaluate(
        "(bar, value) => { bar.value = value; bar.dispatchEvent(new Event('input')); }", frame
    )


def test_a_question_fills_in_and_the_answer_is_that_of_the_api(page, text_url):
    open_chat(page, text_url)
    send(page, QUESTION)
    page.wait_for_selector(".lane .cell")
    done(page)
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS}
    answer = httpx.post(f"{text_url}/v1/chat/completions", json=body, timeout=WAIT_MS / 1000).json()
    text = answer["choices"][0]["message"]["content"]
    page.wait_for_function("() => document.querySelector('.lane .hidden').textContent")
    assert page.locator(".lane .hidden").text_content() == text
    # The replay goes through the frames in order, and ends with the same text.
    last = int(page.locator(".lane .replay input").get_attribute("max"))
    assert last + 1 >= answer["usage"]["completion_tokens"]
    written = []
    for frame in range(last + 1):
        scrub(page, frame)
        written.append(sum(cells(page)))
    assert written[0] == 1 and False not in cells(page)
    assert shown_text(page) == text
    assert page.locator(".lane .cut").count() >= 1
    numbers = page.locator(".lane .numbers").inner_text()
    assert f"NFE\n{answer['usage']['dllm']['nfe']}" in numbers
    assert page.said == []


def test_replay_plays_from_the_first_frame_and_stops_at_the_last(page, text_url):
    open_chat(page, text_url)
    send(page, QUESTION)
    done(page)
    bar = page.locator(".lane .replay input")
    page.get_by_role("button", name="Replay").click()
    assert int(bar.input_value()) < int(bar.get_attribute("max"))
    page.wait_for_function(
        "() => { const b = document.querySelector('.replay input'); return b.value === b.max; }"
    )
    page.get_by_role("button", name="Replay").wait_for()
    assert page.said == []


def test_a_stop_frees_the_row(page, text_url, text_engine):
    open_chat(page, text_url)
    page.get_by_label("Temperature").first.fill("100")  # so that no end token comes soon
    page.get_by_label("Most tokens").first.fill("96")
    aborted = text_engine.stats().num_aborted_requests_total
    send(page, QUESTION)
    page.wait_for_selector(".lane .cell.decided")
    page.click("#stop")
    page.get_by_text("Stopped.").wait_for()
    wait_until(lambda: text_engine.stats().num_running_reqs == 0)
    assert text_engine.stats().num_aborted_requests_total == aborted + 1


def test_two_settings_side_by_side(page, text_url):
    open_chat(page, text_url)
    page.check("#compare")
    second = page.locator("#settings > details").nth(1)
    second.get_by_label("Most tokens").fill(str(TOKENS))
    second.get_by_label("steps").fill("16")
    send(page, QUESTION)
    done(page)
    assert page.locator(".lane").count() == 2
    frames = [int(one.get_attribute("max")) for one in page.locator(".replay input").all()]
    assert frames[0] > frames[1] > 0
    assert page.said == []


def test_a_gap_is_dragged_and_filled(page, text_url):
    page.goto(text_url)
    page.get_by_role("tab", name="Infilling").click()
    words = page.locator("#infill-words .word")
    first = words.nth(3).bounding_box()
    page.mouse.move(first["x"] + first["width"] / 2, first["y"] + 8)
    page.mouse.down()
    last = words.nth(4).bounding_box()  # the gap has moved here and pushed the word on
    page.mouse.move(last["x"] + last["width"] / 2, last["y"] + 8, steps=4)
    page.mouse.up()
    assert page.locator("#infill-words .taken").all_inner_texts() == [" =", " 12"]
    page.fill("#infill-length", "4")
    page.locator("#infill-settings").get_by_label("block length").fill("4")
    page.click("#fill")
    done(page, "#fill")
    assert page.locator(".lane .fixed").all_inner_texts()[0] == "7 + 5"
    page.wait_for_function("() => document.querySelectorAll('.lane .cell').length === 4")
    assert page.said == []


def test_markup_in_an_answer_stays_text(page, text_url):
    open_chat(page, text_url)
    page.get_by_label("Most tokens").first.fill("32")
    send(page, "<img src=x onerror=alert(1)>")
    done(page)
    assert page.locator(".asked").inner_text() == "<img src=x onerror=alert(1)>"
    assert page.locator(".turns img").count() == 0
    assert page.said == []


def test_an_image_appears_once_the_key_is_given(page, image_url):
    page.goto(image_url)
    page.wait_for_selector("#key-form:not([hidden])")
    page.fill("#key", "page-key")
    page.press("#key", "Enter")
    page.wait_for_selector("#images:not([hidden])")
    page.fill("#prompt", "a red circle on a white ground")
    page.fill("#count", "2")
    page.fill("#steps", "4")
    page.fill("#image-seed", "7")
    page.click("#paint-go")
    done(page, "#paint-go")
    pictures = page.locator("figure img")
    assert pictures.count() == 2
    page.wait_for_function(
        "() => [...document.querySelectorAll('figure img')].every(one => one.naturalWidth > 0)"
    )
    captions = page.locator("figcaption").all_inner_texts()
    assert ["seed 7" in captions[0], "seed 8" in captions[1]] == [True, True]
    with page.expect_download() as saved:
        page.locator("figcaption a").first.click()
    assert saved.value.suggested_filename == "jdllm-7.png"
    # The browser itself reports the 401 that asked for the key.
    assert all("401" in text for text in page.said) and len(page.said) == 1
