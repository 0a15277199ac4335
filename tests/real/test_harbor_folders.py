"""Harbor folders whose verifiers have their own image pass the checks of `outrider task check`, with the images of a
real container engine. A grader may run in another kind of sandbox than the agent."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.lab.certify.task_check import check_tasks
from outrider.tasks.datasets import harbor_examples
from outrider.tasks.examples import Example, Gold
from runtimes import engines

pytestmark = pytest.mark.real

KINDS = {"docker": "runtimes.engines:DOCKER", "podman": "runtimes.engines:PODMAN"}
TEST = """#!/bin/bash
reward=0
[ "$(pwd)" = /grading ] && [ ! -e /app/mine ] && [ "$(cat /app/out/answer)" = "$(cat /tests/expected)" ] && reward=1
echo "$reward" > /logs/verifier/reward.txt
"""
TOML = """
artifacts = ["/app/out"]
[environment]
docker_image = "{agents}"
workdir = "/app"
[verifier.environment]
docker_image = "{graders}"
workdir = "/grading"
"""
STEPS = """
[[steps]]
name = "one"
min_reward = 1.0
[[steps]]
name = "two"
verifier = { environment_mode = "shared" }
"""
SOLVE = "mkdir -p out; echo 42 > out/answer; touch mine; sleep 600 & echo $! > running\n"


def folders(root: Path, *, agents: str, graders: str) -> Path:
    """Write two tasks below `root`: one with a single step, and one with two steps, of which the first has a separate
    verifier. Returns `root`."""
    for name in ("single", "steps"):
        task = root / name
        first = task if name == "single" else task / "steps" / "one"
        (first / "solution").mkdir(parents=True)
        (first / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{SOLVE}")
        (first / "instruction.md").write_text("Write the answer into out/answer.")
        table = TOML.format(agents=agents, graders=graders)
        if name == "steps":
            second = task / "steps" / "two"
            for inner in ("solution", "tests"):
                (second / inner).mkdir(parents=True)
            (second / "instruction.md").write_text("Touch done.")
            (second / "solution" / "solve.sh").write_text("#!/bin/bash\n[ -e /tests ] || touch done\n")
            ours = "[ -e done ] && [ -e mine ] && kill -0 $(cat running) && reward=1 || reward=0"
            (second / "tests" / "test.sh").write_text(f"{ours}\necho $reward > /logs/verifier/reward.txt\n")
            table += STEPS
        (task / "task.toml").write_text(table)
    return root


@pytest.fixture(scope="session", autouse=True)
def images() -> Iterator[None]:
    """Removes the images that were made for container engines, after all tests."""
    yield
    engines.remove_images()


@contextmanager
def grading_image(kind: str) -> Iterator[str]:
    """Make an image of this engine: the image of other tests, plus a verifier's files. Yields its name."""
    socket = engines.engine(kind)
    data = io.BytesIO(engines.archive("python"))
    with tarfile.open(fileobj=data, mode="a") as archive:
        for path, text in (("tests/test.sh", TEST), ("tests/expected", "42\n")):
            info = tarfile.TarInfo(path)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    name = f"outrider-test-grader-{os.getpid()}"
    engines.request(socket, "POST", f"/images/create?fromSrc=-&repo={name}&tag=latest", data.getvalue())
    try:
        yield name
    finally:
        engines.request(socket, "DELETE", f"/images/{name}:latest?force=true", b"")


def in_kind(example: Example, kind: str) -> Example:
    """Set the kind of the example's sandboxes, which a folder cannot name. Returns the example."""
    task = example.task
    runtimes = [task["runtime"], task["evaluator"]["runtime"]]
    for runtime in runtimes:
        runtime["kind"] = KINDS[kind]
    return example


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_a_verifiers_image_is_another_than_the_agents(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = engines.prepared(kind, monkeypatch)
    with grading_image(kind) as graders:
        examples = harbor_examples(folders(tmp_path, agents=agents, graders=graders), environ={}, offline=True)
        reports = await check_tasks([in_kind(each, kind) for each in examples], folder=tmp_path)
    assert [(report.id, report.problems) for report in reports] == [("single", ()), ("steps", ())]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", [("docker", "namespace"), ("namespace", "docker")], ids="-".join)
async def test_a_grader_may_be_of_another_kind(
    kinds: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = engines.prepared("docker", monkeypatch)
    agents, graders = ({"kind": KINDS[kind], "image": image} if kind == "docker" else {"kind": kind} for kind in kinds)
    prepare = [{"write": "42\n", "to": "expected"}]
    run = 'test ! -e out/link && test "$(cat out/answer)" = "$(cat expected)" || exit 1'
    evaluator = {"run": run, "carry": ["out"], "runtime": {**graders, "prepare": prepare}}
    task: dict[str, Any] = {"instruction": "Write 42 into out/answer.", "runtime": agents, "evaluator": evaluator}
    gold = Gold(run="mkdir out; ln -s /etc/passwd out/link; echo 42 > out/answer")
    [report] = await check_tasks([Example(id="x", task=task, gold=gold)], folder=tmp_path)
    assert report.problems == ()
