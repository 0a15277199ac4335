"""Harbor folders become tasks. Settings that Outrider does not support are refused by name, and no file outside of a
task's folder is read."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from outrider.errors import InvalidField, TooLarge
from outrider.sandbox.rootfs.dockerfile import read_dockerfile
from outrider.sandbox.rootfs.store import ImageStore
from outrider.spec import Write
from outrider.tasks.datasets import harbor_examples
from outrider.tasks.harbor import schema
from outrider.tasks.harbor.fields import FIELD_USES, Use
from outrider.tasks.harbor.tasks import build_contexts
from test_datasets import as_task, harbor_task

LOGS = {"run": "mkdir -p /logs/agent /logs/verifier /logs/artifacts"}


def only(root: Path, **settings: Any) -> Any:
    [example] = harbor_examples(root, **{"offline": True, **settings})
    return example


def test_a_folder_is_a_task(tmp_path: Path) -> None:
    toml = """
schema_version = "1.4"
artifacts = ["/work/out.txt"]
[task]
name = "org/hello"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30.0
env = { MODE = "it's strict" }
[environment]
docker_image = "debian:13"
workdir = "/app"
cpus = 2
memory_mb = 512
storage_mb = 1024
env = { LANG = "C" }
"""
    harbor_task(tmp_path / "b", toml)
    harbor_task(tmp_path / "a")
    (tmp_path / "c").mkdir()
    first, second = harbor_examples(tmp_path, offline=True)
    assert (first.id, second.id) == ("a", "b")
    task = as_task(second.task)
    assert task.instruction == "Write hello into out.txt.\n"
    assert (task.runtime.image, task.runtime.workdir, task.runtime.env) == ("debian:13", "/app", {"LANG": "C"})
    resources = task.runtime.resources
    assert (resources.cpus, resources.memory_mb, resources.disk_mb) == (2, 512, 1024)
    assert (task.limits.agent_seconds, task.limits.session_seconds) == (120.0, 3600.0)
    assert (task.evaluator.kind, task.evaluator.seconds) == ("harbor", 30.0)
    assert task.evaluator.options["env"] == {"MODE": "it's strict"}
    assert task.artifacts == ["/logs/artifacts/**", "/work/out.txt", "/work/out.txt/**"]
    assert task.labels == {"harbor": "org/hello"}
    assert as_task(first.task).evaluator.seconds == 600
    assert [one.id for one in harbor_examples(tmp_path, tasks=["b"], offline=True)] == ["b"]
    assert [one.id for one in harbor_examples(tmp_path, limit=1, offline=True)] == ["a"]


def test_an_agent_with_much_time_has_a_session_that_is_longer(tmp_path: Path) -> None:
    harbor_task(tmp_path / "a", "[agent]\ntimeout_sec = 7200")
    limits = as_task(only(tmp_path).task).limits
    assert (limits.agent_seconds, limits.session_seconds) == (7200.0, 9000.0)


def test_older_schemas_are_read(tmp_path: Path) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "1.5G"\nstorage = " 512m "\nallow_internet = true\n'
    harbor_task(tmp_path / "a", toml)
    resources = as_task(only(tmp_path).task).runtime.resources
    assert (resources.memory_mb, resources.disk_mb) == (1536, 512)


def test_the_tests_are_options_of_the_evaluator_and_nowhere_else(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "a", test="exit 1 # the secret")
    (folder / "tests" / "data").mkdir()
    (folder / "tests" / "data" / "expected").write_bytes(b"\0\xff")
    (folder / "tests" / "test.sh").chmod(0o755)
    (folder / "tests" / "again.sh").symlink_to("test.sh")
    example = only(tmp_path)
    assert example.task["evaluator"].pop("options")["tests"] == [
        {"write": "exit 1 # the secret", "to": "/tests/again.sh", "executable": True},
        {"write": "AP8=", "encoding": "base64", "to": "/tests/data/expected"},
        {"write": "exit 1 # the secret", "to": "/tests/test.sh", "executable": True},
    ]
    assert example.task["runtime"]["prepare"] == [LOGS]
    assert "secret" not in repr(example.task)


def test_agents_are_not_shown_the_marks_of_a_data_set(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "a")
    (folder / "instruction.md").write_text("<!-- a canary 123 -->\n# CANARY\n\n\n# Title\n# canary below stays\n")
    assert only(tmp_path).task["instruction"] == "# Title\n# canary below stays\n"


def test_a_health_check_is_a_prepare_step(tmp_path: Path) -> None:
    toml = """
