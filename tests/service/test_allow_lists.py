"""Which Python code, runtimes, images and callback hosts a task may name, according to the operator's settings."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest

from outrider.client.client import AsyncClient
from outrider.config import CallbacksConfig, Config, PluginsConfig, SandboxesConfig, load_config
from outrider.errors import InvalidField
from outrider.service.allow_lists import AllowLists
from outrider.service.principals import LOCAL, Principal
from outrider.spec import GroupSpec
from support.service import running_service

SUBMITTER = Principal("alice", "submit", "alice")


def group(callback: str | None = None, **task: Any) -> GroupSpec:
    body = {
        "instruction": "say hello",
        "harness": {"agent": "tools"},
        "evaluator": {"kind": "command", "run": "true"},
        **task,
    }
    return GroupSpec.model_validate({"task": body, "callback_url": callback})


def refusal(spec: GroupSpec, caller: Principal = LOCAL, **settings: Any) -> str | None:
    """Return the field that is refused, or None."""
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
    """Return a group of two steps. The second step is graded in a sandbox of this runtime."""
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


def own_addresses() -> list[str]:
    """Return the addresses of this machine's interfaces: the IPv4 addresses in the kernel's table of local addresses,
    except 127.x, and all IPv6 addresses."""
    lines = Path("/proc/net/fib_trie").read_text().splitlines()
    four = {
        above.split()[-1] for above, line in itertools.pairwise(lines) if "host LOCAL" in line and " 127." not in above
    }
    six = [line.split()[0] for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    return sorted(four) + [str(IPv6Address(int(one, 16))) for one in six]


HELD = (
    *("::ffff:{0}", "64:ff9b::{0}", "64:ff9b:1::{0}", "::{0}", "::ffff:0:{0}", "2001:db8::5efe:{0}"),
    *("2002:{1:04x}:{2:04x}::1", "2001:0:{1:04x}:{2:04x}::1"),
)
"""Forms of IPv6 addresses that contain an IPv4 address."""


def held(address: str) -> list[str]:
    number = int(IPv4Address(address))
    return [form.format(address, number >> 16, number & 0xFFFF) for form in HELD]


@pytest.mark.parametrize("address", own_addresses())
def test_no_notation_of_an_own_address_is_called_back_where_others_reach_the_service(address: str) -> None:
    four = ip_address(address).version == 4
    for form in (address, *(held(address) if four else ())):
        at = form if form == address and four else f"[{form}]"
        assert refusal(group(f"http://{at}:8000/"), host="0.0.0.0") == "callback_url", form
        if not ip_address(address).is_link_local:
            assert refusal(group(f"http://{at}:8000/")) is None, form
        family = socket.AF_INET6 if ":" in form else socket.AF_INET
        for place in (form,) if family == socket.AF_INET else (form, f"{form}%lo"):
            with pytest.raises(OSError, match="callbacks may not go to"):
                AllowLists(Config(host="0.0.0.0")).socket((family, socket.SOCK_STREAM, 0, "", (place, 80)))
    listed = CallbacksConfig(allow=(address,))
    at = address if four else f"[{address}]"
    assert refusal(group(f"http://{at}/"), host="0.0.0.0", callbacks=listed) is None


@pytest.mark.parametrize("form", [*held("169.254.169.254"), "fd00:ec2::254", "fd20:ce::254"])
def test_no_notation_of_a_cloud_s_credentials_is_called_back(form: str) -> None:
    assert refusal(group(f"http://[{form}]/latest")) == "callback_url"


def test_an_address_that_holds_a_listed_one_is_not_listed_by_that() -> None:
    callbacks = CallbacksConfig(allow=("10.0.0.0/8",))
    assert refusal(group("http://[2002:a00:5::1]/"), callbacks=callbacks) == "callback_url"
    assert refusal(group("http://[::ffff:10.0.0.5]/"), callbacks=callbacks) is None


ADDED = """
import subprocess, time
from ipaddress import ip_address
from outrider.sandbox.network.addresses import is_own
asked = [ip_address(one) for one in ("198.51.100.7", "10.200.3.4", "fd77::9", "192.0.2.77")]
before = [is_own(one) for one in asked]
for command in ("link set lo up", "addr add 198.51.100.7/24 dev lo", "route add local 10.200.0.0/16 dev lo",
                "addr add fd77::9/64 dev lo"):
    subprocess.run(["ip", *command.split()], check=True)
until = time.monotonic() + 10  # the kernel adds the route of an address of IPv6 in a worker thread, a moment later
while not is_own(asked[2]) and time.monotonic() < until:
    time.sleep(0.01)
print(before, [is_own(one) for one in asked])
"""


@pytest.mark.deep  # .ci/run installs `ip` before the deep tests
@pytest.mark.skipif(shutil.which("ip") is None or shutil.which("unshare") is None, reason="needs ip and unshare")
def test_an_address_that_the_machine_gets_later_is_own_from_then_on() -> None:
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", ADDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip("no user namespaces here")
    assert done.stdout.strip() == "[False, False, False, False] [True, True, True, False]", done.stderr


def test_a_name_that_leads_to_a_refused_address_is_not_connected_to() -> None:
    public = AllowLists(Config(host="0.0.0.0", callbacks=CallbacksConfig(allow=("localhost",))))
    public.check_host("http://localhost/")
    for address in ("127.0.0.1", "::1", "fe80::1%eth0", "fd00:ec2::254%eth0", "::ffff:169.254.169.254", "0.0.0.0"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with pytest.raises(OSError, match="callbacks may not go to"):
            public.socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 80)))
    public.socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("10.0.0.5", 80))).close()


def test_a_network_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CALLBACKS__ALLOW", '["10.0.0.1/8"]')
    with pytest.raises(InvalidField, match="has host bits set"):
        load_config({})
