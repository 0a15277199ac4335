"""The choice of a dialect for routes that several dialects have, and for unknown routes."""

from __future__ import annotations

import pytest

from outrider.dialects import DIALECTS, UNKNOWN_ROUTES
from outrider.dialects.base import RouteTable, WireCall

ROUTES = RouteTable(DIALECTS)


@pytest.mark.parametrize(
    ("header", "dialect"),
    [((b"anthropic-version", b"2023-06-01"), "messages"), ((b"x-goog-api-key", b"k"), "gemini"), (None, "chat")],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
def test_models_are_listed_in_the_dialect_of_the_clients_headers(
    path: str, header: tuple[bytes, bytes] | None, dialect: str
) -> None:
    routed = ROUTES.find(WireCall("GET", path, headers=[header] if header else []))
    assert routed is not None
    assert routed.dialect.name == dialect


@pytest.mark.parametrize("path", ["/elsewhere", "/v1/messages\n", "/v1/models\nx", "/v1/chat/completions/"])
def test_unknown_routes_are_refused_by_a_dialect_that_is_served(path: str) -> None:
    assert UNKNOWN_ROUTES in DIALECTS
    assert ROUTES.find(WireCall("GET", path)) is None
