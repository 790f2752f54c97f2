"""`python -m jdllm.eval.lm_eval`: lm-eval's own command line, which then knows `--model jdllm`."""

from __future__ import annotations

import sys

from jdllm import errors
from jdllm.host import arguments

try:
    # An optional dependency, which the type checker's environment does not have.
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    needs = f"it needs lm-eval ({missing}): pip install 'jdllm[eval]'"
    arguments.report("python -m jdllm.eval.lm_eval", needs)
    sys.exit(1)

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
        arguments.report("python -m jdllm.eval.lm_eval", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
