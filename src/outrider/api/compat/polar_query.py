"""Parses the query parameters of Polar's requests. The functions raise InvalidField with the name of a wrong
parameter."""

from __future__ import annotations

import re
from contextlib import suppress

from starlette.requests import Request

from outrider.api.compat.polar_results import MOST_LISTED
from outrider.errors import InvalidField


def boolean_of(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise InvalidField(f"must be true or false, not {given!r}", field=name)
    return given in ("true", "1")


def number_of(request: Request, name: str, usual: float, *, least: float, most: float) -> float:
    given = request.query_params.get(name)
    if given is None:
        return usual
    with suppress(ValueError):
        if least <= (value := float(given)) <= most:
            return value
    raise InvalidField(f"must be a number from {least:g} to {most:g}", field=name)


def limit_of(request: Request) -> int:
    given = request.query_params.get("limit", "200")
    if not re.fullmatch("[0-9]{1,4}", given) or not 1 <= int(given) <= MOST_LISTED:
        raise InvalidField(f"must be a whole number from 1 to {MOST_LISTED}", field="limit")
    return int(given)


def choice_of(request: Request, name: str, known: tuple[str, ...]) -> str | None:
    given = request.query_params.get(name)
    if given is not None and given not in known:
        raise InvalidField(f"{given!r} is not one of {', '.join(known)}", field=name)
    return given
