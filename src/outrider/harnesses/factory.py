"""Makes a harness from a task's spec: once when the task is submitted, before the task is stored, and once per session.

This module reads presets and imports agents, but starts no program. Invariant: any mistake in the spec is an
InvalidField with the full path of the field.
"""

from __future__ import annotations

import msgspec
from pydantic import ValidationError

from outrider.errors import InvalidField
from outrider.faults import first_fault
from outrider.harnesses.base import Harness
from outrider.harnesses.command import CommandHarness
from outrider.harnesses.endpoint_variables import ENDPOINT_VARIABLES
from outrider.harnesses.external import ExternalHarness
from outrider.harnesses.inprocess import Agent, InProcessHarness
from outrider.harnesses.placeholders import names_in
from outrider.harnesses.presets import ConfigFile, Option, Preset, checked_options, load_preset
from outrider.plugins import resolve
from outrider.spec import HarnessSpec

FIELD = "task.harness"


def make_harness(spec: HarnessSpec) -> Harness:
    """Make the harness of a task's spec. Raises InvalidField."""
    if spec.elsewhere is not None:
        return ExternalHarness()
    if spec.agent is not None:
        return InProcessHarness(_make_agent(spec))
    preset = load_preset(spec.preset) if spec.preset is not None else _command_preset(spec)
    preset = preset.at_version(spec.version, field=f"{FIELD}.version")
    for name, value in spec.env.items():
        if name in ENDPOINT_VARIABLES:
            raise InvalidField(
                f"{name} is set to the session's own model endpoint and cannot be given",
                field=f"{FIELD}.env.{name}",
            )
        if "\0" in value:
            raise InvalidField("must not contain NUL", field=f"{FIELD}.env.{name}")
    if spec.nonzero_exit is not None:
        preset = msgspec.structs.replace(preset, nonzero_exit=spec.nonzero_exit)
    options = checked_options(preset, spec.options, field=f"{FIELD}.options")
    return CommandHarness(preset, options, spec.env, venv=spec.venv)


def _command_preset(spec: HarnessSpec) -> Preset:
    """Return the task's own command as a preset, with the options used in its texts."""
    command = tuple(spec.command or ())
    for index, part in enumerate(command):
        if "\0" in part:
            raise InvalidField("must not contain NUL", field=f"{FIELD}.command.{index}")
    if not command[0]:
        raise InvalidField("names no program", field=f"{FIELD}.command.0")
    options: dict[str, Option] = {}
    for name in names_in((*command, *spec.env.values(), *spec.files.values()), "option"):
        value = spec.options.get(name)
        if isinstance(value, bool):  # tested first, because a bool is also an int
            options[name] = Option(type="boolean")
        else:
            options[name] = Option(type="number" if isinstance(value, int | float) else "string")
    return Preset(
        name="command",
        summary="the task's own command",
        command=command,
        files=tuple(ConfigFile(path=path, text=text) for path, text in spec.files.items()),
        options=options,
    )


def _make_agent(spec: HarnessSpec) -> Agent:
    field = f"{FIELD}.agent"
    if spec.env:
        raise InvalidField("an in-process agent has no environment of its own", field=f"{FIELD}.env")
    if spec.nonzero_exit is not None:
        raise InvalidField("an in-process agent has no exit code", field=f"{FIELD}.nonzero_exit")
    made = resolve("agent", str(spec.agent), field=field)
    if not all(callable(getattr(made, hook, None)) for hook in ("__call__", "init", "run")):
        raise InvalidField(f"{spec.agent!r} is not an agent class with init and run", field=field)
    try:
        agent: Agent = made(dict(spec.options))
    except InvalidField:
        raise
    except ValidationError as error:
        raise first_fault(error, below=f"{FIELD}.options") from error
    except Exception as error:  # the user's code may raise anything
        message = f"{spec.agent!r} refuses its options: {type(error).__name__}: {error}"
        raise InvalidField(message, field=f"{FIELD}.options") from error
    return agent
