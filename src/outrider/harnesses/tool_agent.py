"""The built-in agent `tools`: asks the model and runs its tool calls in the sandbox until it answers.

It knows no tokens and no reward. `desktop` names a set of tools (see desktop.py), the others are tools. Invariant:
every tool call gets exactly one result, in the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from outrider.errors import RuntimeFailure
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.harnesses.desktop import ACTIONS, Desktop, DesktopOptions
from outrider.messages import Image, Message, Role, ToolCall, ToolSpec
from outrider.pythons.ipython import ipython_mounts
from outrider.runtimes.base import Runtime, Shell, ShellKind
from outrider.spec import Seconds, Spec, Text

ToolName = Literal["bash", "python", "ipython", "desktop"]

MAX_RESULT = 16_384
"""Maximum characters of one tool result that the model is shown. Of a longer one the middle is cut out."""


def _tool(name: str, description: str, argument: str) -> ToolSpec:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }


ARGUMENTS: dict[ShellKind, str] = {"bash": "command", "python": "code", "ipython": "code"}

TOOLS: dict[ShellKind, ToolSpec] = {
    "bash": _tool("bash", "Run a command.", ARGUMENTS["bash"]),
    "python": _tool("python", "Run Python code.", ARGUMENTS["python"]),
    "ipython": _tool("ipython", "Run code in IPython: Python, %magics and !commands.", ARGUMENTS["ipython"]),
}


class ToolOptions(Spec):
    """Options of the agent. `tools` may be empty; `max_turns` bounds the model calls, `tool_seconds` one tool call.
    `desktop` is for the tools of that name."""

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
            raise ValueError("desktop: is an option of the tools 'desktop', which are not among `tools`")
        return self


class ToolAgent:
    """An `Agent`: a loop over model and tools. The first reply without a tool call is its answer. When `max_turns` is
    reached first, the last calls are still run and there is no answer."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = ToolOptions.model_validate(dict(options))
        self._desktop_open = False

    def mounts(self) -> tuple[Path, ...]:
        return ipython_mounts() if "ipython" in self._options.tools else ()

    async def init(self, context: HarnessContext) -> None:
        """Open the desktop, which stays open from step to step. Each other tool starts with its first call."""
        if "desktop" in self._options.tools and not self._desktop_open:
            await self._desktop(context.runtime).open()
            self._desktop_open = True

    def _desktop(self, runtime: Runtime) -> Desktop:
        options = self._options
        return Desktop(runtime, options.desktop or DesktopOptions(), seconds=options.tool_seconds)

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        options = self._options
        messages = [Message(role=Role.SYSTEM, content=options.system)] if options.system is not None else []
        messages.append(Message(role=Role.USER, content=context.task.instruction))
        shells = [name for name in options.tools if name != "desktop"]
        specs = [TOOLS[name] for name in shells]
        desktop = self._desktop(context.runtime) if "desktop" in options.tools else None
        if desktop is not None:
            specs += desktop.tools()
        async with Toolbox(context.runtime, shells, options.tool_seconds, desktop) as toolbox:
            for _ in range(options.max_turns):
                reply = await context.model.chat(messages, tools=specs)
                if not reply.tool_calls:
                    return HarnessOutcome(answer=reply.content)
                messages.append(reply)
                for call in reply.tool_calls:
                    messages.append(await toolbox.result(call))
        return HarnessOutcome(log_tail=f"stopped after {options.max_turns} turns without an answer")


class Toolbox:
    """The tools of one run: shells that open with their first call and close at the end, and perhaps a desktop."""

    def __init__(
        self, runtime: Runtime, tools: Sequence[ShellKind], seconds: float, desktop: Desktop | None = None
    ) -> None:
        self._runtime = runtime
        self._tools = tools
        self._seconds = seconds
        self._desktop = desktop
        self._shells: dict[ShellKind, Shell] = {}

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:
            for shell in self._shells.values():
                stack.push_async_callback(shell.close)
            self._shells = {}

    async def result(self, call: ToolCall) -> Message:
        """The result of a call, as the model is shown it. Raises RuntimeFailure when the sandbox is broken."""
        if self._desktop is not None and call.name in ACTIONS:
            part = await self._desktop.call(call.name, call.arguments)
            if isinstance(part, Image):
                return Message(role=Role.TOOL, parts=(part,), tool_call_id=call.id)
            return Message(role=Role.TOOL, content=part.text, tool_call_id=call.id)
        name = next((tool for tool in self._tools if tool == call.name), None)
        if name is None:
            known = [*self._tools, *(ACTIONS if self._desktop is not None else ())]
            text = f"unknown tool {call.name!r}; known: {', '.join(known) or 'none'}"
        else:
            text = await self._shell_result(name, call)
        return Message(role=Role.TOOL, content=text, tool_call_id=call.id)

    async def _shell_result(self, name: ShellKind, call: ToolCall) -> str:
        try:
            text = json.loads(call.arguments)[ARGUMENTS[name]]
            text.encode()  # fails for half of a surrogate pair, which no program can be given
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # no JSON, no object, no text
            return f'malformed arguments: give a JSON object with a string "{ARGUMENTS[name]}"'
        if name not in self._shells:
            self._shells[name] = await self._runtime.open_shell(name)
        shell = self._shells[name]
        try:
            result = await shell.run(text, seconds=self._seconds)
        except RuntimeFailure:
            # The model may have ended its own shell (`exit`). If the sandbox is broken, opening the next shell fails.
            del self._shells[name]
            await shell.close()
            return f"[the {name} session ended; the next call starts a new one]"
        output = result.output.removesuffix("\n")
        if len(output) > MAX_RESULT:
            half = MAX_RESULT // 2
            output = f"{output[:half]}\n[... {len(output) - 2 * half} characters cut ...]\n{output[-half:]}"
        if result.timed_out:
            status = f"[timed out after {self._seconds:g} s]"
        else:
            status = f"[exit code {result.exit_code}]" if result.exit_code else ""
        return "\n".join(filter(None, (output, status)))
