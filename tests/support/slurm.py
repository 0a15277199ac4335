"""A Slurm cluster of two nodes on this machine, with its own key, ports and folder. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

NODES = ("node1", "node2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
START_SECONDS = 60.0
CONF = """\
ClusterName=outrider-two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=tests Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster. `environment`: the variables that Slurm's programs need in addition to this process's."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *words: str) -> str:
        """Run a program of Slurm and return its output."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the states of the jobs that have not ended, by job id."""
        rows = self.run("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(row.split(maxsplit=1) for row in rows)


@contextlib.contextmanager
def two_nodes() -> Iterator[Slurm]:
    """Start a cluster, and stop it at the end of the block. Skips the test on machines that cannot run Slurm."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a Slurm")
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: `.ci/sandboxes` installs Slurm")
    # A folder with a short name that all users may enter: munge requires this of its socket's folder.
    folder = Path(tempfile.mkdtemp(prefix="or-slurm-"))
    folder.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []
    try:
        _write(folder)
        munge = [f"--{name}={folder}/{file}" for name, file in (("key-file", "munge.key"), ("socket", "munge/socket"))]
        munge += [f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"]
        conf = ["-D", "-f", f"{folder}/slurm.conf"]
        daemons = {"munged": ["munged", "--foreground", *munge], "slurmctld": ["slurmctld", *conf]}
        daemons |= {node: ["slurmd", "-N", node, *conf] for node in NODES}
        for name, words in daemons.items():
            started.append(_start(words, folder / f"{name}.log"))
        cluster = Slurm(folder)
        _wait(cluster, daemons, started)
        yield cluster
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()
        shutil.rmtree(folder)


def _write(folder: Path) -> None:
    for name in ("state", "munge", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir(mode=0o755 if name == "munge" else 0o700)
    key = os.open(folder / "munge.key", os.O_CREAT | os.O_WRONLY, 0o600)
    with open(key, "wb") as file:
        file.write(os.urandom(128))
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    (folder / "slurm.conf").write_text(CONF.format(host=socket.gethostname(), folder=folder, ports=ports))


def _start(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


def _wait(cluster: Slurm, daemons: dict[str, list[str]], started: list[subprocess.Popen[bytes]]) -> None:
    """Wait until both nodes are idle."""
    end = time.monotonic() + START_SECONDS
    environment = {**os.environ, **cluster.environment}
    words = ["timeout", "5", "sinfo", "--noheader", "--Node", "--partition=tests", "--format=%t"]
    while subprocess.run(words, env=environment, capture_output=True, text=True).stdout.split() != ["idle"] * 2:
        ended = [name for name, process in zip(daemons, started, strict=True) if process.poll() is not None]
        if ended or time.monotonic() > end:
            tails = [f"{path.name}: {path.read_text()[-800:]}" for path in cluster.folder.glob("*.log")]
            pytest.fail(f"Slurm did not start ({ended}):\n" + "\n".join(tails))
        time.sleep(0.2)
