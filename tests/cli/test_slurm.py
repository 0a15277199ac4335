"""`outrider slurm` up to the call of sbatch, which is a fake."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cli.world import Cli
from outrider.config import Config
from outrider.service.data_folder import open_store
from store.world import group_row, submit

SERVE = ("--insecure", "--port", "0")
HOSTILE = 'it\'s "a" $(touch owned) `id` \\ #1;'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a bash program `sbatch` before all others on the PATH."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/bash\n{body}\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def written(cli: Cli, *words: str, serve: tuple[str, ...] = SERVE) -> str:
    """Return the batch script for these words."""
    ran = cli.run("slurm", "-o", "-", *words, "--", *serve)
    assert ran.code == 0, ran.err
    return ran.out


def array(script: str, name: str) -> list[str]:
    """Return the words of an array of the script, as bash reads them."""
    [line] = [line for line in script.splitlines() if line.startswith(f"{name}=(")]
    shown = subprocess.run(
        ["bash", "-c", f'{line}\nprintf "%s\\0" "${{{name}[@]}}"'], capture_output=True, text=True, check=True
    )
    return shown.stdout.split("\0")[:-1]


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_job_is_submitted(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch(tmp_path, monkeypatch, 'printf "%s\\n" "$@" >words; cat >script; echo "17;cluster"')
    ran = cli.run("slurm", "--nodes", "3", "--", *SERVE)
    folder = tmp_path / ".outrider" / "slurm"
    assert ran.code == 0, ran.err
    assert (tmp_path / "words").read_text() == "--parsable\n"
    assert "#SBATCH --nodes=3\n" in (tmp_path / "script").read_text()
    assert ran.out.startswith(f"job 17 is submitted; its logs: {folder}/*.log\n")
    assert f'export OUTRIDER_URL="$(cat {folder}/url)" OUTRIDER_TOKEN="$(cat {folder}/token)"' in ran.out
    again = cli.run("slurm", "--json", "--", *SERVE)
    assert again.document == {
        "job": "17",
        "url": f"{folder}/url",
        "token": f"{folder}/token",
        "logs": f"{folder}/*.log",
    }


def test_the_token_is_in_a_file_that_nobody_else_can_read_and_in_nothing_else(cli: Cli, tmp_path: Path) -> None:
    first = written(cli)
    file = tmp_path / ".outrider" / "slurm" / "token"
    token = file.read_text().strip()
    assert len(token) >= 32
    assert [file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777] == [0o600, 0o700]
    assert token not in first
    assert written(cli) == first
    assert file.read_text().strip() == token  # the token is kept for as long as the data
    file.chmod(0o640)
    ran = cli.run("slurm", "-o", "-", "--", *SERVE)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("error: others can read the token in ")


def test_a_full_disk_leaves_no_empty_token(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls would keep it, and each job would refuse it."""

    def no_space(size: int) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(secrets, "token_urlsafe", no_space)
        assert cli.run("slurm", "-o", "-", "--", *SERVE).code == 1
    written(cli)
    assert len((tmp_path / ".outrider" / "slurm" / "token").read_text().strip()) >= 32


def test_what_slurm_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    words = ("--nodes", "4", "--time", "1-2", "--partition", "cpu", "--account", "lab", "--cpus-per-node", "48")
    script = written(cli, *words, "--name", "mine", "--sbatch=--qos=high", "--sbatch", "--no-requeue")
    assert options(script) == [
        *("--job-name=mine", "--nodes=4", "--ntasks-per-node=1", "--time=1-2", "--partition=cpu", "--account=lab"),
        *("--cpus-per-task=48", f"--chdir={tmp_path}", f"--output={tmp_path}/.outrider/slurm/job-%j.log"),
        *("--signal=B:USR1@110", "--requeue", "--open-mode=append", "--no-kill", "--qos=high", "--no-requeue"),
    ]
    assert "--exclusive" in options(written(cli))


def test_the_service_runs_no_sessions_and_listens_where_nodes_reach_it(cli: Cli, tmp_path: Path) -> None:
    script = written(
        cli, "--processes", "6", "--ca", "ca.pem", serve=("--insecure", "--run-lane", "8", "--warm", "0", "-v")
    )
    assert array(script, "serve")[1:] == [
        *("-m", "outrider.cli", "serve", "--insecure", "--run-lane", "8", "--warm", "0", "-v"),
        *("--processes", "0", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path / ".outrider")),
    ]
    assert array(script, "join")[1:] == [
        *("-m", "outrider.cli", "nodes", "join", "--stop-seconds", "0", "--processes", "6"),
        *("--ca", str(tmp_path / "ca.pem"), "--run-lane", "8", "--warm", "0", "--verbose"),
    ]


def test_a_flag_that_is_given_several_times_is_passed_on_as_often(cli: Cli) -> None:
    script = written(cli, serve=("--insecure", "--sandbox-gpu", "0", "--sandbox-gpu", "2"))
    assert array(script, "join")[-4:] == ["--sandbox-gpu", "0", "--sandbox-gpu", "2"]


def test_settings_may_come_from_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "outrider.toml"
    file.write_text(
        'data = "state"\nstop_seconds = 600\nhost = "10.0.0.1"\nport = 9000\ntls = {certificate = "c.pem"}\n'
    )
    script = written(cli, "--time", "0:20:00", serve=("--config", "outrider.toml"))
    assert "--signal=B:USR1@690" in options(script)
    assert array(script, "serve")[4:] == [
        *("--config", "outrider.toml", "--processes", "0", "--data", str(tmp_path / "state"))
    ]
    assert array(script, "join")[-2:] == ["--config", "outrider.toml"]
    assert "\naddress=$(hostname -f)" in script


