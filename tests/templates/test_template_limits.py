"""A template that never ends, or writes without end, is stopped: in bounded time and memory.

Each of these would take minutes or gigabytes in jinja2's own sandbox.
"""

from __future__ import annotations

import time
import tracemalloc

import pytest

from jdllm import errors
from jdllm.templates import budget, chat

GROW = "{%% set ns = namespace(s='a') %%}{%% for i in range(99) %%}%s{%% endfor %%}"
MILLION = "{% set s = 'a' * 1000000 %}"
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop tests": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "static text": "{% macro m() %}" + "y" * 9999 + "{% endmacro %}"
    "{% for i in range(99999) %}{% set x = m() %}{% endfor %}",
    "repetition": "{{ 'a' * 10**10 }}",
    "lists": "{{ [1] * 10**10 }}",
    "power": "{{ 7 ** 10000000000 }}",
    "squares": GROW % "{% set ns.s = (ns.s | int(3)) * (ns.s | int(3)) %}",
    "doubling by ~": GROW % "{% set ns.s = ns.s ~ ns.s %}",
    "doubling by +": GROW % "{% set ns.s = ns.s + ns.s %}",
    "doubling by blocks": GROW % "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
    "doubling, escaped": "{% autoescape true %}"
    + GROW % "{% set ns.s = ns.s ~ ns.s %}"
    + "{% endautoescape %}",
    "slices": MILLION + "{% set ns = namespace(x=[]) %}"
    "{% for i in range(99999) %}{% set ns.x = ns.x + [s[i:]] %}{% endfor %}",
    "padding": "{{ 'a' | center(10 ** 10) }}",
    "padding by a method": "{{ 'a'.ljust(10 ** 10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent, width given": "{{ '%*d' % (10 ** 10, 1) }}",
    "percent filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "format, width given": "{{ '{:{w}}'.format(1, w=10 ** 10) }}",
    "format fields": MILLION + "{{ ('{0}' * 10000).format(s) }}",
    "format_map": "{{ '{a:10000000000}'.format_map({'a': 1}) }}",
    "text of lists": MILLION + "{{ [s] * 100000 }}",
    "json": MILLION + "{{ ([s] * 100000) | tojson }}",
    "json indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "join": MILLION + "{{ ([s] * 100000) | join }}",
    "join by a method": MILLION + "{{ s.join(range(99999) | map('string')) }}",
    "replace": MILLION + "{{ s | replace('a', s) }}",
    "replace by a method": MILLION + "{{ s.replace('a', s) }}",
    "translate": MILLION + "{{ s.translate({97: s}) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(9999) }}",
    "indent": "{{ ('\\n' * 1000000) | indent(9999) }}",
    "wrap": MILLION + "{{ s | wordwrap(1, wrapstring=s) }}",
    "batch": "{{ [1] | batch(10 ** 10, 0) | list }}",
    "slice": "{{ [1] | slice(10 ** 10) | list }}",
    "sum": "{{ ([[1] * 1000] * 100000) | sum(start=[]) }}",
    "round": "{{ 1.5 | round(10 ** 10, 'ceil') }}",
    "bytes": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "date": "{{ strftime_now('%10000000000d') }}",
    "range": "{{ range(10 ** 10) | list }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_what_has_no_end_is_stopped(template, monkeypatch):
    # A smaller budget, for the test's sake; what it bounds stays the same.
    monkeypatch.setattr(budget, "BASE_UNITS", 2**22)
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(errors.ConfigError, match="fails on a plain question"):
            chat.ChatTemplate(template)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20
    assert time.monotonic() - began < 30


def test_what_is_slow_but_small_is_stopped_by_the_deadline(monkeypatch):
    monkeypatch.setattr(budget, "DEADLINE_S", 0.2)
    search = "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'ab' in s %}{% endif %}"
    with pytest.raises(errors.ConfigError, match=r"longer than 0.2 s"):
        chat.ChatTemplate(search + "{% endfor %}")


def test_a_request_that_makes_a_template_run_on_is_a_request_error(monkeypatch):
    monkeypatch.setattr(budget, "DEADLINE_S", 600.0)  # a busy machine takes longer for the steps
    grows = (
        "{% set n = count | default(1) %}{% for a in range(n) %}{% for b in range(n) %}{% endfor %}"
    )
    template = chat.ChatTemplate(grows + "{% endfor %}{{ messages[0].content }}")
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages, variables={"count": 3}) == "hi"
    with pytest.raises(errors.RequestError, match="too many steps"):
        template.render(messages, variables={"count": 99999})


def test_a_long_conversation_is_within_the_limits():
    messages = [{"role": "user", "content": "hello " * 2000}] * 2000
    template = chat.ChatTemplate(
        "{% for m in messages %}{% set c = m.content.split('x')[-1] | trim %}"
        "{{ '<' ~ m.role ~ '>' + c | replace('y', 'z') }}{% endfor %}"
    )
    assert len(template.render(messages)) == 2000 * (12000 - 1 + len("<user>"))
