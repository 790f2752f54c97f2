"""`python -m jdllm.eval.lm_eval`: lm-eval's own command line, which then knows `--model jdllm`."""

from __future__ import annotations

import sys

try:
    # An optional dependency, which the type checker's environment does not have.
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    sys.exit(f"jdllm.eval.lm_eval needs lm-eval ({missing}): pip install 'jdllm[eval]'")

from jdllm import errors
from jdllm.eval import backends, lm_eval_model


def main() -> None:
    """Hands over to lm-eval; an error of ours ends with one line on stderr."""
    assert lm_eval_model.JdllmLM, "importing it registers the model"
    try:
        cli_evaluate()
    except (
        errors.ConfigError,
        errors.RequestError,
        backends.BackendError,
        NotImplementedError,
    ) as error:
        if not error.args:
            raise
        sys.exit(f"jdllm.eval.lm_eval: error: {error}")


if __name__ == "__main__":
    main()
