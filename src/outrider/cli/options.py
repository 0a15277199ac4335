"""Options that several commands share, and the client made from them."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.cli.terminal import terminal_of
from outrider.client.client import DEFAULT_URL, AsyncClient, Client
from outrider.environment import environment


def _json(ctx: typer.Context, given: bool) -> bool:
    # The option is eager: it is read before the others, so that an error in another option is written as JSON, too.
    terminal_of(ctx).json = given
    return given


Url = Annotated[
    str | None,
    typer.Option(
        "--url", metavar="URL", help="The service's address.", show_default=f"$OUTRIDER_URL, else {DEFAULT_URL}"
    ),
]
Token = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN", help="The service's access token.", show_default="$OUTRIDER_TOKEN"),
]
Ca = Annotated[
    str | None,
    typer.Option(
        "--ca",
        metavar="FILE",
        help="Certificate (PEM) of the authority of the service's.",
        show_default="$OUTRIDER_CA, else those of this machine",
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Run Harbor tasks that ask for a network, or leave it open, without one.")
]
Json = Annotated[
    bool, typer.Option("--json", callback=_json, is_eager=True, help="Write one JSON document to standard output.")
]


def client(url: str | None, token: str | None, ca: str | None) -> Client:
    """Return a client of the service that the options name, or else the environment."""
    return Client(_url(url), token=token or environment("OUTRIDER_TOKEN"), ca=ca or environment("OUTRIDER_CA"))


def async_client(url: str | None, token: str | None, ca: str | None) -> AsyncClient:
    """Return a client like `client` does, for asynchronous commands."""
    return AsyncClient(_url(url), token=token or environment("OUTRIDER_TOKEN"), ca=ca or environment("OUTRIDER_CA"))


def _url(url: str | None) -> str:
    return url or environment("OUTRIDER_URL") or DEFAULT_URL
