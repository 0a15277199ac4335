"""Every page: links lead somewhere, named files exist, examples are valid."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from outrider.cli.task_sources import examples_in, load_group
from outrider.client.client import AsyncClient
from outrider.config import Config
from outrider.engines.adapters.options import read_options
from outrider.errors import InvalidField
from outrider.lab.fakes.scripted_engine import ScriptOptions
from outrider.service.admission import parse_body, validate_group
from outrider.spec import GroupSpec
from outrider.trainers.shared_settings import read_settings
from outrider.trainers.verifiers import VerifiersSettings
from support.service import running_service

from .pages import DOCS, PAGES, ROOT, Block, Page

BLOCKS = [block for page in PAGES for block in page.blocks]
SOURCE_PATH = re.compile(r"(?:src|tests|docs|scripts|examples)/[\w./-]*")
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:work|root|home|mnt|Users|data)/[\w.]+")
LANGUAGES = {
    "console",
    "js",
    "json",
    "python",
    "python agent",
    "python openai",
    "python run",
    "sql",
    "toml task",
    "toml template",
    "toml settings",
    "toml verifiers",
    "json group",
    "json script",
    "yaml values",
    "",
}


def of(*infos: str) -> list[Block]:
    found = [block for block in BLOCKS if block.info in infos]
    assert found, f"no page has a block of {infos}"
    return found


def where(block: Block) -> str:
    return block.where


def test_links_lead_somewhere() -> None:
    for page, link in [(each, link) for each in PAGES for link in each.links]:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.is_relative_to(ROOT), (page, link)
        assert target.exists(), (page, link)
        assert not anchor or anchor in Page(target).anchors, (page, link)


def test_files_that_are_named_exist() -> None:
    missing = []
    for page in PAGES:
        commands = [line for block in page.blocks if block.info == "console" for line in block.text.splitlines()]
        named = {found for text in (*page.spans, *commands) for found in SOURCE_PATH.findall(text)}
        missing += [(page, name) for name in sorted(named) if not (ROOT / name).exists()]
    assert missing == []


def test_no_page_names_a_place_on_somebodys_machine() -> None:
    assert [(page, found) for page in PAGES if (found := MACHINE_PATH.findall(page.text))] == []


def test_every_page_is_in_the_index() -> None:
    index = next(page for page in DOCS if page.name == "docs/README.md")
    listed = {(index.path.parent / link).resolve() for link in index.links}
    assert [page.name for page in DOCS if page.path.parent == index.path.parent and page.path not in listed] == [
        index.name
    ]


def test_the_readme_lists_every_page_and_every_trainer() -> None:
    readme = next(page for page in PAGES if page.name == "README.md")
    listed = set(re.findall(r"\]\(([^)\s]+)\)", readme.text.split("## Read on")[1]))
    assert [
        page.name for page in DOCS if page.path.parent.name in ("docs", "trainers") and page.name not in listed
    ] == []


def test_every_page_in_a_folder_is_linked_from_the_page_or_the_index_of_that_name() -> None:
    index = next(page for page in DOCS if page.name == "docs/README.md")
    for page in DOCS:
        folder = page.path.parent
        if folder == index.path.parent:
            continue
        above = folder.with_suffix(".md")
        links = {(index.path.parent / link.partition("#")[0]).resolve() for link in index.links}
        if above.exists():
            links |= {(above.parent / link.partition("#")[0]).resolve() for link in Page(above).links}
        assert page.path.resolve() in links, f"{page.name} is not linked from {above.name} or the index"


async def test_the_refused_body_of_the_page_on_tasks_is_refused_as_shown(tmp_path: Path) -> None:
    tasks = next(page for page in DOCS if page.name == "docs/tasks.md")
    [block] = [block for block in tasks.blocks if block.text.startswith("$ curl -s localhost:8700/v1/groups -d")]
    command, shown = block.text.splitlines()[:2]
    body = json.loads(command.split(" -d ")[1].strip("'"))
    async with running_service(tmp_path=tmp_path) as (_, url), AsyncClient(url) as client:
        with pytest.raises(InvalidField) as refused:
            await client.submit(body)
    assert msgspec.json.encode(refused.value.record()).decode() == shown


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    odd = [block.where for block in BLOCKS if block.info not in LANGUAGES and not block.info.startswith("python run ")]
    assert odd == []


@pytest.mark.parametrize("block", of("toml task"), ids=where)
def test_a_task_is_valid(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "task.toml"
    file.write_text(block.text)
    assert load_group(file, n=2, priority=0).n == 2


@pytest.mark.parametrize("block", of("toml template"), ids=where)
def test_a_template_makes_valid_tasks(block: Block, tmp_path: Path) -> None:
    (tmp_path / "template.toml").write_text(block.text)
    row = {"name": "six", "question": "How much is 6 times 7?", "answer": 42}
    (tmp_path / "questions.jsonl").write_text(json.dumps(row))
    [example] = examples_in(str(tmp_path / "template.toml"), limit=None, image=None)
    assert validate_group({"task": example.task}).task.instruction.startswith("How much is 6 times 7?")
    assert example.gold is not None


@pytest.mark.parametrize("block", of("json group"), ids=where)
def test_a_group_is_valid(block: Block) -> None:
    assert parse_body(GroupSpec, block.text.encode()).task.instruction


@pytest.mark.parametrize("block", of("toml verifiers"), ids=where)
def test_settings_of_the_bridge_to_verifiers_are_valid(block: Block) -> None:
    found = tomllib.loads(block.text)["env"]["agent"]["harness"]["outrider"]
    read_settings(VerifiersSettings, found, source="outrider", variable="OUTRIDER_EXAMPLE")


@pytest.mark.parametrize("block", of("toml settings"), ids=where)
def test_settings_are_valid(block: Block) -> None:
    assert Config.model_validate(tomllib.loads(block.text)) != Config()


@pytest.mark.parametrize("block", of("json script"), ids=where)
def test_a_script_is_valid(block: Block) -> None:
    assert read_options(ScriptOptions, json.loads(block.text)).replies


@pytest.mark.parametrize("block", [found for found in BLOCKS if found.info.startswith("python")], ids=where)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec")


EXITS_WITH_2 = re.compile(r"""\brun\b["']?\s*[:=]\s*["'].*\b(?:grep|diff|cmp) """)
"""Matches an evaluator's command whose program exits with 2 if the file to grade is missing. Exit code 2 is an error,
and there is no reward."""


def test_a_missing_file_is_a_reward_of_0_in_every_example() -> None:
    files = [*(page.path for page in PAGES), *(ROOT / "examples").rglob("*.toml"), *(ROOT / "examples").rglob("*.py")]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines() if EXITS_WITH_2.search(line)]
    assert len(lines) > 10
    gold = "grep -c v harbour.txt"  # a known solution, not an evaluator
    assert [line for line in lines if "|| exit 1" not in line and gold not in line] == []
