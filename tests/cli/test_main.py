"""Errors and --help, for every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.world import Cli, write_task
from outrider.cli.command_line import CliGroup
from outrider.cli.commands import commands

UNREACHABLE = "http://127.0.0.1:9"


ROOT = commands()


def words_of(group: CliGroup) -> list[tuple[str, ...]]:
    """Return the words of every command."""
    members = {name: group.member(name) for name in group.names}
    inner = {name: words_of(each) if isinstance(each, CliGroup) else [()] for name, each in members.items()}
    return [(name, *words) for name, found in inner.items() for words in found]


COMMANDS = words_of(ROOT)


def test_there_is_every_command() -> None:
    assert {words[0] for words in COMMANDS} == {
        *("serve", "run", "status", "cancel", "show", "view", "trace", "regrade", "artifacts", "export", "gc"),
        *("top", "mcp"),
        *(
            "consumers",
            "callbacks",
            "engines",
            "harness",
            "image",
            "doctor",
            "eval",
            "demo",
            "policy",
            "nodes",
            "task",
            "token",
            "slurm",
            "session",
            "sessions",
            "retry",
            "query",
            "diff",
            "queue",
            "capture",
            "diagnose",
        ),
    }


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(cli: Cli, words: tuple[str, ...]) -> None:
    ran = cli.run(*words, "--help")
    assert ran.code == 0
    assert " ".join(("outrider", *words)) in ran.out
    assert "Example" in ran.out or words[-1] == "list"


def test_the_list_of_commands_has_the_first_line_of_each() -> None:
    first_lines = {name: str(ROOT.member(name).help).splitlines()[0] for name in ROOT.names}
    assert {name: ROOT.first_line(name) for name in ROOT.names} == first_lines


def test_the_help_of_the_queue_names_its_commands() -> None:
    queue = ROOT.member("queue")
    assert isinstance(queue, CliGroup)
    assert all(name in str(queue.help).lower() for name in queue.names)


def test_a_command_after_two_dashes_is_run(cli: Cli) -> None:
    assert "cannot reach" in cli.run("--", "status", "--url", UNREACHABLE).err


def test_the_version_is_shown_also_before_a_command(cli: Cli) -> None:
    assert cli.run("--version", "status", "--url", UNREACHABLE).out.startswith("outrider ")


def test_without_words_the_help_is_shown(cli: Cli) -> None:
    ran = cli.run()
    assert (ran.code, ran.err) == (2, "")
    assert "outrider demo" in ran.out


def test_the_version(cli: Cli) -> None:
    assert cli.run("--version").out.startswith("outrider ")


def test_the_package_is_the_command(cli: Cli) -> None:
    ran = subprocess.run([sys.executable, "-m", "outrider", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == cli.run("--version").out


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["stats"], "error: No such command 'stats'", "hint: outrider --help"),
        (["run"], "error: Missing argument 'TASK.toml|SOURCE...'", "hint: outrider run --help"),
        (["run", "x", "-n", "two"], "error: Invalid value for '-n'", "hint: outrider run --help"),
        (["export", "--format", "csv"], "error: Invalid value for '--format'", "hint: outrider export --help"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_a_hint(cli: Cli, words: list[str], error: str, hint: str) -> None:
    ran = cli.run(*words)
    first, second = ran.err.splitlines()
    assert (ran.code, ran.out, second) == (2, "", hint)
    assert first.startswith(error)


def test_an_error_names_its_field(cli: Cli, tmp_path: Path) -> None:
    ran = cli.run("run", write_task(tmp_path, "instruction = 3\n"), "--resume", "first")  # checked before submission
    assert ran.code == 2
    assert ran.err.startswith("error: task.")
    assert len(ran.err.splitlines()) == 1


def test_a_service_that_is_not_there_is_a_failure_with_a_hint(cli: Cli) -> None:
    ran = cli.run("status", "--url", UNREACHABLE)
    assert ran.code == 1
    assert ran.err.splitlines() == [
        f"error: cannot reach the service at {UNREACHABLE}: Connection refused",
        "hint: start one with `outrider serve`, or name its address with --url",
    ]


@pytest.mark.parametrize("by", ["option", "variable"])
@pytest.mark.parametrize(("scheme", "port"), [("http", 80), ("https", 443)])
def test_an_address_without_a_port_is_named_if_nothing_answers(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, by: str, scheme: str, port: int
) -> None:
    url = f"{scheme}://127.1.2.3"  # nothing listens on the usual ports of this address
    words = ("--url", url) if by == "option" else ()
    monkeypatch.setenv("OUTRIDER_URL", url)
    ran = cli.run("status", *words)
    assert ran.code == 1
    error, hint = ran.err.splitlines()
    assert error.startswith(f"error: cannot reach the service at {url}: Connection refused")
    assert error.endswith(f"the address has no port, so port {port} was tried")
    assert hint.startswith("hint: a service listens on port 8700 unless")
    assert hint.endswith(f"such as {url}:8700")


def test_a_password_in_the_address_is_not_shown(cli: Cli) -> None:
    ran = cli.run("status", "--url", UNREACHABLE.replace("://", "://me:geheim@"))
    assert ran.code == 1
    assert ran.err.startswith(f"error: cannot reach the service at {UNREACHABLE}: Connection refused")


def test_a_program_gets_the_error_as_json(cli: Cli) -> None:
    ran = cli.run("status", "--url", UNREACHABLE, "--json")
    assert ran.code == 1
    assert json.loads(ran.out)["error"]["code"] == "service_error"
    assert "Connection refused" in ran.err


def test_the_address_may_come_from_the_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_URL", UNREACHABLE)
    assert UNREACHABLE in cli.run("engines", "list").err


OUTPUTS = pytest.mark.parametrize(
    ("words", "unbuffered"), [("--version", ""), ("--help", ""), ("task list task.toml --json", "1")]
)


def written_to(output: int | None, folder: Path, words: str, unbuffered: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is a descriptor, or closed."""
    write_task(folder)
    command = [sys.executable, "-m", "outrider", *words.split()]
    if output is None:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=subprocess.PIPE, text=True, check=False)


@OUTPUTS
def test_a_full_disk_under_the_output_is_one_line(tmp_path: Path, words: str, unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        ran = written_to(full.fileno(), tmp_path, words, unbuffered)
    assert ran.returncode == 1
    error, hint = ran.stderr.splitlines()
    assert error == "error: No space left on device"
    assert hint.startswith("hint: free some space")


@OUTPUTS
def test_a_reader_that_has_ended_needs_no_message(tmp_path: Path, words: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = written_to(writing, tmp_path, words, unbuffered)
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_an_error_is_shown_although_its_json_cannot_be_written(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        ran = written_to(full.fileno(), tmp_path, f"status --url {UNREACHABLE} --json", "")
    assert ran.returncode == 1
    assert "Connection refused" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_output_may_be_closed(tmp_path: Path) -> None:
    ran = written_to(None, tmp_path, "task list task.toml", "")
    assert (ran.returncode, ran.stderr) == (0, "")
