"""The batch script of `outrider slurm`, run by bash. Slurm's programs, the service and the nodes are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from outrider.slurm.batch_script import BatchJob, script_of

# Called with `-m outrider.cli serve`, `-m outrider.cli nodes join` or `-m outrider.cli.slurm_unfinished`.
PYTHON = """\
if [[ $2 == outrider.cli.slurm_unfinished ]]; then echo "${LEFT:-0}"; exit; fi
event() { echo "$*" >>"$EVENTS"; }
if [[ $3 == serve ]]; then
    trap 'event service ends; exit 0' TERM
    echo $$ >"$EVENTS.service"
    event "service begins with $OUTRIDER_TOKEN"
    echo "a line of the service's log" >&2
    if [[ ${SERVICE_FAILS:-} ]]; then exit 1; fi
    if [[ ${NEVER_READY:-} ]]; then while :; do sleep 0.05; done; fi
    echo "outrider is ready at http://0.0.0.0:8123"
else
    trap 'event node ends; exit 0' TERM
    event "node begins with $OUTRIDER_TOKEN: ${*:5}"
    if [[ ${NODES_FAIL:-} ]]; then exit "$NODES_FAIL"; fi
    if [[ ${ONE_FAILS:-} ]] && mkdir "$EVENTS.failed" 2>/dev/null; then exit 1; fi
fi
while :; do sleep 0.05; done
"""
# The last three arguments are the command to run: bash -c PROGRAM.
SRUN = """\
for node in one two; do
    SLURMD_NODENAME=$node "${@: -3}" &
    echo $! >>"$EVENTS.nodes"
