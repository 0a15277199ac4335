"""Finds the tool that starts a sub-agent by calling tools. In a trial session the scripted model calls one tool after
another, with a random mark in each free text. A tool starts a sub-agent if a new conversation begins with a mark from
its call.

The module sends nothing, and waits for marks only. Invariant: no tool is called in two sessions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.harnesses.presets import Certify
from outrider.lab.certify.rows import SUBAGENT_MARK
from outrider.lab.certify.tool_finder import MarkedCall, find_tools, find_waiter, marked_calls
from outrider.messages import ToolSpec

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""Letters of a mark."""
CALLS = 16
"""Maximum number of tools that are called."""
SESSIONS = 3
"""Maximum number of trial sessions. A new one is needed after a tool that does not return or ends the program."""
SECONDS = 60.0
"""Time limit of a trial session."""
LATE_SECONDS = 3.0
"""Maximum seconds to wait, after the last call, for a sub-agent that starts in the background."""

STARTS = "starts a sub-agent"
NOTHING = "called, but no conversation began"
HELPLESS = "called, but the conversation that began has no tool for a part of the task"
OPEN = "called, but the run ended before the tool returned"
KNOWN = "not called, because its use is known from its declaration"
NO_TEXT = "not called, because it takes no free text"
TOO_MANY = f"not called, because {CALLS} tools are the limit"
NOT_REACHED = "not called, because the trial was over"
ORDER = (STARTS, NOTHING, HELPLESS, OPEN, NOT_REACHED, TOO_MANY, NO_TEXT, KNOWN)
"""Order of the outcomes in a text."""


class SubagentTrial:
    """The trial. `outcomes` has the outcome of each tool by name. `starter` is the call that started a sub-agent, with
    the text that was its prompt, or None."""

    def __init__(self, hint: Certify) -> None:
        self.outcomes: dict[str, str] = {}
        self.starter: tuple[MarkedCall, str] | None = None
        self._hint = hint
        self._session = ""
        self._plan: list[MarkedCall] = []
        self._calls: dict[str, MarkedCall] = {}
        self._started = asyncio.Event()

    @property
    def unfinished(self) -> bool:
        """True if a tool is left to call."""
        return self.starter is None and any(self.outcomes[call.name] == NOT_REACHED for call in self._plan)

    async def next_call(
        self, session: str, tools: Sequence[ToolSpec], replies: int
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the name and the arguments of the next tool to call, or None at the end of the trial. `replies` is the
        number of replies in the session so far."""
        if session != self._session:
            self._session, self._plan = session, self._planned(tools)
        for call in self._plan[:replies]:
            if self.outcomes[call.name] == OPEN:
                self.outcomes[call.name] = NOTHING
        if self.starter is None and replies < len(self._plan):
            call = self._plan[replies]
            if self.outcomes[call.name] == NOT_REACHED:
                self.outcomes[call.name] = OPEN
            return call.name, call.arguments
        try:
            async with asyncio.timeout(LATE_SECONDS if self._plan else 0):
                await self._started.wait()
        except TimeoutError:
            pass
        return None

    def begins(self, mark: str, *, able: bool) -> None:
        """Record that a conversation begins with a mark. `able` is true if the conversation has a tool for a part of
        the task."""
        text = _text(mark)
        call = self._calls.get(text)
        if call is None or self.starter is not None:
            return
        self.outcomes[call.name] = STARTS if able else HELPLESS
        if able:
            self.starter = call, text
            self._started.set()

    def _planned(self, tools: Sequence[ToolSpec]) -> list[MarkedCall]:
        box = find_tools(tools, self._hint)
        known = (box.shell, box.writer, box.reader, box.viewer, find_waiter(tools, self._hint))
        for tool in tools:
            self.outcomes.setdefault(str(tool["function"].get("name", "")), NO_TEXT)
        for found in filter(None, known):
            self.outcomes[found.name] = KNOWN
        calls = marked_calls(tools, self._hint, lambda: _text("".join(secrets.choice(LETTERS) for _ in range(16))))
        left = [call for call in calls if self.outcomes[call.name] in (NO_TEXT, NOT_REACHED, TOO_MANY)]
        room = CALLS - sum(outcome in (NOTHING, HELPLESS, OPEN) for outcome in self.outcomes.values())
        for place, call in enumerate(left):
            self.outcomes[call.name] = NOT_REACHED if place < room else TOO_MANY
        self._calls |= {text: call for call in left for text in call.texts}
        return left[:room]


def told(outcomes: Mapping[str, str]) -> str:
    """Return a readable text with the outcomes, each with its tools."""
    tools = {each: sorted(name for name, outcome in outcomes.items() if outcome == each) for each in ORDER}
    return "; ".join(f"{outcome}: {', '.join(names)}" for outcome, names in tools.items() if names)


def _text(mark: str) -> str:
    return f"{SUBAGENT_MARK}{mark}: say that you are done"