[environment.healthcheck]
command = "test -e ready"
interval_sec = 0.5
timeout_sec = 3
start_period_sec = 7
start_interval_sec = 0.25
retries = 4
"""
    harbor_task(tmp_path / "a", toml)
    _, step = as_task(only(tmp_path).task).runtime.prepare
    assert (step.run, step.seconds, step.attempts) == ("test -e ready", 3.0, 4)
    assert (step.pause_seconds, step.grace_seconds, step.grace_pause_seconds) == (0.5, 7.0, 0.25)


def test_variables_of_the_reader(tmp_path: Path) -> None:
    toml = """
[environment]
env = { A = "${X}", B = "${NOWHERE:-b}", C = "a ${X} stays", D = "${Y:-unused}", E = "${NOWHERE:-}" }
"""
    folder = harbor_task(tmp_path / "a", toml)
    known = {"X": "x", "Y": ""}
    env = only(tmp_path, environ=known).task["runtime"]["env"]
    assert env == {"A": "x", "B": "b", "C": "a ${X} stays", "D": "", "E": ""}
    for table in ("environment", "verifier", "solution"):
        (folder / "task.toml").write_text(f"[{table}]\nenv = {{ KEY = '${{NOWHERE}}' }}")
        (folder / "solution").mkdir(exist_ok=True)
        (folder / "solution" / "solve.sh").touch()
        with pytest.raises(InvalidField, match="takes KEY from the environment, which has no NOWHERE") as raised:
            harbor_examples(tmp_path, environ=known, offline=True)
        assert raised.value.field == f"{table}.env.KEY"


def test_a_separate_verifier_gets_the_artifacts_alone(tmp_path: Path) -> None:
    toml = """
artifacts = ["out.txt", {source = "/x/", destination = "kept", exclude = ["*.o"]}]
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "dump > /x/state"
timeout_sec = 5
"""
    harbor_task(tmp_path / "a", toml)
    task = as_task(only(tmp_path).task)
    assert task.evaluator.carry == ["/logs/artifacts", "/work/out.txt", "/x"]
    assert task.evaluator.runtime is None  # None means the agent's runtime
    assert task.evaluator.options["without"] == [{"folder": "/x/", "patterns": ["*.o"]}]
    assert [(hook.run, hook.seconds) for hook in task.collect] == [("dump > /x/state", 5.0)]


def test_a_verifier_may_have_an_environment_of_its_own(tmp_path: Path) -> None:
    toml = """
artifacts = ["out.txt"]
[environment]
docker_image = "agents"
workdir = "/app"
cpus = 4
env = { A = "1" }
healthcheck = { command = "true" }
[verifier.environment]
memory = "1G"
storage_mb = 64
workdir = "/grading"
env = { B = "${X}" }
healthcheck = { command = "nobody waits for it" }
"""
    folder = harbor_task(tmp_path / "a", toml)
    (folder / "environment").mkdir()
    (folder / "environment" / "data.csv").write_text("1,2")
    task = as_task(only(tmp_path, environ={"X": "x"}).task)
    loose = Write(write="1,2", to="./data.csv")
    assert [LOGS["run"], loose, "true"] == [step if step == loose else step.run for step in task.runtime.prepare]
    own = task.evaluator.runtime
    assert (own.image, own.workdir, own.env) == ("agents", "/grading", {"B": "x"})
    assert (own.resources.cpus, own.resources.memory_mb, own.resources.disk_mb) == (None, 1024, 64)
    assert [LOGS["run"], loose] == [step if step == loose else step.run for step in own.prepare]
    assert task.evaluator.carry == ["/logs/artifacts", "/app/out.txt"]
    assert [file["to"] for file in task.evaluator.options["tests"]] == ["/tests/test.sh"]
    # A verifier with an image of its own has the tests in the image, and gets no loose files.
    (folder / "task.toml").write_text(toml + 'docker_image = "graders"\n')
    (folder / "tests" / "test.sh").unlink()
    task = as_task(only(tmp_path, environ={"X": "x"}, image="ignored").task)
    assert task.evaluator.runtime == own.model_copy(update={"image": "graders", "prepare": own.prepare[:1]})
    assert task.evaluator.options.keys() == {"without"}
    with pytest.raises(InvalidField, match="takes B from the environment") as raised:
        only(tmp_path, environ={})
    assert raised.value.field == "verifier.environment.env.B"


def test_a_separate_verifier_waits_for_no_health_check(tmp_path: Path) -> None:
    harbor_task(tmp_path / "a", SEPARATE + "\n[environment]\nhealthcheck = { command = 'up' }")
    task = as_task(only(tmp_path).task)
    assert task.evaluator.runtime == task.runtime.model_copy(update={"prepare": task.runtime.prepare[:1]})


def test_an_image_of_the_verifiers_own_is_built_in_the_folder_of_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    root = tmp_path / "tasks"
    folder = harbor_task(root / "a", SEPARATE)
    for place in ("tests", "environment"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "Dockerfile").write_text("FROM base\nCOPY . /tests\n")
    harbor_task(root / "shared")
    (root / "shared" / "tests" / "Dockerfile").write_text("a test's own file")
    assert build_contexts(root) == [folder / "environment", folder / "tests"]
    with pytest.raises(InvalidField, match="there is no image 'base'"):
        only(root, tasks=["a"])
    with tarfile.open(tmp_path / "base.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("file"))
    store = ImageStore()
    store.import_(tmp_path / "base.tar", "base")
    with pytest.raises(InvalidField, match="is not built on this machine") as raised:
        only(root, tasks=["a"], image="agents")
    assert raised.value.hint == f"outrider image build {folder / 'tests'}"
    name = read_dockerfile(folder / "tests", store).name
    store.import_(tmp_path / "base.tar", name)
    task = as_task(only(root, tasks=["a"], image="agents").task)
    assert (task.runtime.image, task.evaluator.runtime.image) == ("agents", name)
    assert task.runtime.workdir == "/work"
    assert "tests" not in task.evaluator.options
    # Links in the tests are checked although the tests are not sent, because Harbor refuses such a folder.
    (folder / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidField, match="leaves the task's folder"):
        only(root, tasks=["a"], image="agents")


def test_a_step_between_may_be_verified_apart(tmp_path: Path) -> None:
    toml = """
