"""No client can write a log line, or a field of one, that the server did not mean."""

from __future__ import annotations

import io
import logging
import sys

import pytest
from support import edge

from jdllm import serve
from jdllm.server import cli, middleware
from jdllm.server.edge import log_format

FORGED = "[2026-01-01 00:00:00] INFO jdllm: forged"
BREAKS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
HOSTILE = [
    *(f"a{mark}{FORGED}" for mark in BREAKS),
    "\x1b[2J\x1b[31mred",
    "\x9b31mred",
    "\x00\x07\x08\x7f",
    "\u202egnp.exe\u2066\u200f",
    "\ud800",
    "\ufeff\u00ad",
]


@pytest.fixture
def log():
    """The lines that a logger with the server's formatter writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.Logger("jdllm.test")
    logger.addHandler(handler)
    handler.setFormatter(log_format.EscapingFormatter())
    logger.written = lambda: stream.getvalue()
    return logger


def is_safe(text: str) -> bool:
    """Says whether a text is visible characters and plain line feeds only."""
    return all(character == "\n" or character.isprintable() for character in text)


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_message_is_one_line_of_visible_characters(log, text):
    log.info("rid=%s end", text)
    log.info("%r %s", text, {"key": text})
    log.info("%(rid)s end", {"rid": text})
    log.info("%s end", ValueError(text))
    log.info(f"{text} end")  # noqa: G004 (as a library may do it)
    written = log.written()
    assert written.count("\n") == 5 and len(written.splitlines()) == 5
    assert is_safe(written)
    assert all(" INFO jdllm.test: " in line[:50] for line in written.splitlines())
    assert " end\n" in written


def test_a_format_may_have_lines_but_its_arguments_may_not(log):
    log.info("ready; try:\n%s\nport %d, %.1f %%, %5s|", f"curl\n{FORGED}", 30000, 2.5, "é")
    lines = log.written().split("\n")
    assert lines[0].endswith("jdllm.test: ready; try:")
    assert lines[1:] == [f"curl\\n{FORGED}", "port 30000, 2.5 %,     é|", ""]


def test_words_of_all_languages_stay_readable(log):
    log.info("rid=%s", "Zürich 東京 naïve – “ok” ✓")
    assert "Zürich 東京 naïve – “ok” ✓" in log.written()


def test_a_message_is_cut(log):
    log.info("x%s", "y" * 10**6)
    assert len(log.written()) < log_format.MAX_MESSAGE + 200
    assert "more characters]" in log.written()


def test_a_traceback_is_readable_and_its_messages_forge_nothing(log):
    def inner():
        raise ValueError(f"bad\n{FORGED}\n\x1b[31m{'z' * 10**5}")

    try:
        try:
            inner()
        except ValueError as error:
            error.add_note(f"note\r{FORGED}\n{FORGED}")
            raise RuntimeError(f"outer\n{FORGED}") from error
    except RuntimeError:
        log.exception("a fault")
    written = log.written()
    assert is_safe(written) and len(written) < 10_000
    first, *rest = written.rstrip("\n").split("\n")
    assert first.endswith("ERROR jdllm.test: a fault")
    assert len(rest) > 8 and all(line.startswith(log_format.TRACE_PREFIX) for line in rest)
    assert any(line.endswith("in inner") for line in rest)
    assert any("RuntimeError: outer" in line for line in rest)


def test_a_traceback_without_end_is_cut(log):
    try:
        raise ValueError("\n".join(f"line {i}" for i in range(10**5)))
    except ValueError:
        log.exception("a fault")
    lines = log.written().splitlines()
    assert len(lines) < log_format.MAX_TRACE_LINES + 5
    assert any("more lines]" in line for line in lines)
    assert "line 99999" in lines[-1]


def test_the_text_of_another_formatter_is_not_taken(log):
    other = logging.StreamHandler(io.StringIO())
    other.setFormatter(logging.Formatter())  # leaves its traceback in the record
    log.handlers.insert(0, other)
    try:
        raise ValueError(f"bad\n{FORGED}")
    except ValueError:
        log.exception("a fault", stack_info=True)
    rest = log.written().rstrip("\n").split("\n")[1:]
    assert all(line.startswith(log_format.TRACE_PREFIX) for line in rest)


@pytest.mark.parametrize("text", [*HOSTILE, "a b", 'x, index=0, reason="stop"', "", "é"], ids=ascii)
def test_a_word_is_one_field(text):
    word = log_format.word(text)
    assert is_safe(word) and "\n" not in word
    assert word[0] == word[-1] == '"' and '"' not in word[1:-1].replace('\\"', "")


def test_a_plain_word_stays_as_it_is_and_a_long_one_is_cut():
    assert log_format.word("chatcmpl-0af9:1/x") == "chatcmpl-0af9:1/x"
    assert len(log_format.word("x" * 10**6)) < 300


def test_the_server_installs_it_everywhere(monkeypatch):
    """Also where a library has put a handler of its own before."""
    root_handlers, root_level = logging.root.handlers[:], logging.root.level
    levels = {name: logging.getLogger(name).level for name in serve.HTTP_LOGGERS}
    library = logging.getLogger("some_library")
    library.addHandler(logging.StreamHandler(io.StringIO()))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    try:
        serve.configure_logging(cli.parse([]))
        handlers = [*logging.root.handlers, *library.handlers]
        assert len(handlers) >= 2
        assert all(isinstance(h.formatter, log_format.EscapingFormatter) for h in handlers)
        logging.getLogger("jdllm.x").info("a%s", f"\n{FORGED}")
        assert sys.stderr.getvalue().count("\n") == 1
    finally:
        library.handlers.clear()
        logging.root.handlers[:] = root_handlers
        for name, level in {None: root_level, **levels}.items():
            logging.getLogger(name).setLevel(level)


def test_rid_and_path_in_the_lines_of_a_request(caplog):
    formatter = log_format.EscapingFormatter()
    rid = f'c, index=9, reason=stop\n{FORGED}"'
    body = {"prompt": "hi", "max_tokens": 4, "rid": rid, "user": f"u\n{FORGED}"}
    server = edge.make_state()
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, middleware.__name__):
        assert edge.call(server, "/v1/completions", body).status_code == 200
        edge.call(server, "/no%0A%22%20200%201.0s%20" + FORGED, method="GET")
    records = [record for record in caplog.records if record.name.startswith("jdllm.")]
    lines = [formatter.format(record) for record in records]
    assert all("\n" not in line and is_safe(line) for line in lines)
    finish = next(line for line in lines if "Finish: rid=" in line)
    assert 'rid="c, index=9' in finish and finish.count(", index=0, reason=length, ") == 1
    access = next(line for line in lines if "/no" in line)
    assert "GET /no%0A%22%20200" in access and access.count('"') == 2
