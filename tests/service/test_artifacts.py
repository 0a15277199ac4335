"""Files that agents leave are kept however the run ended, unchanged and within bounds. Files that were left out are
listed."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role
from outrider.schemas import Artifact, ArtifactList, LeftOut
from outrider.sessions.artifacts import LOG_BYTES, GradingLog
from outrider.store.artifacts import GRADING_LOG

from .conftest import MakeWorld
from .program import program
from .stage import StagedRuntime
from .world import World, result_of

LEAVE = "run mkdir -p logs/deep; echo one > logs/a; echo two > logs/deep/b; echo three > other"


def kept(w: World, session_id: str, attempt: int | None = None) -> ArtifactList:
    return w.service.artifacts.listed(session_id, attempt)


def artifact(path: str, data: bytes) -> Artifact:
    return Artifact(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["service.stage:StagedRuntime", "process", "namespace"])
async def test_what_patterns_match_is_kept(world: MakeWorld, temporary: Path, kind: str) -> None:
    async with world(http=True) as w:
        patterns = ["logs/**", "/work/logs/a", "none/*", "other"]
        session = await w.run("ask", LEAVE, artifacts=patterns, runtime={"kind": kind})
        assert result_of(session).verdict is not None
        listed = kept(w, session.id)
        assert listed.attempt == 1
        assert listed.artifacts == (
            artifact("/work/logs/a", b"one\n"),
            artifact("/work/logs/deep/b", b"two\n"),
            artifact("/work/other", b"three\n"),
        )
        folders = [left.path for left in listed.left_out if left.reason.startswith("a folder")]
        assert set(folders) <= {"/work/logs", "/work/logs/deep"}
        assert [left for left in listed.left_out if left.path not in folders] == [
            LeftOut(path="none/*", reason="matches nothing")
        ]
        file = w.service.artifacts.file(session.id, "/work/logs/deep/b")
        assert await asyncio.to_thread(file.read_bytes) == b"two\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["process", "namespace"])
async def test_files_in_the_sessions_folders_are_kept(world: MakeWorld, temporary: Path, kind: str) -> None:
    """The folders exist when the agent starts, and need no pattern."""
    then = 'cd "$OUTRIDER_ARTIFACTS" && mkdir deep && echo one > deep/a && cd "$OUTRIDER_LOGS" && echo two > log'
    async with world(http=True) as w:
        session = await w.run(harness=program(then), runtime={"kind": kind})
        listed = kept(w, session.id)
        assert [(Path(each.path).parts[-3:], each.size) for each in listed.artifacts] == [
            (("artifacts", "deep", "a"), 4),
            (("outrider-session", "logs", "log"), 4),
        ]
        assert listed.left_out == ()


async def test_a_session_without_files_has_no_list(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask")
        assert kept(w, session.id) == ArtifactList(session_id=session.id, attempt=None, artifacts=(), left_out=())


class Folders:
    """An agent and a grader that use the session's folders, whose paths are in their contexts."""

    def __init__(self, options: dict[str, Any]) -> None: ...

    async def init(self, context: HarnessContext) -> None:
        await context.runtime.read(f"{context.folders.logs}/.keep")

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await context.model.chat([Message(role=Role.USER, content="x")])
        await context.runtime.write(f"{context.folders.artifacts}/a", b"work")
        return HarnessOutcome()

    @staticmethod
    async def grade(outcome: Outcome) -> float:
        return float(await outcome.runtime.read(f"{outcome.folders.artifacts}/a") == b"work")


async def test_the_folders_are_in_the_contexts(world: MakeWorld) -> None:
    agent = f"{__name__}:Folders"
    async with world() as w:
        evaluator = {"kind": "callable", "path": f"{agent}.grade"}
        session = await w.run(harness={"agent": agent}, evaluator=evaluator)
        verdict = result_of(session).verdict
        assert verdict is not None
        assert verdict.reward == 1.0
        assert kept(w, session.id).artifacts == (artifact("/tmp/outrider-session/artifacts/a", b"work"),)