artifacts = ["/out"]
[environment]
docker_image = "agents"
[verifier.environment]
docker_image = "graders"
cpus = 2
[[steps]]
name = "one"
artifacts = ["more"]
[steps.verifier.environment]
workdir = "/one"
[[steps]]
name = "two"
verifier = { environment_mode = "shared" }
[[steps]]
name = "three"
[[steps]]
name = "four"
verifier = { environment = { docker_image = "of four" } }
"""
    folder = harbor_task(tmp_path / "a", toml)
    for name in ("one", "two", "three", "four"):
        (folder / "steps" / name / "workdir").mkdir(parents=True)
        (folder / "steps" / name / "workdir" / "setup.sh").write_text("echo of the agent's")
        (folder / "steps" / name / "instruction.md").write_text(name)
    task = as_task(only(tmp_path).task)
    one, two, three, four = evaluators = [task.evaluator, *(step.evaluator for step in task.then)]
    assert [each.runtime and each.runtime.image for each in evaluators] == ["graders", None, "graders", "of four"]
    assert [each.carry for each in (one, two, three)] == [
        ["/logs/artifacts", "/out", "/work/more"],
        None,
        [*one.carry[:2]],
    ]
    assert (one.runtime.workdir, one.runtime.resources.cpus) == ("/one", None)
    assert (three.runtime.resources.cpus, four.runtime.resources.cpus) == (2, None)
    assert ["tests" in each.options for each in evaluators] == [False, True, False, False]
    assert ["alone" in each.options for each in evaluators] == [False, True, False, False]
    assert all(step.run == LOGS["run"] for each in (one, three, four) for step in each.runtime.prepare)
    # Before a step, the files of a verifier that ran in the agent's sandbox are removed. If no verifier ran there,
    # files in /tests and /logs/verifier are from the image, and stay.
    agents, verifiers = "/logs/agent /solution", "/tests /logs/verifier"
    cleaned = [step.prepare[0].run.removeprefix("find ").partition(" -mindepth")[0] for step in task.then]
    assert cleaned == [agents, f"{agents} {verifiers}", agents]


SEPARATE = "[verifier]\nenvironment_mode = 'separate'"
REFUSED: dict[str, str] = {
    "[environment]\ngpus = 1\ngpu_types = ['H100']": "environment.gpu_types",
    "[environment]\nos = 'Windows'": "environment.os",
    "[verifier.environment]\nskills_dir = '/skills'": "verifier.environment.skills_dir",
    "[agent]\nuser = 'nobody'": "agent.user",
    "[verifier]\nuser = 1000": "verifier.user",
    "[environment.tpu]\ntype = 'v6e'\ntopology = '2x2'": "environment.tpu",
    "[[verifier.environment.mcp_servers]]\nname = 'x'\nurl = 'http://x'": "verifier.environment.mcp_servers",
    "[verifier.environment]\ngpus = 1\ngpu_types = ['H100']": "verifier.environment.gpu_types",
    "[[steps]]\nname = 'a'\nverifier = {environment = {os = 'windows'}}": "steps.0.verifier.environment.os",
    "[[verifier.collect]]\ncommand = 'x'\nservice = 'db'": "verifier.collect.0.service",
    "[[artifacts]]\nsource = '/x'\nservice = 'db'": "artifacts.0.service",
}
INVALID: dict[str, str] = {
    "environment = 'docker'": "environment",
    "agent = 5": "agent",
    "task = {name = 'hello'}": "task.name",
    "[environment]\nenv = 'A=1'": "environment.env",
    "[environment]\nmemory = '5'": "environment",
    "[environment]\nmemory = '1G'\nmemory_mb = 5": "environment",
    "[environment]\ncpus = nan": "environment.cpus",
    "[environment]\nallowed_hosts = ['a.org']": "environment",
    "[agent]\nallowed_hosts = []": "agent",
    "[verifier]\nenvironment_mode = 'own'": "verifier.environment_mode",
    "[verifier]\nenvironment_mode = 'shared'\nenvironment = {}": "verifier",
    "artifacts = 'out'": "artifacts",
    "artifacts = ['x', {source = '../y'}]": "artifacts.1",
    "artifacts = [{source = 'y', destination = '/z'}]": "artifacts.0",
    "[environment.healthcheck]\nretries = 1": "environment.healthcheck.command",
}


@pytest.mark.parametrize(("toml", "field"), REFUSED.items())
def test_what_a_task_asks_for_in_vain_is_named(tmp_path: Path, toml: str, field: str) -> None:
    harbor_task(tmp_path / "a", toml)
    with pytest.raises(InvalidField, match=rf"task.toml, line \d+, has {field}, and Outrider does not do") as raised:
        harbor_examples(tmp_path, offline=True)
    assert raised.value.field == field
    assert raised.value.hint


NONE = "[environment]\nnetwork_mode = 'no-network'\n"
PUBLIC = {"allow": ["*"]}
NETWORKS: dict[str, Any] = {
    "": PUBLIC,
    "[environment]\nnetwork_mode = 'public'": PUBLIC,
    "[environment]\nnetwork_mode = 'allowlist'": None,
    "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org', '*.b.org:8443']": {
        "allow": ["a.org", "*.b.org:8443"]
    },
    "[environment]\nallow_internet = true": PUBLIC,
    # Harbor's rule: the older field counts only if no newer field is set.
    "[environment]\nallow_internet = false\nnetwork_mode = 'public'": PUBLIC,
    "[environment]\nallow_internet = false\nallowed_hosts = []\nnetwork_mode = 'allowlist'": None,
    f"{NONE}[agent]\nnetwork_mode = 'public'": {"allow": [], "agent": ["*"]},
    f"{NONE}[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org']": {"allow": [], "agent": ["a.org"]},
    f"{NONE}[verifier]\nnetwork_mode = 'public'": {"allow": [], "verifier": ["*"]},
    "[agent]\nnetwork_mode = 'no-network'": {"allow": ["*"], "agent": []},
    f"{NONE}[[steps]]\nname = 'a'\nagent = {{network_mode = 'public'}}": {"allow": [], "agent": ["*"]},
    f"{NONE}[agent]\nnetwork_mode = 'public'\n[[steps]]\nname = 'a'\nagent = {{network_mode = 'no-network'}}": None,
}
"""The `network` of a task, by its task.toml."""


@pytest.mark.parametrize(("toml", "network"), NETWORKS.items())
def test_a_network_is_given_by_phase(tmp_path: Path, toml: str, network: Any) -> None:
    folder = harbor_task(tmp_path / "a", toml)
    (folder / "steps" / "a").mkdir(parents=True)
    (folder / "steps" / "a" / "instruction.md").write_text("a")
    [example] = harbor_examples(tmp_path)
    assert example.task["runtime"].get("network") == network
    as_task(example.task)
    assert "network" not in only(tmp_path, offline=True).task["runtime"]
    [example] = harbor_examples(tmp_path, network=["mirror:pip"])
    told = json.dumps(network).replace('"*"', '"mirror:pip"')
    assert example.task["runtime"].get("network") == json.loads(told)


def test_a_separate_verifier_has_the_network_of_its_environment(tmp_path: Path) -> None:
    harbor_task(tmp_path / "a", f"{NONE}[verifier.environment]\ncpus = 1")
    task = only(tmp_path, offline=False).task
    assert "network" not in task["runtime"]
    assert task["evaluator"]["runtime"]["network"] == PUBLIC
    toml = "[verifier]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.org']\n[verifier.environment]\n"
    (tmp_path / "a" / "task.toml").write_text(f"{NONE}{toml}network_mode = 'no-network'\ncpus = 1\n")
    own = only(tmp_path, offline=False).task["evaluator"]["runtime"]
    assert own["network"] == {"allow": [], "verifier": ["a.org"]}


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['https://a']", "environment.allowed_hosts.0"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['mirror:pip']", "environment.allowed_hosts.0"),
        (
            f"{NONE}[[steps]]\nname = 'a'\n[[steps]]\nname = 'b'\nagent = {{network_mode = 'public'}}",
            "steps.1.agent.network_mode",
        ),
    ],
)
def test_a_network_that_no_sandbox_has_is_not_promised(tmp_path: Path, toml: str, field: str) -> None:
    folder = harbor_task(tmp_path / "a", toml)
    for name in ("a", "b"):
        (folder / "steps" / name).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text("a")
    with pytest.raises(InvalidField, match="Outrider does not do") as raised:
        harbor_examples(tmp_path)
    assert raised.value.field == field


@pytest.mark.parametrize("said", ["network_mode = 'no-network'", "allow_internet = false"])
def test_a_task_that_needs_no_network_is_taken_as_it_is(tmp_path: Path, said: str) -> None:
    harbor_task(tmp_path / "a", f"[environment]\n{said}\n[verifier.environment]\n{said}\n[agent]\ntimeout_sec = 5")
    example = only(tmp_path, offline=False)
    assert "network" not in example.task["runtime"]
    assert "network" not in example.task["evaluator"].get("runtime", {})


WITH_ALL = {
    "task": {"name": "org/x", "authors": [{"name": "A"}]},
    "environment": {"docker_image": "x", "healthcheck": {"command": "true"}},
    "verifier": {"environment": {"docker_image": "x"}, "collect": [{"command": "true"}]},
    "artifacts": [{"source": "/x"}],
}
NEEDS: dict[str, dict[str, Any]] = {
    "verifier.environment_mode": {"verifier.environment": None},
    "environment.gpu_types": {"environment.gpus": 1},
    "artifacts.service": {"artifacts.source": "/y"},
    **{
        f"environment.mcp_servers.{name}": {
            "environment.mcp_servers": [{"name": "s", "command": "c", "url": "http://127.0.0.1:1/mcp"}]
        }
        for name in ("name", "transport", "url", "command", "args", "headers")
    },
}
"""By field: other fields that are set so that the field has an effect. None removes a field."""
OTHER: dict[str, Any] = {
    "schema_version": "1.3",
    "metadata": {"a": 1},
    "source": "here",
    "task.name": "org/y",
    "task.authors.name": "B",
    "task.keywords": ["a"],
    "agent.user": "nobody",
    "verifier.user": "nobody",
    "verifier.collect.user": "nobody",
    "environment.network_mode": "public",
    "environment.allow_internet": True,
    "environment.allowed_hosts": [],
    "agent.network_mode": "public",
    "verifier.network_mode": "public",
    "environment.os": "windows",
    "environment.gpu_types": ["H100"],
    "environment.tpu": {"type": "v6e"},
    "environment.mcp_servers.transport": "stdio",
    "environment.mcp_servers.url": "http://127.0.0.1:2/mcp",
    "environment.mcp_servers.args": ["-v"],
    "environment.mcp_servers.headers": {"X-A": "b"},
    "environment.env": {"A": "b"},
    "environment.workdir": "/x",
    "verifier.env": {"A": "b"},
    "verifier.environment": {"network_mode": "no-network", "cpus": 3},
    "verifier.environment_mode": "separate",
    "artifacts.exclude": ["*.o"],
    "artifacts.source": "/z",
    "solution.env": {"A": "b"},
    "steps.min_reward": 0.5,
    "steps.name": "b",
}
"""By field: a value that differs from the default. For most other fields, the number 7 or the text "7" is used."""


def placed(config: dict[str, Any], field: str, value: Any) -> None:
    *above, last = field.split(".")
    table: Any = config
    for name in above:
        table = table.setdefault(name, {})
        table = table[0] if isinstance(table, list) else table
    if value is None:
        table.pop(last, None)
    else:
        table[last] = value


def what_comes_of(folder: Path, config: dict[str, Any]) -> Any:
    """Return the task and its solution, the name of the field that Outrider does not support, or another error."""
    (folder / "task.toml").write_text("".join(f"{name} = {as_toml(value)}\n" for name, value in config.items()))
    try:
        [example] = harbor_examples(folder.parent, environ={})
    except InvalidField as error:
        return error.field if "Outrider does not do" in error.message else error
    return example.task, example.gold


def as_toml(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{name} = {as_toml(inner)}" for name, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(as_toml, value)) + "]"
        case _:
            return json.dumps(value)


@pytest.mark.parametrize(
    ("field", "use"), [(field, row.use) for row in FIELD_USES for field in row.fields], ids=lambda each: str(each)
)
def test_each_field_of_the_table_is_used_as_it_says(tmp_path: Path, field: str, use: Use) -> None:
    folder = harbor_task(tmp_path / "tasks" / "a")
    config: dict[str, Any] = copy.deepcopy(WITH_ALL)
    for place in ("environment", "verifier.environment"):
        placed(config, f"{place}.network_mode", "no-network")
    if field.startswith(("steps.", "multi_step")):
        config["steps"] = [{"name": "a"}, {"name": "c"}]
        placed(config, "multi_step_reward_strategy", "mean")
    for place in ("solution", "steps/a/solution", "steps/b/solution", "steps/c/solution"):
        (folder / place).mkdir(parents=True)
        (folder / place / "solve.sh").write_text("")
        if place != "solution":
            (folder / place / ".." / "instruction.md").write_text(place)
    for name, value in NEEDS.get(field, {}).items():
        placed(config, name, value)
    before = what_comes_of(folder, config)
    assert not isinstance(before, str) or use is Use.CHECKED, before
    if field in ("environment.allow_internet", "environment.allowed_hosts"):
        placed(config, "environment.network_mode", None)
    if field.endswith(".allowed_hosts") and not field.startswith("environment"):
        placed(config, field.replace("allowed_hosts", "network_mode"), "allowlist")
        changed: Any = ["a.org"]
    else:
        changed = OTHER.get(field, "final" if field.startswith("multi") else 7 if field.endswith(NUMBERS) else "7")
    placed(config, field, changed)
    after = what_comes_of(folder, config)
    if use is Use.CHECKED:
        assert isinstance(after, str)
        assert after.rpartition(".")[2] in (field.rpartition(".")[2], "network_mode")
    elif use is Use.GIVEN:
        assert not isinstance(after, str)
        assert after != before
    else:
        assert after == before


NUMBERS = ("_sec", "_mb", "cpus", "gpus", "retries")


def fields_of(table: type[BaseModel], above: str = "") -> set[str]:
    """Return the paths of all fields. Repeated tables are listed once: the agent, verifier, health check and artifacts
    of a step have the fields of the task's, and a verifier's environment has the fields of the task's environment."""
    found: set[str] = set()
    for name, field in table.model_fields.items():
        path = f"{above}{name}"
        inner = [each for each in INNER if each in repr(field.annotation)]
        if not inner or path in ("verifier.environment",):
            found.add(path)
        elif path not in ("steps.agent", "steps.verifier", "steps.healthcheck", "steps.artifacts"):
            found |= fields_of(INNER[inner[0]], f"{path}.")
    return found


