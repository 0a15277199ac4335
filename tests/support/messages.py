"""The Messages dialect in tests: events of a stream, checked against the official client's strict types."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

from support.later import anthropic


@cache
def event() -> TypeAdapter[Any]:
    """The official client's type of all events."""
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)
