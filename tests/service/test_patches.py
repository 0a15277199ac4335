"""Changes to a repository that are carried as a patch: what a patch contains, what it leaves out, and what an agent
cannot do with it."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import Boundary
from outrider.evaluators.base import Outcome
from outrider.lifecycle import StopReason
from outrider.schemas import SessionView
from outrider.sessions.patches import MAX_PATCH
from outrider.spec import EvaluatorSpec, RegradeSpec
from outrider.store.artifacts import PATCH
from outrider.trajectory import Verdict

from .conftest import MakeWorld
from .program import program
from .test_failures import failed
from .world import World, result_of

pytestmark = pytest.mark.timeout(180)

REPOSITORY = """mkdir repo; cd repo; git init -q .; mkdir src tests
printf 'one\\ntwo\\n' > src/a.py; echo gone > src/b.py; echo right > tests/test_a.py
printf '*.log\\nbuild/\\n' > .gitignore
git add .; git -c user.name=x -c user.email=x commit -qm base
mkdir build; echo built > build/out; echo noise > x.log; echo edited >> src/b.py"""
"""Before the agent begins, the repository has ignored files and a change that is not committed."""
RUNTIME = {"kind": "namespace", "prepare": [{"run": REPOSITORY}]}
TREE = "cd repo; find . -path ./.git -prune -o -type f -print | sort | xargs md5sum; ls -A .git | grep outrider; exit 0"


async def grade(outcome: Outcome) -> Verdict:
    """Give reward 1 if the patched tree equals the tree that the command `then` makes in another sandbox."""
    assert outcome.patch is not None
    seen = await outcome.runtime.exec(TREE, seconds=60)
    async with outcome.beside() as other:
        made = await other.exec(outcome.task.evaluator.options["then"], seconds=60)
        assert made.exit_code == 0, made
        wanted = await other.exec(TREE, seconds=60)
    if seen.stdout == wanted.stdout:
        return Verdict(reward=1.0)
    return Verdict(reward=0.0, reason=f"{seen.stdout.decode()} is not {wanted.stdout.decode()}")


async def run(
    w: World, agent: str, evaluator: dict[str, Any], *, diff: str = "repo", exclude: Any = (), **fields: Any
) -> SessionView:
    carry = {"diff": diff, "exclude": list(exclude)}
    runtime = fields.pop("runtime", RUNTIME)
    return await w.run(harness=program(agent), runtime=runtime, evaluator={**evaluator, "carry": carry}, **fields)


def made(then: str) -> dict[str, Any]:
    return {"kind": "callable", "path": "service.test_patches:grade", "options": {"then": f"cd repo; {then}"}}


BINARY = "head -c 3000 /dev/urandom > src/c.bin; printf '\\0\\1' > 'src/a name\\twith\\nall'"
COMMIT = "git add .; git -c user.name=y -c user.email=y commit -qm z"
CHANGES = {  # the agent's commands in the repository, and commands that make the expected tree
    "nothing": ("true", "true"),
    "a line": ("echo three >> src/a.py", "echo three >> src/a.py"),
    "committed": (f"echo x > src/new.py; {COMMIT}", "echo x > src/new.py"),
    "removed": ("rm -r src", "rm -r src"),
    "a mode and a link": ("chmod 755 src/a.py; ln -s a.py src/l", "chmod 755 src/a.py; ln -s a.py src/l"),
    "a folder in place of a file": (
        "rm src/a.py; mkdir src/a.py; echo x > src/a.py/y",
        "rm src/a.py; mkdir src/a.py; echo x > src/a.py/y",
    ),
    "no repository any more": ("rm -rf .git; echo x > src/new.py", "echo x > src/new.py"),
    "ignored files": ("echo mine > build/out; echo mine > y.log; echo x > src/new.py", "echo x > src/new.py"),
    "one that was ignored": ("echo > .gitignore; echo mine > x.log", "echo > .gitignore; echo mine > x.log"),
    "a repository within": ("mkdir in; cd in; git init -q .; echo x > y", "mkdir in; echo x > in/y"),
    "strange names": (
        "echo x > ':(top)z'; echo x > '-rf'; mkdir .GIT; echo x > .GIT/config",
        "echo x > ':(top)z'; echo x > '-rf'",
    ),
    "a name that is not UTF-8": ("echo x > $'caf\\xe9'", "echo x > $'caf\\xe9'"),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", CHANGES)
async def test_the_repository_has_the_changes_and_nothing_else(world: MakeWorld, temporary: Path, what: str) -> None:
    agent, then = CHANGES[what]
    async with world(http=True) as w:
        result = result_of(await run(w, f"cd repo; {agent}", made(then)))
        assert (result.error, result.stop_reason) == (None, StopReason.COMPLETED)
        assert result.verdict == Verdict(reward=1.0)
        assert result.carried
        w.assert_quiet()


@pytest.mark.deep
async def test_bytes_and_names_of_all_kinds_survive_and_the_patch_is_one_of_git(
    world: MakeWorld, temporary: Path, tmp_path: Path
) -> None:
    look = "test -s repo/src/c.bin && test \"$(od -An -c 'repo/src/a name\\twith\\nall')\" = '  \\0 001'"
    async with world(http=True) as w:
        session = await run(w, f"cd repo; {BINARY}", {"run": f"{look} || exit 1"})
        assert result_of(session).verdict == Verdict(reward=1.0)
        patch = w.service.artifacts.file(session.id, PATCH).read_bytes()
        again = await w.service.regrade_session(session.id, RegradeSpec(evaluator=EvaluatorSpec(run=f"! ({look})")))
        assert result_of((await w.done(again.id)).sessions[0]).verdict == Verdict(reward=0.0)
    for words, given in ((("init", "-q", "."), b""), (("apply", "-"), patch)):
        await asyncio.to_thread(subprocess.run, ["git", *words], cwd=tmp_path, input=given, check=True)
    assert (tmp_path / "src" / "c.bin").stat().st_size == 3000


@pytest.mark.deep
async def test_what_is_excluded_stays_as_it_was(world: MakeWorld, temporary: Path) -> None:
    agent = "cd repo; echo easy > tests/test_a.py; echo x > tests/new.py; echo x > conftest.py; echo three >> src/a.py"
    async with world(http=True) as w:
        session = await run(w, agent, made("echo three >> src/a.py"), exclude=["tests", "conftest.py"])
        assert result_of(session).verdict == Verdict(reward=1.0)


HOOKS = """cd repo
echo '* filter=evil diff=evil' > .gitattributes
git config filter.evil.clean 'touch /tmp/ran; cat'; git config diff.evil.command 'touch /tmp/ran'
git config core.fsmonitor 'touch /tmp/ran'; git config core.hooksPath hooks; mkdir hooks
printf '#!/bin/sh\\ntouch /tmp/ran' > hooks/post-index-change; chmod 755 hooks/post-index-change
git config --global core.fsmonitor 'touch /tmp/ran'
ln -s / src/root; ln -s ../../tests src/out; cp /bin/true git 2>/dev/null; echo x > src/new.py"""


@pytest.mark.deep
async def test_nothing_of_the_agents_runs_and_no_link_is_followed(world: MakeWorld, temporary: Path) -> None:
    """The grader's sandbox has its own tests, and none of the agent's hooks, filters and drivers has run."""
    look = "test ! -e /tmp/ran && test -e repo/src/new.py && grep -qx right repo/tests/test_a.py || exit 1"
    async with world(http=True) as w:
        session = await run(w, HOOKS, {"run": look})
        assert result_of(session).verdict == Verdict(reward=1.0)


@pytest.mark.deep
async def test_changes_that_are_too_large_are_the_agents_doing(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        session = await run(w, f"yes {'x' * 999} | head -c {MAX_PATCH} > repo/src/large", {"run": "true"})
        result = result_of(session)
        assert (result.stop_reason, result.error) == (StopReason.AGENT_EXCESS, None)
        assert result.verdict is not None
        assert result.verdict.reward == 0.0
        w.assert_quiet()


@pytest.mark.deep
@pytest.mark.parametrize("whose", ["the agent's", "the task's"])
async def test_too_many_files_at_the_top_are_the_agents_doing_if_it_made_them(
    world: MakeWorld, temporary: Path, whose: str
) -> None:
    many = "seq 10001 | xargs touch"
    agent, prepare = (many, "true") if whose == "the agent's" else ("true", many)
    runtime = {"kind": "namespace", "prepare": [{"run": f"{REPOSITORY}; {prepare}"}]}
    async with world(http=True) as w:
        session = await run(w, f"cd repo; {agent}", {"run": "true"}, runtime=runtime, max_attempts=1)
        if whose == "the agent's":
            result = result_of(session)
            assert (result.stop_reason, result.error) == (StopReason.AGENT_EXCESS, None)
            assert result.verdict is not None
            assert result.verdict.reward == 0.0
        else:
            failed(session, Boundary.EVALUATOR, "evaluator_error")
        w.assert_quiet()


async def test_a_folder_that_is_no_repository_is_an_error(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        runtime = {"kind": "namespace", "prepare": [{"run": "mkdir repo"}]}
        session = await run(w, "echo x > repo/a", {"run": "true"}, runtime=runtime, max_attempts=1)
        result = failed(session, Boundary.EVALUATOR, "evaluator_error")
        assert result.error is not None
        assert "no folder .git" in (result.error.log_tail or "")


@pytest.mark.deep
async def test_a_repository_whose_path_looks_like_a_pattern_has_only_its_own_changes(
    world: MakeWorld, temporary: Path
) -> None:
    """A folder whose name the pattern matches is beside the repository."""
    make = "mkdir nextj; mkdir 'next[js]'; cd 'next[js]'; git init -q .; echo x > a; git add ."
    prepare = [{"run": f"{make}; git -c user.name=x -c user.email=x commit -qm base"}]
    async with world(http=True) as w:
        session = await run(
            w,
            "echo y > 'next[js]/b'; echo z > nextj/c",
            {"run": "cd 'next[js]' && grep -qx x a && grep -qx y b && test ! -e c || exit 1"},
            diff="next[js]",
            runtime={"kind": "namespace", "prepare": prepare},
        )
        assert result_of(session).verdict == Verdict(reward=1.0)