done
code=0
for pid in $(<"$EVENTS.nodes"); do wait "$pid" || code=$?; done
exit "$code"
"""
# A signal reaches all processes of a step.
SCANCEL = """\
echo "scancel $*" >>"$EVENTS"
for pid in $(<"$EVENTS.nodes"); do pkill -TERM -P "$pid"; kill -TERM "$pid"; done
"""
SCONTROL = 'echo "scontrol $*" >>"$EVENTS"; exit "${REQUEUE_FAILS:-0}"\n'
PROGRAMS = {"python": PYTHON, "srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "hostname": "echo host\n"}


class Job(NamedTuple):
    """A running batch script, its folder, and the file in which the fakes record events."""

    process: asyncio.subprocess.Process
    folder: Path
    events: Path

    def noted(self) -> list[str]:
        return self.events.read_text().splitlines()

    async def until(self, *events: str) -> None:
        """Return when these events have been recorded. Fails if the job ends before."""
        while not set(events) <= set(self.noted()):
            await asyncio.sleep(0.02)
            if self.process.returncode is not None:
                pytest.fail(f"the job has ended, and noted {self.noted()}")

    async def end(self) -> tuple[int | None, str]:
        """Wait for the end of the job, and return its exit code and its log."""
        out, _ = await self.process.communicate()
        return self.process.returncode, out.decode()


@asynccontextmanager
async def job(tmp_path: Path, variables: Mapping[str, str] | None = None) -> AsyncIterator[Job]:
    """Run a job with these variables in its environment."""
    programs, folder, events = tmp_path / "programs", tmp_path / 'it\'s "a" $(folder)', tmp_path / "events"
    for each in (programs, folder):
        each.mkdir(exist_ok=True)
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}")
        (programs / name).chmod(0o755)
    (folder / "token").write_text("secret\n")
    events.write_text("")
    description = BatchJob(
        python=[str(programs / "python")], folder=folder, directory=tmp_path, nodes=2, serve=["a b"], join=["it's"]
    )
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "EVENTS": str(events),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "one,two",
    }
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script_of(description)),
        env={**environment, **(variables or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield Job(process, folder, events)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Slurm also kills the processes that a job leaves
        await process.wait()


NODES = tuple(f"node begins with secret: it's --name {name} http://host:8123" for name in ("one", "two"))


async def test_a_service_and_a_node_on_each_machine(tmp_path: Path) -> None:
    async with job(tmp_path) as running:
        await running.until("service begins with secret", *NODES)
        assert (running.folder / "url").read_text() == "http://host:8123\n"
        os.killpg(running.process.pid, signal.SIGTERM)  # like Slurm, to all processes of the job
        code, log = await running.end()
        assert code == 143
        assert "Slurm ends this job" in log
        assert not [event for event in running.noted() if event.startswith("scontrol")]
        assert sorted(path.name for path in running.folder.iterdir()) == [
            *("node-one.log", "node-two.log", "service.log", "token")
        ]


async def killed(tmp_path: Path) -> None:
    """Run job 7 until its nodes have begun, and kill all of its processes. The file with the address is left."""
    async with job(tmp_path) as running:
        await running.until(*NODES)
        os.killpg(running.process.pid, signal.SIGKILL)
        await running.end()
        assert (running.folder / "url").read_text() == "http://host:8123\n"


async def test_a_job_that_was_killed_removes_its_address_when_it_comes_back(tmp_path: Path) -> None:
    await killed(tmp_path)
    async with job(tmp_path, {"NEVER_READY": "1"}) as running:
        await running.until("service begins with secret")
        assert not (running.folder / "url").exists()
    async with job(tmp_path) as running:
        await running.until(*NODES)
        assert (running.folder / "url").read_text() == "http://host:8123\n"


async def test_a_second_job_leaves_the_address_of_the_first(tmp_path: Path) -> None:
    """The second job cannot detect that the first one has ended. The service of the second job fails."""
    await killed(tmp_path)
    async with job(tmp_path, {"SLURM_JOB_ID": "8", "SERVICE_FAILS": "1"}) as running:
        code, _ = await running.end()
        assert (code, (running.folder / "url").read_text()) == (1, "http://host:8123\n")


@pytest.mark.deep
async def test_near_the_time_limit_it_ends_in_order_and_comes_back(tmp_path: Path) -> None:
    async with job(tmp_path, {"LEFT": "3"}) as running:
        await running.until(*NODES)
        running.process.send_signal(signal.SIGUSR1)
        code, log = await running.end()
        assert (code, running.noted()[3:]) == (
            0,
            ["service ends", "scancel --signal=TERM 7", "node ends", "node ends", "scontrol requeue 7"],
        )
        assert "sessions that are left: 3" in log
        assert not (running.folder / "url").exists()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({}, 0, "sessions that are left: 0"),
        ({"LEFT": "3", "SLURM_RESTART_COUNT": "3"}, 1, "not queued again"),
        ({"LEFT": "3", "REQUEUE_FAILS": "1"}, 1, "it could not be queued again"),
    ],
)
async def test_when_it_does_not_come_back(tmp_path: Path, variables: dict[str, str], code: int, said: str) -> None:
    async with job(tmp_path, variables) as running:
        await running.until(*NODES)
        running.process.send_signal(signal.SIGUSR1)
        ended, log = await running.end()
        assert (ended, said in log) == (code, True)
        assert ("scontrol requeue 7" in running.noted()) == ("REQUEUE_FAILS" in variables)


@pytest.mark.deep
async def test_nodes_that_are_told_to_end_by_slurm_are_the_end_of_a_preempted_job(tmp_path: Path) -> None:
    async with job(tmp_path, {"LEFT": "1"}) as running:
        await running.until(*NODES)
        told = await asyncio.create_subprocess_exec(
            tmp_path / "programs" / "scancel", env={"PATH": os.environ["PATH"], "EVENTS": str(running.events)}
        )
        await told.wait()
        code, log = await running.end()
        assert (code, running.noted()[-1]) == (0, "scontrol requeue 7")
        assert "all nodes were told to end" in log


@pytest.mark.deep
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SERVICE_FAILS": "1"}, "the service has ended before it was ready"),
        ({"NODES_FAIL": "2"}, "all nodes have ended (exit code 2)"),
    ],
)
async def test_what_cannot_start_is_a_failed_job_with_its_log(
    tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    async with job(tmp_path, variables) as running:
        code, log = await running.end()
        assert (code, said in log) == (1, True)
        assert "a line of the service's log\n" in log
        assert ("service ends" in running.noted()) == ("NODES_FAIL" in variables)


@pytest.mark.deep
async def test_a_service_that_dies_is_a_failed_job(tmp_path: Path) -> None:
    async with job(tmp_path) as running:
        await running.until(*NODES)
        os.kill(int(running.events.with_suffix(".service").read_text()), signal.SIGKILL)
        code, log = await running.end()
        assert (code, "the service has ended" in log) == (1, True)
        assert running.noted()[3:] == ["scancel --signal=TERM 7", "node ends", "node ends"]


@pytest.mark.deep
async def test_a_node_that_dies_is_started_again(tmp_path: Path) -> None:
    async with job(tmp_path, {"ONE_FAILS": "1"}) as running:
        while sum(event in NODES for event in running.noted()) < 3:
            await asyncio.sleep(0.02)
            assert running.process.returncode is None
        logs = [path.read_text() for path in running.folder.glob("node-*.log")]
        assert sorted(logs) == ["", "outrider slurm: the node ended with exit code 1\n"]
