"""The oracles are exact, so float32 matmuls must not be rounded to TF32 on a GPU."""

import jax
import pytest


@pytest.fixture(autouse=True)
def full_matmul_precision():
    with jax.default_matmul_precision("highest"):
        yield