INNER: dict[str, type[BaseModel]] = {
    f"schema.{kind.__name__}": kind
    for kind in vars(schema).values()
    if isinstance(kind, type) and issubclass(kind, schema.Table) and kind is not schema.Table
}


def test_the_table_has_every_field_once() -> None:
    listed = [field for row in FIELD_USES for field in row.fields]
    assert len(listed) == len(set(listed))
    assert set(listed) == fields_of(schema.TaskToml)


def test_files_that_nothing_brings_into_the_sandbox_are_not_left_out(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "a")
    (folder / "environment").mkdir()
    assert only(tmp_path).task["runtime"]["prepare"] == [LOGS]
    (folder / "environment" / "data.csv").write_text("1,2")
    with pytest.raises(InvalidField, match=r"no Dockerfile and no docker_image says how data.csv comes into") as raised:
        only(tmp_path)
    assert raised.value.field == "environment.docker_image"
    brought = only(tmp_path, image="debian").task["runtime"]
    assert (brought["image"], brought["prepare"][1:]) == ("debian", [{"write": "1,2", "to": "./data.csv"}])


@pytest.mark.parametrize(("toml", "field"), INVALID.items())
def test_what_is_invalid_is_named(tmp_path: Path, toml: str, field: str) -> None:
    harbor_task(tmp_path / "a", toml)
    with pytest.raises(InvalidField) as raised:
        harbor_examples(tmp_path, offline=True)
    assert str(raised.value.field).startswith(field)
    assert str(tmp_path / "a" / "task.toml") in raised.value.message


