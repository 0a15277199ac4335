"""Rows of verl's trainers, Eurus-2 and NeMo Gym: from the file to the verdict, and the errors for broken rows."""

from __future__ import annotations

import base64
import json
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cli.test_examples import needs_namespaces
from outrider.cli.task_sources import examples_in
from outrider.errors import InvalidField
from outrider.tasks.datasets import template_examples
from outrider.tasks.examples import Example, Gold
from outrider.tasks.row_values import value_at

from .world import Cli

GSM8K: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": 'How much is 6 times 7? Output the final answer after "####".'}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "index": 0, "answer": "6 * 7 = 42 #### 42", "question": "How much is 6 times 7?"},
}
EURUS: dict[str, Any] = {
    "data_source": "codecontests",
    "prompt": [
        {"role": "system", "content": "When tackling complex reasoning tasks, you have these actions."},
        {"role": "user", "content": "Print the sum of two numbers.\n\nWrite Python code to solve the problem."},
    ],
    "ability": "code",
    "reward_model": {
        "style": "rule",
        "ground_truth": json.dumps({"inputs": ["1 2\n", "40 2\n"], "outputs": ["3\n", "42\n"]}),
    },
    "extra_info": {"split": "train", "index": 1},
}
NEMO_MATH: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "How much is 6 times 7?"}]},
    "question": "How much is 6 times 7?",
    "expected_answer": "42",
    "agent_ref": {"type": "responses_api_agents", "name": "math_with_judge_simple_agent"},
}
CASES = {"inputs": ["1 2\n"], "outputs": ["3\n"], "fn_name": None}
NEMO_CODE: dict[str, Any] = {
    "responses_create_params": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Print the sum of two numbers."}]}]
    },
    "verifier_metadata": {"unit_tests": CASES},
    "hash_id": "0",
}
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
needs_math = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")


