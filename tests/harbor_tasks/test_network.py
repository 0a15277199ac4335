"""Lines of scripts that need a network are found, and lines that install uv are replaced if a mirror has uv."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.errors import InvalidField
from outrider.tasks.datasets import harbor_examples
from outrider.tasks.harbor.network_uses import UV_AT, network_uses, with_uv_of_mirror
from test_datasets import harbor_task

NEED = {
    "apt-get update && apt-get install -y x": "apt-get update",
    "  sudo apt -qq install x": "apt -qq",
    "DEBIAN_FRONTEND=noninteractive apt-get -y install x": "apt-get -y",
    "cd /app && python3 -m pip install -q x": "pip install",
    "if ! pip3 install x; then": "pip3 install",
    "uvx -p 3.13 --with pytest pytest /tests": "uvx",
    "uv pip install x": "uv pip",
    "uv run pytest": "uv run",
    "npm ci": "npm ci",
    "x=$(curl -LsSf https://a.example/install.sh | sh)": "curl -LsSf",
    "git clone https://a.example/b": "git clone",
    "apk add --no-cache git": "apk add",
}
DO_NOT = (
    *("# apt-get update", "echo apt-get install", "pip list", "pip install --no-index --find-links /w x", "pytest -q"),
    *("curl -s http://localhost:8080/health", "wget -q http://127.0.0.1/x", "uvx --offline pytest", "git clone /a /b"),
    *("uv --version", "npm test", "mycurl https://x", "cat apt.conf", "x" * 3000 + "; apt-get update"),
)


@pytest.mark.parametrize(("line", "command"), NEED.items())
def test_a_line_that_needs_a_network(line: str, command: str) -> None:
    [use] = network_uses(f"#!/bin/bash\n{line}\n")
    assert (use.line, use.command) == (2, command)


@pytest.mark.parametrize("line", DO_NOT)
def test_a_line_that_needs_none(line: str) -> None:
    assert list(network_uses(line)) == []


@pytest.mark.timeout(10)
def test_a_hostile_script_is_read_in_time() -> None:
    assert list(network_uses("\n".join(["a=" * 900 + "git clone " + "x" * 900] * 50))) == []


def test_what_needs_a_network_is_told_with_its_line(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "a", "[environment]\ncpus = 1\n", "set -e\napt-get update\nuvx pytest\n")
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text("pip install x\n")
    [example] = harbor_examples(tmp_path)
    assert example.notes == ()
    where = re.escape(f"{folder}/tests/test.sh, line 2 (apt-get update), 3 (uvx): ")
    [example] = harbor_examples(tmp_path, offline=True)
    graded, solved = example.notes
    assert re.match(f"{where}this needs a network, .* may not be graded", graded)
    assert f"{folder}/solution/solve.sh, line 1 (pip install): " in solved


def test_a_name_that_harbor_refuses_is_told_with_its_line_and_remedy(tmp_path: Path) -> None:
    harbor_task(tmp_path / "a", "# x\n[task]\nname = 'router'\n")
    with pytest.raises(InvalidField, match=r"task\.toml, line 3, has task\.name: 'router' is not") as refused:
        harbor_examples(tmp_path, offline=True)
    assert '"my-org/my-task"' in str(refused.value.hint)


INSTALLERS = {
    "curl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh": f"sh {UV_AT} 0.9.7",
    "curl -LsSf https://astral.sh/uv/install.sh | sh": f"sh {UV_AT}",
    "wget -qO- https://astral.sh/uv/0.7.13/install.sh | bash && x": f"sh {UV_AT} 0.7.13 && x",
    "curl -L https://astral.sh/uv/install.sh | env UV_INSTALL_DIR=/u sh": f"env UV_INSTALL_DIR=/u sh {UV_AT}",
    "curl -LsSf https://github.com/astral-sh/uv/releases/download/0.8.0/uv-installer.sh | sh": f"sh {UV_AT} 0.8.0",
}
OTHERS = ("curl https://astral.sh.evil.example/uv/install.sh | sh", "curl https://astral.sh/uv/install.sh -o x; sh x")


@pytest.mark.parametrize(("line", "ours"), INSTALLERS.items())
def test_an_installer_of_uv_is_replaced(line: str, ours: str) -> None:
    assert with_uv_of_mirror(f"set -e\n{line}\nuvx pytest\n") == f"set -e\n{ours}\nuvx pytest\n"


@pytest.mark.parametrize("line", OTHERS)
def test_other_lines_stay(line: str) -> None:
    assert with_uv_of_mirror(line) == line


@pytest.mark.parametrize(
    ("network", "installed", "lacks"),
    [
        (["mirror:pip"], True, ["mirror:apt", "files.example:443"]),
        (["mirror:pip", "mirror:apt", "*.example:443"], True, []),
        (["mirror:apt", "files.example"], False, ["astral.sh:443", "mirror:pip"]),
        (["mirror:pip", "mirror:apt", "files.example", "astral.sh"], False, []),
        (["*"], False, []),
    ],
)
def test_uv_comes_from_the_mirror_and_what_a_network_lacks_is_told(
    tmp_path: Path, network: list[str], installed: bool, lacks: list[str]
) -> None:
    script = (
        "apt-get update\ncurl -LsSf https://astral.sh/uv/0.9.7/install.sh | sh\nuvx pytest\n"
        "curl -o /data https://files.example/data\n"
    )
    harbor_task(tmp_path / "a", "[environment]\ncpus = 1\n", script)
    [example] = harbor_examples(tmp_path, network=network)
    tests = {file["to"]: file["write"] for file in example.task["evaluator"]["options"]["tests"]}
    assert (UV_AT in tests) == installed
    assert ("https://astral.sh" in tests["/tests/test.sh"]) == (not installed)
    if not lacks:
        assert example.notes == ()
        return
    [note] = example.notes
    assert f"the task's network lacks {' '.join(f'--network {name}' for name in lacks)}, so" in note
