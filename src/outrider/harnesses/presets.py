"""Presets: agent programs as data. A TOML file defines how a program is installed, started and pointed at its model.

Invariant: a loaded preset is complete and declares every option that its texts use.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import UnionType
from typing import Any, Literal

import msgspec

from outrider.errors import InvalidField
from outrider.harnesses.common_options import COMMON, OptionType
from outrider.harnesses.mcp_servers import McpSettings
from outrider.harnesses.placeholders import names_in
from outrider.spec import McpServer, NonzeroExit

OptionValue = str | int | float | bool | tuple[str, ...]

DIALECT = "dialect"
"""Name of the option that selects a dialect (an API that the program can speak)."""

MAX_ARGUMENT = 100_000
"""Maximum bytes of a text in an argument or a variable. Linux refuses arguments and variables above 128 KiB."""

_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,63}")

_MINOR = re.compile(r"3\.[0-9]+")

_TYPES: dict[str, type | UnionType] = {
    "string": str,
    "template": str,
    "integer": int,
    "number": int | float,
    "boolean": bool,
    "names": tuple,
}

_CALLED = {"integer": "an integer", "names": "a list of names", "template": "a string"}

_NAME = re.compile(r"(?!-)[^\s,\"'\\{}\x00-\x1f]{1,256}")
"""Matches a name in an option of type `names`. The name has no character with a special meaning in the lists and
settings that contain it."""


class Option(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One option of a preset.

    type: `template` means that the value may have the placeholders of the endpoint: {base_url}, {api_key}, {model},
        {instruction}. `names` means a list of names, or a text with names and commas.
    default, optional: a task must give an option that has no default and is not optional.
    choices, minimum: the allowed values (all, if empty), and the smallest number.
    spelling: for some values, the program's own word.
    dialects: the dialects in which the program has the option (all, if empty).
    arguments, env, files: additions if the option has a value: arguments at the end of the command, variables, and
        texts of files by path. If the preset itself writes a file at such a path, the two texts are merged.

    In texts of the preset, {option.x} is the value of the option x. For names, {option.x} has commas between them,
    {option.x.list} is a JSON list, and {option.x.members} has the members `"name": true` of a JSON object.
    """

    type: OptionType
    default: OptionValue | None = None
    help: str = ""
    choices: tuple[OptionValue, ...] = ()
    optional: bool = False
    minimum: float | None = None
    spelling: dict[str, str] = {}
    dialects: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = {}
    files: dict[str, str] = {}

    def texts(self) -> tuple[str, ...]:
        """Return the texts that the option adds if it has a value."""
        return (*self.arguments, *self.env.values(), *self.files.values())


class ConfigFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file that is written before the program starts. `path` is absolute, or relative to HOME in the sandbox. The
    texts in `added` are merged into `text`."""

    path: str
    text: str
    added: tuple[str, ...] = ()
    executable: bool = False


class SkillSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a program gets skills: it reads them from `folder`, a path below HOME. For a task with skills, the variables
    `env` are set."""

    folder: str
    env: dict[str, str] = {}


