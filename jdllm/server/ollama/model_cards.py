"""What Ollama's clients ask about the models of a server; this one has one, always loaded."""

from __future__ import annotations

import hashlib
from typing import Any

from jdllm import spec
from jdllm.server import state
from jdllm.server.ollama import answer

# Clients look here for what they may send. These routes take what a server of this version takes
# for text; a newer one adds nothing that is served here.
API_VERSION = "0.9.0"
NEVER = "0001-01-01T00:00:00Z"  # how Ollama says that a model stays loaded


def tagged_name(server: state.ServerState) -> str:
    """Returns the model's name as Ollama lists it."""
    name = server.engine.model_name
    return name if ":" in name else f"{name}:latest"


def listed(server: state.ServerState) -> dict[str, Any]:
    """Returns the entry of /api/tags; the digest, by which clients know models, is of the name."""
    name = tagged_name(server)
    return {
        "name": name,
        "model": name,
        "modified_at": answer.timestamp(server.created_s),
        "size": weight_bytes(server),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details(server),
    }


def loaded(server: state.ServerState) -> dict[str, Any]:
    """Returns the entry of /api/ps."""
    size = weight_bytes(server)
    context = {"context_length": server.engine.context_length}
    return listed(server) | {"expires_at": NEVER, "size_vram": size} | context


def shown(server: state.ServerState) -> dict[str, Any]:
    """Returns the answer of /api/show."""
    engine = server.engine
    family = engine.spec.model_type
    infills = engine.spec.diffusion.attention_pattern is spec.AttentionPattern.FULL
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(server),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": engine.context_length,
            f"{family}.embedding_length": engine.spec.hidden_size,
            f"{family}.block_count": engine.spec.num_layers,
        },
        "capabilities": ["completion", "insert"] if infills else ["completion"],
        "modified_at": answer.timestamp(server.created_s),
    }


def details(server: state.ServerState) -> dict[str, Any]:
    family = server.engine.spec.model_type
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def weight_bytes(server: state.ServerState) -> int:
    return int(server.engine.stats().weight_memory_usage_gb * 1e9)
