"""The texts about faults in a request or in settings, and the commands that install missing packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from outrider.config import load_config
from outrider.environment import install_command
from outrider.errors import InvalidField
from outrider.faults import WORDS, fault_text
from outrider.service.admission import validate_group
from outrider.spec import GroupSpec, TaskSpec

ROOT = Path(__file__).parent.parent
TASK: dict[str, Any] = {"instruction": "x", "harness": {"agent": "tools"}, "evaluator": {"run": "true"}}
PYDANTIC = re.compile(
    r"Input should|Extra inputs|Field required|valid (tuple|integer|dictionary|string|list)|should have"
)


@pytest.mark.parametrize(
    ("changed", "field", "text"),
    [
        ({"limits": {"turn": 3}}, "task.limits.turn", "unknown field; did you mean 'turns'?"),
        ({"harnes": {}}, "task.harnes", "unknown field; did you mean 'harness'?"),
        ({"runtime": {"prepare": [{"run": "x", "secods": 3}]}}, "task.runtime.prepare.0.secods", "'seconds'?"),
        ({"evaluator": {"run": "x", "carry": {"dif": "/r"}}}, "task.evaluator.carry.dif", "'diff'?"),
        ({"then": [{"instruction": "x", "agent_second": 3}]}, "task.then.0.agent_second", "'agent_seconds'?"),
        ({"limits": {"xyzzy": 3}}, "task.limits.xyzzy", "unknown field"),
        ({"limits": {"turns": "3"}}, "task.limits.turns", "must be a whole number"),
        ({"limits": {"turns": 0}}, "task.limits.turns", "must be at least 1"),
        ({"artifacts": "x"}, "task.artifacts", "must be a list"),
        ({"history": "old"}, "task.history", "must be 'recorded' or 'template'"),
        ({"instruction": 3}, "task.instruction", "must be a text"),
        ({"harness": "tools"}, "task.harness", "must be an object with fields"),
    ],
)
def test_a_fault_of_a_task_is_told_in_plain_words(changed: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidField) as refused:
        validate_group({"task": TASK | changed})
    assert refused.value.field == field
    assert refused.value.message.endswith(text)


def test_a_misspelt_field_is_told_before_the_one_that_is_missing_for_it() -> None:
    task = {name: value for name, value in TASK.items() if name != "instruction"} | {"instructions": "x"}
    with pytest.raises(InvalidField, match="did you mean 'instruction'"):
        validate_group({"task": task})


@pytest.mark.parametrize("wrong", [None, 3, "x", True, [], {}, [3], {"x": 1}, 1.5])
def test_no_field_of_a_task_is_refused_in_pydantics_words(wrong: object) -> None:
    fields = {"task": wrong, "n": wrong, "priority": wrong, "idempotency_key": wrong, "min_usable": wrong}
    tasks = [TASK | {name: wrong} for name in TaskSpec.model_fields]
    for body in ({"task": TASK, **fields}, *({"task": task} for task in tasks)):
        try:
            GroupSpec.model_validate(body)
        except ValidationError as error:
            for fault in error.errors():
                assert not PYDANTIC.search(fault_text(fault)), fault["type"]


def test_words_do_not_name_a_value() -> None:
    with pytest.raises(ValidationError) as refused:
        GroupSpec.model_validate({"task": TASK | {"limits": {"turns": "hunter2"}}})
    assert "hunter2" not in fault_text(refused.value.errors()[0])
    assert all(callable(words) for words in WORDS.values())


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("ENGINES", '[{"kind": "vllm"', "the variable OUTRIDER_ENGINES is not JSON in line 1, character 17"),
        ("SANDBOXES__ALLOW", '["/a"\n "/b"]', "OUTRIDER_SANDBOXES__ALLOW is not JSON in line 2, character 2"),
        ("SANDBOXES__ALLOW", "/a", "from OUTRIDER_SANDBOXES__ALLOW: must be a list"),
        ("LANES", '{"rum": 3}', "from OUTRIDER_LANES: unknown setting; did you mean 'run'?"),
        ("LANES__RUN", "many", "from OUTRIDER_LANES__RUN: must be a whole number"),
    ],
)
def test_a_broken_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    for name in ("ENGINES", "SANDBOXES__ALLOW", "LANES", "LANES__RUN"):
        monkeypatch.delenv(f"OUTRIDER_{name}", raising=False)
    monkeypatch.setenv(f"OUTRIDER_{variable}", value)
    with pytest.raises(InvalidField) as refused:
        load_config({})
    assert text in refused.value.message


def test_a_path_may_begin_like_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DATA", "[old] data")
    assert load_config({}).data == Path("[old] data")


def test_an_allowed_plugin_is_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_PLUGINS__ALLOW", raising=False)
    assert load_config({"plugins.allow": ["mine"]}).plugins.allow == ("outrider.lab.demo.task", "mine")
    monkeypatch.setenv("OUTRIDER_PLUGINS__ALLOW", '["theirs"]')
    assert load_config({"plugins.allow": ["mine"]}).plugins.allow == ("theirs", "mine")


@pytest.mark.parametrize(
    "extra", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)
def test_what_is_missing_is_installed_by_the_names_of_its_packages(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith("pip install ")
    assert "outrider" not in command
    assert len(command.split()) > 2


def test_no_message_installs_outrider_itself() -> None:
    """No package is published under the name `outrider`."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    assert [str(file) for file in files if file.suffix != ".pyc" and b"install 'outrider" in file.read_bytes()] == []
