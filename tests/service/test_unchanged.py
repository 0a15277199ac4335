"""An agent that changed nothing, and an evaluator that decides the verdict without a sandbox."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider.config import SandboxesConfig
from outrider.evaluators.base import Outcome
from outrider.lifecycle import StopReason
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.schemas import SessionView
from outrider.spec import EvaluatorSpec, RegradeSpec, RuntimeSpec
from outrider.store.artifacts import PATCH
from outrider.trajectory import Verdict

from .conftest import MakeWorld
from .program import program
from .world import World, result_of

pytestmark = [pytest.mark.deep, pytest.mark.timeout(180)]

REPOSITORY = """mkdir repo; cd repo; git init -q .; mkdir src
printf 'one\\ntwo\\n' > src/a.py; echo gone > src/b.py; printf '*.log\\n' > .gitignore; echo kept > kept.log
git add -f .; git -c user.name=x -c user.email=x commit -qm base; echo noise > x.log"""
"""One tracked file is ignored, and there is an ignored file that is not tracked."""
USERS = "mkdir -p ~/.config/git"
"""Makes the folder of the user's own git settings."""


class CountedRuntime(NamespaceRuntime):
    """A runtime that records the names of its sandboxes."""

    made: ClassVar[list[str]] = []

    @classmethod
    def create(cls, spec: RuntimeSpec, context: SandboxContext) -> ToolServerSandbox:
        cls.made.append(context.session_id)
        return super().create(spec, context)


class Deciding:
    """An evaluator that gives reward 1 for a change. For no change, it decides on reward 0 without a sandbox."""

    evaluated: ClassVar[list[bytes | None]] = []

    def __init__(self, spec: EvaluatorSpec) -> None:
        self._options = spec.options

    def decide(self, outcome: Outcome) -> Verdict | None:
        if self._options.get("raise"):
            raise ValueError("undecided")
        if outcome.patch == b"" and not self._options.get("never"):
            return Verdict(reward=0.0, reason="decided")
        return None

    async def evaluate(self, outcome: Outcome) -> Verdict:
        self.evaluated.append(outcome.patch)
        return Verdict(reward=1.0, reason="evaluated")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    CountedRuntime.made.clear()
    Deciding.evaluated.clear()
    yield
    CountedRuntime.made.clear()
    Deciding.evaluated.clear()


ALONE = SandboxesConfig(memory_mb=1999)
"""Room for one sandbox of 1000 MiB, so that no sandbox for grading starts ahead."""
EVALUATED, DECIDED = Verdict(reward=1.0, reason="evaluated"), Verdict(reward=0.0, reason="decided")


async def run(
    w: World, agent: str, prepare: str = REPOSITORY, exclude: Any = (), options: Any = None, **task: Any
) -> tuple[SessionView, int]:
    """Run a session. Returns the session, and the number of sandboxes that it started beside the agent's."""
    before = len(CountedRuntime.made)
    kind = f"{__name__}:{CountedRuntime.__name__}"
    session = await w.run(
        harness=program(f"cd repo; {agent}"),
        runtime={"kind": kind, "prepare": [{"run": prepare}], "resources": {"memory_mb": 1000}},
        evaluator={
            "kind": f"{__name__}:{Deciding.__name__}",
            "carry": {"diff": "repo", "exclude": list(exclude)},
            "options": options or {},
        },
        **task,
    )
    return session, len(CountedRuntime.made) - before - 1


async def know_base(w: World, **given: Any) -> None:
    """Run a first session, after which the node has the repository's base."""
    session, sandboxes = await run(w, "echo x >> src/a.py", **given)
    assert (result_of(session).error, result_of(session).verdict, sandboxes) == (None, EVALUATED, 1)


@pytest.mark.parametrize(
    "agent", ["true", "touch src/a.py; echo mine > y.log", "echo x > n; git add n; git rm -qf n", "git gc -q"]
)
async def test_no_sandbox_is_made_for_an_agent_that_changed_nothing(
    world: MakeWorld, temporary: Path, agent: str
) -> None:
    async with world(http=True, sandboxes=ALONE) as w:
        await know_base(w)
        session, sandboxes = await run(w, agent)
        result = result_of(session)
        assert (result.error, result.stop_reason) == (None, StopReason.COMPLETED)
        assert (result.verdict, sandboxes, len(Deciding.evaluated)) == (DECIDED, 0, 1)
        assert result.carried
        assert w.service.artifacts.file(session.id, PATCH).read_bytes() == b""
        w.assert_quiet()