class Install(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The installation of the program on a node. Install scripts of packages are never run.

    packages: the packages to install from the registry of `kind`. The first package is the program, and ends with
        `version`.
    check: a command that prints `version` if the program works.
    node: the version of Node.js, for npm packages.
    python: the version of Python ("3.12"), for pip packages, or None for the Python that runs Outrider.
    after: commands to run in the program's folder after the installation.
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
        if not (self.packages and self.packages[0].endswith(self.version)):
            raise ValueError("the first package must be the program, in its 'version'")

    def at_version(self, version: str) -> Install:
        """Return how to install another version of the program. Other packages that are pinned to the program's version
        also get the new version."""
        ends = (f"=={self.version}", f"@{self.version}")
        packages = tuple(
            package.removesuffix(self.version) + version if package.endswith(ends) else package
            for package in self.packages
        )
        return msgspec.structs.replace(self, version=version, packages=packages)


class McpCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the model calls a tool of an MCP server by writing a program. The model calls the agent's tool `tool`, and
    passes the program in the argument named by `argument`. `text` is the program, with {server}, {tool} and {arguments}
    (a JSON object) to be replaced."""

    tool: str
    argument: str
    text: str


class Certify(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Facts about a program that `outrider harness check` cannot find in the program's requests.

    shell: the tool that runs a command.
    finish_command: a command that ends the run.
    subagent_arguments: arguments for the tool that starts a sub-agent.
    wait: the tool that waits for a sub-agent by its id, if the program does not always wait for sub-agents.
    skill: the tool that loads a skill.
    mcp_call: how the model calls a tool of an MCP server, if the program does not show such tools to the model.
    """

    shell: str | None = None
    finish_command: str | None = None
    subagent_arguments: dict[str, OptionValue] = {}
    wait: str | None = None
    skill: str | None = None
    mcp_call: McpCall | None = None


Finding = Literal["yes", "no", "not tried"]
"""Result of `outrider harness check` for one feature of a program. "not tried": the check found no tool that
could test the feature."""


class Certified(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Results of `outrider harness check` for the features of a preset's program, in its default dialect. A test runs
    the real programs and compares the results with these values.

    image: when the model opens an image file with a tool, the program sends the image to the model.
    subagent: the program has a tool that starts a sub-agent."""

    image: Finding = "not tried"
    subagent: Finding = "not tried"


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An agent program. Its texts may use the placeholders of the endpoint, {option.x}, {dialect.x}, {prefix} and
    {node} (the paths of the program and of its Node.js), and {home} (HOME in the sandbox).

    answer: which output is the final answer, or None.
    refused: the common options that the program does not have, each with the reason.
    dialects: the APIs that the program can speak, the default first. If there are several, the preset has the option
        `dialect`.
    words: for each dialect, the texts that replace {dialect.x}. They may use the endpoint's placeholders.
    logs: shell patterns of the program's log files below HOME. The end of the newest file is added to the output.
    nonzero_exit: what a non-zero exit code means if the model has replied (see NonzeroExit).
    mcp, skills: how the program gets MCP servers and skills. None means that the program does not support them.
    certified: the features for the table of programs in the docs.
    """

    name: str
    summary: str
    command: tuple[str, ...]
    stdin: str = ""
    env: dict[str, str] = {}
    files: tuple[ConfigFile, ...] = ()
    options: dict[str, Option] = {}
    refused: dict[str, str] = {}
    dialects: tuple[str, ...] = ()
    words: dict[str, dict[str, str]] = {}
    logs: tuple[str, ...] = ()
    answer: Literal["stdout"] | None = None
    nonzero_exit: NonzeroExit = "grade"
    install: Install | None = None
    mcp: McpSettings | None = None
    skills: SkillSettings | None = None
    certify: Certify = Certify()
    certified: Certified = Certified()

    def __post_init__(self) -> None:
        used = names_in(self.texts(), "dialect")
        lacking = {dialect for dialect in self.dialects if not used <= set(self.words.get(dialect, {}))}
        if self.words and lacking:
            raise ValueError(f"preset {self.name!r} has no words for: {', '.join(sorted(lacking))}")
        declared = {f"{name}{form}" for name in self.options for form in ("", ".list", ".members")}
        if missing := names_in(self.texts(), "option") - declared:
            raise ValueError(f"preset {self.name!r} uses undeclared options: {', '.join(sorted(missing))}")
        if wrong := [name for name in self.refused if name not in COMMON or name in self.options]:
            raise ValueError(f"preset {self.name!r} cannot refuse: {', '.join(sorted(wrong))}")

    def texts(self) -> tuple[str, ...]:
        """Return all texts in which placeholders are replaced."""
        own = (*self.command, self.stdin, *self.env.values(), *(file.text for file in self.files))
        return (*own, *(text for option in self.options.values() for text in option.texts()))

    def files_with(self, servers: Sequence[McpServer]) -> tuple[ConfigFile, ...]:
        """Return the preset's files, with the file for MCP servers if there are `servers`."""
        if not servers or self.mcp is None:
            return self.files
        files = {file.path: file for file in self.files}
        file = files.get(self.mcp.file) or ConfigFile(path=self.mcp.file, text="")
        added = (*file.added, self.mcp.text) if self.mcp.text else file.added
        return tuple((files | {file.path: msgspec.structs.replace(file, added=added)}).values())

    def at_version(self, version: str | None, *, field: str = "version") -> Preset:
        """Return the preset with another version of its program. If `version` is None, return this preset. Raises
        InvalidField if the preset installs no program, or if `version` is not an exact version."""
        if version is None:
            return self
        if self.install is None:
            raise InvalidField(f"preset {self.name!r} has no program with versions", field=field)
        if not is_version(version):
            raise InvalidField(f"{version!r} is no version", field=field, hint="give one exact version, such as 1.2.3")
        return msgspec.structs.replace(self, install=self.install.at_version(version))

    def with_options(self, values: Mapping[str, OptionValue]) -> Preset:
        """Return the preset with the arguments, variables and files that the options in `values` add."""
        given = [option for name, option in self.options.items() if name in values]
        files = {file.path: file for file in self.files}
        for path, text in (each for option in given for each in option.files.items()):
            file = files.get(path) or ConfigFile(path=path, text="")
            files[path] = msgspec.structs.replace(file, added=(*file.added, text))
        env = {name: text for option in given for name, text in option.env.items()}
        return msgspec.structs.replace(
            self,
            command=(*self.command, *(part for option in given for part in option.arguments)),
            env=self.env | env,
            files=tuple(files.values()),
        )


def is_version(text: str) -> bool:
    """Return True if the text looks like one exact version."""
    return _VERSION.fullmatch(text) is not None


def preset_names() -> list[str]:
    """Return the names of the built-in presets, sorted."""
    found = files("outrider.harnesses").joinpath("presets").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def load_preset(name: str, *, field: str | None = "task.harness.preset") -> Preset:
    """Return the preset with this name. If there is none, raises InvalidField with a hint that lists all names."""
    known = preset_names()
    if name not in known:
        raise InvalidField(f"unknown preset {name!r}", field=field, hint=f"known: {', '.join(known)}")
    return _read(name)


@functools.cache  # every session loads its preset, and the file does not change while the service runs
def _read(name: str) -> Preset:
    text = files("outrider.harnesses").joinpath("presets", f"{name}.toml").read_text("utf-8")
    raw = tomllib.loads(text)
    raw["options"] = {key: _with_common(key, given) for key, given in raw.get("options", {}).items()}
    preset = msgspec.convert({**raw, "name": name}, Preset)
    if len(preset.dialects) < 2:
        return preset
    option = Option(
        type="string",
        default=preset.dialects[0],
        choices=preset.dialects,
        help="The API of the program's model calls.",
    )
    return msgspec.structs.replace(preset, options={DIALECT: option, **preset.options})


def _with_common(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an option. For a common option, they include the common type, help, choices and minimum."""
    common = COMMON.get(name)
    if common is None:
        return given
    if "type" in given:
        raise ValueError(f"option {name!r} has its common type")
    fields = {"type": common.type, "help": common.help, "choices": common.choices, "minimum": common.minimum}
    return {**fields, "optional": "default" not in given, **given}


def _unknown(preset: Preset, name: str, field: str) -> InvalidField:
    """Return the error for an option `name` that the preset does not have."""
    if name in COMMON:
        reason = f": {preset.refused[name]}" if name in preset.refused else ""
        return InvalidField(
            f"harness {preset.name!r} has no option {name!r}{reason}",
            field=f"{field}.{name}",
            hint=COMMON[name].instead,
        )
    known = ", ".join(sorted(preset.options)) or "none"
    return InvalidField(
        f"harness {preset.name!r} has no option {name!r}", field=f"{field}.{name}", hint=f"known: {known}"
    )


def _names(value: Any) -> tuple[str, ...]:
    """Return the names in a list, or in a text with commas, without repetitions. Returns () for any other value."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return ()
    return tuple(dict.fromkeys(part.strip() for part in parts))


def checked_options(
    preset: Preset, given: Mapping[str, Any], *, field: str = "task.harness.options"
) -> dict[str, OptionValue]:
    """Return the values of the preset's options, including defaults. Optional options without a value are left out.
    Raises InvalidField for an option that is unknown, missing, of the wrong type, too small, or not one of its
    choices."""
    for name in given:
        if name not in preset.options:
            raise _unknown(preset, name, field)
    values: dict[str, OptionValue] = {}
    for name, option in preset.options.items():
        value: Any = given.get(name, option.default)
        if value is None and option.optional:
            continue
        if value is None:
            raise InvalidField(f"harness {preset.name!r} needs option {name!r}", field=f"{field}.{name}")
        values[name] = _checked(option, name, value, f"{field}.{name}")
    dialect = values.get(DIALECT)
    for name in values:
        if dialect is not None and (known := preset.options[name].dialects) and dialect not in known:
            raise InvalidField(
                f"harness {preset.name!r} has no option {name!r} in the dialect {dialect!r}",
                field=f"{field}.{name}",
                hint=f"its dialects with the option: {', '.join(known)}",
            )
    return values


def _checked(option: Option, name: str, value: Any, where: str) -> OptionValue:
    """Return the value of an option after checking its type and limits. Raises InvalidField for the field `where`."""
    names = _names(value) if option.type == "names" else ()
    if names:
        value = names
    # True and False are ints in Python, but an option that is a number does not accept them.
    fits = isinstance(value, _TYPES[option.type]) and (option.type == "boolean" or not isinstance(value, bool))
    if not fits:
        called = _CALLED.get(option.type, f"a {option.type}")
        raise InvalidField(f"option {name!r} must be {called}, not {type(value).__name__}", field=where)
    if option.choices and value not in option.choices:
        known = ", ".join(map(str, option.choices))
        raise InvalidField(f"option {name!r} cannot be {value!r}", field=where, hint=f"one of: {known}")
    if option.minimum is not None and not option.minimum <= value < math.inf:
        raise InvalidField(f"option {name!r} must be at least {option.minimum:g}", field=where)
    if bad := [part for part in names if not _NAME.fullmatch(part)]:
        raise InvalidField(f"option {name!r} has {bad[0]!r}, which is no name", field=where)
    text = ",".join(names) or str(value)
    if option.optional and not text:
        raise InvalidField(f"option {name!r} must not be empty", field=where, hint="leave it out")
    if "\0" in text:
        raise InvalidField(f"option {name!r} must not contain NUL", field=where)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidField(f"option {name!r} is no valid Unicode: {error.reason}", field=where) from error
    if size > MAX_ARGUMENT and name in names_in((*option.arguments, *option.env.values()), "option"):
        raise InvalidField(f"option {name!r} has more than {MAX_ARGUMENT} bytes", field=where)
    checked: OptionValue = value
    return checked
