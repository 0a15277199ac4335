"""Checks the samples of a demo's sessions, computes totals, and writes the samples and the totals to files.

Only `write_files` does I/O. The check runs no model, because the service's count of drifted tokens already shows
whether the engine got exactly the ids in the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from outrider.client.sample_files import SampleFormat, sample_file
from outrider.errors import InvalidField
from outrider.lab.demo.task import TASK_FILE
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView, SessionView, TurnView
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Sample


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A demo's finished groups with their samples, its turns by session id, and its duration in seconds."""

    groups: tuple[GroupView, ...]
    turns: dict[str, tuple[TurnView, ...]]
    seconds: float


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over the finished sessions of one group or of all groups. The fields in seconds are means over these
    sessions. `mean_reward` is the mean over the sessions with a verdict, or 0.0 if no session has one. All other
    numbers are totals."""

    name: str
    sessions: int
    completed: int
    errors: int
    mean_reward: float
    turns: int
    sampled_tokens: int
    trained_tokens: int
    drift_tokens: int
    wait_seconds: float
    init_seconds: float
    run_seconds: float
    eval_seconds: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider demo --json`, and the first part of summary.json. `faults` lists the problems in the
    samples. `samples`, `parquet` and `task` are the paths of the written files."""

    sessions: int
    completed: int
    errors: int
    mean_reward: float
    drift_tokens: int
    sampled_tokens: int
    trained_tokens: int
    samples: str
    parquet: str | None
    task: str
    seconds: float
    runtime: str
    faults: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not (self.errors or self.drift_tokens or self.faults)


def tally(name: str, sessions: Iterable[SessionView]) -> Tally:
    results = [session.result for session in sessions if session.result]
    stages = [result.seconds for result in results]
    return Tally(
        name=name,
        sessions=len(results),
        completed=sum(result.stop_reason is StopReason.COMPLETED for result in results),
        errors=sum(result.stop_reason is StopReason.ERROR for result in results),
        mean_reward=_mean(result.verdict.reward for result in results if result.verdict),
        turns=sum(result.turns for result in results),
        sampled_tokens=sum(result.tokens.sampled for result in results),
        trained_tokens=sum(result.tokens.trained for result in results),
        drift_tokens=sum(result.tokens.drift for result in results),
        wait_seconds=_mean(stage.queued + stage.ready + stage.eval_wait for stage in stages),
        init_seconds=_mean(stage.init for stage in stages),
        run_seconds=_mean(stage.run for stage in stages),
        eval_seconds=_mean(stage.eval for stage in stages),
    )


def tallies(groups: Iterable[GroupView]) -> list[Tally]:
    """Return the totals of each group, followed by the totals of all groups."""
    groups = list(groups)
    each = [tally(group.labels.get("item", group.id), group.sessions) for group in groups]
    return [*each, tally("total", (session for group in groups for session in group.sessions))]


def write_files(rollouts: RolloutSummary, folder: Path, *, runtime: str, faults: Sequence[str]) -> Summary:
    """Write samples.jsonl, samples.parquet (only if pyarrow is installed), summary.json, and task.toml, a task for
    `outrider run`. Raises InvalidField."""
    jsonl = folder / "samples.jsonl"
    _write_samples(rollouts, jsonl, SampleFormat.JSONL)
    parquet: Path | None = folder / "samples.parquet"
    try:
        _write_samples(rollouts, folder / "samples.parquet", SampleFormat.PARQUET)
    except InvalidField as error:
        if error.field != "format":  # an error in the field `format` means that pyarrow is missing
            raise
        parquet = None
    (folder / "task.toml").write_text(TASK_FILE)
    *each, total = tallies(rollouts.groups)
    summary = Summary(
        sessions=total.sessions,
        completed=total.completed,
        errors=total.errors,
        mean_reward=round(total.mean_reward, 4),
        drift_tokens=total.drift_tokens,
        sampled_tokens=total.sampled_tokens,
        trained_tokens=total.trained_tokens,
        samples=str(jsonl),
        parquet=str(parquet) if parquet else None,
        task=str(folder / "task.toml"),
        seconds=round(rollouts.seconds, 2),
        runtime=runtime,
        faults=tuple(faults),
    )
    text = msgspec.json.format(msgspec.json.encode({"summary": summary, "groups": each}), indent=2)
    (folder / "summary.json").write_bytes(text + b"\n")
    return summary


def best_session(rollouts: RolloutSummary) -> SessionView:
    """Return the session to print: of the sessions with the highest reward, the first with the most turns."""

    def merit(session: SessionView) -> tuple[float, int]:
        if session.result is None:
            return (-1.0, 0)
        verdict = session.result.verdict
        return (verdict.reward if verdict else -1.0, session.result.turns)

    return max((session for group in rollouts.groups for session in group.sessions), key=merit)


def _write_samples(rollouts: RolloutSummary, path: Path, kind: SampleFormat) -> None:
    with sample_file(path, kind) as writer:
        for group in rollouts.groups:
            writer.write(group.samples or ())


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fmean(listed) if listed else 0.0


def sample_faults(rollouts: RolloutSummary, tokenizer: Tokenizer) -> list[str]:
    """Return the problems in the samples, as texts. The check decodes the ids that are trained on. Each decoded text
    must be the text of a sampled turn."""
    found: list[str] = []
    for group in rollouts.groups:
        trained: dict[str, int] = {session.id: 0 for session in group.sessions}
        for sample in group.samples or ():
            trained[sample.session_id] += sample.trained_tokens
            found += _one_sample_faults(sample, rollouts.turns[sample.session_id], tokenizer)
        for session in group.sessions:
            expected = session.result.tokens.trained if session.result else 0
            if trained[session.id] != expected:
                found.append(
                    f"{session.id}: its samples train {trained[session.id]} tokens, its result says {expected}"
                )
    return found


def _one_sample_faults(sample: Sample, turns: Sequence[TurnView], tokenizer: Tokenizer) -> Iterator[str]:
    name = f"{sample.session_id} row {sample.row}"
    lengths = {
        sample.trained_tokens,
        len(sample.packed_logprobs) // 8,
        sum(span.end - span.start for span in sample.version_spans),
    }
    if len(lengths) != 1:
        yield f"{name}: not every id that trains has a log-probability and a version"
        return
    sampled = {turn.sampled for turn in turns}
    # The trained ids of a turn are contiguous, so each span must be the text of one turn.
    for start, end in sample.trained:
        if (text := tokenizer.decode(sample.ids[start:end].tolist())) not in sampled:
            yield f"{name}: {text!r} is trained on, but is the text of no turn"
    for mask, logprob, version in zip(sample.loss_mask, sample.logprobs, sample.versions, strict=True):
        if mask and not (logprob <= 0.0 and version >= 0):
            yield f"{name}: mask {mask} with log-probability {logprob} and version {version}"
            return
