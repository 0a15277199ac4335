"""Presets: agent programs as data. A TOML file defines how a program is installed, started and pointed at its model.

Invariant: a loaded preset is complete and declares every option that it uses.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from types import UnionType
from typing import Any, Literal

import msgspec

from outrider.errors import InvalidField
from outrider.harnesses.placeholders import names_in
from outrider.spec import NonzeroExit

OptionValue = str | int | float | bool

DIALECT = "dialect"
"""Name of the option that selects the dialect of a preset with several dialects."""

_MINOR = re.compile(r"3\.[0-9]+")

_TYPES: dict[str, type | UnionType] = {
    "string": str,
    "template": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
}


class Option(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One option of a preset. An option without a default is required. In an option of type `template` the endpoint's
    placeholders ({base_url}, {api_key}, {model}, {instruction}) are filled in. `choices`, if not empty, are the allowed
    values."""

    type: Literal["string", "template", "integer", "number", "boolean"]
    default: OptionValue | None = None
    help: str = ""
    choices: tuple[OptionValue, ...] = ()


class ConfigFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file to write before the program starts. `path` is absolute, or relative to the sandbox's HOME."""

    path: str
    text: str


class Install(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The installation of the program on a node.

    `packages` are pinned requirements in the registry of `kind`. `node` is the version of Node.js for npm packages.
    `python` is the Python version ("3.12") for pip packages; None is the Python that runs Outrider. Install scripts of
    packages are never run; the commands in `after` run instead, in the program's folder. The command `check` prints
    `version` if the program works.
    """

    kind: Literal["pip", "npm"]
    version: str
    packages: tuple[str, ...]
    check: tuple[str, ...]
    check_seconds: float = 60
    node: str | None = None
    python: str | None = None
    after: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "npm") != (self.node is not None):
            raise ValueError("'node' is required for kind 'npm', and allowed for this kind only")
        if self.python is not None and (self.kind != "pip" or not _MINOR.fullmatch(self.python)):
            raise ValueError("'python' is allowed for kind 'pip' only, and must be a minor version such as '3.12'")


class Certify(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts about a program that `outrider harness check` needs and cannot learn from the program's requests.

    `shell` is the tool for running a command. `finish_command` is a command that ends the run.
    `subagent_arguments` are arguments for the tool that starts a sub-agent. `wait` is the tool for waiting for a
    sub-agent by its id, if the program does not wait by itself.
    """

    shell: str | None = None
    finish_command: str | None = None
    subagent_arguments: dict[str, OptionValue] = {}
    wait: str | None = None


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An agent program. Its texts may use the endpoint's placeholders, {option.x}, and {prefix} and {node} for the
    paths of the program and its Node.js. `answer` names the output that is the final answer, if any.

    `dialects` are the program's dialects, the default first. A preset with several dialects has the option `dialect`,
    and {dialect.x} is word x of the chosen dialect's entry in `words`, which may use the endpoint's placeholders.
    `logs` are the program's log files, as shell patterns below HOME: the end of the newest file is added to the
    program's output. `nonzero_exit` is the meaning of a non-zero exit code after the model has replied: see
    NonzeroExit.
    """

    name: str
    summary: str
    command: tuple[str, ...]
    stdin: str = ""
    env: dict[str, str] = {}
    files: tuple[ConfigFile, ...] = ()
    options: dict[str, Option] = {}
    dialects: tuple[str, ...] = ()
    words: dict[str, dict[str, str]] = {}
    logs: tuple[str, ...] = ()
    answer: Literal["stdout"] | None = None
    nonzero_exit: NonzeroExit = "grade"
    install: Install | None = None
    certify: Certify = Certify()

    def __post_init__(self) -> None:
        used = names_in(self.texts(), "dialect")
        lacking = {dialect for dialect in self.dialects if not used <= set(self.words.get(dialect, {}))}
        if self.words and lacking:
            raise ValueError(f"preset {self.name!r} has no words for: {', '.join(sorted(lacking))}")
        if missing := names_in(self.texts(), "option") - set(self.options):
            raise ValueError(f"preset {self.name!r} uses undeclared options: {', '.join(sorted(missing))}")

    def texts(self) -> tuple[str, ...]:
        """Return all texts in which placeholders are filled in."""
        return (*self.command, self.stdin, *self.env.values(), *(file.text for file in self.files))


def preset_names() -> list[str]:
    """Return the names of all built-in presets, sorted."""
    found = files("outrider.harnesses").joinpath("presets").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def load_preset(name: str, *, field: str | None = "task.harness.preset") -> Preset:
    """Return the preset with this name. Raises InvalidField for an unknown name, with all known names."""
    known = preset_names()
    if name not in known:
        raise InvalidField(f"unknown preset {name!r}", field=field, hint=f"known: {', '.join(known)}")
    return _read(name)


@functools.cache  # every session loads its preset, and the file cannot change while the service runs
def _read(name: str) -> Preset:
    text = files("outrider.harnesses").joinpath("presets", f"{name}.toml").read_text("utf-8")
    preset = msgspec.convert({**tomllib.loads(text), "name": name}, Preset)
    if len(preset.dialects) < 2:
        return preset
    option = Option(
        type="string",
        default=preset.dialects[0],
        choices=preset.dialects,
        help="The API of the program's model calls.",
    )
    return msgspec.structs.replace(preset, options={DIALECT: option, **preset.options})


def checked_options(
    preset: Preset, given: Mapping[str, Any], *, field: str = "task.harness.options"
) -> dict[str, OptionValue]:
    """Return the preset's options with defaults filled in. Raises InvalidField for an option that is unknown, missing,
    of the wrong type, or not one of its choices."""
    for name in given:
        if name not in preset.options:
            known = ", ".join(sorted(preset.options)) or "none"
            raise InvalidField(
                f"harness {preset.name!r} has no option {name!r}", field=f"{field}.{name}", hint=f"known: {known}"
            )
    values: dict[str, OptionValue] = {}
    for name, option in preset.options.items():
        value: Any = given.get(name, option.default)
        if value is None:
            raise InvalidField(f"harness {preset.name!r} needs option {name!r}", field=f"{field}.{name}")
        # True is an int in Python, but an option of a number type does not accept it.
        fits = isinstance(value, _TYPES[option.type]) and (option.type == "boolean" or not isinstance(value, bool))
        if not fits:
            raise InvalidField(
                f"option {name!r} must be a {option.type}, not {type(value).__name__}", field=f"{field}.{name}"
            )
        if option.choices and value not in option.choices:
            known = ", ".join(map(str, option.choices))
            raise InvalidField(f"option {name!r} cannot be {value!r}", field=f"{field}.{name}", hint=f"one of: {known}")
        values[name] = value
    return values
