import jax
import pytest


@pytest.fixture(autouse=True)
def highest_matmul_precision():
    with jax.default_matmul_precision("highest"):
        yield
