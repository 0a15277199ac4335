"""Extracts the facts about one session that the rules need, from the session's turns and timeline.

Turns are read one by one in the order of their index. Invariants: no turn is kept whole; a tool's result counts once,
although later requests repeat it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from outrider.messages import Message, Role
from outrider.redaction import without_keys
from outrider.service.diagnosis.prompts import ChangedLine, changed_line, head_of, system_of
from outrider.timeline import Entry, EntryKind
from outrider.trajectory import HEAD_CHANGES, FinishReason, JoinKind, Turn

MOST_TOOLS = 100
"""Maximum number of tools in a session whose results are counted, and of programs whose seconds are counted. All
further tools and programs are left out, because a model may invent any number of names."""
MOST_HEADS = 8
"""Maximum number of a session's conversations whose beginnings are compared."""
MISSING = (126, 127)
"""Exit codes of a shell for a program that cannot be run, or that does not exist."""
SEARCHED = 400
"""Only this many characters at the beginning, and this many at the end, of a tool's result are searched for signs of
failure."""
LEAST_OUTPUT = 8
"""An engine's speed is measured only from turns with at least this many sampled tokens."""
LEAST_CACHED = 256
"""The use of the prefix cache is measured only for a call whose prompt repeats at least this many tokens of an earlier
call. Fewer tokens give no information, because engines cache whole blocks."""

FAILED = re.compile(
    r"""^[^\w{]{0,4}(?:\w+\.)*\w*(?:error|exception|fatal|failed|failure|traceback|denied|refused)\b
    |exit(?:ed)?[ _](?:with[ ])?(?:code|status)\W{0,4}[1-9]
    |return[ _]?code\W{0,4}[1-9]
    |"(?:error|is_error)"\s*:(?!\s*(?:null|false|""|\{\}|\[\]))
    |command\snot\sfound|no\ssuch\stool|unknown\stool|not\sa\s(?:valid\s|known\s)?tool|\btool\b.{0,80}\bnot\s(?:found|available)
    |timed\sout
    """,
    re.IGNORECASE | re.VERBOSE,
)
"""Finds a sign of failure at the beginning of a tool's result."""
EXIT_CODE = re.compile(r"exit(?:ed)?[ _](?:with )?(?:code|status)\W{0,4}[1-9]", re.IGNORECASE)
"""Finds a sign of failure at the end of a tool's result."""


class EngineSpeed(msgspec.Struct):
    """The total seconds and sampled tokens of a session's turns on one engine."""

    seconds: float = 0.0
    tokens: int = 0


class ToolResults(msgspec.Struct):
    """The number of a tool's results in a session, and the number of results that show a failure."""

    results: int = 0
    failed: int = 0


class SessionFacts(msgspec.Struct, kw_only=True):
    """Facts about one session. Times are in seconds.

    cut: number of turns whose reply ended at the token limit.
    calls: number of tool calls in the replies, including malformed calls.
    tools: the results of tools, by tool name.
    speeds: the speed of each engine, by engine name.
    engine, began: the engine of the first turn, and the time at which that turn began.
    first_wait: the time from the request to the first token of the first turn. It is None if no token was sampled or
        the policy's version changed during the turn.
    waits: the same time for each later turn. A turn is left out if it sampled no token, or if the policy's version
        changed during the turn or since the earlier turns.
    cacheable: number of tokens of earlier prompts and replies that the prefix cache could have kept.
    missed: how many of these tokens the engine computed again.
    oldest, newest: the oldest and newest policy version of the sampled tokens, or None.
    ended: the time at which the last turn ended.
    missing: programs that could not be run in the agent's sandbox.
    programs: the seconds of the agent's commands, by program (the first word of a command, without its folder).
    heads: the beginnings of the session's conversations.
    changed: the first line that changed in a system prompt during a conversation.
    """

    session_id: str
    turns: int = 0
    cut: int = 0
    calls: int = 0
    malformed: int = 0
    tools: dict[str, ToolResults] = {}
    speeds: dict[str, EngineSpeed] = {}
    engine: str | None = None
    began: float = 0.0
    ended: float = 0.0
    first_wait: float | None = None
    waits: list[float] = []
    cacheable: int = 0
    missed: int = 0
    oldest: int | None = None
    newest: int | None = None
    missing: list[str] = []
    programs: dict[str, float] = {}
    heads: list[str] = []
    changed: ChangedLine | None = None


