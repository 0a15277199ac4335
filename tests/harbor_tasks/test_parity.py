"""Harbor's own package and our reader accept and refuse the same folders, and Harbor's model accepts our trajectories.

The tests run if Harbor 0.25 can be imported, which needs Python 3.12. tests/real/test_harbor_parity.py makes such an
environment.
"""

from __future__ import annotations

import copy
import json
import math
import re
import tarfile
import warnings
from collections.abc import Iterator
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest

from outrider.client.atif import trajectory
from outrider.errors import InvalidField
from outrider.lifecycle import StopReason
from outrider.sandbox.rootfs.dockerfile import read_dockerfile
from outrider.sandbox.rootfs.store import ImageStore
from outrider.tasks.datasets import harbor_examples
from outrider.tasks.harbor.schema import TaskToml
from outrider.tasks.harbor.verifiers import separate_verifier
from outrider.trajectory import BranchKind, ChatRow, LogprobKind, SampleImage, TokenMode
from support.samples import make_sample
from test_datasets import harbor_task

WHY = "Harbor's package cannot be imported here: it needs Python 3.12, and pip install harbor==0.25.0"
task_module = pytest.importorskip("harbor.models.task.task", reason=WHY)
config_module = pytest.importorskip("harbor.models.task.config", reason=WHY)
paths_module = pytest.importorskip("harbor.models.task.paths", reason=WHY)
verifier_mode = pytest.importorskip("harbor.models.task.verifier_mode", reason=WHY)
verifier_result = pytest.importorskip("harbor.models.verifier.result", reason=WHY)
trajectories = pytest.importorskip("harbor.models.trajectories", reason=WHY)

