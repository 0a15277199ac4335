"""`outrider token`: creates, lists and revokes tokens of the control API. The first token can be created in the store
of a stopped service."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.options import command
from outrider.cli.tables import token_table
from outrider.cli.terminal import Terminal
from outrider.client.client import Client
from outrider.errors import InvalidField, OutriderError
from outrider.schemas import NewToken, Role, TokenList

if TYPE_CHECKING:
    from outrider.config import Config

CONFIG = Path("outrider.toml")
"""The file in which users usually keep the settings of a service, in the folder where they start the service."""

Name = Annotated[str, CliArgument(metavar="NAME", help="The token's name.")]


@command
def create(
    terminal: Terminal,
    service: Client,
    role: Annotated[
        Role,
        CliOption(
            metavar="ROLE",
            help="read: look. submit: also submit groups, and cancel those. node: only join as a node. admin: all.",
        ),
    ],
    name: Annotated[str, CliOption(metavar="NAME", help="Whose it is. Groups and the audit log say it.")],
    tenant: Annotated[
        str | None,
        CliOption(
            metavar="NAME", help="Whose groups it submits and sees.", show_default="a tenant of the token's own name"
        ),
    ] = None,
    max_queued: Annotated[
        int | None,
        CliOption(metavar="N", help="Maximum sessions queued or running at once.", show_default="no limit"),
    ] = None,
    expires: Annotated[
        float | None, CliOption(metavar="DAYS", help="Days until it expires.", show_default="never")
    ] = None,
    data: Annotated[
        Path | None,
        CliOption(metavar="DIR", help="Data folder of a service that is stopped, for its first token."),
    ] = None,
    store: Annotated[
        str | None,
        CliOption(metavar="URL", help="Database of the stopped service, if not SQLite in its data folder."),
    ] = None,
    config: Annotated[Path | None, CliOption(metavar="FILE", help="Settings of the stopped service.")] = None,
) -> None:
    """Make a token, and print it. It cannot be printed again.

    With --data, --store or --config, the token is made for a stopped service.
    Pass the same values as to `outrider serve`.

    Examples:

        outrider token create --role admin --name me --data .outrider

        outrider token create --role admin --name me --config outrider.toml

        outrider token create --role submit --name alice --max-queued 500 --expires 90

        outrider token create --role read --name alices-dashboard --tenant alice
    """
    if data is None and store is None and config is None:
        new = service.create_token(name, role, tenant=tenant, max_queued=max_queued, expires_days=expires)
    else:
        # imported late, because only a token of a stopped service needs settings
        from outrider.cli.setting_options import read_settings

        settings = read_settings({"data": data, "store": store, "config": config})
        if not settings.data.is_dir():
            hint = "it is made when the service starts"
            raise InvalidField(f"there is no folder {settings.data}", field="data", hint=hint)
        if settings.store is None:
            _check_no_other_store(settings.data, config)
        limits = {"max_queued": max_queued, "expires_days": expires}
        spec = {"name": name, "role": role, "tenant": tenant, **limits}
        new = asyncio.run(_create_in(settings, spec))
        if settings.store is None:
            terminal.note(f"only a service whose store is SQLite in {settings.data} knows this token")
    if not terminal.json:
        terminal.note("keep this token: it cannot be shown again")
    terminal.show(new, new.text)


def _check_no_other_store(data: Path, config: Path | None) -> None:
    """Raise InvalidField if the service seems to use another store than SQLite, although the given settings name no
    store. A token that is created in the SQLite file of the data folder would be unknown to such a service."""
    # Imported here, because the other commands do not need the libraries of the service.
    from outrider.service.data_folder import DATABASE, RUNS

    if (data / DATABASE).exists():
        return
    if (data / RUNS).exists():  # every service makes this file, with SQLite and with PostgreSQL
        sign = f"it has used {data}, but there is no {DATABASE}"
    elif config is None and _names_a_store(data):
        sign = f"{CONFIG} names one"
    else:
        return
    raise InvalidField(
        f"the service seems to have another store than SQLite: {sign}",
        field="store",
        hint="name it with --config FILE, --store URL or OUTRIDER_STORE; if it has none, start the service once before",
    )


def _names_a_store(data: Path) -> bool:
    """Return True if the settings file of the current folder names both a store and this data folder."""
    from outrider.config import Config, read_settings_file

    try:
        settings = read_settings_file(CONFIG)
    except (OSError, OutriderError):  # the file may belong to another data folder
        return False
    folder = settings.get("data", Config.model_fields["data"].default)
    return bool(settings.get("store")) and os.path.realpath(str(folder)) == os.path.realpath(data)


async def _create_in(config: Config, spec: dict[str, Any]) -> NewToken:
    """Make a token in the store of a stopped service."""
    # Imported here, because the other commands do not need the libraries of the service.
    from outrider.service.admission import parse_body
    from outrider.service.audit import AuditEntry, AuditLog
    from outrider.service.data_folder import open_store
    from outrider.service.principals import OPERATOR
    from outrider.service.tokens import TokenRegistry
    from outrider.spec import TokenSpec

    async with open_store(config) as store:
        new = await TokenRegistry(store, config.token).create(parse_body(TokenSpec, msgspec.json.encode(spec)))
    entry = AuditEntry(
        at=new.token.created,
        who=OPERATOR.name,
        role=OPERATOR.role,
        call="outrider token create",
        ids={"name": new.token.name},
        status=201,
    )
    await AuditLog(config.data).add(entry)
    return new


@command
def list_tokens(terminal: Terminal, service: Client) -> None:
    """List the tokens by name, including expired and revoked ones.

    Example:

        outrider token list
    """
    tokens = service.tokens()
    terminal.show(TokenList(tokens=tokens), token_table(tokens))


@command
def revoke(terminal: Terminal, service: Client, name: Name) -> None:
    """Revoke a token. Calls under way with the token are cut off.

    Example:

        outrider token revoke alice
    """
    revoked = service.revoke_token(name)
    terminal.show(revoked, f"{revoked.name} is revoked")
