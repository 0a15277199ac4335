"""Writes the MCP servers of a task into the file from which an agent program reads its servers.

The module is pure. Invariants: placeholders in the values of a server are not replaced; everything else in the file
keeps its value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Any

import msgspec

from outrider.destinations import Destination, host_name
from outrider.errors import InvalidField
from outrider.spec import McpServer, McpTransport

FIELD = "task.harness.mcp_servers"
FORMATS = (".json", ".toml", ".yaml")
"""Suffixes of files into which servers can be written. The .yaml file of a preset must be JSON, which is also YAML."""


class McpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form in which a program gets MCP servers. In `name`, `tool` and `allowed`, {server} stands for the name of a
    server.

    file: the file with the servers. It may be one of the preset's files, and is written in the same way.
    key: the path of a table in `file`, with dots between nested tables. Its entries are the servers, by name.
    entries: the form of an entry for each transport that the program supports. In a form, "{name}", "{command}",
        "{args}", "{argv}" (the command and its arguments), "{env}", "{url}" and "{headers}" are replaced. If the forms
        have "{name}", `key` is the path of a list instead of a table.
    env, text: for a task with servers, these variables are set, and this text is merged into `file`.
    name: the name of a server in `file`. It differs from "{server}" if the program reserves some names for itself.
    tool: the model's name for the tool {tool} of a server.
    allowed: in the program's list of allowed tools, the entry that allows all tools of a server. It is empty if this
        list does not apply to tools of servers.
    """

    file: str
    key: str
    tool: str
    allowed: str = ""
    name: str = "{server}"
    entries: dict[McpTransport, dict[str, Any]]
    env: dict[str, str] = {}
    text: str = ""

    def __post_init__(self) -> None:
        if PurePosixPath(self.file).suffix not in FORMATS:
            raise ValueError(f"mcp.file must end in {' or '.join(FORMATS)}")
        if len({"{name}" in form.values() for form in self.entries.values()}) != 1:
            raise ValueError("all forms in mcp.entries must have {name}, or none of them")

    @property
    def listed(self) -> bool:
        """Return True if the program's settings have a list of servers instead of a table."""
        return any("{name}" in form.values() for form in self.entries.values())


def check_mcp_servers(name: str, settings: McpSettings | None, servers: Sequence[McpServer], *, hint: str) -> None:
    """Raise InvalidField if the harness `name` does not support one of the servers. `hint` is for a harness that
    supports no MCP servers."""
    if servers and settings is None:
        raise InvalidField(f"harness {name!r} cannot be given MCP servers", field=FIELD, hint=hint)
    for number, server in enumerate(servers):
        if settings is not None and server.transport not in settings.entries:
            raise InvalidField(
                f"harness {name!r} has no MCP servers of transport {server.transport!r}",
                field=f"{FIELD}.{number}.transport",
                hint=f"its transports: {', '.join(settings.entries)}",
            )


def check_reachable(servers: Sequence[McpServer], destinations: Sequence[str] = ()) -> None:
    """Raise InvalidField if the sandbox cannot reach a server. A sandbox reaches its own loopback and, while the agent
    runs, the `destinations` of its network."""
    for number, server in enumerate(servers):
        if server.url is None:
            continue
        host, port = host_name((server.url.host or "").strip("[]")), server.url.port or 0
        if host is None or not (_is_loopback(host) or _matches(destinations, host, port)):
            where = f"{server.url.host}:{port}"
            if not destinations:
                why = "it has no network but its own loopback"
                hint = (
                    "run the server inside the sandbox: give its command with transport 'stdio', or start it in a "
                    "prepare step and give a URL of 127.0.0.1; or give the task a network, task.runtime.network"
                )
            else:
                why = "its network while the agent runs does not include that place"
                hint = f"add {where!r} to task.runtime.network"
            raise InvalidField(
                f"the sandbox cannot reach the MCP server at {where}: {why}", field=f"{FIELD}.{number}.url", hint=hint
            )


def _matches(destinations: Sequence[str], host: str, port: int) -> bool:
    return any(Destination.read(one).matches(host, port) for one in destinations)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def with_servers(text: str, settings: McpSettings, servers: Sequence[McpServer]) -> str:
    """Return the text of the program's file with the servers added. `text` is the file without the servers, and may be
    empty."""
    entries: dict[str, dict[str, Any]] = {}
    for server in servers:
        name = settings.name.format(server=server.name)
        entries[name] = _entry(settings.entries[server.transport], name, server)
    if PurePosixPath(settings.file).suffix == ".toml":
        # A new table in TOML can simply be appended to the file.
        tables = (_table(settings, name, entry) for name, entry in entries.items())
        return "\n".join((text.rstrip("\n"), *tables)) + "\n"
    data = json.loads(text or "{}")
    *outer, key = settings.key.split(".")
    table = data
    for name in outer:
        table = table.setdefault(name, {})
    if settings.listed:
        table[key] = [*table.get(key, []), *entries.values()]
    else:
        table[key] = table.get(key, {}) | entries
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _table(settings: McpSettings, name: str, entry: Mapping[str, Any]) -> str:
    heading = f"[[{settings.key}]]" if settings.listed else f"[{settings.key}.{name}]"
    return "\n".join((f"\n{heading}", *(f"{key} = {_in_toml(value)}" for key, value in entry.items())))


def _entry(form: Mapping[str, Any], name: str, server: McpServer) -> dict[str, Any]:
    values: dict[str, Any] = {
        "{name}": name,
        "{command}": server.command,
        "{args}": server.args,
        "{argv}": [server.command, *server.args],
        "{env}": server.env,
        "{url}": str(server.url),
        "{headers}": server.headers,
    }
    return {key: values.get(value, value) if isinstance(value, str) else value for key, value in form.items()}


def _in_toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_in_toml(name)} = {_in_toml(each)}' for name, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_in_toml, value))}]"
    # A JSON string is also a TOML string, but TOML requires that DEL is escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
