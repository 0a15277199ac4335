"""The verl bridge without verl: settings, tasks of rows, and a session's rows as verl's columns."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from outrider.errors import Boundary, EngineError, ErrorRecord, EvaluatorError, HarnessError, InvalidField
from outrider.lifecycle import StopReason
from outrider.service.admission import validate_group
from outrider.trainers.trajectories import trajectories_of
from outrider.trainers.verl_rows import (
    SETTINGS,
    Terms,
    VerlSettings,
    columns_of,
    give_own_seed,
    verl_settings,
    verl_task,
)
from outrider.trajectory import BranchKind, LogprobKind
from trainers.sample import group, row

EXAMPLES = Path(__file__).parents[2] / "examples" / "verl"
TASK = {"harness": {"agent": "tools"}, "runtime": {"kind": "memory"}, "evaluator": {"run": "true"}}
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_VERL"):
        monkeypatch.delenv(name, raising=False)


def terms(**changes: Any) -> Terms:
    given: dict[str, Any] = {
        "prompt_length": 16,
        "response_length": 16,
        "logprobs": True,
        "sampling": SAMPLING,
    } | changes
    return Terms(**given)


def columns(*samples: Any, given: Terms | None = None, settings: VerlSettings | None = None, **result: Any) -> Any:
    asked = given or terms(sampling={"temperature": 1.0})
    settings = settings or VerlSettings()
    [trajectory] = trajectories_of(group(*samples, **result), settings, logprobs=asked.logprobs)
    found = columns_of(trajectory, settings, asked, step=3)
    return [SimpleNamespace(**fields, **fields["extra_fields"]) for fields in found]


def test_a_row_becomes_verls_columns_to_the_bit() -> None:
    [one] = columns(row())
    assert one.prompt_ids == [10, 11, 12]
    assert one.response_ids == [20, 21, 13, 14, 22, 23, 24]
    assert one.response_mask == [1, 1, 0, 0, 1, 1, 1]
    assert one.response_logprobs == [-0.5, -1.25, 0.0, 0.0, -2.5, -0.125, -3.0]
    assert (one.reward_score, one.num_turns) == (0.75, 4)
    assert (one.min_global_steps, one.max_global_steps) == (4, 6)
    assert one.reward_extra_info == {"score": 0.75, "acc": 0.75}
    assert one.outrider["session_id"] == "s-1"
    assert one.outrider["metrics"] == {"tests": 3.0}


@pytest.mark.parametrize("prompt_length", range(1, 5))
@pytest.mark.parametrize("response_length", range(1, 12))
def test_lengths_never_change_the_sequence(prompt_length: int, response_length: int) -> None:
    sample = row()
    given = terms(prompt_length=prompt_length, response_length=response_length, sampling={"temperature": 1.0})
    if not any(sample.loss_mask[: min(3, prompt_length) + response_length]):
        with pytest.raises(EngineError, match="samples its first token after verl"):
            columns(sample, given=given)
        return
    [one] = columns(sample, given=given)
    kept = one.prompt_ids + one.response_ids
    assert kept == sample.ids[: len(kept)].tolist()
    assert len(one.prompt_ids) <= prompt_length
    assert len(one.response_ids) <= response_length
    assert len(one.response_ids) == len(one.response_mask) == len(one.response_logprobs)
    assert sum(one.response_mask) + one.outrider["cut_tokens"] == sum(sample.loss_mask)
    assert sum(one.response_mask) == sum(sample.loss_mask[: len(kept)]) > 0


def test_versions_are_of_what_is_kept_and_never_missing() -> None:
    assert [columns(row(), given=terms(response_length=5, sampling={}))[0].max_global_steps] == [4]
    [one] = columns(row(versions=[-1] * 10))
    assert (one.min_global_steps, one.max_global_steps) == (3, 3)


def test_rows_that_must_not_train_are_left_out_and_the_main_one_is_last() -> None:
    helper = row(row=1, kind=BranchKind.SUBAGENT, ids=[1, 2, 3, 9, 9, 9, 9, 9, 9, 9])
    masked = row(row=2, kind=BranchKind.AUXILIARY, reward=None)
    assert [one.outrider["kind"] for one in columns(row(), helper, masked)] == ["subagent", "main"]
    only = columns(row(), helper, masked, settings=VerlSettings(rows="main"))
    assert [one.outrider["kind"] for one in only] == ["main"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [0, 0.5, 0, 0, 0, 0, 0.25 + 0.75]),
        ({"response_length": 6}, [0, 0.5, 0, 0, 0, 0.75]),  # the last turn is cut, and its reward is lost
        ({"prompt_length": 2, "response_length": 4}, [0, 0, 0.5 + 0.75, 0]),
    ],
)
def test_rewards_of_turns_are_at_their_ends(given: dict[str, int], expected: list[float]) -> None:
    sample = row(turn_spans=((3, 5), (7, 10)), turn_rewards=(0.5, 0.25))
    [one] = columns(sample, given=terms(sampling={"temperature": 1.0}, **given))
    assert one.token_rewards == expected
    assert one.turn_scores == [0.5, 0.25]


def test_a_row_keeps_its_own_reward() -> None:
    helper = row(row=1, kind=BranchKind.SUBAGENT, reward=-1.0)
    assert [(one.reward_score, one.token_rewards[-1]) for one in columns(row(), helper)] == [(-1.0, -1.0), (0.75, 0.75)]
    assert [one.reward_extra_info["score"] for one in columns(row(), helper)] == [0.75, 0.75]


def test_metrics_are_kept_and_those_that_verl_shall_see_must_be_there() -> None:
    [one] = columns(row(), settings=VerlSettings(metrics=["tests"]))
    assert one.reward_extra_info == {"score": 0.75, "acc": 0.75, "tests": 3.0}
    with pytest.raises(EvaluatorError, match="has no metric 'speed', only tests"):
        columns(row(), settings=VerlSettings(metrics=["speed"]))


def test_log_probabilities_fit_what_verl_compares_them_with() -> None:
    assert columns(row(logprob_kind=LogprobKind.RAW))[0].response_logprobs is not None
    with pytest.raises(EngineError, match=r"from before the temperature \(0.8\)"):
        columns(row(logprob_kind=LogprobKind.RAW), given=terms())
    with pytest.raises(EngineError, match="has no log-probabilities"):
        columns(row(logprob_kind=LogprobKind.NONE))
    quiet = terms(logprobs=False)
    assert columns(row(logprob_kind=LogprobKind.NONE), given=quiet)[0].response_logprobs is None


@pytest.mark.parametrize(
    ("samples", "result", "kind", "message"),
    [
        (
            (row(),),
            {"error": ErrorRecord(boundary=Boundary.HARNESS, code="harness_error", message="it broke")},
            HarnessError,
            "session s-1: it broke",
        ),
        ((row(),), {"verdict": None, "stop_reason": StopReason.SESSION_TIMEOUT}, HarnessError, "was not graded"),
        ((), {}, EngineError, "has no token to train on"),
        ((row(reward=None),), {}, EngineError, "has no token to train on"),
    ],
)
def test_a_session_that_cannot_be_trained_on_raises(
    samples: Any, result: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        columns(*samples, **result)


def test_a_rows_task_wins_over_the_settings_and_verls_sampling_over_both() -> None:
    settings = verl_settings({"outrider": {"task": TASK | {"limits": {"turns": 5, "response_tokens": 8}}}})
    own = {"instruction": "Sort it.", "limits": {"turns": 7}, "sampling": {"temperature": 0.1, "min_p": 0.05}}
    task = verl_task(settings, {"task": json.dumps(own), "uid": "u-1", "global_steps": 12}, terms())
    assert task["instruction"] == "Sort it."
    assert task["limits"] == {"turns": 7, "response_tokens": 8}
    assert task["sampling"] == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "min_p": 0.05,
    }
    assert task["labels"] == {"verl.uid": "u-1", "verl.global_steps": "12"}
    assert task["harness"] == {"agent": "tools"}


@pytest.mark.parametrize(("own", "given"), [(None, 16), (99, 16), (4, 4), ("many", "many")])
def test_the_limit_of_sampled_tokens_is_verls_or_less(own: Any, given: Any) -> None:
    settings = verl_settings({"outrider": {"task": TASK | {"limits": {"response_tokens": own}}}})
    task = verl_task(settings, {"raw_prompt": [{"role": "user", "content": "x"}]}, terms())
    assert task["limits"] == {"response_tokens": given}


def test_a_row_without_a_task_gives_its_last_user_message() -> None:
    settings = verl_settings({"outrider": {"task": TASK}})
    prompt = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "Do it."}]}]
    task = verl_task(settings, {"raw_prompt": prompt}, terms())
    assert task["instruction"] == "Do it."
    assert task["limits"] == {"response_tokens": 16}
    with pytest.raises(InvalidField, match="no instruction"):
        verl_task(settings, {}, terms())


def test_each_trajectory_of_a_prompt_has_its_own_seed() -> None:
    def seeded(number: int | None, n: int) -> int:
        task = verl_task(VerlSettings(task=TASK), {"task": {"instruction": "x", "sampling": {"seed": 40}}}, terms())
        give_own_seed(task, number, n)
        seed: int = task["sampling"]["seed"]
        return seed

    assert [seeded(number, 3) for number in range(3)] == [40, 41, 42]
    assert seeded(None, 1) == 40
    with pytest.raises(InvalidField, match="cannot have seeds"):
        seeded(None, 2)
    without = verl_task(VerlSettings(task=TASK), {"task": {"instruction": "x"}}, terms())
    give_own_seed(without, None, 2)
    assert "seed" not in without["sampling"]


def test_no_two_rollouts_share_a_nested_setting() -> None:
    custom = {"outrider": {"task": TASK | {"runtime": {"kind": "memory", "env": {"A": "1"}}}}}
    settings = verl_settings(custom)
    first = verl_task(settings, {"task": {"instruction": "x"}}, terms())
    first["runtime"]["env"]["A"] = "changed"
    first["harness"]["agent"] = "changed"
    second = verl_task(settings, {"task": {"instruction": "x"}}, terms())
    assert second["runtime"]["env"] == {"A": "1"}
    assert second["harness"] == {"agent": "tools"}
    assert custom["outrider"]["task"]["runtime"]["env"] == {"A": "1"}


@pytest.mark.parametrize(
    ("custom", "variable", "message", "field"),
    [
        ({"outrider": {"relais": "x"}}, None, "has the unknown key 'relais'", f"{SETTINGS}.relais"),
        ({"outrider": {"complete": "most"}}, None, "must be 'all' or 'any'", f"{SETTINGS}.complete"),
        ({"outrider": []}, None, "it must be an object", SETTINGS),
        ({}, '{"actor": "x"', "OUTRIDER_VERL is not JSON", "OUTRIDER_VERL"),
        ({}, '{"actr": "x"}', "OUTRIDER_VERL has the unknown key 'actr'", "OUTRIDER_VERL.actr"),
        ({"outrider": {"url": "localhost:8700"}}, None, "no http address", f"{SETTINGS}.url"),
    ],
)
def test_wrong_settings_are_named_with_their_source(
    monkeypatch: pytest.MonkeyPatch, custom: Any, variable: str | None, message: str, field: str
) -> None:
    if variable:
        monkeypatch.setenv("OUTRIDER_VERL", variable)
    with pytest.raises(InvalidField) as raised:
        verl_settings(custom)
    assert message in raised.value.message
    assert raised.value.field == field


def test_no_settings_are_the_defaults() -> None:
    assert verl_settings(None) == verl_settings({"other": 1}) == VerlSettings()


def test_after_an_edit_of_the_data_the_example_trains_on_the_new_rows(tmp_path: Path) -> None:
    rows, python = tmp_path / "rows.jsonl", tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLES / "make_data.py")
    assert spec is not None
    make_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_data)
    data = [str(rows), str(tmp_path / "data"), "--template", str(EXAMPLES / "template.json"), "--val", "1"]
    own = {"MODEL": "/m", "DATA": str(tmp_path / "data"), "OUTRIDER_URL": "http://x", "OUTRIDER_TOKEN": "t"}
    own["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    trained = []
    first = (EXAMPLES / "rows.jsonl").read_text().splitlines()
    for lines in (first, first[1:], first):  # an edit, then the first rows again, whose file exists
        rows.write_text("\n".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["make_data.py", *data])
            make_data.main()
        ran = subprocess.run([EXAMPLES / "train.sh"], env=own, check=True, capture_output=True, text=True)
        words = dict(word.split("=", 1) for word in ran.stdout.splitlines() if word.startswith("data."))
        trained.append(words["data.train_files"].strip("[]"))
        assert pq.read_table(trained[-1]).num_rows == len(lines) - 1
    assert trained[0] == trained[2] != trained[1]
    (tmp_path / "data" / "val.parquet").unlink()
    refused = subprocess.run([EXAMPLES / "train.sh"], env=own, capture_output=True, text=True)
    assert (refused.returncode, "make_data.py" in refused.stderr) == (2, True)


@pytest.mark.deep
def test_the_example_makes_files_whose_rows_are_tasks(tmp_path: Path) -> None:
    source = [EXAMPLES / "rows.jsonl", tmp_path, "--template", EXAMPLES / "template.json", "--val", "1"]
    command = [sys.executable, str(EXAMPLES / "make_data.py"), *map(str, source)]
    made = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert [line.split(" rows")[0] for line in made[0].splitlines()] == ["train: 2", "val: 1"]
    assert made[1] == "".join(line + " (as it was)\n" for line in made[0].splitlines())
    # The same setting is in train.sh.
    settings = verl_settings({"outrider": {"task": {"harness": {"preset": "mini-swe-agent"}}}})
    assert "task.harness.preset=mini-swe-agent" in (EXAMPLES / "train.sh").read_text()
    written = [one for file in sorted(tmp_path.glob("*-*.parquet")) for one in pq.read_table(file).to_pylist()]
    assert len(written) == 3
    for one in written:
        task = validate_group({"task": verl_task(settings, one, terms()), "n": 8}).task
        assert task.instruction.endswith("into answer.txt.")
        graded = subprocess.run(["bash", "-c", str(task.evaluator.run)], cwd=tmp_path, capture_output=True)
        assert graded.returncode == 1
        answer = str(task.evaluator.run).splitlines()[1]
        (tmp_path / "answer.txt").write_text(f"{answer}\n")
        assert subprocess.run(["bash", "-c", str(task.evaluator.run)], cwd=tmp_path).returncode == 0
        (tmp_path / "answer.txt").unlink()


def test_what_the_example_names_of_ours_is_there() -> None:
    source = (EXAMPLES.parents[1] / "src" / "outrider" / "trainers" / "verl.py").read_text()
    for file in ("loops.yaml", "train.sh"):
        [name] = re.findall(r"outrider\.trainers\.verl\.(\w+)", (EXAMPLES / file).read_text())
        assert f"\nclass {name}(" in source
