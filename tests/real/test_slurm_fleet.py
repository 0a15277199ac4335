"""`outrider slurm` on a real Slurm cluster with two nodes: a job is queued again, is cancelled, and reaches its time
limit, each time while sessions run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outrider.client.client import AsyncClient
from outrider.lifecycle import SessionState, StopReason
from outrider.schemas import GroupView, SessionView
from support.service import RENDERER, call, say
from support.slurm import NODES, Slurm, two_nodes
from support.tokenizer import write_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

GROUPS, EACH = 10, 10
MARK = "4013"
"""Seconds that an agent sleeps, longer than the test. The number also identifies the agent's processes."""
FOR_EVER = "Wait for ever."
REPLIES = [
    call("sleep 1; echo hi > out.txt"),
    say("done"),
    {"when": FOR_EVER, "reply": call(f"sleep {MARK}")},
]
LANES = ("--init-lane", "4", "--run-lane", "5", "--eval-lane", "4")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError as error:
        pytest.skip(f"the name of this machine has no address: {error}")
    with two_nodes() as cluster:
        yield cluster


class Job(NamedTuple):
    """A submitted job, and the files in which it publishes its URL and its token."""

    number: str
    slurm: Slurm
    url: Path
    token: Path
    data: Path

    def client(self, *, not_at: str = "") -> AsyncClient:
        """Wait until the job's service has an address other than `not_at`. Returns a client of the service."""
        until(lambda: self.url.exists() and self.url.read_text() != not_at, self.log)
        return AsyncClient(self.url.read_text().strip(), token=self.token.read_text().strip())

    def log(self) -> str:
        """Return the end of the job's logs and the state of the cluster, for error messages."""
        tails = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.url.parent.glob("*.log"))]
        queue = self.slurm.run("squeue", "--format=%i %T %r %S")
        return "\n".join([queue, self.slurm.run("sinfo"), *tails])


def until(holds: Callable[[], bool], log: Callable[[], str], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            pytest.fail(log())
        time.sleep(0.1)


def environment(slurm: Slurm) -> dict[str, str]:
    """Return the environment for programs, in which temporary files are below the cluster's folder."""
    temporary = slurm.folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return {**os.environ, **slurm.environment, "TMPDIR": str(temporary)}


def command(slurm: Slurm, folder: Path, *options: str) -> Any:
    """Run `outrider slurm` in the new folder `folder`. Returns its JSON output."""
    folder.mkdir()
    (folder / "script.json").write_text(json.dumps({"replies": REPLIES}))
    write_tokenizer(folder / "tokenizer")
    serve = [
        "--engine",
        "scripted=script.json",
        "--tokenizer",
        "tokenizer",
        "--renderer",
        RENDERER,
        "--data",
        "my data",
    ]
    words = ["slurm", "--json", "--nodes", "2", "--cpus-per-node", "2", *options, "--", *serve, "--insecure", *LANES]
    done = subprocess.run(
        [sys.executable, "-m", "outrider.cli", *words, "--stop-seconds", "2"],
        cwd=folder,
        env=environment(slurm),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def job_of(slurm: Slurm, folder: Path, told: Any) -> Job:
    return Job(told["job"], slurm, Path(told["url"]), Path(told["token"]), folder / "my data")


def unfinished(data: Path) -> str:
    """Return the number of unfinished sessions, as a job reads it at its time limit."""
    words = [sys.executable, "-m", "outrider.cli.slurm_unfinished", "--data", str(data)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def group(instruction: str, n: int) -> dict[str, Any]:
    return {
        "task": {
            "instruction": instruction,
            "harness": {"agent": "tools", "options": {"tools": ["bash"]}},
            "runtime": {"kind": "namespace"},
            "evaluator": {"run": "grep -qx hi out.txt"},
        },
        "n": n,
    }


async def sessions(client: AsyncClient, groups: list[str]) -> list[SessionView]:
    return [session for id in groups for session in (await client.group(id)).sessions]


def processes(text: str) -> list[str]:
    """Return the command lines on this machine, in all namespaces, that contain `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # the process has just ended
            continue
        if text in line:
            found.append(line)
    return found


async def test_sessions_over_two_nodes_survive_a_requeue(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s "a" $(folder) 100%j'  # with characters that are special in bash or in Slurm
    job = job_of(slurm, folder, command(slurm, folder))
    async with job.client() as client:
        groups = [(await client.submit(group("Write hi.", EACH))).id for _ in range(GROUPS)]
        while True:
            seen = await sessions(client, groups)
            before = {session.id: session for session in seen if session.state is SessionState.DONE}
            running = {session.node for session in seen if session.state is SessionState.RUNNING}
            if len(before) >= 25 and running == set(NODES):
                break
    assert len(before) < GROUPS * EACH
    first = job.url.read_text()
    slurm.run("scontrol", "requeue", job.number)
    until(lambda: not job.url.exists(), job.log)

    async with job.client(not_at=first) as client:
        done: list[GroupView] = await client.wait(groups)
        results = [view.id for view in (await client.results(after=0, limit=100)).groups]
        ended = {session.id: session for view in done for session in view.sessions}
        assert len(ended) == GROUPS * EACH
        endings = Counter((session.state, session.result.stop_reason) for session in ended.values())
        assert endings == {(SessionState.DONE, StopReason.COMPLETED): GROUPS * EACH}, job.log()
        assert {session.result.verdict.reward for session in ended.values()} == {1.0}
        assert {session.node for session in ended.values()} == set(NODES)
        # No finished session ran again, and at least one unfinished session did.
        kept = {id: (session.attempt, session.result.verdict) for id, session in before.items()}
        assert kept.items() <= {id: (session.attempt, session.result.verdict) for id, session in ended.items()}.items()
        assert any(session.attempt > 1 for session in ended.values())
        assert sorted(results) == sorted(groups)

        await client.submit(group(FOR_EVER, 4))
        until(lambda: len(processes(f"sleep {MARK}")) >= 4, job.log)
        slurm.run("scancel", job.number)
    until(lambda: not slurm.states(), job.log)
    assert processes(f"sleep {MARK}") == []
    assert processes(str(job.data)) == []
    assert list((slurm.folder / "tmp").iterdir()) == []
    assert not job.url.exists()
    assert unfinished(job.data) == "4\n"  # the next job on this folder would run these sessions


async def test_the_time_limit_brings_a_job_back_while_sessions_are_left(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    job = job_of(slurm, folder, command(slurm, folder))
    async with job.client() as client:
        waiting = (await client.submit(group(FOR_EVER, 4))).id
        until(lambda: len(processes(f"sleep {MARK}")) >= 4, job.log)
        first = job.url.read_text()
        slurm.run("scancel", "--batch", "--signal=USR1", job.number)  # Slurm sends this signal before the time limit
    async with job.client(not_at=first) as client:
        assert "sessions that are left: 4" in job.log()
        until(lambda: len(processes(f"sleep {MARK}")) >= 4, job.log)
        assert {session.attempt for session in await sessions(client, [waiting])} == {2}
        await client.cancel(waiting)
        [done] = await client.wait([waiting])
        assert {session.result.stop_reason for session in done.sessions} == {StopReason.CANCELLED}
        slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    until(lambda: not slurm.states(), job.log)
    assert "sessions that are left: 0" in job.log()
    assert "JobState=COMPLETED" in slurm.run("scontrol", "show", "job", job.number)
    assert list((slurm.folder / "tmp").iterdir()) == []