@pytest.mark.parametrize(
    ("name", "toml"),
    [
        ("environment/docker-compose.yaml", ""),
        ("trajectory.json", ""),
        ("tests/docker-compose.yaml", SEPARATE),
        ("tests/docker-compose.yaml", "[verifier.environment]\ndocker_image = 'x'"),
        ("tests/.harborignore", ""),
    ],
)
def test_a_file_that_asks_for_something_in_vain_is_named(tmp_path: Path, name: str, toml: str) -> None:
    folder = harbor_task(tmp_path / "a", toml)
    (folder / "environment").mkdir()
    (folder / name).write_text("x")
    with pytest.raises(InvalidField, match=re.escape(name)):
        harbor_examples(tmp_path, offline=True)


def test_a_table_that_is_no_toml(tmp_path: Path) -> None:
    harbor_task(tmp_path / "a", "[environment")
    with pytest.raises(InvalidField, match=r"task\.toml is not a TOML file"):
        harbor_examples(tmp_path, offline=True)


def test_a_dockerfile_needs_an_image_that_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    folder = harbor_task(tmp_path / "tasks" / "a")
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM debian:13")
    with pytest.raises(InvalidField, match=r"Dockerfile, line 1: there is no image 'debian:13'"):
        harbor_examples(tmp_path, offline=True)
    assert only(tmp_path, image="mine").task["runtime"]["image"] == "mine"


