"""Sets up compilation before a test module imports jax, and watches what a run takes."""

import gc

import pytest
from support import compiling, resources

RESOURCES = resources.Resources()


def pytest_configure(config):
    has_cache = config.pluginmanager.has_plugin("cacheprovider")
    compiling.set_up(str(config.cache.mkdir("compiled")) if has_cache else None)


def pytest_collection_finish(session):
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    module = item.nodeid.partition("::")[0]
    with RESOURCES.of_module(module):
        result = yield
        ends = nextitem is None or nextitem.path != item.path
        RESOURCES.after_test(ended=getattr(item, "module", None) if ends else None)
    return result


def pytest_sessionfinish(session):
    if RESOURCES.is_too_large:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not RESOURCES.has_run:
        return
    terminalreporter.section("resources")
    for line in RESOURCES.summary():
        terminalreporter.write_line(line)
