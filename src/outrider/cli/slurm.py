"""`outrider slurm`: submits a Slurm batch job, which runs a service and its nodes."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from outrider.cli.command_line import CliArgument, CliOption
from outrider.cli.join import join
from outrider.cli.options import command
from outrider.cli.serve import serve
from outrider.cli.setting_options import read_settings
from outrider.cli.terminal import Terminal
from outrider.config import Config, is_local
from outrider.errors import InvalidField, ServiceError
from outrider.slurm.batch_script import TOKEN_FILE, URL_FILE, BatchJob, script_of

PLACE = "Allocation"
FOLDER = "slurm"
"""Name of the job's folder within the data folder."""
STANDARD_OUTPUT = "-"
SERVICE_ONLY = ("processes", "stop_seconds", "token")
"""Parameters of `outrider serve` that are not passed on to `outrider nodes join`, because they have another meaning in
that command."""


class Submitted(msgspec.Struct, frozen=True, kw_only=True):
    """The output of `outrider slurm --json`.

    job: the job's number. None if the command only wrote the script.
    url, token: the paths of the files with the service's address and token. The file `url` exists while the service
        runs. If the job is killed, the file stays until the next start of the job.
    logs: a file name pattern that matches the log files.
    """

    job: str | None
    url: str
    token: str
    logs: str


