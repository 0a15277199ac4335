"""Calls the tools of a harness to find the one that starts a sub-agent. In a trial session, the scripted model calls
one tool after another. It puts a mark (a random text) into each text argument.

A tool starts a sub-agent if all of this happens after its call:

- A new conversation begins with one of the call's marks.
- The new conversation goes on after a tool call of its own.
- The calling conversation goes on, too. So a new conversation that replaces the calling one, such as its summary, does
  not count.

Invariant: no tool is called in two sessions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.harnesses.presets import Certify
from outrider.lab.certify.rows import SUBAGENT_MARK
from outrider.lab.certify.tool_finder import MarkedCall, find_tools, find_waiter, marked_calls, may_start
from outrider.messages import ToolSpec

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""The letters of the random marks."""
CALLS = 16
"""Maximum number of tools to call."""
SESSIONS = 3
"""Maximum number of trial sessions. A session ends early if a tool does not return or ends the program. The next
session calls the remaining tools."""
SECONDS = 60.0
"""Time limit of a trial session."""
LATE_SECONDS = 5.0
"""A sub-agent may start in the background. After the last call, the trial waits at most this many seconds for one."""

STARTS = "starts a sub-agent"
NOTHING = "called, but no conversation began"
HELPLESS = "called, but the conversation that began has no tool for a part of the task"
IDLE = "called, but the conversation that began ran no tool"
ALONE = "called, but after the conversation that began the program's own conversation did not go on"
OPEN = "called, but the run ended before the tool returned"
KNOWN = "not called, because its use is known from its declaration"
NO_TEXT = "not called, because it takes no free text"
TOO_MANY = f"not called, because {CALLS} tools are the limit"
NOT_REACHED = "not called, because the trial was over"
ORDER = (STARTS, NOTHING, HELPLESS, IDLE, ALONE, OPEN, NOT_REACHED, TOO_MANY, NO_TEXT, KNOWN)
"""The order in which `summary` lists the outcomes of the tools."""


class SubagentTrial:
    """Chooses the tool calls of the trial sessions and judges them. `outcomes` maps each tool's name to its outcome.
    `starter` is None until a call has started a sub-agent. Then `starter` is a pair: that call, and the text (one of
    the call's arguments) with which the sub-agent's conversation began."""

    def __init__(self, hint: Certify) -> None:
        self.outcomes: dict[str, str] = {}
        self.starter: tuple[MarkedCall, str] | None = None
        self._hint = hint
        self._calls: dict[str, MarkedCall] = {}
        self._session = ""
        self._plan: list[MarkedCall] = []
        self._returned: set[str] = set()
        self._begun: dict[str, tuple[str, str]] = {}
        self._started = asyncio.Event()

    @property
    def unfinished(self) -> bool:
        """True if no tool has started a sub-agent yet and a tool is left to call."""
        return self.starter is None and NOT_REACHED in self.outcomes.values()

    async def next_call(
        self, session: str, tools: Sequence[ToolSpec], replies: int
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the name and the arguments of the next tool to call, or None at the end of the trial. `replies` is the
        number of replies in the conversation so far."""
        self._add(tools)
        if session != self._session:
            self._session, self._begun, self._returned = session, {}, set()
            self._plan = []
        self._plan += [
            call for call in self._calls.values() if self.outcomes[call.name] == NOT_REACHED and call not in self._plan
        ]
        names = {tool["function"].get("name") for tool in tools}
        plan = [call for call in self._plan if call.name in names]
        for call in plan[:replies]:
            self._returned.add(call.name)
            self._judge(call)
        if self.starter is None and replies < len(plan):
            call = plan[replies]
            if self.outcomes[call.name] == NOT_REACHED:
                self.outcomes[call.name] = OPEN
            return call.name, call.arguments
        try:
            async with asyncio.timeout(LATE_SECONDS if plan else 0):
                await self._started.wait()
        except TimeoutError:
            pass
        return None

    def begins(self, mark: str, *, able: bool, replies: int) -> None:
        """Record that a conversation begins with the text `mark`. `able` is True if the conversation has a tool for the
        sub-agent's part of the task. `replies` is the number of replies in the conversation so far."""
        text = _text(mark)
        call = next((call for call in self._plan if text in call.texts), None)
        if call is not None and self.starter is None:
            outcome = HELPLESS if not able else IDLE if replies == 0 else ALONE
            if ORDER.index(outcome) >= ORDER.index(self._begun.get(call.name, ("", HELPLESS))[1]):
                self._begun[call.name] = text, outcome
            self._judge(call)

    def _judge(self, call: MarkedCall) -> None:
        """Update the outcome of a call that was made in this session."""
        text, outcome = self._begun.get(call.name, ("", NOTHING))
        if outcome is ALONE and call.name in self._returned:
            outcome, self.starter = STARTS, self.starter or (call, text)
            self._started.set()
        if self.outcomes[call.name] != NOT_REACHED:
            self.outcomes[call.name] = outcome

    def _add(self, tools: Sequence[ToolSpec]) -> None:
        """Record the tools that no earlier request declared. Each new tool gets an outcome: NOT_REACHED if the tool is
        to be called, otherwise the reason why the tool is not called."""
        new = [tool for tool in tools if str(tool["function"].get("name", "")) not in self.outcomes]
        if not new:
            return
        box = find_tools(tools, self._hint)
        used = filter(None, (box.shell, box.writer, box.reader, box.viewer, find_waiter(tools, self._hint)))
        known = {found.name for found in used}
        calls = {call.name: call for call in marked_calls(new, self._hint, _random_text)}
        for tool in new:
            name = str(tool["function"].get("name", ""))
            is_known = name in known and not may_start(tool)
            self.outcomes[name] = KNOWN if is_known else NOT_REACHED if name in calls else NO_TEXT
        for name in calls:
            if self.outcomes[name] == NOT_REACHED:
                if len(self._calls) < CALLS:
                    self._calls[name] = calls[name]
                else:
                    self.outcomes[name] = TOO_MANY


def summary(outcomes: Mapping[str, str]) -> str:
    """Return a readable text with each outcome and its tools."""
    tools = {each: sorted(name for name, outcome in outcomes.items() if outcome == each) for each in ORDER}
    return "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in tools.items() if names)


def _random_text() -> str:
    return _text("".join(secrets.choice(LETTERS) for _ in range(16)))


def _text(mark: str) -> str:
    return f"{SUBAGENT_MARK}{mark}: say that you are done"
