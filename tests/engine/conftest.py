"""One tiny engine for the tests of this folder, and one that serves requests alone."""

import pytest
from tiny_engine import make_engine


@pytest.fixture(scope="session")
def engine():
    with make_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def cacheless_engine():
    with make_engine(disable_radix_cache=True, max_running_requests=1) as engine:
        yield engine
