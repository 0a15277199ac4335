"""The MCP servers and skills of a Harbor folder are given to the harness that runs its task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.cli.options import with_harness
from outrider.errors import InvalidField
from outrider.spec import TaskSpec
from outrider.tasks.harbor.tasks import harbor_examples
from test_datasets import OFFLINE, harbor_task

SERVERS = """
[environment]
network_mode = "no-network"
skills_dir = "/opt/skills"
[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "serve"
args = ["-v"]
[[environment.mcp_servers]]
name = "web"
transport = "http"
url = "http://localhost:8000/mcp"
headers = {Authorization = "Bearer ${TOKEN}", Mode = "${MODE:-plain}"}
"""
GIVEN = {
    "mcp_servers": [
        {"name": "files", "transport": "stdio", "command": "serve", "args": ["-v"]},
        {
            "name": "web",
            "transport": "streamable-http",
            "url": "http://localhost:8000/mcp",
            "headers": {"Authorization": "Bearer t-1", "Mode": "plain"},
        },
    ],
    "skills": ["/opt/skills"],
}


def task_of(folder: Path, toml: str = SERVERS, environ: Any = None) -> dict[str, Any]:
    harbor_task(folder / "a", toml)
    [example] = harbor_examples(folder, environ={"TOKEN": "t-1"} if environ is None else environ)
    return example.task


def test_they_are_given_to_whichever_harness_runs_the_task(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    assert task["harness"] == GIVEN
    for harness, agent in (("codex", None), (None, "tools")):
        spec = TaskSpec.model_validate(with_harness(task, harness, agent))
        assert (spec.harness.preset, spec.harness.agent) == (harness, agent)
        assert [server.name for server in spec.harness.mcp_servers] == ["files", "web"]
        assert spec.harness.skills == ["/opt/skills"]
    assert with_harness(task, None, None) == task
    assert with_harness({"harness": {"agent": "x", "skills": ["s"]}}, None, "tools")["harness"]["agent"] == "x"


def test_a_task_without_them_has_no_harness(tmp_path: Path) -> None:
    assert "harness" not in task_of(tmp_path, OFFLINE)


def test_a_missing_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField) as caught:
        task_of(tmp_path, environ={})
    assert caught.value.field == "environment.mcp_servers.1.headers.Authorization"