NOT_DONE = re.compile(r"and Outrider does not do (.+)$")
"""Matches the message with which we refuse a folder that is valid for Harbor. docs/datasets.md lists the reasons."""
DOCUMENTED = (
    *(
        f"{place}environment.{name}"
        for place in ("", "verifier.", "steps.0.verifier.")
        for name in ("os", "gpu_types", "tpu")
    ),
    *(
        f"{place}environment.{name}"
        for place in ("verifier.", "steps.0.verifier.")
        for name in ("mcp_servers", "skills_dir")
    ),
    *("agent.user", "verifier.user", "artifacts.0.service"),
    *("verifier.collect.0.service", "verifier.collect.0.user", "tests/docker-compose.yaml"),
)
ENVIRONMENT = (
    *("build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "tpu"),
    *("mcp_servers", "env", "skills_dir", "workdir", "network_mode", "allowed_hosts", "allow_internet"),
    *("memory", "storage", "healthcheck"),
)
BASE: dict[str, Any] = {
    "schema_version": "1.4",
    "task": {"name": "org/x", "authors": [{"name": "A"}]},
    "environment": {
        "env": {"A": "b"},
        "healthcheck": {"command": "true"},
        "mcp_servers": [{"name": "s", "command": "c", "url": "http://x"}],
    },
    "verifier": {"collect": [{"command": "true"}]},
    "artifacts": [{"source": "/x"}],
}
FIELDS = (
    *("schema_version", "version", "task", "metadata", "source", "multi_step_reward_strategy", "steps", "artifacts"),
    *(f"task.{name}" for name in ("name", "version", "description", "authors", "keywords", "nowhere")),
    *("task.authors.0.name", "task.authors.0.email"),
    *(f"agent.{name}" for name in ("timeout_sec", "user", "network_mode", "allowed_hosts")),
    *(f"verifier.{name}" for name in ("timeout_sec", "env", "user", "network_mode", "allowed_hosts", "collect")),
    *("verifier.environment_mode", "verifier.environment"),
    *(f"verifier.collect.0.{name}" for name in ("command", "service", "timeout_sec", "user")),
    *(f"{place}environment.{name}" for place in ("", "verifier.") for name in ENVIRONMENT),
    *(f"environment.healthcheck.{name}" for name in ("command", "interval_sec", "timeout_sec", "retries")),
    *(f"environment.healthcheck.{name}" for name in ("start_period_sec", "start_interval_sec")),
    *("environment.env.A", "solution.env", "solution", "agent", "verifier", "environment"),
    *(f"artifacts.0.{name}" for name in ("source", "destination", "exclude", "service")),
    *(f"environment.mcp_servers.0.{name}" for name in ("name", "transport", "url", "command", "args", "headers")),
)
VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2.5, 3.0, math.nan, math.inf, True, "", " ", "x", "5", "2.5", "true", "linux", "LINUX", "windows"),
    *("public", "no-network", "allowlist", "shared", "separate", "mean", "final", "root", "main", "a/b", "a/b\n"),
    *("../x", "/x", "a/../b", "a\\b", "manifest.json", ".", "2G", " 512 m ", "1.5g", "G", "1e400G", "nanM", "1.0", "é"),
    *([], ["a"], ["a.org"], [1], [{}], [{"name": "x"}], [{"source": "../x"}], [{"command": "x"}], {}, {"a": "b"}),
    *({"a": 1}, {"command": "x"}, {"type": "v6e", "topology": "2x2"}, {"cpus": 1}, [{"name": "x", "url": "http://x"}]),
)
ODD: tuple[Any, ...] = ({}, [], "docker", {"allowed_hosts": ["a.org"]}, {"mcp_servers": [{}]})
OF_STEPS: tuple[dict[str, Any], ...] = (
    *({"environment_mode": mode} for mode in ("shared", "separate", "own", "", 1)),
    *({"environment": {"docker_image": "x"}, "environment_mode": mode} for mode in ("shared", "separate")),
    *(
        {"environment": {name: value}}
        for name in ("gpus", "memory", "os", "cpus", "tpu")
        for value in (0, 1, "windows")
    ),
    *({"environment": value} for value in ODD),
)
PAIRS: tuple[dict[str, Any], ...] = (
    {"environment.memory": "1G", "environment.memory_mb": 1024},
    {"environment.memory": "1G", "environment.memory_mb": 1},
    {"environment.memory": 5, "environment.memory_mb": 1},
    {"environment.network_mode": "allowlist", "environment.allowed_hosts": ["a.org"]},
    {"environment.network_mode": "public", "environment.allowed_hosts": ["a.org"]},
    {"environment.network_mode": "public", "environment.allowed_hosts": []},
    {"agent.network_mode": "public", "agent.allowed_hosts": []},
    {"verifier.environment_mode": "shared", "verifier.environment": {}},
    {"verifier.environment_mode": "separate", "verifier.environment": {"docker_image": "x"}},
    {"verifier.environment_mode": "shared", "steps": [{"name": "a", "verifier": {"environment": {"cpus": 1}}}]},
    {"verifier.environment": {"docker_image": "x"}, "steps": [{"name": "a"}]},
    {"verifier.environment": {"memory": "1G", "memory_mb": 1}},
    {"verifier.environment": {"network_mode": "public", "allowed_hosts": ["a.org"]}},
    *({"steps": [{"name": "a", "verifier": verifier}, {"name": "b"}]} for verifier in OF_STEPS),
    {"version": "1.0", "schema_version": 5},
    {"version": 5, "schema_version": "1.0"},
    {"artifacts.0.service": "db", "artifacts.0.source": "x"},
    {"steps": [{"name": "a"}, {"name": "A"}]},
    {"steps": [{"name": "con"}]},
    {"steps": [{"name": "a", "min_reward": "x"}]},
    *({"environment.mcp_servers.0.transport": each} for each in ("stdio", "http", "sse", "streamable-http", "ws")),
    {"environment.mcp_servers.0.transport": "stdio", "environment.mcp_servers.0.headers": {"A": "b"}},
    *(
        {"environment.mcp_servers.0.headers": headers}
        for headers in (
            *({"A": "b"}, {"A b": "c"}, {"A": "b\nc"}, {"A": "${B}"}, {"A": "${B"}, {"Authorization": "Bearer ${B}"}),
            *({"Authorization": "Bearer x"}, {"X-Api-Key": "x"}, {"X-Api-Key": ""}, {"Cookie": "a=${B}"}),
            *({"X-Api-Key": "${B:-x}"}, {"X-Api-Key": "${B:-}"}, {"A": "${B:-x} y"}, {"Authorization": "${B}:${B}"}),
        )
    ),
)