class FactsReader:
    """Collects the facts about a session. Add the turns in the order of their index."""

    def __init__(self, session_id: str) -> None:
        self.facts = SessionFacts(session_id=session_id)
        self._called: dict[str, str] = {}
        """The tool names of the calls without a result so far, by call id."""
        self._answered: set[str] = set()
        self._lengths: dict[int, int] = {}
        """The number of prompt and reply tokens of each turn, by the turn's index."""
        self._roots: dict[int, int] = {}
        self._systems: dict[int, str] = {}
        """The system prompt of each conversation, by the index of its first turn."""

    def add(self, turn: Turn) -> None:
        facts = self.facts
        sampled = len(turn.output_ids) // 4
        facts.turns += 1
        facts.cut += turn.finish is FinishReason.LENGTH
        self._add_calls(turn)
        self._add_results(turn.messages)
        if facts.engine is None:
            facts.engine, facts.began = turn.engine, turn.timings.received
        facts.ended = max(facts.ended, turn.timings.finished)
        if sampled >= LEAST_OUTPUT:
            speed = facts.speeds.setdefault(turn.engine, EngineSpeed())
            speed.seconds += max(0.0, turn.timings.finished - turn.timings.received)
            speed.tokens += sampled
        if turn.timings.first_token is not None and not self._policy_changed(turn):
            wait = max(0.0, turn.timings.first_token - turn.timings.received)
            if facts.turns == 1:
                facts.first_wait = wait
            else:
                facts.waits.append(wait)
        self._add_cache(turn)
        self._lengths[turn.index] = turn.prompt_length + sampled
        for span in turn.versions:
            if span.end > span.start:
                facts.oldest = span.version if facts.oldest is None else min(facts.oldest, span.version)
                facts.newest = span.version if facts.newest is None else max(facts.newest, span.version)
        self._add_prompt(turn)

    def add_commands(self, entries: Iterable[Entry]) -> None:
        """Add the commands in the session's timeline. Of several entries with the same number, the last one is used."""
        facts = self.facts
        last = {entry.number: entry for entry in entries if entry.kind is EntryKind.COMMAND}
        for entry in last.values():
            if entry.end is None or entry.data.get("sandbox") == "grading":
                continue
            program = without_keys(entry.name.split(maxsplit=1)[0].rpartition("/")[2]) if entry.name.strip() else ""
            if program and (program in facts.programs or len(facts.programs) < MOST_TOOLS):
                facts.programs[program] = facts.programs.get(program, 0.0) + max(0.0, entry.end - entry.start)
                if entry.data.get("exit_code") in MISSING and program not in facts.missing:
                    facts.missing.append(program)

    def _policy_changed(self, turn: Turn) -> bool:
        """Return True if the policy's version rose during the call, or since the session's earlier calls. Such a call
        may have waited while new weights were loaded."""
        versions = {span.version for span in turn.versions}
        before = self.facts.newest
        return len(versions) > 1 or (before is not None and any(version > before for version in versions))

    def _add_calls(self, turn: Turn) -> None:
        calls = turn.reply.tool_calls if turn.reply is not None else ()
        self.facts.calls += len(calls) + turn.malformed_calls
        self.facts.malformed += turn.malformed_calls
        for call in calls:
            if call.id not in self._answered:
                self._called[call.id] = call.name

    def _add_results(self, messages: Sequence[Message]) -> None:
        tools = self.facts.tools
        for message in messages:
            if message.role is not Role.TOOL or message.tool_call_id is None:
                continue
            name = self._called.pop(message.tool_call_id, None)
            if name is None or (name not in tools and len(tools) >= MOST_TOOLS):
                continue
            self._answered.add(message.tool_call_id)
            counted = tools.setdefault(name, ToolResults())
            counted.results += 1
            counted.failed += shows_failure(message.content)

    def _add_cache(self, turn: Turn) -> None:
        if turn.join is not JoinKind.APPEND or turn.parent is None or turn.cached_tokens is None:
            return
        before = min(self._lengths.get(turn.parent, 0), turn.prompt_length)
        if before >= LEAST_CACHED:
            self.facts.cacheable += before
            self.facts.missed += max(0, before - turn.cached_tokens)

    def _add_prompt(self, turn: Turn) -> None:
        if turn.parent is not None:
            self._roots[turn.index] = self._roots.get(turn.parent, turn.parent)
            return
        self._roots[turn.index] = turn.index
        system = self._systems[turn.index] = system_of(turn.messages)
        if turn.join is JoinKind.ROOT and len(self.facts.heads) < MOST_HEADS:
            self.facts.heads.append(head_of(turn.messages))
        if turn.cause in HEAD_CHANGES and turn.forked_from is not None and self.facts.changed is None:
            before = self._systems.get(self._roots.get(turn.forked_from, -1), "")
            if before and system:
                self.facts.changed = changed_line(before, system)


def shows_failure(result: str) -> bool:
    """Return True if a tool's result shows that the call failed."""
    text = result.strip()
    if FAILED.search(text[:SEARCHED]):
        return True
    return len(text) > SEARCHED and bool(EXIT_CODE.search(text[-SEARCHED:]))
