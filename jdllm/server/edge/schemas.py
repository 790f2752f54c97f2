"""Puts the request models into /openapi.json; the routes parse bodies themselves.

They do so because a bad body must get a 400 in OpenAI's form that names one field, and
FastAPI's own parsing does not give that.
"""

from __future__ import annotations

from typing import Any

import pydantic


def body(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route that reads `model`."""
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