@command
def slurm(
    terminal: Terminal,
    flags: Annotated[
        list[str] | None,
        CliArgument(
            metavar="-- [SERVE FLAGS]...",
            help="Everything after `--` is given to `outrider serve`.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[int, CliOption(metavar="N", help="Nodes of the allocation.", panel=PLACE)] = 1,
    time: Annotated[
        str | None,
        CliOption(
            metavar="LIMIT",
            help="Time limit, as Slurm writes it: 8:00:00.",
            show_default="the partition's",
            panel=PLACE,
        ),
    ] = None,
    partition: Annotated[
        str | None, CliOption(metavar="NAME", help="Partition.", show_default="Slurm's", panel=PLACE)
    ] = None,
    account: Annotated[
        str | None, CliOption(metavar="NAME", help="Account.", show_default="your own", panel=PLACE)
    ] = None,
    cpus_per_node: Annotated[
        int | None,
        CliOption(metavar="N", help="Processors of each node.", show_default="whole nodes", panel=PLACE),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        CliOption(
            metavar="OPTION",
            help="A further option of sbatch, such as --sbatch=--qos=high. May be repeated.",
            panel=PLACE,
        ),
    ] = None,
    name: Annotated[str, CliOption(metavar="NAME", help="Name of the job.")] = "outrider",
    processes: Annotated[
        int | None,
        CliOption(
            metavar="N", help="Processes that run sessions, on each node.", show_default="one for every four cores"
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        CliOption(
            metavar="FILE",
            help="Certificate (PEM) of the authority of the service's, for its nodes.",
            show_default="those of each node",
        ),
    ] = None,
    output: Annotated[
        str | None,
        CliOption(
            "--output", "-o", metavar="FILE", help="Write the batch script there, - for here, and submit nothing."
        ),
    ] = None,
) -> None:
    """Submit a job that runs a service and its nodes on a Slurm cluster.

    The service runs on the first node of the allocation, and sessions run on all
    nodes of it. The data folder and this Python must be on a file system that all
    nodes share. If Slurm queues the job again, the job continues with the same
    data.

    Examples:

        outrider slurm --nodes 4 --time 8:00:00 -- --config outrider.toml --insecure

        outrider slurm --nodes 2 -o job.sh -- --engine vllm=http://gpu7:8000 --tokenizer models/Qwen3-8B --insecure
    """
    if output == STANDARD_OUTPUT and terminal.json:
        raise InvalidField(
            "both would be on standard output", field="output", hint="give --output a file, or no --json"
        )
    given, settings = _serve_options(flags or ()), settings_of(flags or ())
    _check(given, settings)
    data = Path(os.path.abspath(settings.data))
    folder = data / FOLDER
    added = ["--processes", "0"]  # always added; --host and --port only if the user has not set them
    added += [] if "host" in settings.model_fields_set else ["--host", "0.0.0.0"]
    added += [] if "port" in settings.model_fields_set else ["--port", "0"]
    job = BatchJob(
        python=[sys.executable],
        folder=folder,
        directory=Path.cwd(),
        nodes=nodes,
        serve=[*(flags or ()), *added, "--data", str(data)],
        join=_join_flags(given, processes, ca),
        name=name,
        time=time,
        partition=partition,
        account=account,
        cpus_per_node=cpus_per_node,
        options=sbatch or (),
        stop_seconds=settings.stop_seconds,
        fully_qualified=settings.tls.certificate is not None,
    )
    script = script_of(job)
    _make_folder(data, folder)
    number = None
    if output is None:
        number = _submit(script)
    elif output == STANDARD_OUTPUT:
        terminal.out.file.write(script)
    else:
        Path(output).write_text(script)
    submitted = Submitted(
        job=number, url=str(folder / URL_FILE), token=str(folder / TOKEN_FILE), logs=str(folder / "*.log")
    )
    if output == STANDARD_OUTPUT:
        return
    url_file, token_file = shlex.quote(submitted.url), shlex.quote(submitted.token)
    terminal.show(
        submitted,
        f"written; submit it: sbatch {shlex.quote(str(output))}"
        if submitted.job is None
        else f"job {submitted.job} is submitted; its logs: {submitted.logs}",
        "once it runs, and again after each start of it:",
        f'  export OUTRIDER_URL="$(cat {url_file})" OUTRIDER_TOKEN="$(cat {token_file})"',
        "  outrider status",
    )


def settings_of(flags: Sequence[str]) -> Config:
    """Return the settings of a service that `outrider serve` starts with these flags. Raises UsageError for an unknown
    flag."""
    return read_settings(_serve_options(flags))


def _serve_options(flags: Sequence[str]) -> Mapping[str, Any]:
    """Parse flags of `outrider serve`, and return their values by parameter name."""
    return serve.make_context("outrider serve", list(flags), obj=Terminal()).params


def _check(given: Mapping[str, Any], settings: Config) -> None:
    """Raise InvalidField for flags that would make the job fail, or show the token to others."""
    if given["token"] is not None:
        hint = "leave it out: the job has a token of its own, in a file"
        raise InvalidField("a batch script can be read by others, and must have no token", field="token", hint=hint)
    if "processes" in settings.model_fields_set:
        hint = "give --processes to outrider slurm, before the --: the number of processes on each node"
        raise InvalidField("the service of a job runs no sessions itself", field="processes", hint=hint)
    if "host" in settings.model_fields_set and is_local(settings.host):
        hint = "leave it out, or name an address that the other nodes of the job can reach"
        raise InvalidField(f"no other machine reaches {settings.host}", field="host", hint=hint)
    if settings.tls.certificate is None and not settings.tls.insecure:
        hint = "add --tls-certificate FILE after the --, or --insecure where you trust the cluster's network"
        raise InvalidField("the nodes reach the service over the network", field="tls", hint=hint)


def _join_flags(given: Mapping[str, Any], processes: int | None, ca: Path | None) -> list[str]:
    # A node must not wait for running sessions when the job ends. Slurm also sends SIGTERM to the agents then, so a
    # node that waited would grade interrupted runs.
    words = ["--stop-seconds", "0"]
    if processes is not None:
        words += ["--processes", str(processes)]
    if ca is not None:
        words += ["--ca", str(ca.absolute())]
    for parameter in join.params:
        value = None if parameter.name in SERVICE_ONLY else given.get(parameter.name)
        for each in value if isinstance(value, list | tuple) else [value]:  # a repeatable flag has a list of values
            if each is True:
                words.append(parameter.opts[0])
            elif each is not None and each is not False:
                words += [parameter.opts[0], str(each)]
    return words


def _make_folder(data: Path, folder: Path) -> None:
    """Make the data folder and the job's folder, and write a new token to a file. Other users cannot read what this
    function makes. An existing folder or token is kept. Raises InvalidField if others can read the existing token."""
    for each in (data, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / TOKEN_FILE
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        if path.stat().st_mode & 0o077:
            raise InvalidField(
                f"others can read the token in {path}", field="token", hint="remove the file: another one is made"
            ) from None
        return
    try:
        with open(file, "w") as opened:
            opened.write(secrets.token_urlsafe(32) + "\n")
    except BaseException:  # such as a full disk: a later call would keep the empty file, and each job would refuse it
        path.unlink()
        raise


def _submit(script: str) -> str:
    """Submit the script with sbatch, and return the job's number. Raises ServiceError, whose message contains the
    output of sbatch."""
    try:
        done = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    except OSError as error:
        hint = "run this where Slurm's commands are, such as a login node, or write the script with --output FILE"
        raise ServiceError(f"cannot run sbatch: {error.strerror}", hint=hint) from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ServiceError(f"sbatch refused the job: {output}", hint="see the options of outrider slurm, and --sbatch")
    return done.stdout.strip().partition(";")[0]  # sbatch may print the number, a semicolon and the cluster's name
