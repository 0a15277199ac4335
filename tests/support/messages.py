"""The Messages dialect in tests: the official client's type of streamed events, for strict checks."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from support.later import anthropic


@cache
def event() -> TypeAdapter[Any]:
    """Return an adapter for the official client's type of all events."""
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)