@pytest.mark.parametrize(
    ("do", "limits", "ending"),
    [
        (("crash",), {}, StopReason.ERROR),
        (("pass 30",), {"agent_seconds": 20}, StopReason.AGENT_TIMEOUT),
        (("pass 30",), {"session_seconds": 20}, StopReason.SESSION_TIMEOUT),
        (("ask", "ask"), {"turns": 2}, StopReason.MAX_TURNS),
    ],
)
async def test_they_are_kept_however_the_run_ended(
    world: MakeWorld, do: tuple[str, ...], limits: dict[str, Any], ending: StopReason
) -> None:
    async with world() as w:
        session = await w.run("ask", LEAVE, *do, artifacts=["logs/a"], limits=limits, max_attempts=1)
        assert result_of(session).stop_reason is ending
        assert kept(w, session.id).artifacts == (artifact("/work/logs/a", b"one\n"),)
        w.assert_quiet()


async def test_each_attempt_has_its_own(world: MakeWorld) -> None:
    async with world() as w:
        session = await w.run("ask", LEAVE, "crash at 2", "run echo done > end", artifacts=["logs/a", "end"])
        assert session.attempt == 3
        listed = [kept(w, session.id, attempt) for attempt in (1, 2, 3)]
        assert [len(each.artifacts) for each in listed] == [1, 1, 2]
        assert kept(w, session.id) == listed[2]
        assert kept(w, session.id, 4) == ArtifactList(session_id=session.id, attempt=4, artifacts=(), left_out=())


async def test_those_of_earlier_steps_stay(world: MakeWorld, temporary: Path) -> None:
    first = "echo one > logs/a; echo one > logs/b; echo same > logs/c"
    leave = f"run if test -e logs; then rm logs/a; echo two > logs/b; echo two > logs/d; else mkdir logs; {first}; fi"
    async with world() as w:
        then = [{"instruction": "go on", "evaluator": {"run": "true"}}]
        fields = {"artifacts": ["logs/*"], "evaluator": {"run": "true"}, "runtime": {"kind": "process"}}
        session = await w.run("ask", leave, then=then, **fields)
        result, listed = result_of(session), kept(w, session.id)
        assert (result.error, session.attempt) == (None, 1)
        assert sorted(listed.artifacts, key=lambda each: each.path) == [
            artifact("/work/logs/a", b"one\n"),
            artifact("/work/logs/b", b"two\n"),
            artifact("/work/logs/c", b"same\n"),
            artifact("/work/logs/d", b"two\n"),
        ]
        assert result.artifact_bytes == 17
        file = w.service.artifacts.file(session.id, "/work/logs/a")
        assert await asyncio.to_thread(file.read_bytes) == b"one\n"


async def test_they_are_the_agents_and_not_the_graders(world: MakeWorld) -> None:
    async with world() as w:
        evaluator = {"run": "echo graded > logs/a", "carry": ["logs"]}
        session = await w.run("ask", LEAVE, artifacts=["logs/a"], evaluator=evaluator)
        assert result_of(session).error is None
        assert kept(w, session.id).artifacts == (artifact("/work/logs/a", b"one\n"),)


async def test_links_and_special_files_are_left_out(world: MakeWorld) -> None:
    async with world() as w:
        leave = "run ln -s /etc/passwd link; mkfifo pipe; ln -s /etc folder; echo x > 'a b%?#'; echo y > plain"
        session = await w.run("ask", leave, artifacts=["*"], runtime={"kind": "process"})
        listed = kept(w, session.id)
        assert listed.artifacts == (artifact("/work/a b%?#", b"x\n"), artifact("/work/plain", b"y\n"))
        assert {left.path for left in listed.left_out} == {"/work/link", "/work/pipe", "/work/folder"}


class Unreadable(StagedRuntime):
    """A runtime whose search for files fails: it raises an exception, or it stops the sandbox and returns odd names."""

    async def glob(self, pattern: str, *, limit: int = 0) -> list[str]:
        if "break" in self._spec.env:
            raise ZeroDivisionError
        await self.stop()
        return ["a", "../../b", "not-\udcff-utf-8"]


