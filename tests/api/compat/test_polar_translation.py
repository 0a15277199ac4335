"""The translation of each field of Polar's requests: into a native group, or into a refusal that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.api.compat.polar_evaluators import STRATEGIES
from outrider.api.compat.polar_request import FOLDERS, PRESETS, SESSION_DIR, PolarTaskRequest, group_of, polar_fields
from outrider.errors import InvalidField
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.factory import make_harness
from outrider.harnesses.presets import preset_names
from outrider.sandbox.host_paths import HostPaths
from outrider.service.admission import check_group, parse_body
from outrider.spec import DiffSpec, PrepareCommand, StoredGroupSpec, Upload

FILES = Path("/srv/files")
TASK: dict[str, Any] = {"task_id": "t", "instruction": "Do it.", "agent": {"harness": "codex"}}
SHELL = {"harness": "shell", "custom_shell": {"command": "run '{instruction}'", "cwd": "/a b", "env": {"X": "1"}}}
ON_OUTPUT = {
    "test_command": "pytest -rA",
    "expected_output_json": json.dumps({"T.a": "PASSED", "tests/test_b.py::test_c": "FAILED"}),
    "repo_dir": "/repo",
    "test_timeout": 100,
    "exclude_patterns": ["*.lock"],
}


def translated(**changes: Any) -> StoredGroupSpec:
    """Return the group of the task with these fields changed or added."""
    return group_of(parse_body(PolarTaskRequest, json.dumps(TASK | changes).encode()), files=FILES)


def runtime(**fields: Any) -> dict[str, Any]:
    return {"runtime": {"image": "debian", **fields}}


def evaluator(strategy: str, config: Any = None, **fields: Any) -> dict[str, Any]:
    return {"evaluator": {"strategy": strategy, "config": config or {}, **fields}}


def test_the_defaults_are_polars() -> None:
    group = translated()
    assert (group.n, group.priority, group.min_usable, group.callback_url) == (1, 0, None, None)
    limits = group.task.limits
    assert (limits.session_seconds, limits.agent_seconds, limits.prepare_seconds) == (600, 7 * 86_400, 600)
    assert (group.task.harness.preset, group.task.runtime.kind) == ("codex", None)  # the node's default kind
    assert group.idempotency_key == "polar:t"
    assert group.translated is not None
    assert (group.translated.system, group.translated.usable_trains) == ("polar", True)
    assert group.translated.request == {
        "task_id": "t",
        "builder": {"strategy": "per_request", "config": {}},
        "metadata": {},
        "graded": False,
    }
    assert translated() == group  # a repeated request is recognised by its bytes
    assert translated().model_dump_json() == group.model_dump_json()


def test_limits_priority_and_seeds() -> None:
    group = translated(
        num_samples=8,
        dispatch_priority=100,
        early_stop_min_usable_sessions=6,
        timeout_seconds=7200,
        metadata={"agent_timeout": 900.5, "eval_sampling_seed_base": 0, "group_id": "g"},
    )
    assert (group.n, group.priority, group.min_usable) == (8, 100, 6)
    limits = group.task.limits
    assert (limits.session_seconds, limits.agent_seconds, limits.prepare_seconds) == (7200, 900.5, 3600)
    assert group.task.sampling.seed == 0  # each sample has its own seed, derived from this one
    # The session's time must end first, so the agent's time must not end at the same moment.
    assert translated(timeout_seconds=5, metadata={"agent_timeout": 5}).task.limits.agent_seconds > 5


@pytest.mark.parametrize(("theirs", "ours"), PRESETS.items())
def test_every_harness_has_its_preset(theirs: str, ours: str) -> None:
    group = translated(agent={"harness": theirs, "model_name": "m", "env": {"A": "1"}})
    assert group.task.harness.preset == ours in preset_names()
    make_harness(group.task.harness)
    assert group.task.harness.env["A"] == "1"
    assert group.task.harness.env["SESSION_DIR"] == "/tmp/polar-session"
    assert group.task.labels == {
        "polar.task_id": "t",
        "polar.harness": theirs,
        "polar.model": "m",
        "polar.builder": "per_request",
        "polar.ungraded": "true",
    }


def test_settings_of_harnesses() -> None:
    claude = translated(agent={"harness": "claude_code", "settings": {"max_turns": 9, "disallowed_tools": ["A", "B"]}})
    assert claude.task.limits.turns == 9
    assert claude.task.harness.options == {"disallowed_tools": "A,B"}
    assert translated(agent={"harness": "mini_swe_agent", "settings": {"step_limit": 3}}).task.limits.turns == 3
    settings = {"max_iterations": 8, "temperature": 0.5, "max_output_tokens": 100}
    openhands = translated(agent={"harness": "openhands_sdk", "settings": settings}).task
    assert (openhands.limits.turns, openhands.sampling.temperature) == (8, 0.5)
    assert openhands.harness.options == {"max_tokens": 100}
    for group in (claude, translated(agent={"harness": "pi", "settings": {"context_tokens": 262144}})):
        make_harness(group.task.harness)


def test_a_shell_gets_its_command_and_the_instruction() -> None:
    harness = translated(agent=SHELL).task.harness
    assert harness.command == ["bash", "-lc", "cd '/a b' || exit 1\nrun '{instruction}'"]
    assert (harness.env["X"], harness.env["TASK_ID"]) == ("1", "t")
    make_harness(harness)


def test_an_agent_class_has_options_alone() -> None:
    harness = translated(agent={"import_path": "package.module:Agent", "settings": {"a": 1}}).task.harness
    assert (harness.agent, harness.options, harness.env) == ("package.module:Agent", {"a": 1}, {})


def test_sandboxes() -> None:
    prepare = [
        {"type": "upload_file", "source": "a/b.txt", "target": "/x/b.txt"},
        {"type": "upload_dir", "source": "/srv/files/c", "target": "c"},
        {
            "type": "exec",
            "command": "make",
            "cwd": "/x",
            "env": {"A": "1"},
            "max_attempts": 3,
            "retry_backoff_seconds": 2,
        },
    ]
    given = translated(
        agent={"import_path": "tools"},
        timeout_seconds=50,
        **runtime(
            prepare=prepare,
            env={"B": "2"},
            workdir="/w",
            cpus=2,
            memory_mb=512,
            storage_mb=100,
            gpus=1,
            allow_internet=False,
            network="none",
            kwargs={"volumes": ["/data:/mnt:ro"]},
        ),
    ).task.runtime
    assert (given.kind, given.image, given.workdir, given.env) == ("docker", "debian", "/w", {"B": "2"})
    resources = given.resources
    assert (resources.cpus, resources.memory_mb, resources.disk_mb, resources.gpus) == (2, 512, 100, 1)
    assert given.prepare == [
        Upload(upload="a/b.txt", to="/x/b.txt"),
        Upload(upload="c", to="c"),
        PrepareCommand(run="cd /x || exit 1\nmake", seconds=50, env={"A": "1"}, attempts=3, pause_seconds=2),
    ]
    assert [(mount.source, mount.target) for mount in given.mounts] == [("/data", "/mnt")]
    assert translated(**runtime(backend="apptainer")).task.runtime.kind == "apptainer"
    assert translated(**runtime(import_path="a.b:C")).task.runtime.kind == "a.b:C"
    assert translated(**runtime(kwargs={"kind": "namespace"})).task.runtime.kind == "namespace"
    first, *_ = translated(**runtime()).task.runtime.prepare
    assert isinstance(first, PrepareCommand)
    assert "/tmp/polar-session/artifacts" in first.run  # the folders named by the variables


def test_evaluators() -> None:
    assert translated(**evaluator("session_completed")).task.evaluator.kind == "completed"
    harbor = translated(**evaluator("harbor", env={"A": "1"})).task.evaluator
    assert (harbor.kind, harbor.seconds, harbor.carry) == ("harbor", 120, None)
    assert harbor.options == {"env": {"A": "1"}, "mean": True}
    make_evaluator(harbor)
    own = translated(**evaluator("a.b:C", {"x": 1}, refresh_runtime=True)).task.evaluator
    assert (own.kind, own.options) == ("a.b:C", {"x": 1})


def test_test_on_output_is_the_exact_map_of_every_test() -> None:
    spec = translated(**evaluator("test_on_output", ON_OUTPUT, env={"A": "b c"}, refresh_runtime=True)).task.evaluator
    assert spec.carry == DiffSpec(diff="/repo", exclude=["*.lock"])
    assert (spec.kind, spec.seconds) == ("swebench", 100 + 60 + 300)
    assert spec.options["expected"] == {"T.a": "PASSED", "test_c": "FAILED"}
    assert spec.options["test_command"] == "export A='b c'\npytest -rA"
    assert (spec.options["folder"], spec.options["test_seconds"]) == ("/repo", 100)
    make_evaluator(spec)


def test_swebench_harness_takes_a_row() -> None:
    row = {
        "instance_id": "a__b-1",
        "repo": "a/b",
        "version": "1.0",
        "FAIL_TO_PASS": '["tests/test_a.py::test_b"]',
        "PASS_TO_PASS": [],
        "test_patch": "",
        "log_parser": "parse_log_pytest",
        "test_command": "pytest -rA",
    }
    spec = translated(**evaluator("swebench_harness", row)).task.evaluator
    assert spec.carry == DiffSpec(diff="/testbed")
    assert spec.options["fail_to_pass"] == ["tests/test_a.py::test_b"]
    make_evaluator(spec)


def test_admission_errors_name_polars_fields(tmp_path: Path) -> None:
    for changes, field in (
        ({"agent": {"harness": "codex", "settings": {"max_budget_usd": 1}}}, "agent.settings.max_budget_usd"),
        ({"agent": {"harness": "codex", "env": {"OPENAI_BASE_URL": "http://x"}}}, "agent.env.OPENAI_BASE_URL"),
        ({"agent": {"import_path": "support.coin:No"}}, "agent.import_path"),
        (runtime(kwargs={"kind": "odd"}), "runtime.backend"),
        (evaluator("harbor", {"tests": [{"write": 1, "to": "x"}]}), "evaluator.config.tests.0.write"),
        (evaluator("support.coin:No"), "evaluator.strategy"),
    ):
        with pytest.raises(InvalidField) as caught, polar_fields():
            check_group(translated(**changes), paths=HostPaths.of(tmp_path), here=False)
        assert caught.value.field == field, changes


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"task_id": "a/b"}, "task_id"),
    ({"task_id": ".."}, "task_id"),
    ({"task_id": 1}, "task_id"),
    ({"odd": 1}, "odd"),
    ({"num_samples": 0}, "num_samples"),
    ({"num_samples": True}, "num_samples"),
    ({"dispatch_priority": 101}, "dispatch_priority"),
    ({"timeout_seconds": 0}, "timeout_seconds"),
    ({"instruction": ""}, "instruction"),
    ({"num_samples": 2, "early_stop_min_usable_sessions": 3}, ""),
    ({"metadata": {"outrider": 1}}, "metadata"),
    ({"metadata": {"agent_timeout": -1}}, "metadata.agent_timeout"),
    ({"metadata": {"eval_sampling_seed_base": 1.5}}, "metadata.eval_sampling_seed_base"),
    ({"builder": {"strategy": "other"}}, "builder.strategy"),
    ({"builder": {"strategy": "per_request", "config": {"odd": 1}}}, "builder.config"),
    ({"agent": {}}, "agent"),
    ({"agent": {"harness": "codex", "import_path": "a:b"}}, "agent"),
    ({"agent": {"harness": "shell"}}, "agent"),
    ({"agent": SHELL | {"harness": "codex"}}, "agent"),
    ({"agent": SHELL | {"settings": {"odd": 1}}}, "agent.settings.odd"),
    ({"agent": {"harness": "swe_agent"}}, "agent.harness"),
    ({"agent": {"harness": "codex", "skills_path": "/"}}, "agent.skills_path"),
    ({"agent": {"harness": "codex", "mcp_servers": [{"name": "m", "transport": "stdio"}]}}, "agent.mcp_servers.0"),
    ({"agent": {"harness": "claude_code", "settings": {"max_turns": 0}}}, "agent.settings.max_turns"),
    (runtime(backend="podman"), "runtime.backend"),
    (runtime(allow_internet=True), "runtime.allow_internet"),
    (runtime(internet_volumes=["v"]), "runtime.internet_volumes"),
    (runtime(network="bridge7"), "runtime.network"),
    (runtime(direct_exec_init_command="x"), "runtime.direct_exec_init_command"),
    (runtime(kwargs={"privileged": True}), "runtime.kwargs.privileged"),
    (runtime(kwargs={"volumes": "x"}), "runtime.kwargs.volumes"),
    (runtime(kwargs={"volumes": ["/a:/b"]}), "runtime.kwargs.volumes.0"),
    (runtime(kwargs={"volumes": ["a:/b:ro"]}), "runtime.kwargs.volumes.0.source"),
    (runtime(workdir="x"), "runtime.workdir"),
    (runtime(prepare=[{"type": "upload_file", "source": "/etc/passwd", "target": "x"}]), "runtime.prepare.0.source"),
    (runtime(prepare=[{"type": "upload_dir", "source": "../x", "target": "x"}]), "runtime.prepare.0.source"),
    (runtime(prepare=[{"type": "exec", "command": "x", "max_attempts": 11}]), "runtime.prepare.0.exec.max_attempts"),
    (runtime(prepare=[{"type": "copy"}]), "runtime.prepare.0"),
    (evaluator("harbor_rubric"), "evaluator.strategy"),
    (evaluator("harbor", refresh_runtime=True), "evaluator.refresh_runtime"),
    (evaluator("harbor", {"odd": 1}), "evaluator.config.odd"),
    (evaluator("session_completed", env={"A": "1"}), "evaluator.env"),
    (evaluator("a:b", env={"A": "1"}), "evaluator.env"),
    (evaluator("test_on_output", {}), "evaluator.config.test_command"),
    (evaluator("test_on_output", ON_OUTPUT | {"expected_output_json": "["}), "evaluator.config.expected_output_json"),
    (
        evaluator("test_on_output", ON_OUTPUT | {"expected_output_json": {"a": "SKIPPED"}}),
        "evaluator.config.expected_output_json",
    ),
    (
        evaluator("test_on_output", ON_OUTPUT | {"expected_output_json": {"a.py::t": "PASSED", "b.py::t": "FAILED"}}),
        "evaluator.config.expected_output_json",
    ),
    (evaluator("test_on_output", ON_OUTPUT | {"patch_command": "patch"}), "evaluator.config.patch_command"),
    (evaluator("test_on_output", ON_OUTPUT | {"test_timeout": 0}), "evaluator.config.test_timeout"),
    (evaluator("test_on_output", ON_OUTPUT | {"exclude_patterns": "x"}), "evaluator.config.exclude_patterns"),
    (
        {
            **evaluator("test_on_output", ON_OUTPUT),
            **runtime(eval_prepare=[{"type": "exec", "command": "true"}]),
        },
        "runtime.eval_prepare",
    ),
]


@pytest.mark.parametrize(("changes", "field"), REFUSED)
def test_what_cannot_be_translated_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        translated(**changes)
    assert caught.value.field == field
    assert str(caught.value)


def test_the_same_steps_may_be_given_for_grading() -> None:
    steps = [{"type": "exec", "command": "true"}]
    translated(**evaluator("test_on_output", ON_OUTPUT), **runtime(prepare=steps, eval_prepare=steps))
    translated(**evaluator("harbor"), **runtime(prepare=steps, eval_prepare=[]))  # graded in the agent's sandbox
    translated(**evaluator("test_on_output", ON_OUTPUT), **runtime(eval_prepare=[]))


def test_the_page_has_every_harness_and_evaluator() -> None:
    text = (Path(__file__).parents[3] / "docs" / "compat" / "polar.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    first = {name.strip(" `"): rest for name, rest in rows}
    for theirs, ours in PRESETS.items():
        assert f"`{ours}`" in first[theirs]
    assert STRATEGIES.keys() <= first.keys()
    assert SESSION_DIR in text
    assert all(f"`{name}`" in text for name in FOLDERS)