def toml(value: Any) -> str:
    match value:
        case bool() | str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return "{" + ", ".join(f"{json.dumps(name)} = {toml(inner)}" for name, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    for path, value in changes.items():
        *above, last = path.split(".")
        at: Any = config
        for part in above:
            at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
        at[last] = value
    return config


def mutations() -> Iterator[dict[str, Any]]:
    yield {}
    for field in FIELDS:
        for value in VALUES:
            yield {field: value}
    yield from PAIRS


def harbor_says(folder: Path) -> str | None:
    """Return the error with which Harbor refuses a folder, or None if Harbor accepts it."""
    with warnings.catch_warnings(action="ignore"):
        try:
            task_module.Task(folder)
        except (OSError, ValueError, ArithmeticError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return None


def we_say(root: Path) -> InvalidField | None:
    try:
        harbor_examples(root, image="some-image", environ={"B": "b"}, offline=True)
    except InvalidField as error:
        return error
    return None


def difference(folder: Path) -> str | None:
    theirs, ours = harbor_says(folder), we_say(folder.parent)
    if ours is None:
        return None if theirs is None else f"Harbor refuses it: {theirs}"
    if theirs is None and not (NOT_DONE.search(ours.message) and ours.field in DOCUMENTED):
        return f"we refuse it: {ours.message} ({ours.field})"
    return None


@pytest.mark.timeout(600)
def test_the_same_tables_are_accepted(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "tasks" / "a")
    for name in ("a", "b"):
        (folder / "steps" / name).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(name)
    wrong, accepted, refused = [], 0, 0
    for changes in mutations():
        text = "".join(f"{name} = {toml(value)}\n" for name, value in changed(changes).items())
        (folder / "task.toml").write_text(text, "utf-8")
        if found := difference(folder):
            wrong.append(f"{changes}: {found}")
        accepted += harbor_says(folder) is None
        refused += harbor_says(folder) is not None
    assert wrong == []
    assert min(accepted, refused) > 500


def test_the_same_folders_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    (tmp_path / "outside").write_text("x")
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "base.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    store = ImageStore()
    store.import_(tmp_path / "base.tar", "base")

    def link(to: str, name: str) -> Any:
        return lambda folder: (folder / name).symlink_to(to)

    def verified_by(image: str, *more: Any) -> Any:
        """Return a change of a folder: the verifier gets the image that the TOML text `image` names, or an image built
        from a Dockerfile if `image` is empty, and test.sh is removed. The changes `more` follow."""

        def change(folder: Path) -> None:
            (folder / "tests" / "test.sh").unlink()
            (folder / "task.toml").write_text(f"[verifier.environment]\n{image}")
            if not image:
                (folder / "tests" / "Dockerfile").write_text("FROM base\nRUN touch /tests")
                store.import_(tmp_path / "base.tar", read_dockerfile(folder / "tests", store).name)
            for other in more:
                other(folder)

        return change

    named = "docker_image = 'x'"
    changes: dict[str, Any] = {
        "as it is": lambda folder: None,
        "no instruction": lambda folder: (folder / "instruction.md").unlink(),
        "no tests": lambda folder: (folder / "tests" / "test.sh").rename(folder / "test.sh"),
        "no TOML": lambda folder: (folder / "task.toml").write_text("["),
        "no text": lambda folder: (folder / "instruction.md").write_bytes(b"\xff"),
        "a link within": link("test.sh", "tests/again"),
        "a link to a file outside": link("../../../outside", "tests/out"),
        "a link to a folder outside": link("../../../folder", "solution/out"),
        "a link in a circle": link("..", "tests/up"),
        "a link to itself": link(".", "solution/self"),
        "an image that has the tests": verified_by(named),
        "a Dockerfile of an image that has the tests": verified_by(""),
        "no image that has the tests": verified_by(named, lambda folder: (folder / "task.toml").write_text("")),
        "an empty name of an image": verified_by("docker_image = ''"),
        "a link out of tests that an image has": verified_by(named, link("../../../outside", "tests/out")),
        "a link out of tests of an image that is built": verified_by("", link("../../../folder", "tests/out")),
        "services of a verifier": verified_by(named, lambda folder: (folder / "tests/docker-compose.yaml").touch()),
        "an empty step list": lambda folder: (folder / "task.toml").write_text("steps = []"),
        "a folder for test.sh": lambda folder: (
            (folder / "tests" / "test.sh").unlink(),
            (folder / "tests" / "test.sh").mkdir(),
        ),
    }
    wrong = {}
    for number, (name, change) in enumerate(changes.items()):
        folder = harbor_task(tmp_path / f"tasks{number}" / "a")
        (folder / "solution").mkdir()
        (folder / "solution" / "solve.sh").write_text("true")
        change(folder)
        if found := difference(folder):
            wrong[name] = found
    assert wrong == {}


VERIFIERS: tuple[dict[str, Any], ...] = (
    {},
    {"environment_mode": "shared"},
    {"environment_mode": "separate"},
    {"environment": {}},
    {"environment": {"cpus": 2, "docker_image": ""}},
    {"environment": {"docker_image": "own", "workdir": "/grading", "env": {"A": "b"}, "memory_mb": 1024}},
)
FILES = ("tests/Dockerfile", "steps/a/tests/Dockerfile", "steps/a/tests/docker-compose.yaml", "environment/Dockerfile")


def test_separate_verifiers_run_in_the_same_environments(tmp_path: Path) -> None:
    """Harbor and our reader agree on the image, on the folder in which an image with the tests is built, and on the
    other settings of a separate verifier's sandbox."""
    names = ("cpus", "memory_mb", "storage_mb", "workdir", "env")
    wrong, separate = [], 0
    for number, files in enumerate(chain.from_iterable(combinations(FILES, count) for count in range(3))):
        folder = harbor_task(tmp_path / str(number))
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).touch()
        for of_task, of_step, steps in product(VERIFIERS, VERIFIERS, (True, False)):
            table: dict[str, Any] = {"verifier": of_task, "environment": {"docker_image": "agents", "cpus": 1}}
            if steps:
                table["steps"] = [{"name": "a", "verifier": of_step}]
            theirs_config = config_module.TaskConfig.model_validate(copy.deepcopy(table))
            ours_config = TaskToml.model_validate(copy.deepcopy(table))
            theirs = verifier_mode.resolve_verifier_environment_definition(
                theirs_config, paths_module.TaskPaths(folder), theirs_config.steps[0] if steps else None
            )
            ours = separate_verifier(ours_config, folder, ours_config.steps[0] if ours_config.steps else None)
            told = expected = None
            if theirs is not None:
                separate += 1
                own = theirs.directory if theirs.bundled_tests else None
                image = theirs.config.docker_image
                expected = (own, image, *(getattr(theirs.config, name) for name in names))
            if ours is not None:
                context = ours.context and ours.context.resolve()
                image = ours.image if ours.context else ours_config.environment.docker_image
                told = (context, image, *(getattr(ours.environment, name) for name in names))
            if told != expected:
                wrong.append((files, table, told, expected))
    assert wrong == []
    assert separate > 300


def test_the_examples_are_accepted() -> None:
    folders = sorted(path.parent for path in (Path(__file__).parents[2] / "examples" / "harbor").glob("*/task.toml"))
    assert {folder.name: harbor_says(folder) for folder in folders} == {folder.name: None for folder in folders}


def test_harbors_model_takes_our_trajectories() -> None:
    image: dict[str, Any] = {"turn": 0, "message": 0, "digest": "d", "size": 1, "url": None}
    sample = make_sample(
        group_id="g",
        session_id="s",
        attempt=1,
        sample_index=0,
        row=0,
        rows=1,
        kind=BranchKind.MAIN,
        turns=(0, 1),
        ids=[1, 2, 3, 4, 5, 6],
        loss_mask=[0, 0, 0, 0, 1, 1],
        logprobs=[0.0, 0.0, 0.0, 0.0, -0.5, -0.25],
        versions=[-1, -1, -1, -1, 3, 3],
        prompt_length=2,
        reward=1.0,
        mode=TokenMode.TOKENS,
        logprob_kind=LogprobKind.SAMPLING,
        stop_reason=StopReason.COMPLETED,
        min_version=3,
        max_version=3,
        images=(SampleImage(media_type="image/png", **image), SampleImage(media_type="image/tiff", **image)),
        turn_spans=((2, 3), (4, 6)),
        turn_rewards=(None, None),
    )
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    broken = {"id": "d", "type": "function", "function": {"name": "bash", "arguments": "{"}}
    shown = [{"type": "text", "text": "t"}, {"type": "image", "path": "images/a.png"}, {"type": "image", "url": "u"}]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "content": "lost", "tool_call_id": "nobody's"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": shown},
        {"role": "assistant", "content": "old"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call, broken], "weight": 0},
        {"role": "tool", "content": "out", "tool_call_id": "c"},
        {"role": "tool", "content": "other", "tool_call_id": "x"},
        {"role": "assistant", "content": "done", "weight": 1},
    ]
    row = ChatRow(
        messages=messages,
        tools=[{"type": "function", "function": {"name": "bash"}}],
        group_id="g",
        session_id="s",
        sample_index=0,
        row=0,
        kind=BranchKind.MAIN,
        label="",
        reward=1.0,
        metrics={},
        stop_reason=StopReason.COMPLETED,
        labels={},
        images=sample.images,
    )
    written = json.loads(json.dumps(trajectory(sample, row)))
    read = trajectories.Trajectory.model_validate(written)
    assert read.to_json_dict() == without_none(written)
    steps = read.steps
    assert [step.source for step in steps] == ["agent", "system", "user", "agent", "agent", "agent"]
    assert [step.is_copied_context for step in steps] == [True, None, None, True, True, None]
    assert [result.source_call_id for result in steps[4].observation.results] == ["c", None]
    assert steps[4].tool_calls[1].arguments == {"text": "{"}
    assert (steps[4].metrics.completion_token_ids, steps[4].metrics.logprobs) == ([3], None)
    assert (steps[5].metrics.prompt_token_ids, steps[5].metrics.completion_token_ids) == ([1, 2, 3, 4], [5, 6])
    assert steps[5].metrics.logprobs == [-0.5, -0.25]
    assert read.has_multimodal_content()


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_none(inner) for name, inner in value.items() if inner is not None}
    return [without_none(inner) for inner in value] if isinstance(value, list) else value
