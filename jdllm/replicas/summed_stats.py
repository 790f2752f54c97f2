"""The statistics of several replicas as those of one server."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdllm.engine.stats import EngineStats

# Of what replicas do at the same time, the slowest counts; of what they have alike, any.
LARGEST = frozenset({"jit_compile_seconds", "startup_time_seconds", "tp_size", "ep_size"})
# Shares that have no sums to divide here; replicas count alike.
MEANS = frozenset({"padding_fraction", "batch_occupancy"})


def add(parts: Sequence[EngineStats]) -> EngineStats:
    """Returns the sums; a share is computed from sums where there are some. None of them: zeros."""
    columns = {
        field.name: [getattr(one, field.name) for one in parts]
        for field in dataclasses.fields(EngineStats)
    }
    values: dict[str, Any] = {name: sum(column) for name, column in columns.items()}
    values |= {name: max(columns[name], default=0) for name in LARGEST}
    values |= {name: sum(columns[name]) / max(len(parts), 1) for name in MEANS}
    values["token_usage"] = values["num_used_tokens"] / max(values["max_total_num_tokens"], 1)
    values["cache_hit_rate"] = values["cached_tokens_total"] / max(values["prompt_tokens_total"], 1)
    return EngineStats(**values)
