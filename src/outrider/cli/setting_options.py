"""Makes the command-line options for a service's settings, which config.py defines.

The value of an option is a text or a list of texts. `load_config` converts and checks the texts, as it does with
environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from outrider.cli.command_line import OPTIONS, CliOption
from outrider.cli.engine_option import KIND_HELP, parse_engine
from outrider.config import OWN, Config, all_settings, chosen_systems, load_config, takes_many
from outrider.errors import InvalidField

REPEATED = "May be repeated."

ConfigFile = Annotated[
    Path | None,
    CliOption(
        metavar="FILE",
        help="Settings as TOML, or as YAML of Polar or of verl's recipe. Flags and variables win over it.",
    ),
]
Verbose = Annotated[bool, CliOption("--verbose", "-v", help="Log more.")]
MACHINE = OWN - {"data"}
"""Settings that a machine chooses for itself when it joins a service. The data folder is left out, because a node has
no store."""
MachineConfig = Annotated[Config, MACHINE]
"""Annotation of a command's parameter. It gives the command one option for each setting in MACHINE. The annotation
`Config` gives a command options for all settings."""

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def setting_options(only: frozenset[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield the option --config, then an option for each setting. If `only` is given, it names the settings and
    sections that get options. Each option is given as the name and the annotation of a function's parameter."""
    yield "config", ConfigFile
    for path, field, setting in all_settings():
        section, dot, _ = path.partition(".")
        if setting.option is None or (only is not None and section not in only):
            continue
        option, _, metavar = setting.option.partition(" ")
        many = takes_many(field)
        help = (_plain(field.description or ""), KIND_HELP if path == "engines" else "", REPEATED if many else "")
        info = CliOption(
            option,
            metavar=metavar or None,
            help=" ".join(filter(None, help)),
            show_default=_plain(setting.default) if setting.default else _shown(field.default),
            panel=(section.upper() if section == "tls" else section.capitalize()) if dot else OPTIONS,
        )
        kind = list[str] if many else str if metavar else bool
        yield _parameter(path), Annotated[kind | None, info]


def read_settings(options: Mapping[str, Any]) -> Config:
    """Return the settings, merged from the options, the environment and the file of --config. Raises InvalidField, also
    for an option whose text is empty: without its `--token "$TOKEN"`, a service would be open to all users."""
    flags: dict[str, Any] = {}
    for path, _, setting in all_settings():
        value = options.get(_parameter(path))
        if value == "":
            option = (setting.option or path).partition(" ")[0]
            raise InvalidField(f"{option} is empty", field=path, hint=f"give {option} a value, or leave it out")
        flags[path] = value or None
    if engines := flags["engines"]:
        flags["engines"] = [parse_engine(text) for text in engines]
    file: Path | None = options["config"]
    if file is not None and file.suffix in (".yaml", ".yml"):
        from outrider.cli.yaml_files import yaml_reader  # imported here, because most services have no YAML file

        return load_config(flags, file=file, read=yaml_reader(chosen_systems(flags)))
    return load_config(flags, file=file)


def _parameter(path: str) -> str:
    return path.replace(".", "__")


def _plain(markdown: str) -> str:
    """Return Markdown as plain text in one line, without links and backquotes."""
    return " ".join(_LINK.sub(r"\1", markdown.replace("\n", " ")).replace("`", "").split())


def _shown(default: Any) -> str | bool:
    """Return the default of a setting as a text for the help, or False if the help should show none."""
    if isinstance(default, tuple):
        return ", ".join(map(str, default)) or False
    if isinstance(default, float):
        return f"{default:g}"
    return False if default is None or default is False else str(default)
