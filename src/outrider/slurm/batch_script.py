"""Writes the batch script of a job. The only side effect is that it reads `job.sh`.

Invariant: Slurm and bash read each path, name or option as one value, whatever characters it contains.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import ceil
from pathlib import Path

from outrider.errors import InvalidField, RequestError

URL_FILE = "url"
TOKEN_FILE = "token"
"""Names of two files in the job's folder: one with the service's address, and one with the service's token. `job.sh`
uses the same names."""
START_SECONDS = 600
"""Maximum seconds until the service is ready. Before that, the service loads a tokenizer, and possibly an embedded
model."""
END_SECONDS = 90
"""Seconds for the end of a job, in addition to the service's `stop_seconds`. In this time, the script interrupts
sessions, ends the nodes, counts the unfinished sessions, and queues the job again."""
LEAST_SECONDS = 30
"""From the fourth time on, a job is queued again only if its nodes ran for at least this number of seconds. If they ran
for fewer seconds, the job's time may be too short for any session."""

_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?", re.DOTALL)
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """The settings of a job.

    `python`: the command of a Python interpreter that has Outrider installed, on every node.
    `serve`: the arguments of `outrider serve`.
    `join`: the arguments of `outrider nodes join`.
    `folder`: where the job writes its logs and the service's address, and reads the service's token.
    `directory`: the folder to which relative paths refer.
    `options`: more options of sbatch, written as `--name=value`.

    No field may contain a secret, because other users can read a batch script.
    """

    python: Sequence[str]
    folder: Path
    directory: Path
    nodes: int
    serve: Sequence[str]
    join: Sequence[str] = ()
    name: str = "outrider"
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus_per_node: int | None = None
    options: Sequence[str] = ()
    stop_seconds: float = 20.0
    fully_qualified: bool = False
    """True if the service's address must have the machine's fully qualified name, because a TLS certificate usually
    contains that name."""

    @property
    def warning_seconds(self) -> int:
        """The job begins to stop this many seconds before its time limit."""
        return ceil(self.stop_seconds) + END_SECONDS


def script_of(job: BatchJob) -> str:
    """Return the text of the batch script. Raises InvalidField for a setting that Slurm cannot carry out, and
    RequestError for a value with control characters."""
    head = [f"#SBATCH {_for_sbatch(option)}" for option in _options(job)]
    return "\n".join(["#!/bin/bash", *head, "", *_settings(job), "", files(__package__).joinpath("job.sh").read_text()])


def _options(job: BatchJob) -> list[str]:
    if job.nodes < 1:
        raise InvalidField("a job needs at least one node", field="nodes")
    if job.cpus_per_node is not None and job.cpus_per_node < 1:
        raise InvalidField("a node needs at least one processor", field="cpus_per_node")
    if job.time is not None:
        seconds, warning = _seconds(job.time), job.warning_seconds
        least = warning + 60 + LEAST_SECONDS + 30  # 60: Slurm may send its signal a minute early
        if seconds is not None and seconds < least:
            hint = (
                f"the minimum is {least} s, of which {warning} s (--stop-seconds + {END_SECONDS}) are for the job's end"
            )
            raise InvalidField(f"a time limit of {seconds} s is too short", field="time", hint=hint)
    if "\\" in str(job.folder):
        # In a path with a backslash, Slurm does not replace `%j` by the job's number, so all jobs would write to the
        # same log.
        raise InvalidField(f"Slurm cannot write to a folder whose name has a backslash: {job.folder}", field="data")
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "cpus-per-task": None if job.cpus_per_node is None else str(job.cpus_per_node),
        "chdir": str(job.directory),
        "output": str(job.folder).replace("%", "%%") + "/job-%j.log",
        # Before the time limit, Slurm sends USR1 to this script alone. At the limit, Slurm sends TERM to every process
        # of the job.
        "signal": f"B:USR1@{job.warning_seconds}",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if job.cpus_per_node is None:
        words.append("--exclusive")
    words += ["--requeue", "--open-mode=append", "--no-kill"]
    for option in job.options:
        if not _OPTION.fullmatch(option):
            hint = "write --sbatch --name=value or --sbatch --name, once for each"
            raise InvalidField(f"{option!r} is no long option of sbatch", field="sbatch", hint=hint)
    return [*words, *job.options]


def _settings(job: BatchJob) -> list[str]:
    """Return lines that assign the variables of `job.sh`."""
    python = [*job.python, "-m"]
    commands = {
        "serve": [*python, "outrider.cli", "serve", *job.serve],
        "join": [*python, "outrider.cli", "nodes", "join", *job.join],
        "unfinished": [*python, "outrider.cli.slurm_unfinished", *job.serve],
    }
    return [
        f"folder={shlex.quote(str(job.folder))}",
        f"stop_seconds={ceil(job.stop_seconds)}",
        f"start_seconds={START_SECONDS}",
        f"least_seconds={LEAST_SECONDS}",
        f"cpus={job.cpus_per_node or ''}",
        f"address=$({'hostname -f' if job.fully_qualified else 'hostname'})  # of this machine, for the others",
        *(f"{name}=({shlex.join(_one_line(words))})" for name, words in commands.items()),
    ]


def _for_sbatch(option: str) -> str:
    """Quote a word for an #SBATCH line. sbatch reads these lines like a shell, except that a backslash escapes the next
    character even within quotes."""
    [word] = _one_line([option])
    return shlex.quote(word.replace("\\", "\\\\"))


def _one_line(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if not word.isprintable():
            raise RequestError(f"a batch script cannot have control characters: {word!r}")
    return words


def _seconds(text: str) -> int | None:
    """Convert a time limit in the format of sbatch's option --time to seconds. Returns None for no limit. Raises
    InvalidField."""
    if text.upper() in ("0", "UNLIMITED", "INFINITE"):
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        hint = "write MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 8:00:00"
        raise InvalidField(f"{text!r} is no time limit", field="time", hint=hint)
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    hours_first = days is not None or len(numbers) == 3
    units = (3600, 60, 1) if hours_first else (60, 1)
    return 86_400 * int(days or 0) + sum(number * unit for number, unit in zip(numbers, units, strict=False))
