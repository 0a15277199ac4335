"""The scripted model of a certification. It is an engine that replies with the steps of a row (test), and calls tools
that the prompt declares.

The model reads the row and the number of earlier replies from each prompt, and keeps no count of its own. The model
supports only the chat format of the certifying service. Invariant: for every generation that has begun, `calls` has
exactly the prompt's ids and the ids that were yielded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from outrider.constraint import ConstraintKind
from outrider.engines.base import Chunk, EngineHealth, EngineOptions, GenerateRequest, PauseMode
from outrider.harnesses.presets import Certify
from outrider.lab.certify.rows import (
    FIRST_WORD,
    MARK,
    OFFERED,
    READ,
    SUBAGENT_MARK,
    SUBAGENT_STEPS,
    TRIAL,
    WRITE_HELPED,
    CertificationRow,
    ModelAction,
    ScriptedStep,
    row_named,
)
from outrider.lab.certify.subagent_trial import SubagentTrial
from outrider.lab.certify.tool_finder import FoundTool, TaskTools, find_tools, find_waiter
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.messages import ToolSpec
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Ids, LogprobKind, TokenMode

CONTEXT_TOKENS = 1 << 20
TITLE = "A task of three steps"
"""The reply to a prompt without a task, such as a request for a title of the conversation."""

START = "<|im_start|>"
END = "<|im_end|>"

HELP_SECONDS = 10.0
"""Maximum seconds that a reply waits for the sub-agent to finish. The reply waits only if the program has no tool that
waits for sub-agents."""

_CHUNK_TOKENS = 8
"""Number of tokens per chunk. The number is small, so that every streamed reply has several chunks."""

_MARKS = re.compile(rf"({re.escape(MARK)}|{re.escape(SUBAGENT_MARK)})([a-z-]+)")
_AGENT_ID = re.compile(r'"agent_id": ?"([^"]+)"')
_TOOLS = re.compile(r"\n<tools>\n(.*?)\n</tools>\n\nFor each function call", re.DOTALL)


class PromptState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a conversation, read from a prompt.

    - `row`: the name of the row; None if the prompt does not name one.
    - `subagent`: True if a sub-agent makes the call.
    - `replies`: the number of the model's replies after the message with the task. Without a task, all replies count.
    - `agent_id`: the id of a started sub-agent, from the newest message; or None.
    - `words`: which of the words OFFERED and READ occur in the prompt.
    """

    row: str | None
    subagent: bool = False
    replies: int = 0
    agent_id: str | None = None
    tools: tuple[ToolSpec, ...] = ()
    words: frozenset[str] = frozenset()


class ScriptedCall(msgspec.Struct, kw_only=True):
    """One generation. `state` is the state of its prompt, `step` the reply, `prompt` the prompt's ids, and `output` the
    ids yielded so far."""

    session_key: str
    state: PromptState
    step: ScriptedStep
    prompt: Ids
    output: list[int]


