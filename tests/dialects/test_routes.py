"""Which dialect answers a route that several could."""

from __future__ import annotations

import pytest

from outrider.dialects import dialect_of_unknown_routes, dialects
from outrider.dialects.base import WireCall


@pytest.mark.parametrize(
    ("header", "dialect"),
    [((b"anthropic-version", b"2023-06-01"), "messages"), ((b"x-goog-api-key", b"k"), "gemini"), (None, "chat")],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
def test_models_are_listed_in_the_dialect_of_the_clients_headers(
    path: str, header: tuple[bytes, bytes] | None, dialect: str
) -> None:
    call = WireCall("GET", path, headers=[header] if header else [])
    assert next(one.name for one in dialects() if one.action(call) is not None) == dialect


def test_unknown_routes_are_refused_by_a_dialect_that_is_served() -> None:
    assert dialect_of_unknown_routes().name in [one.name for one in dialects()]
    assert all(one.action(WireCall("GET", "/elsewhere")) is None for one in dialects())
