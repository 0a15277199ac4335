"""How the exit code of an agent program, and the calls before the exit, decide the outcome."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import Boundary, InvalidField
from outrider.lifecycle import StopReason
from outrider.sessions import rollout
from outrider.trajectory import HarnessExit, Verdict

from .conftest import MakeWorld
from .program import program
from .test_failures import REJECTING, failed
from .world import SAY, group, result_of

HANG_UP = """
url=${OPENAI_BASE_URL#http://}; address=${url%%/*}
exec 3<>"/dev/tcp/${address%:*}/${address#*:}"
body='{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
printf '%s\\r\\n' "POST /${url#*/}/chat/completions HTTP/1.1" "Host: x" "Content-Length: ${#body}" "" >&3
printf %s "$body" >&3
while read -r line <&3; do case $line in data:*) exit 3;; esac; done
"""
"""Exits when the reply to its call has begun."""
GRADED = {"run": "test -f done"}
PROCESS = {"kind": "process"}


@pytest.fixture(autouse=True)
def a_busy_machine_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the limit for harmful stalls. On a machine with many busy loops, the process may stand still for two
    seconds, and the failure then counts as the service's."""
    monkeypatch.setattr(rollout, "HARMFUL_SECONDS", 60.0)


@pytest.mark.parametrize(
    ("then", "code"),
    [
        ("exit 3", 3),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        ("kill -ABRT $$", 134),
        ("exit 127", 127),
        ("exit 126", 126),
    ],
)
async def test_a_program_that_fails_after_a_reply_is_graded(
    world: MakeWorld, temporary: Path, then: str, code: int
) -> None:
    """If this were an error, the attempt would be repeated until the model avoids the failure, and the failure would be
    missing from the data."""
    async with world(http=True) as w:
        do = f"touch done; echo no such tool >&2; {then}"
        session = await w.run(harness=program(do), evaluator=GRADED, runtime=PROCESS, max_attempts=3)
        result = result_of(session)
        assert (result.stop_reason, result.error, session.attempt) == (StopReason.NONZERO_EXIT, None, 1)
        assert result.verdict == Verdict(reward=1.0)
        assert result.harness_exit == HarnessExit(code=code, log_tail="no such tool")
        (sample,) = await w.service.reader.samples(session.id)
        assert (sample.reward, sample.stop_reason) == (1.0, StopReason.NONZERO_EXIT)
        w.assert_quiet()


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        (program("exit 3") | {"nonzero_exit": "error"}, "command exited with code 3"),
        ({"command": ["bash", "-c", "exit 127"]}, "command exited with code 127"),
        ({"command": ["bash", "-c", "exit 126"]}, "command exited with code 126"),
    ],
)
async def test_a_program_that_fails_by_itself_is_an_error(
    world: MakeWorld, temporary: Path, harness: Any, message: str
) -> None:
    async with world(http=True) as w:
        session = await w.run(harness=harness, evaluator=GRADED, runtime=PROCESS, max_attempts=2)
        result = failed(session, Boundary.HARNESS, "harness_error")
        assert result.error is not None
        assert (result.error.message, result.harness_exit, session.attempt) == (message, None, 2)


async def test_a_program_that_fails_behind_a_failed_call_is_the_engines_failure(
    world: MakeWorld, temporary: Path
) -> None:
    async with world([SAY, REJECTING], http=True) as w:
        session = await w.run(harness=program("ask; exit 3"), evaluator=GRADED, runtime=PROCESS)
        failed(session, Boundary.ENGINE, "engine_rejected")


async def test_a_program_that_leaves_its_only_call_is_an_error(world: MakeWorld, temporary: Path) -> None:
    """The model has sent no whole reply, so the program's failure does not follow from a reply."""
    async with world([{"reply": SAY, "stall": 1}], http=True) as w:
        session = await w.run(
            harness={"command": ["bash", "-c", HANG_UP]}, evaluator=GRADED, runtime=PROCESS, max_attempts=1
        )
        result = failed(session, Boundary.HARNESS, "harness_error")
        assert result.turns == 1


async def test_a_limit_outranks_the_exit_code(world: MakeWorld, temporary: Path) -> None:
    async with world(http=True) as w:
        session = await w.run(
            harness=program("ask; exit 3"), evaluator=GRADED, runtime=PROCESS, limits={"turns": 1}, max_attempts=1
        )
        assert result_of(session).stop_reason is StopReason.MAX_TURNS


async def test_an_in_process_agent_has_no_exit_code(world: MakeWorld) -> None:
    async with world() as w:
        with pytest.raises(InvalidField) as refused:
            await w.service.submit(group(harness={"agent": "tools", "nonzero_exit": "grade"}))
        assert refused.value.field == "task.harness.nonzero_exit"


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        ("ask", {}),
        ("crash", {}),
        ("ask", {"evaluator": {"run": "true", "carry": ["out"]}}),
        ("ask", {"evaluator": {"run": "exit 7"}}),
    ],
    ids=["well", "failed", "carried", "ungraded"],
)
async def test_what_a_session_held_is_freed_without_the_garbage_collector(
    world: MakeWorld, last: str, fields: dict[str, Any]
) -> None:
    """A session's token tree can have many megabytes, and passes of the collector are rare."""
    async with world() as w:
        view = await w.submit("wait here", "ask", last, max_attempts=1, **fields)
        await w.stage.arrived["here"].wait()
        (models,) = w.node._models.values()
        tree = weakref.ref(models.policy.tree)
        del models
        gc.disable()
        try:
            w.stage.open["here"].set()
            await w.done(view.id)
            async with asyncio.timeout(60):
                while tree() is not None:  # noqa: ASYNC110  # a finalizer may run in another thread
                    await asyncio.sleep(0)
        finally:
            gc.enable()