class ScriptedModel:
    """An `Engine` that replies with the steps of a certificate's row.

    - `hint`: what the preset declares about the harness's tools.
    - `workdir`: the folder that the row's relative paths start from.
    - `wait_until_sent`: waits until the given word has been sent to a client, or until a timeout.
    - `unmarked`: the row for prompts that declare tools but name no row.
    - `trial`: tries tools to find the one that starts a sub-agent.
    """

    mode = TokenMode.TOKENS
    logprob_kind = LogprobKind.SAMPLING
    constraints = frozenset(ConstraintKind)  # no constraint is refused, but scripted replies ignore constraints
    name = "script"

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: str,
        hint: Certify,
        workdir: str,
        wait_until_sent: Callable[[str], Awaitable[bool]],
        *,
        unmarked: CertificationRow | None = None,
    ) -> None:
        self.calls: list[ScriptedCall] = []
        self.trial = SubagentTrial(hint)
        self._tokenizer = tokenizer
        self._folder = folder
        self._hint = hint
        self._workdir = workdir
        self._wait_until_sent = wait_until_sent
        self._unmarked = unmarked
        self._helped: dict[str, asyncio.Event] = {}

    async def start(self) -> None:
        """Do nothing, because the engine opens nothing."""

    async def close(self) -> None:
        """Do nothing, because the engine opens nothing."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True, context_tokens=CONTEXT_TOKENS)

    async def pause(self, mode: PauseMode) -> None:
        """Do nothing, because the policy never changes."""

    async def resume(self) -> None:
        """Do nothing, because the engine is never paused."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        state = read_prompt(self._tokenizer.decode(request.input_ids.tolist()))
        row = row_named(state.row) if state.row else self._unmarked
        if row is None or not (state.tools or state.subagent):
            step = ScriptedStep(raw=TITLE + END)
        else:
            steps = SUBAGENT_STEPS if state.subagent else row.steps
            step = steps[min(state.replies, len(steps) - 1)]
        if state.subagent and row is None and state.row:
            able = choose_call(WRITE_HELPED, find_tools(state.tools, self._hint), self._workdir) is not None
            self.trial.begins(state.row, able=able, replies=state.replies)
            step = SUBAGENT_STEPS[min(state.replies, len(SUBAGENT_STEPS) - 1)] if able else step
        calls = self._tool_calls(step, state)
        helped = self._helped.setdefault(request.session_key, asyncio.Event())
        if row is TRIAL and state.tools and not state.subagent:
            tried = await self.trial.next_call(request.session_key, state.tools, state.replies)
            calls = calls if tried is None else [tried]
        elif step.wait and find_waiter(state.tools, self._hint) is None:
            # Wait for the sub-agent here, because a program that runs it in the background may exit after the reply.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(helped.wait(), HELP_SECONDS)
        ids = self._tokenizer.encode(self._reply(step, calls))
        call = ScriptedCall(
            session_key=request.session_key, state=state, step=step, prompt=np.array(request.input_ids), output=[]
        )
        self.calls.append(call)
        options: dict[str, Any] = {
            "replies": [{"ids": ids}],
            "context_tokens": CONTEXT_TOKENS,
            "chunk_tokens": _CHUNK_TOKENS + (len(self._tokenizer.encode(FIRST_WORD)) if step.stall else 0),
        }
        # The engine needs a tokenizer only for stop strings, and loading one is slow.
        tokenizer = self._folder if request.sampling.stop else None
        engine = ScriptedEngine(EngineOptions(name=self.name, tokenizer=tokenizer, options=options))
        async for chunk in engine.generate(request):
            first = not call.output
            call.output += chunk.ids
            yield chunk
            if first and step.stall:
                await self._wait_until_sent(FIRST_WORD)
        if state.subagent and step is SUBAGENT_STEPS[-1]:
            helped.set()

    def _reply(self, step: ScriptedStep, tool_calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
        """Return the text of a reply, including the end-of-turn token."""
        if step.raw.endswith(END):
            return step.raw
        thinking = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
        calls = []
        for name, arguments in tool_calls:
            body = {"name": name, "arguments": arguments}
            match step.style:
                case "plain":
                    text = json.dumps(body, ensure_ascii=False)
                case "escaped":
                    text = json.dumps(body, ensure_ascii=True, separators=(",", ":"))
                case "spaced":
                    text = json.dumps(body, ensure_ascii=False, indent=3, separators=("  ,", " :   "))
            calls.append(f"<tool_call>\n{text}\n</tool_call>")
        return thinking + "\n".join(part for part in (step.text, *calls) if part) + step.raw + END

    def _tool_calls(self, step: ScriptedStep, state: PromptState) -> list[tuple[str, dict[str, Any]]]:
        tools = find_tools(state.tools, self._hint)
        chosen = [choose_call(action, tools, self._workdir) for action in step.actions]
        calls = [(tool.name, arguments) for tool, arguments in filter(None, chosen)]
        if step.subagent and self.trial.starter is not None:
            starter, text = self.trial.starter
            prompt = f"{SUBAGENT_MARK}{state.row}: {step.subagent}"
            calls.append((starter.name, starter.with_prompt(text, prompt)))
        if step.wait and state.agent_id and (waiter := find_waiter(state.tools, self._hint)):
            calls.append((waiter.name, waiter.call(state.agent_id)))
        # Some programs run until the model calls the shell with a certain command. A reply that has no other call runs
        # this command.
        finish = self._hint.finish_command
        if tools.shell and finish and not state.subagent and not (calls or step.raw):
            calls.append((tools.shell.name, tools.shell.call(finish)))
        return calls


def choose_call(action: ModelAction, tools: TaskTools, workdir: str) -> tuple[FoundTool, dict[str, Any]] | None:
    """Return the tool for an action and the arguments of its call; None if no tool can do the action. A tool that runs
    commands is preferred."""
    if action.look is not None:
        if (viewer := tools.viewer) is None:
            return None
        return viewer, viewer.call(f"{workdir}/{action.look}" if viewer.absolute else action.look)
    if action.note is not None:
        return None if tools.noter is None else (tools.noter, tools.noter.call(action.note))
    if action.skill is not None and tools.loader is not None:
        return tools.loader, tools.loader.call(action.skill)
    if tools.shell is not None:
        return tools.shell, tools.shell.call(action.command)
    if action.write is not None and (writer := tools.writer) is not None:
        name, text = action.write
        return writer, writer.call(f"{workdir}/{name}" if writer.absolute else name, text)
    if action.read is not None and (reader := tools.reader) is not None:
        return reader, reader.call(posixpath.join(workdir, action.read) if reader.absolute else action.read)
    return None


def read_prompt(text: str) -> PromptState:
    """Read the state of a prompt from its rendered text."""
    messages = [part.removesuffix("\n").removesuffix(END) for part in text.split(START)[1:]]
    # The tools are in the last block of the system message. The harness's own text may look like a block, so lines that
    # are not tools are skipped.
    blocks = _TOOLS.findall(messages[0]) if messages else ()
    tools: list[ToolSpec] = []
    for line in blocks[-1].split("\n") if blocks else ():
        try:
            tool: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
            tools.append(tool)
    # Find the message with the task. Search the system message last: only some programs put a sub-agent's task there.
    # Skip replies and tool results, because a mark in them does not name the task.
    for index, message in [*list(enumerate(messages))[1:], *list(enumerate(messages))[:1]]:
        if not message.startswith(("user\n<tool_response>", "assistant\n")) and (found := _MARKS.search(message)):
            # The last message is the reply that is about to be generated, so it does not count.
            replies = sum(later.startswith("assistant\n") for later in messages[index + 1 : -1])
            agent_id = _AGENT_ID.search(messages[-2])
            return PromptState(
                row=found[2],
                subagent=found[1] == SUBAGENT_MARK,
                replies=replies,
                agent_id=agent_id[1] if agent_id else None,
                tools=tuple(tools),
                words=frozenset(word for word in (OFFERED, READ) if word in text),
            )
    replies = sum(message.startswith("assistant\n") for message in messages[:-1])
    return PromptState(row=None, replies=replies, tools=tuple(tools))