def written(folder: Path, *rows: Any, name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def examples(kind: str, folder: Path, *rows: Any, faults: bool = False) -> list[Example]:
    return examples_in(f"{kind}:{written(folder, *rows)}", limit=None, image=None, faults=faults)


@pytest.mark.deep
@needs_math
@needs_namespaces
async def test_the_right_answer_of_a_row_earns_1(cli: Cli, tmp_path: Path) -> None:
    verl, nemo = written(tmp_path, GSM8K), written(tmp_path, NEMO_MATH, name="nemo.jsonl")
    ran = await cli("task", "check", f"verl:{verl}", f"nemo-gym:{nemo}", "--json")
    assert ran.document == {"tasks": 2, "ok": 2, "bad": []}


@pytest.mark.deep
@needs_namespaces
@pytest.mark.parametrize(("kind", "row"), [("verl", EURUS), ("nemo-gym", NEMO_CODE)])
async def test_a_program_that_passes_the_cases_of_a_row_earns_1(
    cli: Cli, tmp_path: Path, kind: str, row: dict[str, Any]
) -> None:
    written(tmp_path, {**row, "program": PROGRAM})
    task = tmp_path / "task.toml"
    task.write_text(f'[rows]\nfile = "rows.jsonl"\nkind = "{kind}"\n[gold]\nreply = "{{row.program}}"\n')
    ran = await cli("task", "check", task, "--json")
    assert ran.document == {"tasks": 1, "ok": 1, "bad": []}


def test_messages_are_the_instruction(tmp_path: Path) -> None:
    sums, code = examples("verl", tmp_path, GSM8K, EURUS)
    assert sums.task["instruction"] == GSM8K["prompt"][0]["content"]
    assert sums.gold == Gold(reply="<answer>42</answer>")
    assert code.task["instruction"] == (
        "When tackling complex reasoning tasks, you have these actions.\n\n"
        "Print the sum of two numbers.\n\nWrite Python code to solve the problem."
    )
    assert code.task["evaluator"] == {
        "kind": "code",
        "options": {"inputs": ["1 2\n", "40 2\n"], "outputs": ["3\n", "42\n"]},
    }
    assert [sums.id, code.id] == ["0", "1"]


def test_messages_may_be_json_text(tmp_path: Path) -> None:
    packed, text = examples(
        "verl", tmp_path, {**GSM8K, "prompt": json.dumps(GSM8K["prompt"])}, {**GSM8K, "prompt": "[1]"}
    )
    assert packed.task["instruction"] == GSM8K["prompt"][0]["content"]
    assert text.task["instruction"] == "[1]"


def test_each_message_of_a_conversation_has_its_role(tmp_path: Path) -> None:
    said = [("system", "Be short."), ("user", "6 times 7?"), ("assistant", "41."), ("user", "No.")]
    prompt = [{"role": role, "content": content} for role, content in said]
    [example] = examples("verl", tmp_path, {**GSM8K, "prompt": prompt})
    assert example.task["instruction"] == "Be short.\n\nUser: 6 times 7?\n\nAssistant: 41.\n\nUser: No."


def test_packed_cases_of_nemo_gym_are_unpacked(tmp_path: Path) -> None:
    text = base64.b64encode(zlib.compress(json.dumps({"inputs": ["1"], "outputs": ["2"]}).encode())).decode()
    row = {**NEMO_CODE, "verifier_metadata": {"unit_tests": {"packed": text, "fn_name": "f"}}}
    [example] = examples("nemo-gym", tmp_path, row)
    assert example.task["evaluator"]["options"] == {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}


def test_a_row_of_nemo_gym_may_hold_one_of_swe_bench(tmp_path: Path) -> None:
    patch = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-1\n+2\n"
    inner = {
        "instance_id": "a__a-1",
        "repo": "pallets/flask",
        "problem_statement": "It is 1.",
        "patch": patch,
        "test_patch": patch.replace("a.py", "tests/test_a.py"),
        "FAIL_TO_PASS": '["tests/test_a.py::test"]',
    }
    parameters = {"input": [], "metadata": {"docker_image": "swebench/a:latest"}}
    row = {"responses_create_params": parameters, "verifier_metadata": {"instance_dict": inner}}
    [example] = examples("nemo-gym", tmp_path, row)
    assert example.task["runtime"] == {"image": "swebench/a:latest", "workdir": "/testbed"}
    assert example.task["evaluator"]["options"]["fail_to_pass"] == ["tests/test_a.py::test"]


TOOLS = {**NEMO_MATH["responses_create_params"], "tools": [{"type": "function", "name": "search"}]}
PICTURE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("verl", {**GSM8K, "prompt": None}, "prompt", "is missing"),
    ("verl", {**GSM8K, "prompt": []}, "prompt", "is a list and must be a text"),
    ("verl", {**GSM8K, "prompt": PICTURE}, "prompt", "has a part of type 'input_image'"),
    ("verl", {**GSM8K, "reward_model": {}}, "reward_model.ground_truth", "is missing"),
    ("verl", {**GSM8K, "reward_model": None}, "reward_model.ground_truth", "is missing"),
    ("verl", {**GSM8K, "ability": "logic"}, "ability", "is 'logic'"),
    (
        "verl",
        {**GSM8K, "reward_model": {"ground_truth": ["5", None]}},
        "reward_model.ground_truth",
        "is no answer: None",
    ),
    ("nemo-gym", {**NEMO_MATH, "expected_answer": float("nan")}, "expected_answer", "is no answer: nan"),
    ("verl", {**EURUS, "reward_model": {"ground_truth": {"tests": 1}}}, "reward_model.ground_truth", "is an object"),
    ("verl", {**EURUS, "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": []}'}}, "", "has 1 inputs and 0"),
    ("nemo-gym", {"expected_answer": "1"}, "responses_create_params.input", "is missing"),
    ("nemo-gym", {**NEMO_MATH, "expected_answer": None}, "verifier", "has neither"),
    ("nemo-gym", {**NEMO_MATH, "responses_create_params": TOOLS}, "responses_create_params.tools", "names tools"),
    ("nemo-gym", {**NEMO_CODE, "verifier_metadata": {"unit_tests": "x"}}, "", "has no lists of inputs and outputs"),
]


@pytest.mark.parametrize(("kind", "row", "column", "says"), BROKEN)
def test_what_a_row_lacks_is_named(tmp_path: Path, kind: str, row: dict[str, Any], column: str, says: str) -> None:
    good = GSM8K if kind == "verl" else NEMO_MATH
    fine, broken = examples(kind, tmp_path, good, row, faults=True)
    assert fine.faults == ()
    [fault] = broken.faults
    assert fault.column == column or not column
    assert says in fault.problem
    assert fault.remedy
    with pytest.raises(InvalidField, match=r"row 1 of .*rows.jsonl") as raised:
        examples(kind, tmp_path, good, row)
    assert raised.value.field == fault.column


def test_an_evaluator_of_ones_own_goes_over_the_row(tmp_path: Path) -> None:
    written(tmp_path, {**NEMO_MATH, "expected_answer": None, "puzzle": [1]})
    task = tmp_path / "task.toml"
    task.write_text(
        '[rows]\nfile = "rows.jsonl"\nkind = "nemo-gym"\n[evaluator]\nkind = "http"\n'
        'options = { grader = "gym", contract = "nemo_gym", data = "{row}" }\n'
    )
    [example] = examples_in(str(task), limit=None, image=None)
    assert example.task["evaluator"]["options"]["data"]["puzzle"] == [1]


def test_placeholders_reach_into_columns() -> None:
    template = {
        "instruction": "{row.prompt}",
        "evaluator": {"options": {"gold": "{row.reward_model.ground_truth}", "last": "{row.prompt.-1.content}"}},
        "labels": {"said": "It says: {row.prompt}", "index": "{row.extra_info.index}"},
    }
    [example] = template_examples([{**GSM8K, "extra_info": '{"index": 5}'}], template)
    question = GSM8K["prompt"][0]["content"]
    assert example.task == {
        "instruction": question,
        "evaluator": {"options": {"gold": "42", "last": question}},
        "labels": {"said": f"It says: {question}", "index": 5},
    }
    with pytest.raises(InvalidField, match=r"row 0 of rows has no column 'reward_model.truth'") as raised:
        template_examples([GSM8K], {"instruction": "{row.reward_model.truth}"})
    assert raised.value.hint == "reward_model has: ground_truth, style"
    with pytest.raises(InvalidField, match="the instruction of row 0 of rows has a part of type 'input_image'"):
        template_examples([{"prompt": PICTURE}], {"instruction": "{row.prompt}"})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("a.b", 1), ("a.c", 2), ("list.0", "x"), ("list.-2", "x"), ("list.2", None), ("list.-3", None)),
        *(("text.k.0", 7), ("text.0", None), ("word.k", None), ("none.k", None), ("a.b.c", None)),
    ],
)
def test_fields_within_columns(path: str, value: Any) -> None:
    row = {"a": {"b": 0, "c": 2}, "a.b": 1, "list": ["x", "y"], "text": '{"k": [7]}', "word": "k", "none": None}
    assert value_at(row, path) == value
