"""`outrider show`: one session's turns, verdict and error, for reading."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from outrider.cli.options import Json, Token, Url, client
from outrider.cli.terminal import terminal_of
from outrider.cli.transcript import print_session
from outrider.schemas import SessionView, TurnView


class Record(msgspec.Struct, frozen=True):
    """What `outrider show --json` writes."""

    session: SessionView
    turns: tuple[TurnView, ...]


def show(
    ctx: typer.Context,
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's id.")],
    url: Url = None,
    token: Token = None,
    json: Json = False,
) -> None:
    """Show what a session's model was shown and sampled, and how it ended.

    Of several attempts it is the newest.

    Example:

        outrider show s-0019a4e2b6c1f3d2-0
    """
    terminal = terminal_of(ctx)
    with client(url, token) as service:
        record = Record(service.session(session), service.turns(session))
    if terminal.json:
        terminal.document(record)
    else:
        print_session(terminal.out, record.session, record.turns)