@pytest.mark.parametrize("place", ["tests/link", "solution/link"])
def test_links_that_lead_out_or_in_a_circle_are_refused(tmp_path: Path, place: str) -> None:
    folder = harbor_task(tmp_path / "tasks" / "a")
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").touch()
    (tmp_path / "secret").write_text("the host's")
    link = folder / place
    for aim, says in ((tmp_path / "secret", "leaves the task's folder"), (link.parent, "a folder that it is in")):
        link.unlink(missing_ok=True)
        link.symlink_to(aim)
        with pytest.raises(InvalidField, match=says):
            harbor_examples(tmp_path, offline=True)
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(InvalidField, match="neither a file nor a folder"):
        harbor_examples(tmp_path, offline=True)


@pytest.mark.parametrize("place", ["environment", "tests"])
def test_a_dockerfile_of_another_folder_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The image would contain the files of a folder that is not the task's."""
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    folder = harbor_task(tmp_path / "tasks" / "a", '[verifier]\nenvironment_mode = "separate"\n')
    other = tmp_path / "project"
    other.mkdir()
    (other / "Dockerfile").write_text("FROM base\nCOPY . /\n")
    (folder / place).rename(tmp_path / "away") if (folder / place).exists() else None
    (folder / place).symlink_to(other)
    for read in (lambda: build_contexts(tmp_path / "tasks"), lambda: harbor_examples(tmp_path / "tasks", offline=True)):
        with pytest.raises(InvalidField, match=f"{place} is a link that leaves the task's folder"):
            read()


