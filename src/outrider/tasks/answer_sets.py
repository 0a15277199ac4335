"""Adapters of data sets in which the agent's reply is the answer: rows of verl and of NeMo Gym.

Right answers and test cases go into the evaluator's options, which no agent sees. Sources of the columns:

- verl: `examples/data_preprocess/gsm8k.py` (volcengine/verl at 030a519a)
- Eurus-2: its users' converters, because the data itself is a file of 1.7 GB
- NeMo Gym: `resources_servers/math_with_judge/task_data.py`, `resources_servers/code_gen/app.py` and
  `environments/swe/data/example.jsonl` (NVIDIA-NeMo/Gym at 195e8fcc, 05a4377b and 62c6fc29)
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outrider.tasks.conversations import is_conversation, text_of
from outrider.tasks.dataset_rows import Additions, Columns, Draft, kind_of
from outrider.tasks.examples import Gold
from outrider.tasks.swebench import swebench

OWN_EVALUATOR = 'give the task an evaluator of its own, in a TOML file with `[rows] kind = "{kind}"`'
MAX_PACKED = 256 << 20
"""Maximum bytes of test cases after decompression."""


def verl(columns: Columns, given: Additions) -> Draft:
    """The adapter of rows for verl's trainers. The column `prompt` is a text or a list of messages, and
    `reward_model.ground_truth` has the right answer or test cases. The id of a task is the number of the row."""
    instruction = question(columns, "prompt")
    number = str(columns.number)
    truth = columns.get("reward_model.ground_truth")
    source = columns.get("data_source")
    labels = {"verl": source} if isinstance(source, str) and source else {}
    if "evaluator" in given.own:
        return Draft(number, {"instruction": instruction, "labels": labels})
    evaluator: dict[str, Any] = {}
    gold = None
    if truth is None or truth == "":
        columns.missing("reward_model.ground_truth")
    elif (cases := test_cases(truth)) is not None:
        evaluator = by_cases(columns, cases, "reward_model.ground_truth")
    elif isinstance(truth, str | int | float | list):
        if columns.get("ability") not in ("math", "MATH", None):
            columns.fault(
                "ability",
                f"is {columns.get('ability')!r}, and its ground truth is an answer that only mathematics compares",
                OWN_EVALUATOR.format(kind="verl"),
            )
        evaluator, gold = by_answer(columns, truth, "reward_model.ground_truth")
    else:
        columns.fault(
            "reward_model.ground_truth",
            f"is {kind_of(truth)} without inputs and outputs",
            OWN_EVALUATOR.format(kind="verl"),
        )
    return Draft(number, {"instruction": instruction, "evaluator": evaluator, "labels": labels}, gold)


def nemo_gym(columns: Columns, given: Additions) -> Draft:
    """The adapter of rows of NeMo Gym, and of Nemotron's data in the same format. `responses_create_params.input` has
    the question. The row also has `expected_answer`, test cases in `verifier_metadata.unit_tests`, or a row of
    SWE-bench."""
    if isinstance(columns.get("verifier_metadata.instance_dict"), Mapping | str):
        return nemo_gym_swe(columns, given)
    instruction = question(columns, "responses_create_params.input")
    number = str(columns.number)
    if instructions := columns.optional_text("responses_create_params.instructions"):
        instruction = f"{instructions.strip()}\n\n{instruction}"
    agent = columns.get("agent_ref.name")
    labels = {"nemo_gym": agent} if isinstance(agent, str) and agent else {}
    if "evaluator" in given.own:
        return Draft(number, {"instruction": instruction, "labels": labels})
    if columns.get("responses_create_params.tools"):
        columns.fault(
            "responses_create_params.tools",
            "names tools that a server of NeMo Gym runs, and agents here do not have them",
            f"leave the row out, or {OWN_EVALUATOR.format(kind='nemo-gym')} and an agent with these tools",
        )
    evaluator: dict[str, Any] = {}
    gold = None
    tests, answer = "verifier_metadata.unit_tests", "expected_answer"
    if columns.get(answer) is None and columns.get(f"verifier_metadata.{answer}") is not None:
        answer = f"verifier_metadata.{answer}"
    if (cases := columns.get(tests)) is not None:
        evaluator = by_cases(columns, cases, tests)
    elif columns.get(answer) is not None:
        evaluator, gold = by_answer(columns, columns.get(answer), answer)
    else:
        columns.fault(
            "verifier",
            "has neither expected_answer nor verifier_metadata.unit_tests",
            f"{OWN_EVALUATOR.format(kind='nemo-gym')}, such as kind http with a server of NeMo Gym and data = "
            '"{row}": docs/public-datasets.md',
        )
    return Draft(number, {"instruction": instruction, "evaluator": evaluator, "labels": labels}, gold)


def nemo_gym_swe(columns: Columns, given: Additions) -> Draft:
    """The adapter of rows of NeMo Gym that contain a row of SWE-bench and the name of its image."""
    inner = columns.get("verifier_metadata.instance_dict")
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except (ValueError, RecursionError):
            inner = None
    if not isinstance(inner, Mapping):
        columns.fault("verifier_metadata.instance_dict", "is no object")
        inner = {}
    image = columns.get("responses_create_params.metadata.docker_image")
    own = Columns({**inner} | ({"image": image} if isinstance(image, str) else {}), columns.number)
    draft = swebench(own, given)
    columns.faults += own.faults
    return draft


def question(columns: Columns, name: str) -> str:
    """Return the question in a column, which has a text or a list of messages."""
    value = columns.get(name)
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not is_conversation(value):
        return columns.text(name)
    try:
        return text_of(value)
    except ValueError as error:
        columns.fault(name, str(error))
        return "?"


def test_cases(truth: Any) -> Any:
    """Return the test cases in a ground truth: an object with `inputs` or `outputs`, or its JSON text. Returns None for
    any other ground truth."""
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            return None
    return truth if isinstance(truth, Mapping) and {"inputs", "outputs"} & truth.keys() else None


def by_cases(columns: Columns, cases: Any, name: str) -> dict[str, Any]:
    """Return the evaluator that runs a program on test cases in the format of APPS, TACO and LiveCodeBench."""
    if isinstance(cases, str):
        cases = test_cases(cases)
    if isinstance(cases, Mapping) and isinstance(packed := cases.get("packed"), str):
        cases = {**cases, **(unpacked(packed) or {})}
    if not isinstance(cases, Mapping) or not all(isinstance(cases.get(key), list) for key in ("inputs", "outputs")):
        columns.fault(name, "has no lists of inputs and outputs")
        return {}
    inputs, outputs = cases["inputs"], cases["outputs"]
    if not inputs or len(inputs) != len(outputs):
        columns.fault(name, f"has {len(inputs)} inputs and {len(outputs)} outputs")
        return {}
    options = {"inputs": inputs, "outputs": outputs}
    if cases.get("fn_name"):
        options["fn_name"] = cases["fn_name"]
    return {"kind": "code", "options": options}


def unpacked(packed: str) -> Any:
    """Decompress test cases that NeMo Gym has packed (`_pack_unit_tests`). Returns None if the text is broken."""
    try:
        plain = zlib.decompressobj()
        text = plain.decompress(base64.b64decode(packed, validate=True), MAX_PACKED)
        found = json.loads(text)
    except (ValueError, RecursionError, binascii.Error, zlib.error):
        return None
    return found if isinstance(found, dict) else None


def by_answer(columns: Columns, answer: Any, name: str) -> tuple[dict[str, Any], Gold | None]:
    """Return the evaluator that compares an answer as mathematics, and the known solution, which `outrider task check`
    uses."""
    given = answer if isinstance(answer, list) else [answer]
    for one in given:
        if not isinstance(one, str | int | float) or (isinstance(one, float) and not math.isfinite(one)):
            columns.fault(name, f"is no answer: {one!r:.60}")
            return {}, None
    answers = [str(one) for one in given]
    if not answers or not all(one.strip() for one in answers):
        columns.fault(name, "is empty")
        return {}, None
    gold = Gold(reply=f"<answer>{answers[0]}</answer>")
    return {"kind": "math", "options": {"gold": answers if len(answers) > 1 else answers[0]}}, gold