async def test_a_failure_to_collect_is_recorded_and_fails_nothing(
    world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "service.test_artifacts:Unreadable"
    async with world() as w:
        gone = await w.run("ask", artifacts=["*"], runtime={"kind": kind})
        broken = await w.run("ask", artifacts=["*"], runtime={"kind": kind, "env": {"break": ""}})
        for session in (gone, broken):
            assert result_of(session).stop_reason is StopReason.COMPLETED
        assert [(left.path, left.reason) for left in kept(w, gone.id).left_out] == [
            ("/work/a", "the sandbox does not run"),
            ("/b", "the sandbox does not run"),
            ("/work/not-\\udcff-utf-8", "its name is not UTF-8"),
        ]
        assert kept(w, broken.id).attempt is None
        assert f"the artifacts of session {broken.id} attempt 1 are not kept" in caplog.text


async def test_a_service_that_cannot_write_says_so(
    world: MakeWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world() as w:
        (tmp_path / "data/artifacts").write_text("in the way")
        session = await w.run("ask", LEAVE, artifacts=["logs/a"])
        assert result_of(session).stop_reason is StopReason.COMPLETED
        assert f"the artifacts of session {session.id}" in caplog.text


async def test_none_are_kept_of_a_cancelled_session(world: MakeWorld) -> None:
    async with world() as w:
        view = await w.submit("ask", LEAVE, "wait here", artifacts=["logs/a"])
        await w.stage.arrived["here"].wait()
        await w.service.cancel(view.id)
        (session,) = (await w.done(view.id)).sessions
        assert kept(w, session.id).attempt is None
        w.assert_quiet()


async def test_what_collects_the_outcome_runs_before_it_is_kept_and_graded(world: MakeWorld) -> None:
    """The commands run in order after the agent's last call. A command that fails or takes too long does not harm the
    session."""
    hooks = [
        {"run": "cat nowhere"},
        {"run": "sleep 60", "seconds": 0.05},
        {"run": "cat said > collected"},
        {"run": "echo last >> collected"},
    ]
    async with world(http=True) as w:
        evaluator = {"run": "cat collected"}
        session = await w.run("ask", "run echo hi > said", artifacts=["coll*"], collect=hooks, evaluator=evaluator)
        result = result_of(session)
        assert (result.stop_reason, result.verdict and result.verdict.reward) == (StopReason.COMPLETED, 1.0)
        assert kept(w, session.id).artifacts == (
            artifact("/work/collected", b"hi\nlast\n"),
            artifact(GRADING_LOG, b"hi\nlast\n"),
        )


@pytest.mark.parametrize(("code", "reward"), [(0, 1.0), (1, 0.0), (3, None)])
async def test_what_graders_print_is_kept(world: MakeWorld, code: int, reward: float | None) -> None:
    """If the grader fails, the output of all evaluations is kept: the first, the second, and the one in an untouched
    sandbox."""
    async with world(http=True) as w:
        run = f"echo looked; echo why >&2; exit {code}"
        session = await w.run(
            "ask", runtime={"kind": "process"}, evaluator={"kind": "command", "run": run}, max_attempts=1
        )
        result = result_of(session)
        assert (result.verdict.reward if result.verdict else None) == reward
        listed = kept(w, session.id)
        said = b"looked\nwhy\n"
        whole = said if code < 3 else b"%b[evaluation 2]\n%b[evaluation 3]\n%b" % (said, said, said)
        assert listed.artifacts == (artifact(GRADING_LOG, whole),)
        assert result.artifact_bytes == len(whole)


async def test_a_grader_that_prints_nothing_leaves_no_log(world: MakeWorld) -> None:
    async with world(http=True) as w:
        session = await w.run("ask", runtime={"kind": "process"}, evaluator={"kind": "command", "run": "true"})
        assert kept(w, session.id).artifacts == ()


def test_of_a_long_log_the_middle_is_cut() -> None:
    whole = b"".join(b"%07d\n" % number for number in range(100_000))
    log = GradingLog()
    for start in range(0, len(whole), 70_001):
        log.add(whole[start : start + 70_001])
    half = LOG_BYTES // 2
    note = b"\n[... %d bytes cut ...]\n" % (len(whole) - LOG_BYTES)
    assert log.content() == whole[:half] + note + whole[-half:]
