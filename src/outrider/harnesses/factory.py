"""Makes the harness of a task: once when the task is submitted, before it is stored, and then once per session.

This module reads presets and imports agents, but starts no program. Invariant: any mistake in the spec raises an
InvalidField with the full path of the field.
"""

from __future__ import annotations

import posixpath

import msgspec
from pydantic import ValidationError

from outrider.errors import InvalidField
from outrider.faults import first_fault
from outrider.harnesses.base import Harness
from outrider.harnesses.command import OWN_SETTINGS, CommandHarness
from outrider.harnesses.endpoint_variables import ENDPOINT_VARIABLES
from outrider.harnesses.external import ExternalHarness
from outrider.harnesses.inprocess import Agent, InProcessHarness
from outrider.harnesses.mcp_servers import FIELD as MCP_SERVERS
from outrider.harnesses.mcp_servers import check_mcp_servers
from outrider.harnesses.mcp_tools import NAME as TOOL_OF_AGENTS
from outrider.harnesses.placeholders import names_in
from outrider.harnesses.presets import ConfigFile, Option, Preset, checked_options, load_preset, preset_names
from outrider.harnesses.skills import FIELD as SKILLS
from outrider.plugins import resolve
from outrider.sandbox.runtimes.tool_server.launch import HOME as ROOTS_HOME
from outrider.spec import HarnessSpec, PrepareCommand, TaskSpec

FIELD = "task.harness"


def make_harness(spec: HarnessSpec) -> Harness:
    """Make the harness that the task's spec describes. Raises InvalidField."""
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
    can = [name for name in preset_names() if load_preset(name).mcp]
    others = f"presets with MCP servers: {', '.join(can)}"
    own = "write your program's settings with task.harness.files"
    check_mcp_servers(preset.name, preset.mcp, spec.mcp_servers, hint=others if spec.preset else own)
    if spec.skills and preset.skills is None:
        can = [name for name in preset_names() if load_preset(name).skills]
        raise InvalidField(
            f"harness {preset.name!r} cannot be given skills",
            field=SKILLS,
            hint=f"presets with skills: {', '.join(can)}"
            if spec.preset
            else "write them in prepare steps to the folder from which your program reads its skills",
        )
    return CommandHarness(
        preset,
        options,
        spec.env,
        venv=spec.venv,
        servers=spec.mcp_servers,
        skills=spec.skills,
        guarded=spec.preset is not None,
    )


def mcp_tool_names(spec: HarnessSpec) -> dict[str, str]:
    """Return the agent's names for the tools of MCP servers: for each server's name, a pattern such as
    `mcp__files__{tool}`."""
    settings = load_preset(spec.preset).mcp if spec.preset is not None else None
    name = settings.tool if settings is not None else TOOL_OF_AGENTS
    return {server.name: name.format(server=server.name, tool="{tool}") for server in spec.mcp_servers}


def check_written(task: TaskSpec) -> None:
    """Raise InvalidField if a prepare step writes a file that the task's preset also writes. The check uses the HOME
    that the task sets or, without one, the home folder of root. For any other HOME, the harness itself checks for
    existing files when the session begins."""
    if task.harness.preset is None:
        return
    home = task.harness.env.get("HOME") or task.runtime.env.get("HOME") or ROOTS_HOME
    files = load_preset(task.harness.preset).files_with(task.harness.mcp_servers)
    taken = {posixpath.normpath(posixpath.join(home, file.path)) for file in files}
    for number, step in enumerate(task.runtime.prepare):
        if isinstance(step, PrepareCommand):
            continue
        path = posixpath.normpath(posixpath.join(task.runtime.workdir, step.to))
        if path in taken:
            raise InvalidField(
                f"the preset {task.harness.preset!r} writes {path}, too",
                field=f"task.runtime.prepare.{number}.to",
                hint=f"leave the step out; {OWN_SETTINGS}",
            )


def _command_preset(spec: HarnessSpec) -> Preset:
    """Return the task's own command as a preset. The preset has the options that the command's texts use."""
    command = tuple(spec.command or ())
    for index, part in enumerate(command):
        if "\0" in part:
            raise InvalidField("must not contain NUL", field=f"{FIELD}.command.{index}")
    if not command[0]:
        raise InvalidField("names no program", field=f"{FIELD}.command.0")
    options: dict[str, Option] = {}
    for name in names_in((*command, *spec.env.values(), *spec.files.values()), "option"):
        value = spec.options.get(name)
        if isinstance(value, bool):  # this comes first, because a bool is also an int
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
    except Exception as error:  # code of users may raise anything
        message = f"{spec.agent!r} refuses its options: {type(error).__name__}: {error}"
        raise InvalidField(message, field=f"{FIELD}.options") from error
    takes: frozenset[str] = getattr(agent, "takes", frozenset())
    for name in ("mcp_servers", "skills"):
        if getattr(spec, name) and name not in takes:
            raise InvalidField(
                f"{spec.agent!r} takes no {name}",
                field=f"{FIELD}.{name}",
                hint="use the agent 'tools' with a shell, an agent whose `takes` has the name, or a preset",
            )
    for number, server in enumerate(spec.mcp_servers):
        if server.transport != "stdio":
            raise InvalidField(
                f"in-process agents have no MCP servers of transport {server.transport!r}",
                field=f"{MCP_SERVERS}.{number}.transport",
                hint="give the server's command, with transport 'stdio'",
            )
    return agent