def test_every_value_is_read_as_it_was_given(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / HOSTILE.replace("\\", "%j")
    folder.mkdir()
    monkeypatch.chdir(folder)
    script = written(
        cli, "--name", HOSTILE, f"--sbatch=--comment={HOSTILE}", serve=(*SERVE, "--files", HOSTILE, "--data", "a b")
    )
    assert f"{folder}/a b" == array(script, "serve")[-1]
    assert HOSTILE in array(script, "serve")
    assert HOSTILE in array(script, "join")
    # A backslash escapes even within quotes of an #SBATCH line, and `%` begins a placeholder in the log's name.
    read = [shlex.split(line)[0].replace("\\\\", "\\") for line in options(script)]
    assert f"--job-name={HOSTILE}" in read
    assert f"--comment={HOSTILE}" in read
    assert f"--chdir={folder}" in read
    assert f"--output={folder}/a b/slurm/".replace("%", "%%") + "job-%j.log" in read
    file = folder / "job.sh"
    file.write_text(script)
    subprocess.run(["bash", "-n", file], check=True)
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--nodes", "0", "--", *SERVE], "error: nodes: a job needs at least one node"),
        (["--cpus-per-node", "0", "--", *SERVE], "error: cpus_per_node: a node needs at least one processor"),
        (["--time", "soon", "--", *SERVE], "error: 'soon' is no time limit"),
        (["--time", "3", "--", *SERVE], "error: a time limit of 180 s is too short"),
        (["--time", "0-0:3:59", "--", *SERVE, "--stop-seconds", "30"], "error: a time limit of 239 s is too short"),
        (["--sbatch", "-C gpu", "--", *SERVE], "error: '-C gpu' is no long option of sbatch"),
        (["--sbatch=--comment=a\nb", "--", *SERVE], "error: a batch script cannot have control characters: "),
        (["--name", "a\nrm x", "--", *SERVE], "error: a batch script cannot have control characters"),
        (["--", *SERVE, "--data", "a\\b"], "error: data: Slurm cannot write to a folder whose name has a backslash"),
        (["--", "--port", "0"], "error: tls: the nodes reach the service over the network"),
        (["--", *SERVE, "--token", "secret"], "error: a batch script can be read by others, and must have no token"),
        (["--", *SERVE, "--processes", "4"], "error: processes: the service of a job runs no sessions itself"),
        (["--", *SERVE, "--host", "127.0.0.1"], "error: host: no other machine reaches 127.0.0.1"),
        (["--", *SERVE, "--port", "x"], "error: setting 'port' from flags: must be a whole number"),
        (["--", *SERVE, "--nodes", "2"], "error: No such option"),
        (["--", *SERVE, "--engine", "vllm"], "error: engine: 'vllm' is not KIND=WHERE"),
        (["--", *SERVE, "--config", "none.toml"], "error: cannot read config file none.toml"),
        (["--insecure"], "error: No such option"),
        (["--json", "-o", "-", "--", *SERVE], "error: both would be on standard output"),
    ],
)
def test_what_cannot_be_right_is_refused_before_it_waits_in_a_queue(
    cli: Cli, tmp_path: Path, words: list[str], error: str
) -> None:
    ran = cli.run("slurm", *words)
    assert ran.code == 2
    assert ran.err.startswith(error)
    assert not (tmp_path / ".outrider").exists()


@pytest.mark.parametrize("time", ["0", "UNLIMITED", "4", "4:00", "3:60", "0:04:00", "0-1", "0-0:4", "0-0:0:240"])
def test_time_limits_that_are_long_enough(cli: Cli, time: str) -> None:
    assert f"--time={time}" in options(written(cli, "--time", time, serve=(*SERVE, "--stop-seconds", "30")))


def test_without_slurm_the_script_can_be_written(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ran = cli.run("slurm", "--", *SERVE)
    assert ran.code == 1
    first, hint = ran.err.splitlines()
    assert first == "error: cannot run sbatch: No such file or directory"
    assert "or write the script with --output FILE" in hint
    ran = cli.run("slurm", "-o", "a job.sh", "--", *SERVE)
    assert ran.out.startswith("written; submit it: sbatch 'a job.sh'\n")
    assert re.search("^#SBATCH --nodes=1$", (tmp_path / "a job.sh").read_text(), re.MULTILINE)


def test_what_sbatch_says_is_shown(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    ran = cli.run("slurm", "--partition", "x", "--json", "--", *SERVE)
    assert ran.code == 1
    assert json.loads(ran.out)["error"]["message"] == (
        "sbatch refused the job: sbatch: error: invalid partition specified: x"
    )


@pytest.mark.deep
async def test_sessions_that_a_stopped_service_has_left_are_counted(tmp_path: Path) -> None:
    async def count() -> bytes:
        words = ("-m", "outrider.cli.slurm_unfinished", "--insecure", "--data", "state", "--processes", "2")
        process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out

    assert await count() == b"0\n"
    async with open_store(Config(data=tmp_path / "state")) as store:
        await submit(store, group_row(n=3))
    assert await count() == b"3\n"
