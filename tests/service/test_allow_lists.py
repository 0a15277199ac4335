"""What tasks may name: Python, runtimes, images and hosts of callbacks, as the operator's settings say."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient
from outrider.config import CallbacksConfig, Config, PluginsConfig, SandboxesConfig, load_config
from outrider.errors import InvalidField
from outrider.service.allow_lists import AllowLists
from outrider.service.principals import LOCAL, Principal
from outrider.spec import GroupSpec
from support.service import running_service

SUBMITTER = Principal("alice", "submit")


def group(callback: str | None = None, **task: Any) -> GroupSpec:
    body = {
        "instruction": "say hello",
        "harness": {"agent": "tools"},
        "evaluator": {"kind": "command", "run": "true"},
        **task,
    }
    return GroupSpec.model_validate({"task": body, "callback_url": callback})


def refusal(spec: GroupSpec, caller: Principal = LOCAL, **settings: Any) -> str | None:
    """The field that is refused."""
    try:
        AllowLists(Config(**settings)).check(spec, caller)
    except InvalidField as error:
        return error.field
    return None


@pytest.mark.parametrize(
    ("allow", "name", "allowed"),
    [
        ([], "my_rewards:exact", False),
        (["my_rewards"], "my_rewards:exact", True),
        (["my_rewards"], "my_rewards.maths:exact", True),
        (["my_rewards"], "my_rewards_of_others:exact", False),
        (["my_rewards"], "my_rewards:os.system", False),
        (["my_rewards:os.system"], "my_rewards:os.system", True),
        (["my_rewards.maths"], "my_rewards:exact", False),
        (["my_rewards:exact"], "my_rewards:exact", True),
        (["my_rewards:exact"], "my_rewards:exactly", False),
        (["*"], "os:system", True),
        ([], "exact", True),
    ],
)
def test_python_is_named_only_where_the_operator_lists_it(allow: list[str], name: str, allowed: bool) -> None:
    plugins = PluginsConfig(allow=tuple(allow))
    tasks: dict[str, dict[str, Any]] = {
        "task.evaluator.path": {"evaluator": {"kind": "callable", "path": name}},
        "task.evaluator.kind": {"evaluator": {"kind": name}},
        "task.harness.agent": {"harness": {"agent": name}},
        "task.runtime.kind": {"runtime": {"kind": name}},
    }
    for field, task in tasks.items():
        assert refusal(group(**task), plugins=plugins) == (None if allowed else field)


async def test_what_is_not_listed_is_not_even_imported(tmp_path: Path) -> None:
    async with running_service(tmp_path=tmp_path, plugins=PluginsConfig()) as (_, url), AsyncClient(url) as client:
        task = group(runtime={"kind": "memory"}).task.model_dump(exclude_unset=True)
        for change in (
            {"evaluator": {"kind": "callable", "path": "antigravity:fly"}},
            {"harness": {"agent": "this:c"}},
        ):
            with pytest.raises(InvalidField, match="would run inside the service"):
                await client.submit({"task": task | change})
        with pytest.raises(InvalidField, match="would run inside the service"):
            await client.add_engine({"kind": "antigravity:Engine"})
    assert {"antigravity", "this"}.isdisjoint(sys.modules)


def graded_in(**runtime: Any) -> GroupSpec:
    """A group of two steps, the second of which is graded in a sandbox of that runtime."""
    evaluator = {"run": "true", "carry": ["out"], "runtime": runtime}
    return group(then=[{"instruction": "go on", "evaluator": evaluator}])


def test_what_a_grader_s_sandbox_is_made_of_must_be_allowed_too() -> None:
    field = "task.then.0.evaluator.runtime"
    assert refusal(graded_in(kind="some:Runtime"), plugins=PluginsConfig()) == f"{field}.kind"
    assert refusal(graded_in(kind="process"), SUBMITTER) == f"{field}.kind"
    assert refusal(graded_in(kind="process")) is None
    images = SandboxesConfig(images=("python",))
    assert refusal(graded_in(image="pythonic/evil"), sandboxes=images) == f"{field}.image"
    assert refusal(graded_in(image="python:3.12"), sandboxes=images) is None
    first = group(evaluator={"run": "true", "carry": [], "runtime": {"image": "evil"}})
    assert refusal(first, sandboxes=images) == "task.evaluator.runtime.image"


def test_only_an_admin_runs_programs_without_a_sandbox() -> None:
    for kind in ("process", "some:Runtime"):
        spec, plugins = group(runtime={"kind": kind}), PluginsConfig(allow=("some",))
        assert refusal(spec, plugins=plugins) is None
        assert refusal(spec, SUBMITTER, plugins=plugins) == "task.runtime.kind"
        allowed = SandboxesConfig(runtimes=(kind,))
        assert refusal(spec, SUBMITTER, sandboxes=allowed, plugins=plugins) is None
    assert refusal(group(), SUBMITTER) is None


@pytest.mark.parametrize(
    ("prefix", "image", "allowed"),
    [
        ("python", "python", True),
        ("python", "python:3.12", True),
        ("python", "python@sha256:0", True),
        ("python", "pythonic/evil", False),
        ("registry.example/team/", "registry.example/team/agent:1", True),
        ("registry.example/team/", "registry.example/teams/agent:1", False),
        ("registry.example", "registry.example.evil/agent", False),
    ],
)
def test_images_begin_as_the_operator_says(prefix: str, image: str, allowed: bool) -> None:
    spec = group(runtime={"image": image})
    assert refusal(spec) is None
    settings = SandboxesConfig(images=(prefix,))
    assert refusal(spec, sandboxes=settings) == (None if allowed else "task.runtime.image")
    assert refusal(group(), sandboxes=settings) is None


@pytest.mark.parametrize(
    ("place", "settings", "allowed"),
    [
        ("http://trainer.example/done", {}, True),
        ("http://10.0.0.5:80/done", {}, True),
        ("http://127.0.0.1/done", {}, True),
        ("http://127.0.0.1/done", {"host": "0.0.0.0"}, False),
        ("http://[::1]/done", {"host": "0.0.0.0"}, False),
        ("http://0.0.0.0/done", {"host": "0.0.0.0"}, False),
        ("http://0x7f.1/done", {"host": "0.0.0.0"}, False),
        ("http://[::ffff:127.0.0.1]/done", {"host": "0.0.0.0"}, False),
        ("http://169.254.169.254/latest/meta-data", {}, False),
        ("http://[::ffff:169.254.169.254]/latest", {}, False),
        ("http://[fe80::1]/", {}, False),
        ("http://[fd00:ec2::254]/latest", {}, False),
        ("http://100.100.100.200/latest", {}, False),
        ("http://trainer.example/", {"allow": ("trainer.example",)}, True),
        ("http://TRAINER.example./", {"allow": ("trainer.example",)}, True),
        ("http://trainer.example.evil/", {"allow": ("trainer.example",)}, False),
        ("http://a.team.example/", {"allow": ("*.team.example",)}, True),
        ("http://team.example/", {"allow": ("*.team.example",)}, False),
        ("http://other.example/", {"allow": ("10.0.0.0/8",)}, False),
        ("http://10.1.2.3/", {"allow": ("10.0.0.0/8",)}, True),
        ("http://11.1.2.3/", {"allow": ("10.0.0.0/8",)}, False),
        ("http://127.0.0.1/", {"host": "0.0.0.0", "allow": ("127.0.0.0/8",)}, True),
        ("http://127.0.0.1/", {"host": "0.0.0.0", "allow": ("127.0.0.1",)}, True),
    ],
)
def test_callbacks_go_where_they_may(place: str, settings: dict[str, Any], allowed: bool) -> None:
    config = {"host": settings.get("host", "127.0.0.1"), "callbacks": CallbacksConfig(allow=settings.get("allow", ()))}
    assert refusal(group(place), **config) == (None if allowed else "callback_url")


def test_a_name_that_leads_to_a_refused_address_is_not_connected_to() -> None:
    public = AllowLists(Config(host="0.0.0.0", callbacks=CallbacksConfig(allow=("localhost",))))
    public.check_host("http://localhost/")
    for address in ("127.0.0.1", "::1", "fe80::1%eth0", "::ffff:169.254.169.254", "0.0.0.0"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with pytest.raises(OSError, match="callbacks may not go to"):
            public.socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 80)))
    public.socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("10.0.0.5", 80))).close()


def test_a_network_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CALLBACKS__ALLOW", '["10.0.0.1/8"]')
    with pytest.raises(InvalidField, match="has host bits set"):
        load_config({})
