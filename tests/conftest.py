"""Sets up compilation before a test module imports jax, and watches what a run takes."""

import contextlib
import gc
import logging

import pytest
from support import compiling, resources

RESOURCES = resources.Resources()


def pytest_configure(config):
    has_cache = config.pluginmanager.has_plugin("cacheprovider")
    compiling.set_up(str(config.cache.mkdir("compiled")) if has_cache else None)
    # pytest-xdist would begin with the files that have the most tests. In order, those of a folder
    # follow one another in a worker, too, and share what the folder keeps open.
    config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):  # a worker is watched by who started it
        resources.limit_arenas()
        RESOURCES.watch()


def pytest_collection_finish(session):
    gc.freeze()


@contextlib.contextmanager
def logs_as_before():
    """Undoes what commands set up, whose handlers write to a stream that ends with their test."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    module = item.nodeid.partition("::")[0]
    with RESOURCES.of_module(module):
        with logs_as_before():
            result = yield
        ends = nextitem is None or nextitem.path != item.path
        RESOURCES.after_test(
            ended=getattr(item, "module", None) if ends else None,
            folder_ended=nextitem is None or nextitem.path.parent != item.path.parent,
        )
    return result


def pytest_runtest_logstart(nodeid):
    RESOURCES.begin(nodeid)


def pytest_runtest_logfinish(nodeid):
    RESOURCES.end(nodeid)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, in the process that starts the workers
def pytest_testnodedown(node, error):
    if error is None:
        RESOURCES.add(node.workeroutput["resources"])


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem):
    RESOURCES.end(crashitem)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # the whole run is judged where it was started
        session.config.workeroutput["resources"] = RESOURCES.report()
    elif RESOURCES.is_too_large:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if not RESOURCES.has_run:
        return
    terminalreporter.section("resources")
    for line in RESOURCES.summary():
        terminalreporter.write_line(line)
