"""The scripted model: an engine that says what the row at hand wants said, with the tools that it is shown.

It reads its task from the prompt it is given, and keeps no state of a conversation. Invariant: `calls` holds, for
every generation it has begun, the very ids it was given and those it has handed out.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from outrider.certify.prompt import END, Scene, read_prompt
from outrider.certify.rows import FIRST_WORD, HELPER, HELPER_MARK, Act, Step, row_named
from outrider.certify.toolbox import Tool, Toolbox, find_subagent, find_tools, find_waiter
from outrider.constraint import ConstraintKind
from outrider.engines.base import Chunk, EngineHealth, EngineOptions, GenerateRequest, PauseMode
from outrider.harnesses.presets import Certify
from outrider.testing.scripted_engine import ScriptedEngine
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Ids, LogprobKind, TokenMode

CONTEXT_TOKENS = 1 << 20
TITLE = "A task of three steps"
"""What it says to a call that is no part of a task, such as for a title."""

_CHUNK_TOKENS = 8


class Call(msgspec.Struct, kw_only=True):
    """One generation: what it was to say, the prompt's ids, shape (prompt length,), and the ids handed out so far."""

    session_key: str
    scene: Scene
    step: Step
    prompt: Ids
    output: list[int]


class Actor:
    """`Engine`. `hint` is what the preset says of its tools, `workdir` where their relative paths begin; `heard` waits
    until clients have been sent a word, or for long enough."""

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING
    constraints = frozenset(ConstraintKind)  # it says what the scene wants, whatever form is asked for
    name = "script"

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: str,
        hint: Certify,
        workdir: str,
        heard: Callable[[str], Awaitable[bool]],
    ) -> None:
        self.calls: list[Call] = []
        self._tokenizer = tokenizer
        self._folder = folder
        self._hint = hint
        self._workdir = workdir
        self._heard = heard

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, context_tokens=CONTEXT_TOKENS)

    async def pause(self, mode: PauseMode) -> None:
        """Its policy never changes."""

    async def resume(self) -> None:
        """It is never paused."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        scene = read_prompt(self._tokenizer.decode(request.input_ids.tolist()))
        step = self._step(scene)
        ids = self._tokenizer.encode(step.raw if scene.row is None else self._spoken(step, scene))
        call = Call(
            session_key=request.session_key, scene=scene, step=step, prompt=np.array(request.input_ids), output=[]
        )
        self.calls.append(call)
        chunk_tokens = _CHUNK_TOKENS + (len(self._tokenizer.encode(FIRST_WORD)) if step.stall else 0)
        async for chunk in self._script(ids, chunk_tokens, bool(request.sampling.stop)).generate(request):
            first = not call.output
            call.output += chunk.ids
            yield chunk
            if first and step.stall:
                await self._heard(FIRST_WORD)

    def _script(self, ids: list[int], chunk_tokens: int, stops: bool) -> ScriptedEngine:
        """One reply's engine; only stop strings need a tokenizer, which takes a while to load."""
        replies: list[Any] = [{"ids": ids}]
        options = {"replies": replies, "context_tokens": CONTEXT_TOKENS, "chunk_tokens": chunk_tokens}
        return ScriptedEngine(EngineOptions(name=self.name, tokenizer=self._folder if stops else None, options=options))

    def _step(self, scene: Scene) -> Step:
        row = row_named(scene.row) if scene.row else None
        if row is None or not (scene.tools or scene.helper):
            return Step(raw=TITLE + END)
        steps = HELPER if scene.helper else row.steps
        return steps[min(scene.said, len(steps) - 1)]

    def _spoken(self, step: Step, scene: Scene) -> str:
        """The reply as the model says it."""
        if step.raw.endswith(END):
            return step.raw
        calls = [_call(tool, arguments, step.style) for tool, arguments in self._calls(step, scene)]
        think = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
        return think + "\n".join(part for part in (step.text, *calls) if part) + step.raw + END

    def _calls(self, step: Step, scene: Scene) -> list[tuple[Tool, dict[str, Any]]]:
        tools = find_tools(scene.tools, self._hint)
        calls = [call for act in step.run if (call := way_to_do(act, tools, self._workdir)) is not None]
        if step.helper and (helper := find_subagent(scene.tools, self._hint)):
            calls.append((helper, helper.call(f"{HELPER_MARK}{scene.row}: {step.helper}")))
        if step.wait and scene.agent_id and (waiter := find_waiter(scene.tools, self._hint)):
            calls.append((waiter, waiter.call(scene.agent_id)))
        ending = self._hint.finish_command
        if tools.shell and ending and not scene.helper and not (calls or step.raw):
            calls.append((tools.shell, tools.shell.call(ending)))
        return calls


def way_to_do(act: Act, tools: Toolbox, workdir: str) -> tuple[Tool, dict[str, Any]] | None:
    """The tool that does it, and its arguments; None when none of them can. One that runs commands goes first."""
    if tools.shell is not None:
        return tools.shell, tools.shell.call(act.command)
    if act.write is not None and (writer := tools.writer) is not None:
        name, text = act.write
        return writer, writer.call(_path(name, writer, workdir), text)
    if act.read is not None and (reader := tools.reader) is not None:
        return reader, reader.call(_path(act.read, reader, workdir))
    return None


def _path(name: str, tool: Tool, workdir: str) -> str:
    return f"{workdir}/{name}" if tool.absolute else name


def _call(tool: Tool, arguments: Mapping[str, Any], style: Literal["plain", "spaced", "escaped"]) -> str:
    """A call as the model writes it."""
    body = {"name": tool.name, "arguments": arguments}
    match style:
        case "plain":
            text = json.dumps(body, ensure_ascii=False)
        case "escaped":
            text = json.dumps(body, ensure_ascii=True, separators=(",", ":"))
        case "spaced":
            text = json.dumps(body, ensure_ascii=False, indent=3, separators=("  ,", " :   "))
    return f"<tool_call>\n{text}\n</tool_call>"
