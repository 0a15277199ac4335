"""Every page: links lead somewhere, named files exist, examples are valid."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from outrider.cli.task_sources import examples_in, load_group
from outrider.config import Config
from outrider.engines.adapters.options import read_options
from outrider.lab.fakes.scripted_engine import ScriptOptions
from outrider.service.admission import parse_body, validate_group
from outrider.spec import GroupSpec

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
    "toml task",
    "toml template",
    "toml settings",
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


@pytest.mark.parametrize("page", PAGES, ids=repr)
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in Page(target).anchors, link


@pytest.mark.parametrize("page", PAGES, ids=repr)
def test_files_that_are_named_exist(page: Page) -> None:
    commands = [line for block in page.blocks if block.info == "console" for line in block.text.splitlines()]
    named = {found for text in (*page.spans, *commands) for found in SOURCE_PATH.findall(text)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=repr)
def test_no_page_names_a_place_on_somebodys_machine(page: Page) -> None:
    assert MACHINE_PATH.findall(page.text) == []


def test_every_page_is_in_the_index() -> None:
    index = next(page for page in DOCS if page.name == "docs/README.md")
    listed = {(index.path.parent / link).resolve() for link in index.links}
    assert [page.name for page in DOCS if page.path.parent == index.path.parent and page.path not in listed] == [
        index.name
    ]


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


@pytest.mark.parametrize("block", of("toml settings"), ids=where)
def test_settings_are_valid(block: Block) -> None:
    assert Config.model_validate(tomllib.loads(block.text)).engines


@pytest.mark.parametrize("block", of("json script"), ids=where)
def test_a_script_is_valid(block: Block) -> None:
    assert read_options(ScriptOptions, json.loads(block.text)).replies


@pytest.mark.parametrize("block", [found for found in BLOCKS if found.info.startswith("python")], ids=where)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.where, "exec")
