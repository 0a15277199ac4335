"""The built-in agent `tools`: asks the model and runs its tool calls in the sandbox until it answers.

It knows no tokens and no reward. Invariant: every tool call gets exactly one result, in the order of the calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from outrider.errors import RuntimeFailure
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.pythons.ipython import ipython_mounts
from outrider.runtimes.base import Runtime, Shell
from outrider.spec import Seconds, Spec, Text

ToolName = Literal["bash", "python", "ipython"]

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


ARGUMENTS: dict[ToolName, str] = {"bash": "command", "python": "code", "ipython": "code"}

TOOLS: dict[ToolName, ToolSpec] = {
    "bash": _tool("bash", "Run a command.", ARGUMENTS["bash"]),
    "python": _tool("python", "Run Python code.", ARGUMENTS["python"]),
    "ipython": _tool("ipython", "Run code in IPython: Python, %magics and !commands.", ARGUMENTS["ipython"]),
}


class ToolOptions(Spec):
    """Options of the agent. `tools` may be empty; `max_turns` bounds the model calls, `tool_seconds` one tool call."""

    tools: Annotated[tuple[ToolName, ...], Field(strict=False)] = ("bash", "python")
    system: Text | None = None
    max_turns: Annotated[int, Field(ge=1, le=100_000)] = 8
    tool_seconds: Seconds = 60

    @field_validator("tools")
    @classmethod
    def _distinct(cls, value: tuple[ToolName, ...]) -> tuple[ToolName, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must not name a tool twice")
        return value


class ToolAgent:
    """An `Agent`: a loop over model and tools. The first reply without a tool call is its answer. When `max_turns` is
    reached first, the last calls are still run and there is no answer."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = ToolOptions.model_validate(dict(options))

    def mounts(self) -> tuple[Path, ...]:
        return ipython_mounts() if "ipython" in self._options.tools else ()

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare: each tool starts with its first call."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        options = self._options
        messages = [Message(role=Role.SYSTEM, content=options.system)] if options.system is not None else []
        messages.append(Message(role=Role.USER, content=context.task.instruction))
        specs = [TOOLS[name] for name in options.tools]
        async with Toolbox(context.runtime, options.tools, options.tool_seconds) as toolbox:
            for _ in range(options.max_turns):
                reply = await context.model.chat(messages, tools=specs)
                if not reply.tool_calls:
                    return HarnessOutcome(answer=reply.content)
                messages.append(reply)
                for call in reply.tool_calls:
                    result = await toolbox.call(call)
                    messages.append(Message(role=Role.TOOL, content=result, tool_call_id=call.id))
        return HarnessOutcome(log_tail=f"stopped after {options.max_turns} turns without an answer")


class Toolbox:
    """The tools of one run: shells that open with their first call and close at the end."""

    def __init__(self, runtime: Runtime, tools: Sequence[ToolName], seconds: float) -> None:
        self._runtime = runtime
        self._tools = tools
        self._seconds = seconds
        self._shells: dict[ToolName, Shell] = {}

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:
            for shell in self._shells.values():
                stack.push_async_callback(shell.close)
            self._shells = {}

    async def call(self, call: ToolCall) -> str:
        """The result of a call, as the model is shown it. Raises RuntimeFailure when the sandbox is broken."""
        name = next((tool for tool in self._tools if tool == call.name), None)
        if name is None:
            return f"unknown tool {call.name!r}; known: {', '.join(self._tools) or 'none'}"
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
