"""The verdict of a row: what was left of its session, held against what must be. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from outrider.certify.actor import Call, way_to_do
from outrider.certify.exact import faults
from outrider.certify.rows import Row
from outrider.certify.toolbox import COMMAND, READ, WRITE, described, find_subagent, find_tools
from outrider.harnesses.presets import Certify
from outrider.lifecycle import StopReason
from outrider.schemas import TurnView
from outrider.trajectory import BranchKind, Sample, SessionResult

Word = Literal["holds", "does not hold", "not tried"]


class RowVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a certificate. `required` says whether the certificate can hold without it, `reason` why it does not
    hold or was not tried, or what is worth knowing; `turns` are its model calls, `forks` the times its history came
    back changed, by cause, `branches` how many it has of each kind, `labels` what they are called, `streamed` whether
    the program asks for streams. `log_tail` is the end of what the program wrote, where it does not hold."""

    row: str
    what: str
    verdict: Word
    required: bool = True
    reason: str = ""
    turns: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    drift_tokens: int = 0
    forks: dict[str, int] = {}
    branches: dict[str, int] = {}
    labels: tuple[str, ...] = ()
    streamed: bool = False
    seconds: float = 0.0
    log_tail: str | None = None


def holds(rows: Sequence[RowVerdict]) -> bool:
    """Whether a certificate of these rows holds: something was tried, all that was tried holds, and what was not tried
    is nothing that is required."""
    tried = [row for row in rows if row.verdict != "not tried"]
    untried = [row for row in rows if row.verdict == "not tried" and row.required]
    return bool(tried) and not untried and all(row.verdict == "holds" for row in tried)


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a row's session has left. `streams` says whether the harness asks for streamed replies, `in_time`
    whether it was sent the first word before the rest was sampled."""

    result: SessionResult
    samples: Sequence[Sample]
    turns: Sequence[TurnView]
    calls: Sequence[Call]
    streams: bool
    in_time: bool


def judge(row: Row, evidence: Evidence, *, hint: Certify, dialect: str | None) -> RowVerdict:
    """The verdict. `dialect` is the one that the harness should have spoken, if that is known."""
    result = evidence.result
    word, reason = _verdict(row, evidence, hint, dialect)
    return RowVerdict(
        row=row.name,
        what=row.what,
        verdict=word,
        required=row.needs is None,
        reason=reason,
        turns=result.turns,
        sampled_tokens=result.tokens.sampled,
        trained_tokens=result.tokens.trained,
        drift_tokens=result.tokens.drift,
        forks=result.forks,
        branches=dict(Counter(leaf.kind for leaf in _leaves(evidence.turns))),
        labels=tuple(sorted({leaf.label for leaf in _leaves(evidence.turns)} - {""})),
        streamed=evidence.streams,
        seconds=round(result.seconds.run, 2),
        log_tail=result.error.log_tail if result.error and word == "does not hold" else None,
    )


def _leaves(turns: Sequence[TurnView]) -> list[TurnView]:
    """The turns that a branch ends in."""
    parents = {turn.parent for turn in turns}
    return [turn for turn in turns if turn.index not in parents]


class _Finding(Exception):
    """The first thing that decides a row."""

    def __init__(self, word: Word, reason: str) -> None:
        super().__init__(reason)
        self.word: Word = word
        self.reason = reason


def _verdict(row: Row, evidence: Evidence, hint: Certify, dialect: str | None) -> tuple[Word, str]:
    try:
        _could_be_tried(row, evidence, hint)
        _has_ended_well(row, evidence)
        _has_exact_tokens(evidence)
        _has_done_the_rows_own(row, evidence, dialect)
    except _Finding as finding:
        return finding.word, finding.reason
    forks = evidence.result.forks
    return "holds", "forked: " + ", ".join(f"{cause} {count}" for cause, count in forks.items()) if forks else ""


def _could_be_tried(row: Row, evidence: Evidence, hint: Certify) -> None:
    tools = [tool for call in evidence.calls for tool in call.scene.tools]
    if not evidence.calls:
        return
    toolbox = find_tools(tools, hint)
    if any(way_to_do(act, toolbox, "/") is None for step in row.steps for act in step.run):
        raise _Finding(
            "not tried",
            f"none of its tools could do what the row asks for. Needed: {COMMAND.what}; or {WRITE.what}, and "
            f"{READ.what}. Offered: {described(tools)}",
        )
    if row.needs == "subagent" and find_subagent(tools, hint) is None:
        raise _Finding("not tried", "it shows the model no tool that starts a sub-agent")
    if row.needs == "stream" and not evidence.streams:
        raise _Finding("not tried", "it asks for its replies in one piece")


def _has_ended_well(row: Row, evidence: Evidence) -> None:
    result = evidence.result
    if result.error is not None:
        told = [result.error.message, *([result.error.hint] if result.error.hint else [])]
        raise _Finding("does not hold", f"{result.error.code}: {'; '.join(told)}")
    if result.stop_reason is not StopReason.COMPLETED:
        raise _Finding("does not hold", f"ended by {result.stop_reason.value}")
    if result.verdict is None or result.verdict.reward != 1.0:
        raise _Finding(
            "does not hold", f"its calls were not all carried out as the model said them: {row.check} is not so"
        )


def _has_exact_tokens(evidence: Evidence) -> None:
    tokens = evidence.result.tokens
    if tokens.drift:
        raise _Finding("does not hold", f"{tokens.drift} tokens drifted")
    if tokens.sampled != tokens.trained + tokens.masked + tokens.dropped:
        raise _Finding("does not hold", f"{tokens.sampled} sampled tokens are not {tokens.trained} trained + the rest")
    if (said := sum(len(call.output) for call in evidence.calls)) != tokens.sampled:
        raise _Finding("does not hold", f"the model said {said} tokens, and {tokens.sampled} were recorded")
    if (trained := sum(sum(sample.loss_mask) for sample in evidence.samples)) != tokens.trained:
        raise _Finding("does not hold", f"the rows train on {trained} tokens, and {tokens.trained} were counted")
    if found := faults(evidence.samples, evidence.calls):
        raise _Finding("does not hold", "; ".join(found))


def _has_done_the_rows_own(row: Row, evidence: Evidence, dialect: str | None) -> None:
    spoken = {turn.dialect for turn in evidence.turns}
    if dialect is not None and spoken != {dialect}:
        raise _Finding("does not hold", f"it spoke {', '.join(sorted(spoken))}, not {dialect}")
    malformed = sum(turn.malformed_calls for turn in evidence.turns)
    said = sum(call.step.malformed for call in evidence.calls)
    if malformed != said:
        raise _Finding("does not hold", f"{malformed} malformed calls were recorded, not {said}")
    if row.needs == "stream" and not evidence.in_time:
        raise _Finding("does not hold", "not a word reached it before the reply was over")
    if row.needs == "subagent" and not any(call.scene.helper for call in evidence.calls):
        raise _Finding("does not hold", "no sub-agent asked the model")
    if row.needs == "subagent" and BranchKind.SUBAGENT not in (kinds := {turn.kind for turn in evidence.turns}):
        raise _Finding("does not hold", f"its sub-agent's calls were taken for {', '.join(sorted(kinds))}")
