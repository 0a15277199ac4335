"""Judges one row (one test) of a certificate: compares the records of the row's session with what the scripted model
received and sampled.

The module shares no code with the one that makes training samples. Invariant: a row holds only if each trained token id
has the model's log-probability, and comes after exactly the ids that the model had as context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from outrider.dialects.reading import RESULT
from outrider.harnesses.mcp_servers import FIELD as MCP_SERVERS
from outrider.harnesses.presets import Certify, Finding
from outrider.lab.certify.rows import OFFERED, READ, CertificationRow
from outrider.lab.certify.scripted_model import ScriptedCall, choose_call
from outrider.lab.certify.subagent_trial import STARTS, summary
from outrider.lab.certify.tool_finder import COMMAND, IMAGE, WRITE, describe, find_tools
from outrider.lab.certify.tool_finder import READ as READER
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import StopReason
from outrider.schemas import TurnView
from outrider.spec import HarnessSpec, RuntimeSpec
from outrider.trajectory import BranchKind, Sample, SessionResult

Word = Literal["holds", "does not hold", "not tried"]


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The harness and the runtime that a certificate is about, as fields of a task. `dialect` is the dialect that the
    harness must use; None allows any. `hint` is what the preset declares about the harness's tools."""

    name: str
    harness: HarnessSpec
    runtime: RuntimeSpec
    dialect: str | None = None
    hint: Certify = Certify()


class RowVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one row (one test) of a certificate.

    - `required`: True if the row must be tried before the certificate can hold.
    - `reason`: why the row does not hold or was not tried; for a row that holds, a remark.
    - `turns`: the number of model calls.
    - `forks`: how often the harness sent a changed history, by cause.
    - `branches`, `labels`: the number of branches of each kind, and the labels of all branches.
    - `streamed`: True if the program requests streamed replies.
    - `ignored`: the parts of requests that had no effect. Maps each part to the number of turns whose requests had this
      part.
    - `tools`: the outcomes of a `SubagentTrial`, by tool.
    - `found`: whether the program sends images (row `image`), or has a tool that starts sub-agents (row `sub-agent`).
      None for other rows, and if the row does not hold.
    - `log_tail`: the end of the program's output, if the row does not hold.
    """

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
    ignored: dict[str, int] = {}
    tools: dict[str, str] = {}
    found: Finding | None = None
    seconds: float = 0.0
    log_tail: str | None = None


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts on a harness, in the order of the rows. `ok` is True if the certificate `holds`."""

    harness: str
    dialect: str | None
    runtime: str
    ok: bool
    rows: tuple[RowVerdict, ...]
    seconds: float


def holds(rows: Sequence[RowVerdict]) -> bool:
    """Return True if the certificate holds: at least one row and every required row was tried, and every tried row
    holds."""
    tried = [row for row in rows if row.verdict != "not tried"]
    untried = [row for row in rows if row.verdict == "not tried" and row.required]
    return bool(tried) and not untried and all(row.verdict == "holds" for row in tried)


class RowEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a row's session.

    - `streams`: True if the harness requests streamed replies.
    - `in_time`: True if the first word of a reply was sent to the harness before the rest of the reply was sampled.
    - `tried`: for the row `sub-agent`, the outcomes of the `SubagentTrial`, by tool.
    """

    result: SessionResult
    samples: Sequence[Sample]
    turns: Sequence[TurnView]
    calls: Sequence[ScriptedCall]
    streams: bool
    in_time: bool
    tried: dict[str, str] = {}


def judge(row: CertificationRow, evidence: RowEvidence, *, hint: Certify, dialect: str | None) -> RowVerdict:
    """Return the verdict of a row. `dialect` is the dialect that the harness must use; None allows any."""
    result = evidence.result
    forks = ", ".join(f"{cause} {count}" for cause, count in result.forks.items())
    declared = [tool for call in evidence.calls for tool in call.state.tools]
    tools = find_tools(declared, hint)
    word: Word = "not tried"
    # A harness declares its tools with its first model call, so the tools are checked only if there are
    # `evidence.calls`. If the harness failed before its first call, `_failures` reports this failure below.
    if row.needs == "mcp" and result.error is not None and (result.error.field or "").startswith(MCP_SERVERS):
        reason = result.error.message  # the MCP server cannot start, because the sandbox has no Python
    elif evidence.calls and row.needs == "mcp" and tools.noter is None and result.error is None:
        word, reason = "does not hold", f"it shows the model no tool of the MCP server. Offered: {describe(declared)}"
    elif evidence.calls and row.needs == "image" and tools.viewer is None:
        reason = f"it shows the model no tool such as {IMAGE.what}"
    elif evidence.calls and any(
        choose_call(action, tools, "/") is None for step in row.steps for action in step.actions
    ):
        reason = (
            f"none of its tools could do what the row asks for. Needed: {COMMAND.what}; or {WRITE.what}, and "
            f"{READER.what}. Offered: {describe(declared)}"
            + ("" if declared else "; a program without tools is tried by its own task on a scripted engine instead")
        )
    elif evidence.calls and row.needs == "subagent" and STARTS not in evidence.tried.values():
        reason = f"no tool started a sub-agent; {summary(evidence.tried) or 'none is offered'}"
    elif evidence.calls and row.needs == "stream" and not evidence.streams:
        reason = "it asks for its replies in one piece"
    elif failure := next(_failures(row, evidence, dialect), None):
        word, reason = "does not hold", failure
    else:
        unread = ", ".join(f"{name} ({count})" for name, count in result.ignored.items() if name.startswith(RESULT))
        remarks = (
            summary(evidence.tried),
            "the program sent no image to the model" if row.needs == "image" and not unread else "",
            f"forked: {forks}" if forks else "",
            f"{result.tokens.unsure} tokens in unsure branches" if result.tokens.unsure else "",
            f"not read by the model (turns): {unread}" if unread else "",
        )
        word, reason = "holds", "; ".join(filter(None, remarks))
    found: Finding | None = None
    if row.needs in ("image", "subagent") and word != "does not hold":
        sent = row.needs == "subagent" or any(name.startswith(RESULT) for name in result.ignored)
        found = "not tried" if word == "not tried" else "yes" if sent else "no"
    parents = {turn.parent for turn in evidence.turns}
    leaves = [turn for turn in evidence.turns if turn.index not in parents]
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
        branches=dict(Counter(leaf.kind for leaf in leaves)),
        labels=tuple(sorted({leaf.label for leaf in leaves} - {""})),
        streamed=evidence.streams,
        ignored=result.ignored,
        tools=evidence.tried,
        found=found,
        seconds=round(result.seconds.run, 2),
        log_tail=result.error.log_tail if result.error and word == "does not hold" else None,
    )


def _failures(row: CertificationRow, evidence: RowEvidence, dialect: str | None) -> Iterator[str]:
    """Yield the problems of a session, the most informative one first."""
    result, tokens = evidence.result, evidence.result.tokens
    if result.error is not None:
        yield f"{result.error.code}: {'; '.join(filter(None, (result.error.message, result.error.hint)))}"
    if result.stop_reason is not StopReason.COMPLETED:
        yield f"ended by {result.stop_reason.value}"
    if result.verdict is None or result.verdict.reward != 1.0:
        yield f"its calls were not all carried out as the model said them: {row.check} is not so"

    if tokens.drift:
        yield f"{tokens.drift} tokens drifted"
    if tokens.sampled != tokens.trained + tokens.masked + tokens.dropped:
        yield f"{tokens.sampled} sampled tokens are not {tokens.trained} trained + the rest"
    if (sampled := sum(len(call.output) for call in evidence.calls)) != tokens.sampled:
        yield f"the model sampled {sampled} tokens, and {tokens.sampled} were recorded"
    if (trained := sum(sample.trained_tokens for sample in evidence.samples)) != tokens.trained:
        yield f"the rows train on {trained} tokens, and {tokens.trained} were counted"
    if found := sample_faults(evidence.samples, evidence.calls):
        yield "; ".join(found)

    spoken = {turn.dialect for turn in evidence.turns}
    if dialect is not None and spoken != {dialect}:
        yield f"it spoke {', '.join(sorted(spoken))}, not {dialect}"
    malformed = sum(turn.malformed_calls for turn in evidence.turns)
    if malformed != (expected := sum(call.step.malformed for call in evidence.calls)):
        yield f"{malformed} malformed calls were recorded, not {expected}"
    if row.needs == "stream" and not evidence.in_time:
        yield "not a word reached it before the reply was over"
    if row.needs == "skill":
        words = {word for call in evidence.calls for word in call.state.words}
        if OFFERED not in words:
            yield "it does not show the model the skill's description"
        if READ not in words:
            yield "the model has not got the text of the skill's SKILL.md"
    if row.needs == "subagent":
        kinds = {turn.kind for turn in evidence.turns}
        if not any(call.state.subagent for call in evidence.calls):
            yield "no sub-agent asked the model"
        elif BranchKind.SUBAGENT not in kinds:
            yield f"its sub-agent's calls were taken for {', '.join(sorted(kinds))}"


def sample_faults(samples: Sequence[Sample], calls: Sequence[ScriptedCall]) -> list[str]:
    """Return the problems in the samples of one session, as texts. `calls` are all generations of the session."""
    found = []
    for sample in samples:
        ids, mask = sample.ids, sample.loss_mask.astype(bool)
        proved = np.zeros(len(ids), dtype=bool)
        for call in calls:
            start, end = len(call.prompt), len(call.prompt) + len(call.output)
            if np.array_equal(ids[:end], np.concatenate([call.prompt, np.asarray(call.output, dtype=np.int32)])):
                proved[start:end] = True
        named = f"row {sample.row} ({sample.kind.value})"
        if unproved := int((mask & ~proved).sum()):
            found.append(f"{named} trains on {unproved} ids that the engine did not sample after the ids before them")
        wrong = sum(sample.logprobs[at] != scripted_logprob(int(at), int(ids[at])) for at in np.flatnonzero(mask))
        if wrong:
            found.append(f"{named} has {wrong} log-probabilities that are not the engine's")
    return found
