"""The built-in agent `tools`: calls the model and runs its tool calls in the sandbox, until the model replies without a
tool call.

The option `tools` lists the tools by name. The name `desktop` stands for several tools (see desktop.py). Invariant:
every tool call gets exactly one result, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.desktop import Desktop, DesktopOptions, tool_names
from outrider.harnesses.mcp_tools import mcp_tools
from outrider.harnesses.skills import Skill, described, find_skills
from outrider.harnesses.toolbox import TOOLS, Tool, Toolbox, ToolName
from outrider.messages import Message, Role
from outrider.sandbox.pythons.ipython import ipython_mounts
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import Seconds, Spec, Text


class ToolOptions(Spec):
    """Options of the agent.

    tools: the names of the tools. The list may be empty.
    max_turns: the maximum number of model calls.
    tool_seconds: the time limit of one tool call.
    desktop: the options of the desktop. They require "desktop" in `tools`."""

    tools: Annotated[tuple[ToolName, ...], Field(strict=False)] = ("bash", "python")
    system: Text | None = None
    max_turns: Annotated[int, Field(ge=1, le=100_000)] = 8
    tool_seconds: Seconds = 60
    desktop: DesktopOptions | None = None

    @field_validator("tools")
    @classmethod
    def _distinct(cls, value: tuple[ToolName, ...]) -> tuple[ToolName, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must not name a tool twice")
        return value

    @model_validator(mode="after")
    def _desktop_is_used(self) -> Self:
        if self.desktop is not None and "desktop" not in self.tools:
            raise ValueError('desktop: needs "desktop" in `tools`')
        return self


class ToolAgent:
    """An `Agent` that calls the model and runs its tools in a loop. The first reply without a tool call is the answer.
    If `max_turns` is reached first, the last tool calls still run, but there is no answer.

    To add tools, write a subclass that passes `own` to the constructor. In the list that the model gets, the added
    tools come after the built-in tools, but before the tools of the desktop. The constructor raises ValueError if an
    added tool has the name of a built-in tool."""

    def __init__(self, options: Mapping[str, Any], *, own: Sequence[Tool] = ()) -> None:
        self._options = ToolOptions.model_validate(dict(options))
        self._own = tuple(own)
        self._desktop_open = False
        self._skills: list[Skill] | None = None
        built_in = {*TOOLS, *tool_names(self._options.desktop or DesktopOptions())}
        if taken := [tool.spec["function"]["name"] for tool in own if tool.spec["function"]["name"] in built_in]:
            raise ValueError(f"{taken[0]!r} is a built-in tool")

    @property
    def takes(self) -> frozenset[str]:
        """The fields of the task's harness that the agent supports. Skills require a tool that runs commands or code,
        because the model reads skills with such a tool."""
        readers = {"bash", "python", "ipython"}.intersection(self._options.tools)
        return frozenset({"mcp_servers", "skills"} if readers else {"mcp_servers"})

    def mounts(self) -> tuple[Path, ...]:
        return ipython_mounts() if "ipython" in self._options.tools else ()

    async def init(self, context: HarnessContext) -> None:
        """Find the task's skills, and open the desktop if it is among the tools. The desktop stays open for all steps
        of a task. Other tools start with their first call."""
        if self._skills is None:
            self._skills = await find_skills(context.runtime, context.task.harness.skills)
        if "desktop" in self._options.tools and not self._desktop_open:
            await self._desktop(context.runtime).open()
            self._desktop_open = True

    def _desktop(self, runtime: Runtime) -> Desktop:
        options = self._options
        return Desktop(runtime, options.desktop or DesktopOptions(), seconds=options.tool_seconds)

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        options = self._options
        system = options.system
        if self._skills:
            system = "\n\n".join(filter(None, (system, described(self._skills))))
        messages = [Message(role=Role.SYSTEM, content=system)] if system is not None else []
        messages.append(Message(role=Role.USER, content=context.task.instruction))
        tools = [name for name in options.tools if name != "desktop"]
        desktop = self._desktop(context.runtime) if "desktop" in options.tools else None
        async with (
            mcp_tools(context) as served,
            Toolbox(context, tools, (*self._own, *served), options.tool_seconds, desktop) as toolbox,
        ):
            for _ in range(options.max_turns):
                reply = await context.model.chat(messages, tools=toolbox.specs)
                if not reply.tool_calls:
                    return HarnessOutcome(answer=reply.content)
                messages.append(reply)
                for call in reply.tool_calls:
                    messages.append(await toolbox.result(call))
        return HarnessOutcome(log_tail=f"stopped after {options.max_turns} turns without an answer")
