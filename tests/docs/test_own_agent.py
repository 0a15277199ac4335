"""The examples of docs/bring-your-own-agent.md work as described, in real sandboxes, with the page's own text."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import main
from outrider.sandbox.pythons.portable import portable_command, portable_python
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from support.environments import environment, program
from support.small_root import small_root

from .pages import page

PAGE = page("docs/bring-your-own-agent.md")
SHOWN_AT = "/srv/agents"
IN_ENVIRONMENT, WITH_NODE, IN_IMAGE, *_ = [block.text for block in PAGE.blocks if block.info == "toml task"]
[PYTHON] = [block.text for block in PAGE.blocks if block.info == "python"]
[NODE] = [block.text for block in PAGE.blocks if block.info == "js"]

pytestmark = pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="needs namespace sandboxes")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An OUTRIDER_HOME for this test alone. Only the interpreter that Outrider makes for images is shared."""
    made = tmp_path / "home"
    made.mkdir()
    (made / "python").symlink_to(portable_python().parent)
    monkeypatch.setenv("OUTRIDER_HOME", str(made))
    return made


def certificate(task: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Check the task of the page, with `folder` in place of the page's folder, and return the certificate. The check
    must succeed."""
    file = folder / "my-agent.toml"
    file.write_text(task.replace(SHOWN_AT, str(folder)))
    code = main(["harness", "check", "--task", str(file), "--row", "three-turns", "--row", "parallel-calls", "--json"])
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    made: dict[str, Any] = json.loads(said.out)
    assert [row["drift_tokens"] for row in made["rows"]] == [0, 0]
    assert made["runtime"] == "namespace"
    return made


@pytest.mark.deep
def test_an_agent_in_a_virtual_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment is as `python -m venv` makes it, with the interpreter that runs this test. The agent's module
    lies outside the environment, as an editable install."""
    made = tmp_path / "mine/.venv"
    packages = environment(made)
    (tmp_path / "project").mkdir()
    (tmp_path / "project/my_agent.py").write_text(PYTHON)
    (packages / "my_agent.pth").write_text(f"{tmp_path}/project\n")
    program(made / "bin/my-agent", made / "bin/python", "import my_agent")
    certificate(IN_ENVIRONMENT, tmp_path, capsys)
    assert list((tmp_path / "project").rglob("my_agent.*.pyc")), "it was compiled on the node"


@pytest.mark.deep
@pytest.mark.skipif(not os.path.realpath(shutil.which("node") or "").startswith("/usr/"), reason="no node in /usr here")
def test_an_agent_in_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "node-agent").mkdir()
    (tmp_path / "node-agent/agent.mjs").write_text(NODE)
    certificate(WITH_NODE, tmp_path, capsys)


@pytest.mark.deep
def test_an_agent_in_an_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The image has no Python: the agent runs with the interpreter that is mounted in every such sandbox."""
    root = small_root(tmp_path / "root")
    command = shlex.join([*portable_command(), "/opt/agent/my_agent.py"])
    program(root / "opt/agent/run", "/bin/bash", f'exec {command} "$@"')
    (root / "opt/agent/my_agent.py").write_text(PYTHON)
    with tarfile.open(tmp_path / "my-agent.tar", "w") as archive:
        archive.add(root, ".")
    assert main(["image", "import", str(tmp_path / "my-agent.tar"), "my-agent"]) == 0
    capsys.readouterr()
    certificate(IN_IMAGE, tmp_path, capsys)
