"""scripts/check_latest.py: which versions are tried, and the results in the table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import check_latest
import pytest
from check_latest import FAILED, NEWEST, PASSED, ROOT, TRAINERS, UNINSTALLABLE, UNKNOWN, Trainer, is_newer, tried
from packaging.requirements import Requirement

PAGE = (ROOT / "docs" / "trainers.md").read_text("utf-8")
TRAINER = Trainer("SomeRL", ("somerl", "somerl-gym"), "SOME_VENV", "test-some")


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.packages[0])
def test_the_page_names_the_version_that_the_tests_install(trainer: Trainer) -> None:
    installed = (ROOT / "Makefile").read_text("utf-8") + (ROOT / "pyproject.toml").read_text("utf-8")
    version = check_latest.tested_version(trainer, PAGE)
    for package in trainer.packages:
        pins = re.findall(rf'(?<![\w-]){re.escape(package)}[=<>][^\s")]*', installed)
        assert pins
        assert all(version in Requirement(pin).specifier for pin in pins)


@pytest.mark.parametrize(
    ("version", "other", "newer"),
    [("1.10", "1.9", True), ("1.9", "1.10", False), ("0.4.0", "0.4.0", False), ("0.4.0.post1", "0.4.0", True)],
)
def test_versions_are_compared_by_their_numbers(version: str, other: str, newer: bool) -> None:
    assert is_newer(version, other) == newer


class Runs:
    """A stand-in for `logged` that records the commands. Commands that contain `fails` fail."""

    def __init__(self, fails: str = "nothing") -> None:
        self.commands: list[str] = []
        self._fails = fails

    def __call__(self, command: Sequence[str], log: Path) -> bool:
        self.commands.append(" ".join(command))
        return self._fails not in self.commands[-1]


@pytest.mark.parametrize(("newest", "result"), [("1.0", NEWEST), ("0.9", NEWEST), (None, UNKNOWN)])
def test_only_a_newer_version_is_tried(newest: str | None, result: str) -> None:
    runs = Runs()
    assert tried(TRAINER, "1.0", newest, runs).result == result
    assert runs.commands == []


@pytest.mark.parametrize(
    ("fails", "result", "commands"),
    [("nothing", PASSED, 3), ("test-some", FAILED, 3), ("somerl==1.1", UNINSTALLABLE, 2), ("stamps", UNINSTALLABLE, 1)],
)
def test_the_newest_version_replaces_the_tested_one_before_the_tests(
    fails: str, result: str, commands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_latest, "ROOT", tmp_path)
    monkeypatch.setattr(check_latest, "LATEST", tmp_path / "latest")
    runs = Runs(fails)
    row = tried(TRAINER, "1.0", "1.1", runs)
    assert (row.result, row.log) == (result, "latest/somerl/log")
    assert len(runs.commands) == commands
    if result == PASSED:
        made, installed, tested = runs.commands
        venv = tmp_path / "latest" / "somerl" / "venv"
        assert made == f"make SOME_VENV={venv} {venv}/.stamps/dev"
        assert installed.endswith("--no-deps somerl==1.1 somerl-gym==1.1")
        assert tested == f"make SOME_VENV={venv} test-some"


def test_the_output_of_a_command_goes_into_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert check_latest.logged(("echo", "hello"), log)
    assert not check_latest.logged(("false",), log)
    assert log.read_text() == "+ echo hello\nhello\n+ false\n"


def test_an_unknown_trainer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check_latest.main(["nobody"])
    assert "unknown: nobody; choose from trl, verl, skyrl, openrlhf, nemo-gym" in capsys.readouterr().err
