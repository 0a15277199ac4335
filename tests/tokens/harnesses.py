"""Builds sessions call by call, with the agents, tools and histories of real clients."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.messages import Message, Role, ToolSpec
from outrider.tokens.branches.classify import Lineage, lineages
from outrider.trajectory import BranchKind, FinishReason

from .renderers import family_renderer, small_tokenizer
from .rollout import Rollout
from .strategies import hermes_call

IM_END = 2


def tool(*names: str) -> tuple[ToolSpec, ...]:
    return tuple({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names)


def system(text: str) -> Message:
    return Message(role=Role.SYSTEM, content=text)


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def result(reply: Message, text: str) -> Message:
    return Message(role=Role.TOOL, content=text, tool_call_id=reply.tool_calls[0].id)


TASK = user("Fix the failing test in the parser module.")
CODER = system("You are a coding agent.")
CODING = tool("bash", "edit", "task")
EXPLORING = tool("grep", "read")
SUMMARY = "The parser fails on empty input.\nI changed parse() in parser.py.\nNext: run the tests again."
MAIN = ("main", None, 0, "")
"""The entry of `Harness.told` for a turn of the main conversation."""


class Harness:
    """One session's calls."""

    def __init__(self) -> None:
        self.rollout = Rollout(family_renderer("qwen3"))

    def call(
        self,
        messages: Sequence[Message],
        said: str,
        tools: Sequence[ToolSpec] = (),
        *,
        agent: str | None = None,
        of: str | None = None,
        purpose: str | None = None,
        declared: str | None = None,
        cut: bool = False,
    ) -> Message:
        """Make one call, with the hints that its client sends. Returns the reply."""
        joined = self.rollout.join(messages, tools)
        ids = [*small_tokenizer().encode(said), IM_END]
        finish = FinishReason.ABORT if cut else FinishReason.STOP
        reply = self.rollout.answer(joined, ids, tools=tools, finish=finish)
        turn = self.rollout.turns[-1]
        kind, _, label = (declared or "").partition("/")
        self.rollout.turns[-1] = msgspec.structs.replace(
            turn,
            agent_id=agent,
            parent_agent_id=of,
            purpose=purpose,
            declared=BranchKind(kind) if kind else None,
            declared_label=label,
        )
        return reply

    def lines(self) -> list[Lineage]:
        self.rollout.check_samples()
        return lineages(self.rollout.turns)

    def told(self) -> list[tuple[str, int | None, int, str]]:
        """Each turn's kind, parent, depth and label."""
        return [(line.kind.value, line.parent, line.depth, line.label) for line in self.lines()]


class Agent:
    """A conversation of tool calls: `step` calls a tool and gets its result, `end` answers."""

    def __init__(
        self, harness: Harness, opening: Sequence[Message], tools: Sequence[ToolSpec], agent: str | None = None
    ) -> None:
        self.harness = harness
        self.history = list(opening)
        self.tools = tools
        self.agent = agent

    def step(self, name: str = "bash", found: str | None = None, **arguments: object) -> Message:
        said = f"Next I call {name} for step {len(self.history)}.\n{hermes_call(name, arguments or {'command': 'ls'})}"
        reply = self.harness.call(self.history, said, self.tools, agent=self.agent)
        self.history += [reply, result(reply, found or f"output {len(self.history)}")]
        return reply

    def end(self, said: str = "All of it is done.") -> Message:
        reply = self.harness.call(self.history, said, self.tools, agent=self.agent)
        self.history.append(reply)
        return reply


def a_main(harness: Harness, *, steps: int = 2) -> Agent:
    """The main conversation after `steps` calls."""
    main = Agent(harness, [CODER, TASK], CODING)
    for _ in range(steps):
        main.step()
    return main
