"""transformers without its warnings on import: only its tokenizers are used."""

from __future__ import annotations

import logging

# It warns that PyTorch is missing.
logging.getLogger("transformers").disabled = True
import transformers  # noqa: E402
from transformers.models.auto import tokenization_auto  # noqa: E402

logging.getLogger("transformers").disabled = False
# It reads config.json next to the tokenizer and warns about model types and RoPE keys that it
# does not know; `models/` decides about that file.
logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
logging.getLogger("transformers.modeling_rope_utils").setLevel(logging.ERROR)

__all__ = ["tokenization_auto", "transformers"]
