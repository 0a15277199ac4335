"""The common part of the bridges: settings, tasks of dataset rows, sampling parameters, and the rows that may be
trained on."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from outrider.client.client import AsyncClient
from outrider.errors import EngineError, EvaluatorError, HarnessError, InvalidField
from outrider.schemas import GroupView
from outrider.trainers.shared_settings import BridgeSettings, read_settings, sampling_of, task_for
from outrider.trainers.trajectories import chosen_metrics, trajectories_of
from support.scribe import scribe_task
from support.service import running_service, say


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_X"):
        monkeypatch.delenv(name, raising=False)


def read(given: Any = None) -> BridgeSettings:
    return read_settings(BridgeSettings, given, source="config.outrider", variable="OUTRIDER_X")


def test_the_environment_wins_object_by_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_X", '{"task": {"limits": {"turns": 3}}, "priority": 2}')
    monkeypatch.setenv("OUTRIDER_URL", "http://far:8700/")
    monkeypatch.setenv("OUTRIDER_TOKEN", "secret")
    given = MappingProxyType({"task": MappingProxyType({"limits": {"turns": 9, "agent_seconds": 5.0}})})
    settings = read(given)
    assert settings.task == {"limits": {"turns": 3, "agent_seconds": 5.0}}
    assert (settings.priority, settings.url, settings.token) == (2, "http://far:8700", "secret")


@pytest.mark.parametrize(("name", "text"), [("s.toml", "priority = 4\n"), ("s.json", '{"priority": 4}')])
def test_the_variable_may_name_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    monkeypatch.setenv("OUTRIDER_X", f"@{tmp_path / name}")
    assert read().priority == 4


@pytest.mark.parametrize(
    ("given", "variable", "message", "field"),
    [
        ({"tsk": {}}, None, "config.outrider has the unknown key 'tsk'", "config.outrider.tsk"),
        ({}, '{"colour": 1}', "OUTRIDER_X has the unknown key 'colour'", "OUTRIDER_X.colour"),
        (
            {"task": {"limits": {"turn": "{row.turns}"}}},
            None,
            "config.outrider.task.limits.turn: unknown field; did you mean 'turns'?",
            "config.outrider.task.limits.turn",
        ),
        ({}, '{"task": {"instrucion": "x"}}', "unknown field; did you mean", "OUTRIDER_X.task.instrucion"),
        ({"priority": "high"}, None, "config.outrider.priority: must be a whole number", None),
        ("text", None, "config.outrider is 'text'; it must be an object", "config.outrider"),
        ({}, '{"task": ', "OUTRIDER_X is not JSON: Expecting value at character 10", "OUTRIDER_X"),
        ({}, "[1]", "OUTRIDER_X is a JSON list; it must be an object", "OUTRIDER_X"),
        ({}, "@nowhere.toml", "OUTRIDER_X names nowhere.toml, which cannot be read", "OUTRIDER_X"),
        ({"url": "http://127.0.0.1"}, None, "config.outrider.url is 'http://127.0.0.1', which names no port", None),
        ({}, '{"url": "127.0.0.1:8700"}', "OUTRIDER_X.url is '127.0.0.1:8700', which is no http address", None),
    ],
)
def test_what_is_wrong_is_named(
    monkeypatch: pytest.MonkeyPatch, given: Any, variable: str | None, message: str, field: str | None
) -> None:
    if variable:
        monkeypatch.setenv("OUTRIDER_X", variable)
    with pytest.raises(InvalidField) as caught:
        read(given)
    assert message in caught.value.message
    assert field is None or caught.value.field == field


def test_the_key_that_was_meant_is_named() -> None:
    with pytest.raises(InvalidField) as caught:
        read({"prioirty": 1})
    assert caught.value.hint == "did you mean priority?"


def make_task(settings: dict[str, Any], row: dict[str, Any], prompt: Any = "p", **sampling: Any) -> dict[str, Any]:
    return task_for(read(settings), row, prompt=prompt, sampling=sampling, labels={"of": 7, "none": None})


def test_the_rows_task_wins_over_the_settings() -> None:
    common = {"limits": {"turns": 5, "agent_seconds": 9.0}, "evaluator": {"run": "grep -qx '{row.answer}' out.txt"}}
    task = make_task({"task": common}, {"task": {"limits": {"turns": 2}, "history": None}, "answer": "42"})
    assert task == {
        "limits": {"turns": 2, "agent_seconds": 9.0},
        "evaluator": {"run": "grep -qx '42' out.txt"},
        "instruction": "p",
        "sampling": {},
        "labels": {"of": "7"},
    }
    assert common["evaluator"] == {"run": "grep -qx '{row.answer}' out.txt"}


def test_a_task_shares_nothing_with_the_settings() -> None:
    settings = read({"task": {"harness": {"options": {"tools": ["bash"]}}}})
    first, second = (task_for(settings, {}, prompt="p", sampling={}, labels={}) for _ in range(2))
    first["harness"]["options"]["tools"].append("ipython")
    assert second["harness"]["options"]["tools"] == ["bash"]
    assert settings.task["harness"]["options"]["tools"] == ["bash"]


def test_a_rows_task_may_be_json_in_a_column_of_any_name() -> None:
    task = make_task({"task_column": "job"}, {"job": '{"instruction": "do it"}'})
    assert task["instruction"] == "do it"
    with pytest.raises(InvalidField, match="column 'job' is not JSON: Expecting ':' delimiter at character 9"):
        make_task({"task_column": "job"}, {"job": '{"task" 1}'})
    with pytest.raises(InvalidField, match="column 'job' is a int"):
        make_task({"task_column": "job"}, {"job": 5})


def test_the_last_user_message_is_the_instruction() -> None:
    chat = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "hm"}]
    parts = {"role": "user", "content": [{"type": "text", "text": "new"}]}
    assert make_task({}, {}, [*chat, parts])["instruction"] == "new"
    with pytest.raises(InvalidField, match="no instruction"):
        make_task({}, {}, [{"role": "system", "content": "s"}])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([{"role": "user", "content": None}], "a user message whose content is a NoneType"),
        ([{"role": "user"}], "a user message whose content is a NoneType"),
        ([{"role": "user", "content": [5]}], "a user message with a part that is a int"),
        (["hello"], "a prompt with a str where a message must be an object"),
        ([{"role": "user", "content": ""}], "no instruction"),
        ("", "no instruction"),
        (None, "no instruction"),
    ],
)
def test_a_prompt_that_is_no_conversation_is_named(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidField) as caught:
        make_task({}, {}, prompt)
    assert message in caught.value.message
    assert "give every row a prompt" in (caught.value.hint or "")


@pytest.mark.parametrize("part", ["sampling", "labels"])
def test_a_part_of_the_task_that_must_be_an_object_is_named(part: str) -> None:
    with pytest.raises(InvalidField, match=f"task.{part} is 'greedy'; it must be an object"):
        make_task({}, {"task": {part: "greedy"}})


def test_a_sampling_parameter_that_is_no_number_is_named() -> None:
    with pytest.raises(InvalidField, match="the sampling parameter temperature='hot' is no number"):
        make_task({}, {}, temperature="hot")


def test_numpys_values_are_plain_ones() -> None:
    """Data frames and batches of trainers have such values."""
    row = {"task": {"limits": {"turns": np.int64(3)}, "history": np.array([1, 2])}, "answer": np.int64(42)}
    chat = np.array([{"role": "user", "content": "hello"}], dtype=object)
    task = make_task({"task": {"labels": {"answer": "{row.answer}"}}}, row, chat, temperature=np.float32(0.5))
    assert json.loads(json.dumps(task)) == task
    assert (task["limits"], task["history"], task["labels"]["answer"]) == ({"turns": 3}, [1, 2], 42)
    assert (task["instruction"], task["sampling"]) == ("hello", {"temperature": 0.5})


def test_a_column_that_the_settings_name_must_be_there() -> None:
    with pytest.raises(
        InvalidField, match="the dataset row has no column 'job', which the setting task_column names"
    ) as (caught):
        make_task({"task_column": "job"}, {"prompt": "p", "jobs": "{}"})
    assert caught.value.hint == "it has: jobs, prompt"
    assert make_task({"task_column": "job"}, {"job": None})["instruction"] == "p"


def test_a_placeholder_without_a_column_is_named() -> None:
    with pytest.raises(
        InvalidField, match=r"uses \{row.answer\}, and the dataset row has no column 'answer'"
    ) as caught:
        make_task({"task": {"labels": {"a": "{row.answer}"}}}, {"label": "1", "answer": None})
    assert caught.value.hint == "it has: label"


def test_sampling_by_the_engines_names() -> None:
    vllm = {"temperature": 1, "top_p": 0.9, "top_k": -1, "max_tokens": 64, "min_tokens": 1, "logprobs": 1, "stop": None}
    assert sampling_of(vllm) == {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "max_tokens": 64}
    sglang = {"max_new_tokens": 8, "sampling_seed": 3, "stop": [], "skip_special_tokens": False, "no_stop_trim": True}
    assert sampling_of(sglang) == {"max_tokens": 8, "seed": 3}
    for name, value in {"stop": ["\n"], "min_tokens": 5, "custom_params": {"a": 1}}.items():
        with pytest.raises(InvalidField, match=f"{name}=.* cannot be passed to"):
            sampling_of({name: value})


async def rolled_out(tmp_path: Path, n: int, task: dict[str, Any]) -> GroupView:
    async with running_service(tmp_path=tmp_path, replies=[say("hello")]) as (_, url), AsyncClient(url) as client:
        submitted = await client.submit({"task": {"instruction": "say hello"} | task, "n": n})
        return await client.group(submitted.id, wait=30, samples=True)


async def test_rows_and_errors_of_a_group(tmp_path: Path) -> None:
    group = await rolled_out(tmp_path, 3, scribe_task("rows", rewards=[0.5], fails=[1], rewrites=[2]))
    found = trajectories_of(group, read(), logprobs=True)
    assert [each.session.sample_index for each in found] == [0, 1, 2]
    [error] = [each.error for each in found if each.error is not None]
    assert isinstance(error, HarnessError)
    assert "the scribe fell ill" in error.message
    assert sorted(len(each.rows) for each in found) == [0, 1, 2]
    graded = [each for each in found if each.error is None]
    assert {each.reward for each in graded} == {0.5}
    for row in (row for each in graded for row in each.rows):
        assert len(row.ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
        assert row.trained_versions() == [0]
        assert not any(row.mask[: row.start])
        assert [logprob != 0.0 for logprob in row.logprobs] == [bool(trains) for trains in row.mask]
    [both] = [each for each in graded if len(each.rows) == 2]
    main = trajectories_of(group, read({"rows": "main"}), logprobs=True)
    assert [len(each.rows) for each in main] == [min(1, len(each.rows)) for each in found]
    assert main[both.session.sample_index].rows == both.rows[:1]


async def test_rows_are_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    group = await rolled_out(tmp_path, 1, scribe_task("cut"))
    [whole] = trajectories_of(group, read(), logprobs=True)
    [row] = whole.rows
    assert not whole.truncated
    cap = row.start + 1
    [short] = trajectories_of(group, read({"max_row_tokens": cap}), logprobs=True)
    assert (short.rows[0].ids, short.rows[0].cut) == (row.ids[:cap], sum(row.mask) - 1)
    assert short.truncated
    [nothing] = trajectories_of(group, read({"max_row_tokens": row.start}), logprobs=True)
    assert isinstance(nothing.error, EngineError)
    assert "no token to train on" in nothing.error.message


async def test_a_metric_that_the_verdict_lacks(tmp_path: Path) -> None:
    group = await rolled_out(tmp_path, 1, scribe_task("metric"))
    [trajectory] = trajectories_of(group, read(), logprobs=True)
    assert chosen_metrics(trajectory, read({"metrics": ["number"]})) == {"number": 0.0}
    with pytest.raises(EvaluatorError, match="has no metric 'speed', only number"):
        chosen_metrics(trajectory, read({"metrics": ["speed"]}))
