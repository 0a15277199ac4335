"""The skill for coding agents and llms.txt: their tools, commands and links exist. A scripted agent that follows the
skill's steps finds planted faults, with the MCP tools and with the command line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from api.test_mcp import connected, text
from cli.conftest import cli as cli
from cli.test_diagnose import FAULTS, SUBJECTS, N
from cli.world import Cli
from outrider.cli.commands import commands
from outrider.client.client import AsyncClient
from outrider.mcp.tools import TOOLS
from support.service import running_service

ROOT = Path(__file__).parent.parent.parent
SKILL = (ROOT / "skills" / "outrider" / "SKILL.md").read_text()
PLANTED = ("tools that never work", "errors")
SEEN = {"tools that never work": "nosuchprogram", "errors": "the hidden tests are missing"}
"""The text by which a session of the run shows its fault."""


def steps() -> list[tuple[str, str]]:
    """Return the tool and the command of each numbered step."""
    rows = re.findall(r"^\| \d\. .* \| `(\w+)`.* \| `(outrider [^`]+)` \|$", SKILL, re.MULTILINE)
    assert len(rows) == 5
    return rows


def document(result: str) -> Any:
    """Return the JSON between the marks of a tool's result."""
    found = re.search(r"<data (\w+)>\n(.*)\n</data \1>", result, re.DOTALL)
    assert found is not None
    return json.loads(found[2])


@pytest.mark.parametrize("name", PLANTED)
async def test_an_agent_with_the_tools_finds_the_fault(tmp_path: Path, name: str) -> None:
    replies, task = FAULTS[name]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as api:
        await api.wait([(await api.submit({"task": task, "n": N})).id])
        status, diagnose, show, timeline, query = (tool for tool, _ in steps())
        async with connected(url) as client:
            assert document(await text(client, status))["sessions"]["done"] == N
            findings = document(await text(client, diagnose, labels={"run": "tuesday"}))["findings"]
            finding = most_severe(findings, name)
            [session, *_] = finding["sessions"]
            shown = await text(client, show, session=session)
            happened = await text(client, timeline, session=session)
            [sql] = re.findall(r"```sql\n(.*?)```", SKILL, re.DOTALL)
            rows = document(await text(client, query, sql=sql))["rows"]
    assert finding["subject"] == SUBJECTS[name]
    assert SEEN[name] in shown
    assert " · call · " in happened
    assert [row[2] for row in rows] == ([N] if name == "errors" else [])


@pytest.mark.parametrize("name", PLANTED)
async def test_an_agent_with_the_command_line_finds_the_fault(cli: Cli, tmp_path: Path, name: str) -> None:
    replies, task = FAULTS[name]
    async with running_service(tmp_path=tmp_path, replies=replies) as (_, url), AsyncClient(url) as api:
        await api.wait([(await api.submit({"task": task, "n": N})).id])
        status, diagnose, show, _, _ = (command.split()[1:] for _, command in steps())
        assert (await cli(*status, "--url", url)).document["service"]["sessions"]["done"] == N
        findings = (await cli(*diagnose, "--url", url)).document["findings"]
        finding = most_severe(findings, name)
        words = [finding["sessions"][0] if word == "s-..." else word for word in show]
        assert SEEN[name] in (await cli(*words, "--url", url)).out


def most_severe(findings: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the fault's finding, which must be among the most severe ones."""
    assert name in {finding["rule"] for finding in findings if finding["severity"] == findings[0]["severity"]}
    return next(finding for finding in findings if finding["rule"] == name)


def test_the_skill_names_tools_and_commands_that_exist() -> None:
    named = set(re.findall(r"`([a-z]+_[a-z]+)`", SKILL)) - {"dry_run"}
    named |= {tool for tool, _ in steps()}
    assert named <= {tool.name for tool in TOOLS}
    called = re.findall(r"`outrider ([^`]+)`", SKILL)
    assert len(called) > 10
    for words in called:
        at: Any = commands()
        for word in words.split():
            if not hasattr(at, "names"):
                break
            at = at.member(word)  # raises KeyError for an unknown command
        options = {name for parameter in at.params for name in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= options


def test_the_skill_has_the_head_that_agents_read() -> None:
    head = re.match(r"---\nname: outrider\ndescription: (.+)\n---\n", SKILL)
    assert head is not None
    assert len(head[1]) < 1024
    assert len(SKILL.splitlines()) < 100


def test_the_table_of_the_page_has_each_tool_and_its_role() -> None:
    page = (ROOT / "docs" / "mcp.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.MULTILINE) == [(tool.name, tool.role) for tool in TOOLS]


def test_the_links_of_llms_txt_lead_to_files() -> None:
    linked = re.findall(r"\]\(([^)]+)\)", (ROOT / "llms.txt").read_text())
    assert len(linked) > 10
    assert [place for place in linked if not (ROOT / place).is_file()] == []