@pytest.mark.parametrize(
    "agent",
    [
        "echo x > src/new.py; git add .; git -c user.name=y -c user.email=y commit -qm z",
        "git update-index --assume-unchanged src/a.py; echo x >> src/a.py",
        "git update-index --skip-worktree src/a.py; rm src/a.py",
        "echo '*.txt' > .git/info/exclude; echo x > a.txt",
        f"{USERS}; echo '*.txt' > ~/.config/git/ignore; echo x > a.txt",
        f"{USERS}; echo '*.py text' > ~/.config/git/attributes; printf 'one\\r\\ntwo\\r\\n' > src/a.py",
        "git config core.fileMode false; chmod 755 src/a.py",
        "echo x >> kept.log",
        "rm -rf .git; echo x > src/new.py",
        "mkdir in; cd in; git init -q .; echo x > y",
    ],
)
async def test_every_change_is_still_seen(world: MakeWorld, temporary: Path, agent: str) -> None:
    async with world(http=True, sandboxes=ALONE) as w:
        await know_base(w)
        session, sandboxes = await run(w, agent)
        assert (result_of(session).error, result_of(session).verdict, sandboxes) == (None, EVALUATED, 1)
        assert Deciding.evaluated[-1] not in (None, b"")


async def test_a_users_ignored_files_are_changes_in_the_first_grading_and_in_later_ones(
    world: MakeWorld, temporary: Path
) -> None:
    """The first grading makes the patch with git in a new sandbox, where preparation has left the user's git
    settings."""
    prepare = f"{REPOSITORY}; {USERS}; echo '*.txt' > ~/.config/git/ignore"
    async with world(http=True, sandboxes=ALONE) as w:
        for _ in range(2):
            session, sandboxes = await run(w, "echo x > a.txt", prepare=prepare)
            assert (result_of(session).error, result_of(session).verdict, sandboxes) == (None, EVALUATED, 1)


async def test_a_change_of_excluded_files_alone_is_no_change(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True, sandboxes=ALONE) as w:
        await know_base(w, exclude=["src/b.py"])
        session, sandboxes = await run(w, "echo x >> src/b.py", exclude=["src/b.py"])
        assert (result_of(session).verdict, sandboxes) == (DECIDED, 0)


async def test_a_base_that_is_not_known_costs_a_sandbox_but_no_evaluation(world: MakeWorld, temporary: Path) -> None:
    """The base is not known before the first grading. It is not known either if preparation leaves changes, because
    their tree is not in the agent's repository."""
    async with world(http=True, sandboxes=ALONE) as w:
        for prepare in (REPOSITORY, f"{REPOSITORY}; echo changed >> src/b.py"):
            session, sandboxes = await run(w, "true", prepare=prepare)
            assert (result_of(session).verdict, sandboxes) == (DECIDED, 1)
        session, sandboxes = await run(w, "true", prepare=f"{REPOSITORY}; echo changed >> src/b.py")
        assert (result_of(session).verdict, sandboxes) == (DECIDED, 1)
        assert not Deciding.evaluated


async def test_an_evaluator_that_decides_nothing_is_run(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True, sandboxes=ALONE) as w:
        await know_base(w, options={"never": True})
        session, sandboxes = await run(w, "true", options={"never": True})
        assert (result_of(session).verdict, sandboxes, Deciding.evaluated[-1]) == (EVALUATED, 1, b"")


async def test_an_exception_of_the_decision_is_no_reward(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True, sandboxes=ALONE) as w:
        await know_base(w)
        session, _ = await run(w, "true", options={"raise": True}, max_attempts=1)
        result = result_of(session)
        assert result.verdict is None
        assert result.error is not None
        assert "the evaluator raised ValueError: undecided" in result.error.message
        w.assert_quiet()


async def test_the_sandbox_that_started_ahead_is_stopped_and_the_filter_holds(
    world: MakeWorld, temporary: Path
) -> None:
    async with world(http=True) as w:
        await know_base(w)
        session, sandboxes = await run(w, "true", filters=[{"when": "no_patch", "then": "mask"}])
        verdict = result_of(session).verdict
        assert verdict is not None
        assert (verdict.reason, verdict.metrics) == ("filtered: no_patch; decided", {"filter_no_patch": 1.0})
        assert sandboxes <= 1
        w.assert_quiet()


async def test_regrading_needs_no_sandbox(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True, sandboxes=ALONE) as w:
        idle, _ = await run(w, "true")
        busy, _ = await run(w, "echo x > src/new.py")
        for session, verdict, sandboxes in ((idle, DECIDED, 0), (busy, EVALUATED, 1)):
            before = len(CountedRuntime.made)
            asked = RegradeSpec(evaluator=EvaluatorSpec(kind=f"{__name__}:{Deciding.__name__}"))
            again = await w.service.regrade_session(session.id, asked)
            assert result_of((await w.done(again.id)).sessions[0]).verdict == verdict
            assert len(CountedRuntime.made) - before == sandboxes
