"""`outrider doctor` checks this machine; `outrider harness` lists the agent programs, and refuses wrong names."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest

from cli.world import Cli
from outrider.doctor import Diagnosis, Finding


def diagnosis(cli: Cli) -> Diagnosis:
    ran = cli.run("doctor", "--json")
    found = msgspec.convert(ran.document, Diagnosis)
    assert ran.code == (0 if found.ok else 1)
    return found


def named(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {found.name: found for found in findings}


def test_doctor_looks_at_everything(cli: Cli) -> None:
    found = diagnosis(cli)
    assert {"memory", "namespace", "process"} <= named(found.runtimes).keys()
    assert {"mini-swe-agent", "pi", "shell", "tools"} <= named(found.harnesses).keys()
    assert {"embedded", "openai", "scripted", "sglang", "vllm"} <= named(found.engines).keys()
    assert named(found.formats)["jsonl"].ok
    assert [named(found.stores)[name].ok for name in ("sqlite", "postgresql")] == [True, True]
    assert found.versions["outrider"]


@pytest.mark.deep
def test_doctor_says_what_to_do(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    missing = named(diagnosis(cli).harnesses)["mini-swe-agent"]
    assert not missing.ok
    assert "outrider harness install mini-swe-agent" in (missing.hint or "")
    [line] = [each for each in cli.run("doctor").out.splitlines() if "outrider harness install" in each]
    names, _, hint = line.partition(": ")
    assert {"mini-swe-agent", "pi"} <= set(names.split(", "))
    assert hint == "run: outrider harness install NAME"


def test_doctor_reports_a_full_disk(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", no_space)
    tried = named(diagnosis(cli).runtimes)["process"]
    assert (tried.ok, tried.detail) == (False, "a sandbox cannot be tried here: No space left on device")
    assert "set TMPDIR" in (tried.hint or "")


def test_doctor_looks_for_gpus(cli: Cli) -> None:
    found = diagnosis(cli).gpus
    assert found
    assert all(each.ok or "--sandbox-gpu" in (each.hint or "") for each in found)


def test_doctor_sees_a_taken_port(cli: Cli) -> None:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", 8700))
            taken.listen()
        except OSError:
            pytest.skip("port 8700 is in use on this machine")
        [port] = diagnosis(cli).ports
    assert not port.ok
    assert "--port" in (port.hint or "")


def test_harness_list(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    rows = {row["name"]: row for row in cli.run("harness", "list", "--json").document["harnesses"]}
    assert rows["shell"]["installed"]
    assert not rows["pi"]["installed"]
    assert rows["pi"]["version"] in cli.run("harness", "list").out


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["check", "pi"], 1, "is not installed on this node"),
        (["check", "none"], 2, "unknown preset 'none'"),
        (["install", "shell"], 2, "has nothing to install"),
    ],
)
def test_harness_errors(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, error: str
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    ran = cli.run("harness", *words)
    assert ran.code == code
    assert error in ran.err.splitlines()[0]
