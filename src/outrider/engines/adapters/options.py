"""Checks the options and the URL of an engine when the engine object is created.

Invariant: a misspelled option raises InvalidField with the option's name.
"""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from outrider.engines.base import EngineOptions
from outrider.errors import InvalidField

T = TypeVar("T", bound=msgspec.Struct)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of every engine server. `api_key` is sent as a bearer token; with None, no token is sent."""

    api_key: str | None = None


def read_options(kind: type[T], values: dict[str, Any]) -> T:
    """Convert option values to a struct of type `kind`. Raises InvalidField for an unknown name or a wrong type."""
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise InvalidField(f"engine options: {error}", field="options", hint=f"known: {known}") from error


def server_url(options: EngineOptions) -> str:
    """Return the server's base URL without a trailing slash or `/v1`. Raises InvalidField if the URL is missing or is
    not a valid http or https URL."""
    url = (options.url or "").rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unclosed bracket, or an invalid port number
        usable = False
    if not usable:
        raise InvalidField(
            f"engine {options.name!r} needs the http:// or https:// URL of its server, not {options.url!r}",
            field="url",
        )
    return url.removesuffix("/v1")
