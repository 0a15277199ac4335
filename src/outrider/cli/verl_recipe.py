"""Reads a service's settings from the group `proxy_server` in a YAML configuration of verl's recipe.

The other groups of the file belong to the recipe's trainer and are ignored. The keys `tool_format` and `llm_proxy_ip`
have no effect. Invariant: unknown keys of `proxy_server`, and values without a matching setting, are refused with an
error that names the key and its line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.errors import InvalidField
from outrider.faults import fault_text
from outrider.text_files import read_text_file

MOST = 1 << 20
"""Maximum size of a configuration file in bytes."""
GROUP = "proxy_server"
FIELD = "config"
INTERPOLATION = "${"


class _ProxyServer(BaseModel):
    """The keys of the group `proxy_server`. A null value has the same effect as a missing key."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    host: Annotated[str, Field(min_length=1)] | None = None
    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    tool_format: str | None = None
    llm_proxy_ip: str | None = None
    debug: bool | None = None
    session_dump_dir: str | None = None


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a configuration of verl's recipe, and return its settings in the same form as a settings file. Raises
    InvalidField if the group is missing, if it has an unknown key, or if a value has no matching setting."""
    group, lines = _group(path)

    def refused(key: str, why: str, hint: str | None = None) -> InvalidField:
        return InvalidField(f"{path}, line {lines.get(key, lines[''])}: {why}", field=f"{GROUP}.{key}", hint=hint)

    for key, value in group.items():
        if isinstance(value, str) and INTERPOLATION in value:
            raise refused(str(key), f"{value!r} is an interpolation, which is not resolved here", "write the value")
    try:
        proxy = _ProxyServer.model_validate(group)
    except ValidationError as error:
        fault = error.errors()[0]
        raise refused(str(fault["loc"][0]), fault_text(fault, _ProxyServer)) from error
    if proxy.session_dump_dir is not None:
        raise refused(
            "session_dump_dir",
            "records of sessions are not written to files: they are in the service's store",
            "leave the key out; GET /sessions/{session_id} has the record, also after a restart",
        )
    settings: dict[str, Any] = {}
    if proxy.host is not None:
        settings["host"] = proxy.host
    if proxy.port is not None:
        settings["port"] = proxy.port
    if proxy.debug:
        settings["log_level"] = "debug"
    return settings


def _group(path: Path) -> tuple[dict[Any, Any], dict[str, int]]:
    """Return the group `proxy_server`, and the line number of each of its keys. Lines are counted from 1. The key ""
    stands for the line of the group itself."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise InvalidField(
            f"{path} cannot be read without the package pyyaml", field=FIELD, hint="pip install pyyaml"
        ) from error
    text = read_text_file(path, field=FIELD, limit=MOST, what="configuration of verl's recipe")
    try:
        value, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidField(f"{path} is not YAML: {error}", field=FIELD) from error
    if not isinstance(value, dict) or GROUP not in value:
        raise InvalidField(
            f"{path} has no group {GROUP}, and no other group of the recipe has settings of the proxy",
            field=FIELD,
            hint="leave --config out; a topology of Polar is read with --compat polar",
        )
    group = value[GROUP]
    top, node = next((key, node) for key, node in reversed(root.value) if key.value == GROUP)
    lines = {"": top.start_mark.line + 1}
    if isinstance(node, yaml.MappingNode):
        lines |= {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    if group is None:
        return {}, lines
    if not isinstance(group, dict):
        raise InvalidField(f"{path}, line {lines['']}: {GROUP} must be a group of keys", field=GROUP)
    return group, lines