@pytest.mark.parametrize(
    ("link", "to"),
    [
        ("environment", "."),
        ("environment", "tests"),
        ("solution", "environment/inner"),
        ("steps/a/tests", "environment"),
    ],
)
def test_a_folder_with_the_tests_or_the_solution_is_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, to: str
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    folder = harbor_task(tmp_path / "tasks" / "a")
    (folder / "environment/inner").mkdir(parents=True) if link != "environment" else None
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(folder / to)
    (folder / "environment" / "Dockerfile").write_text("FROM base\nCOPY . /\n")
    for read in (lambda: build_contexts(tmp_path / "tasks"), lambda: harbor_examples(tmp_path / "tasks", offline=True)):
        with pytest.raises(InvalidField, match="would show the agent") as refused:
            read()
        assert "put only" in str(refused.value.hint)


def test_a_link_does_not_bring_the_tests_to_the_agent(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "tasks" / "a")
    (folder / "environment").mkdir()
    (folder / "environment" / "link").symlink_to(folder / "tests" / "test.sh")
    with pytest.raises(InvalidField, match="would show the agent"):
        harbor_examples(tmp_path, image="mine", offline=True)


def test_an_instruction_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = harbor_task(tmp_path / "tasks" / "a")
    (tmp_path / "secret").write_text("the host's")
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidField, match="leaves the task's folder"):
        harbor_examples(tmp_path, offline=True)


