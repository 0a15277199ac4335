"""Tasks of MiniWoB, from a small folder of pages like MiniWoB's own."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.task_sources import examples_in
from outrider.errors import InvalidField
from outrider.service.admission import validate_group
from outrider.tasks.miniwob.tasks import miniwob_examples

PAGE = """<html><head>
<link rel="stylesheet" href="../core/look/core.css"><script src="../core/core.js"></script>
<script>var icon = "../common/icons/" + name;</script>
<style>#x { content:url(../common/special/mark.png); }</style></head>
<body><div id="query"></div></body></html>
"""
PLACE = "/miniwob/miniwob/{}.html"


@pytest.fixture
def html(tmp_path: Path) -> Path:
    files = {
        "core/core.js": "var core = {};",
        "core/unused.js": "",
        "core/look/core.css": "",
        "core/look/images/icon.png": "icon",
        "common/icons/one.png": "one",
        "common/special/mark.png": "mark",
        "miniwob/click-test.html": PAGE,
        "miniwob/other.html": PAGE,
        "flight/elsewhere.html": PAGE,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def packed(task: dict[str, Any]) -> list[str]:
    [data] = [step["write"] for step in task["runtime"]["prepare"] if step.get("encoding") == "base64"]
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as archive:
        return archive.getnames()


def page_of(task: dict[str, Any], name: str) -> str:
    [text] = [step["write"] for step in task["runtime"]["prepare"] if step.get("to") == PLACE.format(name)]
    return str(text)


def test_a_page_is_a_task_for_each_seed(html: Path) -> None:
    first, second = miniwob_examples("click-test", size=2, seed=7, html=html)
    assert (first.id, second.id) == ("click-test-7", "click-test-8")
    for example in (first, second):
        assert validate_group({"task": example.task}).task.harness.agent == "tools"
    assert "const seed = 7;" in page_of(first.task, "click-test")
    assert packed(first.task) == [
        "common/special/mark.png",
        "core/core.js",
        "core/look/core.css",
        "common/icons/one.png",
        "core/look/images/icon.png",
    ]
    assert miniwob_examples("click-test", size=2, seed=7, html=html) == [first, second]


def test_the_browser_may_show_the_page_and_nothing_else(html: Path) -> None:
    [example] = miniwob_examples("other", html=html)
    [policy] = [
        json.loads(step["write"]) for step in example.task["runtime"]["prepare"] if "/policies/" in step.get("to", "")
    ]
    assert policy["URLAllowlist"] == ["file:///miniwob/miniwob/other.html"]
    assert "*" in policy["URLBlocklist"]
    assert policy["DeveloperToolsAvailability"] == 2
    assert example.task["harness"]["options"]["tools"] == ["desktop"]


def test_a_page_may_be_shown_as_an_accessibility_tree(html: Path) -> None:
    [seen], [read] = (miniwob_examples("other", html=html, observation=each) for each in ("screenshot", "tree"))
    options = [example.task["harness"]["options"]["desktop"] for example in (seen, read)]
    assert [each.pop("observation") for each in options] == ["screenshot", "tree"]
    assert seen.task == read.task
    assert validate_group({"task": read.task}).task.harness.agent == "tools"


def test_only_the_known_solution_has_its_script(html: Path) -> None:
    solved, unsolved = miniwob_examples(html=html)
    assert (solved.id, unsolved.id, unsolved.gold) == ("click-test-0", "other-0", None)
    assert solved.gold is not None
    [written] = solved.gold.files
    assert written["to"] == PLACE.format("click-test")
    assert 'solutions["click-test"]' in written["write"]
    assert "solutions" not in json.dumps(solved.task)


def test_pages_that_are_not_there(html: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="no page 'elsewhere'") as refused:
        miniwob_examples("elsewhere", html=html)
    assert refused.value.hint == "it has: click-test, other"
    with pytest.raises(InvalidField, match="'html' is no way to show a page") as refused:
        miniwob_examples("other", html=html, observation="html")
    assert refused.value.hint == "one of: screenshot, tree, both"
    with pytest.raises(InvalidField, match="has no pages"):
        miniwob_examples(html=tmp_path / "core")


@pytest.mark.skipif(importlib.util.find_spec("miniwob") is None, reason="the package miniwob is not installed")
@pytest.mark.parametrize(
    ("source", "limit", "ids", "observation"),
    [
        ("miniwob:click-test", 1, ["click-test-0"], "screenshot"),
        ("miniwob:click-test:tree", None, [f"click-test-{seed}" for seed in range(4)], "tree"),
        ("miniwob::both", 2, ["ascending-numbers-0", "bisect-angle-0"], "both"),
    ],
)
def test_the_source_on_the_command_line_may_name_the_observation(
    source: str, limit: int | None, ids: list[str], observation: str
) -> None:
    examples = examples_in(source, limit=limit, image=None)
    assert [example.id for example in examples] == ids
    assert {example.task["harness"]["options"]["desktop"]["observation"] for example in examples} == {observation}


@pytest.mark.skipif(importlib.util.find_spec("miniwob") is not None, reason="miniwob is installed")
def test_without_the_package_it_says_what_to_install() -> None:
    for source in ("miniwob", "miniwob:click-test"):
        with pytest.raises(InvalidField, match="miniwob is not installed") as refused:
            examples_in(source, limit=None, image=None)
        assert "pip install" in str(refused.value.hint)
