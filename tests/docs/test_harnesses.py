"""A preset's page has the section that scripts/harness_pages.py makes of the preset, and names no other version."""

from __future__ import annotations

import re
import runpy

import pytest

from outrider.harnesses.common_options import COMMON
from outrider.harnesses.presets import load_preset, preset_names

from .pages import ROOT, page

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "harness_pages.py"))
WITH_SECTION = SCRIPT["with_section"]
NUMBER = re.compile(r"\b(\d+\.\d+(?:\.\d+)?)\b")


@pytest.mark.parametrize("name", preset_names())
def test_a_page_has_what_its_preset_says(name: str) -> None:
    text = page(f"docs/harnesses/{name}.md").text
    assert text == WITH_SECTION(text, load_preset(name)), "run: python scripts/harness_pages.py"


def test_the_overview_has_the_options_of_every_program() -> None:
    text = page("docs/harnesses.md").text
    assert text == SCRIPT["with_options_table"](text), "run: python scripts/harness_pages.py"
    assert page("docs/harnesses.md").tables("Option")[0].column("Option") == [f"`{name}`" for name in COMMON]


@pytest.mark.parametrize("name", [name for name in preset_names() if load_preset(name).install])
def test_a_page_begins_with_the_version_and_names_the_right_node(name: str) -> None:
    recipe = load_preset(name).install
    assert recipe is not None
    text = page(f"docs/harnesses/{name}.md").text
    [introduction] = re.findall(r"\A# .*\n\n((?:.+\n)+)\n", text)
    found = NUMBER.search(introduction)
    assert found is not None
    assert found[1] == recipe.version
    assert set(re.findall(r"Node\.js (\d+\.\d+\.\d+)", text)) == ({recipe.node} if recipe.node else set())


@pytest.mark.parametrize("name", [name for name in preset_names() if load_preset(name).install])
def test_a_page_says_how_the_program_is_pointed_at_the_gateway_and_how_its_calls_are_labelled(name: str) -> None:
    whole = page(f"docs/harnesses/{name}.md")
    [facts] = whole.tables("Property")
    assert "base URL and key" in facts.column("Property")
    assert "history" in facts.column("Property")
    assert "branches" in facts.column("Property")
    assert "../branches.md" in whole.links
