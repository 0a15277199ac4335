"""Translates the evaluators of Polar's requests to specs of Outrider's evaluators, which grade in the same way.

No evaluator runs here. Invariant: if a key of a `config` cannot be translated, the request is refused with an error
that names the key.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from outrider.errors import InvalidField
from outrider.evaluators.checks.expected_statuses import COLOUR, STATUSES, name_of_test
from outrider.spec import Environment, Name, Spec

CONFIG = "evaluator.config"
REPOSITORY = "/testbed"
"""Default folder of the repository."""
APPLY_SECONDS, TEST_SECONDS = 60.0, 1200.0
"""Polar's default time limits, in seconds: for applying the agent's changes, and for running the tests."""
HARBOR_SECONDS = 120.0
STARTING_SECONDS = 300.0
"""Seconds that are added to the time limit of a grading, for restoring the tests' files and reading the log."""
REPOSITORY_KEYS = frozenset({"repo_dir", "patch_command", "apply_timeout", "test_timeout", "exclude_patterns"})
COLUMNS = {"FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "pass_to_pass"}
"""Maps columns of SWE-bench to options of Outrider's evaluator, where the names differ."""
OPTIONS = frozenset(
    ("instance_id", "fail_to_pass", "pass_to_pass", "test_patch", "test_command", "eval_script", "log_parser", "repo")
) | {"version", "eval_type", "pytest"}


class PolarEvaluator(Spec):
    """The evaluator in a request. `refresh_runtime` requests a sandbox that no agent has used."""

    strategy: Name
    config: Annotated[dict[str, Any], Field(max_length=256)] = Field(default_factory=dict)
    env: Environment = Field(default_factory=dict)
    refresh_runtime: bool = False


class Strategy(NamedTuple):
    """A kind of evaluator in Polar: the keys that `config` may have, and a function that creates the spec for
    Outrider's evaluator."""

    keys: frozenset[str]
    spec: Callable[[PolarEvaluator, str], dict[str, Any]]


def evaluator_of(asked: PolarEvaluator | None, task_id: str) -> dict[str, Any]:
    """Translate an evaluator to the spec for Outrider's evaluator. A task without an evaluator gets the evaluator
    `completed`, whose reward is left out of the results. Raises InvalidField."""
    if asked is None:
        return {"kind": "completed"}
    if ":" in asked.strategy:
        if asked.env:
            raise InvalidField("a Python class has no environment of its own", field="evaluator.env")
        return {"kind": asked.strategy, "options": asked.config}
    found = STRATEGIES.get(asked.strategy)
    if found is None:
        raise InvalidField(
            f"there is no evaluator {asked.strategy!r}",
            field="evaluator.strategy",
            hint=f"known: {', '.join(STRATEGIES)}, or a class as module:Class",
        )
    if strange := sorted(asked.config.keys() - found.keys):
        known = ", ".join(sorted(found.keys)) or "none"
        raise InvalidField(
            f"{asked.strategy!r} has no such field here", field=f"{CONFIG}.{strange[0]}", hint=f"known: {known}"
        )
    return found.spec(asked, task_id)


def _completed(asked: PolarEvaluator, task_id: str) -> dict[str, Any]:
    if asked.env:
        raise InvalidField("session_completed runs no program, so it has no environment", field="evaluator.env")
    return {"kind": "completed"}


def _harbor(asked: PolarEvaluator, task_id: str) -> dict[str, Any]:
    if asked.refresh_runtime:
        raise InvalidField(
            "harbor grades in the agent's sandbox", field="evaluator.refresh_runtime", hint="leave it out"
        )
    seconds = _seconds(asked.config, "timeout", HARBOR_SECONDS)
    options = {name: value for name, value in asked.config.items() if name != "timeout"}
    return {"kind": "harbor", "seconds": seconds, "options": {**options, "env": asked.env, "mean": True}}


def _test_on_output(asked: PolarEvaluator, task_id: str) -> dict[str, Any]:
    """Return the spec for running a repository's tests and comparing the status of each test with the expected status.
    It uses Outrider's evaluator `swebench` with the option `expected`."""
    config = asked.config
    command = config.get("test_command")
    if not isinstance(command, str) or not command.strip():
        raise InvalidField("must be the command that runs the tests", field=f"{CONFIG}.test_command")
    expected = _expected(config.get("expected_output_json"))
    options = {
        "instance_id": task_id,
        "fail_to_pass": list(expected),
        "expected": expected,
        "log_parser": "parse_log_pytest",
        "test_patch": "",
        "test_command": _exports(asked.env) + command,
    }
    return _on_repository(config, options)


def _swebench(asked: PolarEvaluator, task_id: str) -> dict[str, Any]:
    """Return the spec for grading like SWE-bench. `config` has the columns of a SWE-bench row, or options of Outrider's
    evaluator `swebench`."""
    config = asked.config
    options: dict[str, Any] = {"instance_id": task_id}
    for name, value in config.items():
        if name not in REPOSITORY_KEYS and value is not None:
            options[COLUMNS.get(name, name)] = value
    for name in ("fail_to_pass", "pass_to_pass"):
        if isinstance(options.get(name), str):
            options[name] = _json(options[name], f"{CONFIG}.{name.upper()}")
    for name in ("test_command", "eval_script"):
        if isinstance(options.get(name), str):
            options[name] = _exports(asked.env) + options[name]
    return _on_repository(config, options)


def _on_repository(config: Mapping[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    folder = config.get("repo_dir", REPOSITORY)
    exclude = config.get("exclude_patterns") or []
    if config.get("patch_command") is not None:
        raise InvalidField(
            "the changes are applied by git, not by a command",
            field=f"{CONFIG}.patch_command",
            hint="leave it out: the changes are carried with all file modes and binary files",
        )
    if not isinstance(exclude, list) or not all(isinstance(each, str) for each in exclude):
        raise InvalidField("must be a list of patterns of paths", field=f"{CONFIG}.exclude_patterns")
    tests = _seconds(config, "test_timeout", TEST_SECONDS)
    return {
        "kind": "swebench",
        "carry": {"diff": folder, "exclude": exclude},
        "seconds": tests + _seconds(config, "apply_timeout", APPLY_SECONDS) + STARTING_SECONDS,
        "options": {**options, "folder": folder, "test_seconds": tests},
    }


def _expected(given: Any) -> dict[str, str]:
    field = f"{CONFIG}.expected_output_json"
    table = _json(given, field) if isinstance(given, str) else given
    if not isinstance(table, Mapping) or not all(status in STATUSES for status in table.values()):
        raise InvalidField(f"must be an object of tests and their statuses ({', '.join(STATUSES)})", field=field)
    expected: dict[str, str] = {}
    for test, status in table.items():
        name = COLOUR.sub("", test)
        name = name_of_test(name) if "::" in name else name
        if expected.setdefault(name, status) != status:
            raise InvalidField(
                f"{name!r} is expected to be {expected[name]} and {status}: tests are told apart by their names without"
                " the file",
                field=field,
            )
    if "PASSED" not in expected.values():
        raise InvalidField("expects no test to pass, so an empty run would be right", field=field)
    return expected


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _json(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("is not JSON", field=field) from error


def _seconds(config: Mapping[str, Any], name: str, usual: float) -> float:
    value = config.get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 86_400:
        raise InvalidField("must be a number of seconds, above 0 and at most a day", field=f"{CONFIG}.{name}")
    return float(value)


STRATEGIES = {
    "session_completed": Strategy(frozenset(), _completed),
    "test_on_output": Strategy(REPOSITORY_KEYS | {"test_command", "expected_output_json"}, _test_on_output),
    "swebench_harness": Strategy(REPOSITORY_KEYS | OPTIONS | COLUMNS.keys(), _swebench),
    "harbor": Strategy(frozenset({"tests", "alone", "timeout"}), _harbor),
}
"""Polar's evaluators that are supported, by name."""
