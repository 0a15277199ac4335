"""Who is to blame when a sandbox fails that an agent has had: the agent, or what it was given.

It knows no lane and no reward but the one that an agent has for having made its grading impossible. Invariant: an agent
is blamed only on evidence: the runtime says that the failure came from inside the sandbox, the agent's model had said
something by then, and what failed works in a sandbox that no agent has touched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.errors import EvaluatorError, HarnessError, OutriderError, RuntimeFailure, plain
from outrider.runtimes.base import NoShell, Runtime, Witness
from outrider.trajectory import Verdict

REASON = "agent_excess"
PROBE_SECONDS = 30.0


def excess_verdict(failure: OutriderError, reward: float) -> Verdict:
    """Of an agent that has made its grading impossible."""
    return Verdict(reward=reward, metrics={REASON: 1.0}, reason=plain(f"{REASON}: {failure.message}"))


@asynccontextmanager
async def blamed(runtime: Runtime) -> AsyncIterator[None]:
    """Around what is done in a sandbox that is not stopped meanwhile: a failure of it, of the agent program in it or of
    the evaluator says when it leaves whether it has come from inside. Others, such as an engine's, are left as they
    are."""
    try:
        yield
    except (RuntimeFailure, HarnessError, EvaluatorError) as failure:
        if isinstance(runtime, Witness) and await runtime.broken_inside():
            failure.inside = True
        raise


async def try_out(runtime: Runtime, failure: OutriderError) -> None:
    """Whether a sandbox does the least that is asked of one, and has the shell that another had not. Raises
    RuntimeFailure."""
    await runtime.write(f"{runtime.scratch}/outrider-try", b"x")
    done = await runtime.exec("true", seconds=PROBE_SECONDS)
    if done.exit_code != 0:
        raise RuntimeFailure("a new sandbox runs no command", log_tail=done.log_tail())
    if isinstance(failure, NoShell):
        await (await runtime.open_shell(failure.kind)).close()