def test_steps_are_those_of_the_task(tmp_path: Path) -> None:
    toml = """
multi_step_reward_strategy = "final"
artifacts = ["/out"]
[agent]
timeout_sec = 100.0
[verifier]
env = { A = "1", B = "1" }
[[verifier.collect]]
command = "all"
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
min_reward = { lines = 3 }
artifacts = ["more"]
agent = { timeout_sec = 1900.0 }
healthcheck = { command = "test -e up" }
[steps.verifier]
timeout_sec = 7.0
env = { B = "2" }
[[steps.verifier.collect]]
command = "own"
timeout_sec = 5
[[steps]]
name = "three"
verifier = { environment_mode = "separate" }
"""
    folder = harbor_task(tmp_path / "a", toml, test="exit 1")
    (folder / "tests" / "help.sh").write_text("help")
    (folder / "instruction.md").unlink()
    for name in ("one", "two", "three"):
        step = folder / "steps" / name
        for inner in ("tests", "solution", "workdir"):
            (step / inner).mkdir(parents=True)
        (step / "instruction.md").write_text(f"<!-- canary -->\nDo {name}.")
        (step / "solution" / "solve.sh").write_text(f"solve {name}")
    (folder / "steps" / "two" / "tests" / "test.sh").write_text("exit 2")
    (folder / "steps" / "two" / "workdir" / "setup.sh").write_text("touch up")
    (folder / "steps" / "one" / "workdir" / "in.txt").write_text("in")
    example = only(tmp_path)
    task = as_task(example.task)
    assert (task.instruction, [step.instruction for step in task.then]) == ("Do one.", ["Do two.", "Do three."])
    assert example.task["runtime"]["prepare"] == [LOGS, {"write": "in", "to": "./in.txt"}]
    assert [step.needs for step in task.then] == [{"reward": 0.5}, {"lines": 3.0}]
    assert (task.limits.agent_seconds, task.limits.session_seconds) == (100.0, 2100.0 + 1800.0)
    assert [step.agent_seconds for step in task.then] == [1900.0, 100.0]
    _, second, third = steps = [task, *task.then]
    tests = [{file["to"]: file["write"] for file in step.evaluator.options["tests"]} for step in steps]
    assert tests == [{"/tests/help.sh": "help", "/tests/test.sh": f"exit {code}"} for code in (1, 2, 1)]
    assert [step.evaluator.options["env"] for step in steps] == [{"A": "1", "B": b} for b in ("1", "2", "1")]
    assert [step.evaluator.seconds for step in steps] == [600.0, 7.0, 600.0]
    assert [[hook.run for hook in step.collect] for step in steps] == [["all"], ["all", "own"], ["all"]]
    assert ["alone" in step.evaluator.options for step in steps] == [True, True, False]
    assert (second.evaluator.carry, third.evaluator.carry) == (None, ["/logs/artifacts", "/out"])
    assert [step.run for step in third.evaluator.runtime.prepare] == [LOGS["run"]]
    assert task.artifacts == ["/logs/artifacts/**", "/out", "/out/**", "more", "more/**"]
    assert [step.get("run", step.get("to")) for step in example.task["then"][0]["prepare"]][1:] == [
        "./setup.sh",
        "bash ./setup.sh",
        "test -e up",
    ]
    assert task.steps_reward == "final"
    assert [file["write"] for gold in (example.gold, *example.gold.then) for file in gold.files] == [
        "solve one",
        "solve two",
        "solve three",
    ]
    (folder / "steps" / "three" / "instruction.md").unlink()
    with pytest.raises(InvalidField, match=r"cannot read .*three"):
        only(tmp_path)


def test_tests_that_are_too_large_and_tasks_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="no folder below"):
        harbor_examples(tmp_path, offline=True)
    folder = harbor_task(tmp_path / "a")
    with pytest.raises(InvalidField, match="there is no task 'b'"):
        harbor_examples(tmp_path, tasks=["b"], offline=True)
    (folder / "tests" / "fixture").mkdir()
    harbor_task(folder / "tests" / "fixture" / "inner")  # a part of the tests, not a task
    assert only(tmp_path).id == "a"
    (folder / "tests" / "more").write_bytes(random.Random(1).randbytes(17 << 20))
    with pytest.raises(TooLarge, match="16 MiB"):
        harbor_examples(tmp_path, offline=True)
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(InvalidField, match=r"has no tests/test\.sh"):
        harbor_examples(tmp_path, offline=True)
