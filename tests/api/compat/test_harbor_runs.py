"""Harbor's run API, with a client written from the contract alone."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.compat.test_verl import Recipe
from external.world import Owner
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.service.service import Service
from outrider.tasks.datasets import harbor_examples
from support.coin import OneCall
from support.harbor import HarborClient, packed, task_folder
from support.service import call, running_service, say

pytestmark = pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="no user namespaces on this machine")

GOLDEN = Path(__file__).parent / "golden" / "verl" / "harbor-runs.txt"
REPLIES = (f"I write.{call('echo 42 > answer.txt')}", say("Done."))
TOOLS = "tools"
CHANGING = (
    (re.compile(r"s-[0-9a-f]{16}-"), "s-GROUP-"),
    (re.compile(r"g-[0-9a-f]{16}"), "g-GROUP"),
    (re.compile(r'"logprobs":\[\[.*?\]\]'), '"logprobs":[NUMBERS]'),
    (re.compile(r'"(prompt|completion)_token_ids":\[\[.*?\]\]'), r'"\1_token_ids":[IDS]'),
)


class CallsTwice(OneCall):
    """An agent whose two calls are half a second apart. The second continues the first."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        asked = [Message(role=Role.USER, content=context.task.instruction)]
        reply = await context.model.chat(asked)
        await asyncio.sleep(0.5)
        await context.model.chat([*asked, reply, Message(role=Role.USER, content="Go on.")])
        return HarnessOutcome()


class Breaks(OneCall):
    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await super().run(context)
        raise RuntimeError("a broken agent")


def request(**more: Any) -> dict[str, Any]:
    return {
        "job_id": "verl-default",
        "task_id": "swe-1",
        "task_path": "/data/swe-1",
        "agent": {"import_path": TOOLS, "model_name": "openai/qwen", "kwargs": {}},
        "timeout_multiplier": 1.0,
        "max_retries": 0,
        "verifier": {"disable": False},
        **more,
    }


def agent(path: str, **more: Any) -> dict[str, Any]:
    return {"import_path": path, "kwargs": {}, **more}


@asynccontextmanager
async def run_server(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[HarborClient, Service]]:
    settings = {"replies": REPLIES, "compat": ("verl",), **settings}
    async with (
        aiohttp.ClientSession() as http,
        running_service(tmp_path=tmp_path, **settings) as (service, url),
    ):
        yield HarborClient(http, url), service


async def group_of(client: HarborClient, run_id: str) -> dict[str, Any]:
    code, body = await client.get(f"/v1/groups/{run_id}?samples=true")
    assert code == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


async def test_a_run_that_blocks_and_one_that_is_polled(tmp_path: Path) -> None:
    """Both runs have the rows that the native API has for the same task and script."""
    archive = packed(task_folder(tmp_path / "swe-1"))
    async with run_server(tmp_path) as (client, _):
        blocked = await client.run(request(), archive)
        run_id = await client.begin(request(), archive)
        assert await client.ended(run_id) == await client.status(run_id)
        polled = await client.result(run_id)
        [example] = harbor_examples(tmp_path / "swe-1")
        body = {"task": {**example.task, "harness": {"agent": TOOLS}}}
        async with client.http.post(f"{client.url}/v1/groups", json=body) as reply:
            own_id = (await reply.json())["id"]
        async with client.http.get(f"{client.url}/v1/groups/{own_id}?wait=30&samples=true") as reply:
            own = await reply.json()
        for response in (blocked, polled):
            assert (response.status, response.error) == ("completed", None)
            assert response.rewards == {"reward": 1.0, "speed": 0.5}
            group = await group_of(client, response.run_id)
            assert [each["ids"] for each in group["samples"]] == [each["ids"] for each in own["samples"]]
            assert [each["reward"] for each in group["samples"]] == [each["reward"] for each in own["samples"]] == [1.0]
            assert group["labels"]["harbor.job_id"] == "verl-default"
            assert response.rollout_details is not None
            [detail] = response.rollout_details
            [row] = own["samples"]
            whole = [*detail.prompt_token_ids[-1], *detail.completion_token_ids[-1]]
            assert whole == row["ids"]
            assert [len(each) for each in detail.logprobs] == [len(each) for each in detail.completion_token_ids]
            assert response.token_usage is not None
            assert response.token_usage.n_output_tokens == sum(map(len, detail.completion_token_ids))
            assert response.token_usage.n_input_tokens == sum(map(len, detail.prompt_token_ids))
        assert blocked.run_id != run_id


async def test_a_run_is_recorded_in_the_session_of_its_proxy(tmp_path: Path) -> None:
    """The recipe's loop: create, run with the session's URL, close, read, delete."""
    archive = packed(task_folder(tmp_path / "swe-1"))
    async with run_server(tmp_path) as (client, _):
        recipe = Recipe(client.http, client.url)
        await recipe.status("POST", "/sessions/swe-1-a", "created")
        metadata = request(llm_proxy_url="http://10.0.0.5:8700/swe-1-a/v1")
        run_id = await client.begin(metadata, archive)
        assert await client.begin(metadata, archive) == run_id, "a repeated submission is the same run"
        assert (await client.ended(run_id)).rewards == {"reward": 1.0, "speed": 0.5}
        code, body = await client.post("/api/v1/runs/async", {**metadata, "task_id": "other"}, archive)
        assert code == 409, body
        question = {"model": "m", "messages": [{"role": "user", "content": "Hi."}]}
        assert (await recipe.ask("POST", "/swe-1-a/v1/chat/completions", question))[0] == 409
        await recipe.status("POST", "/sessions/swe-1-a/complete", "completed")
        record = await recipe.record("swe-1-a")
        [detail] = (await client.result(run_id)).rollout_details or []
        assert [turn.completion_token_ids for turn in record.turns] == detail.completion_token_ids
        assert [turn.finish_reason for turn in record.turns] == ["tool_calls", "stop"]
        listed = json.loads((await recipe.ask("GET", "/sessions"))[1])
        assert listed["sessions"] == [{"session_id": "swe-1-a", "turns": 2, "completed": True}]
        await recipe.status("DELETE", "/sessions/swe-1-a", "deleted")
        code, body = await client.post("/api/v1/runs/async", metadata, archive)
        assert code == 400, "the session is gone"
        assert b"llm_proxy_url" in body


async def test_a_reset_makes_room_for_the_next_run(tmp_path: Path) -> None:
    """The turns of the run before the reset do not come back, even after a restart."""
    archive = packed(task_folder(tmp_path / "swe-1"))
    metadata = request(llm_proxy_url="http://h:1/a", agent=agent("api.compat.test_harbor_runs:Breaks"))
    async with run_server(tmp_path) as (client, _):
        recipe = Recipe(client.http, client.url)
        await recipe.status("POST", "/sessions/a", "created")
        run_id = await client.begin(metadata, archive)
        failed = await client.ended(run_id)
        assert (failed.status, failed.rewards) == ("failed", None)
        assert "a broken agent" in (failed.error or "")
        assert len((await recipe.record("a")).turns) == 1
        await recipe.status("POST", "/sessions/a/reset", "reset")
        assert (await recipe.record("a")).turns == []
    async with run_server(tmp_path) as (client, _):
        recipe = Recipe(client.http, client.url)
        assert (await recipe.record("a")).turns == []
        assert (await client.status(run_id)).status == "failed", "runs survive the service"
        second = await client.begin({**metadata, "agent": agent(TOOLS)}, archive)
        assert second != run_id
        assert (await client.ended(second)).status == "completed"
        assert len((await recipe.record("a")).turns) == 2


async def test_a_run_goes_on_in_the_next_service(tmp_path: Path) -> None:
    archive = packed(task_folder(tmp_path / "swe-1"))
    slow = agent("api.compat.test_harbor_runs:CallsTwice")
    metadata = request(agent=slow, llm_proxy_url="http://h/a/v1")
    async with run_server(tmp_path) as (client, _):
        recipe = Recipe(client.http, client.url)
        await recipe.status("POST", "/sessions/a", "created")
        run_id = await client.begin(metadata, archive)
        for _ in range(1000):
            if (await recipe.record("a")).turns:
                break
            await asyncio.sleep(0.01)
        assert (await client.status(run_id)).status == "running"
    async with run_server(tmp_path) as (client, _):
        recipe = Recipe(client.http, client.url)
        assert await client.begin(metadata, archive) == run_id, "the client's repetition finds the run"
        response = await client.run(metadata, archive)
        assert (response.run_id, response.status, response.retry_count) == (run_id, "completed", 0)
        assert len((await recipe.record("a")).turns) == 2, "those of the attempt that has ended"


async def test_a_closed_session_cancels_its_run(tmp_path: Path) -> None:
    archive = packed(task_folder(tmp_path / "swe-1"))
    metadata = request(llm_proxy_url="http://h/a", agent=agent("support.coin:CallAndWait"))
    async with run_server(tmp_path) as (client, _):
        recipe = Recipe(client.http, client.url)
        await recipe.status("POST", "/sessions/a", "created")
        run_id = await client.begin(metadata, archive)
        for _ in range(1000):
            if (await recipe.record("a")).turns:
                break
            await asyncio.sleep(0.02)
        assert (await client.get(f"/api/v1/runs/async/{run_id}/result"))[0] == 404, "not yet"
        assert (await client.status(run_id)).status == "running"
        await recipe.status("POST", "/sessions/a/complete", "completed")
        ended = await client.ended(run_id)
        assert (ended.status, ended.rewards) == ("failed", None)
        assert "cancelled" in (ended.error or "")


async def test_a_time_limit_is_graded_and_no_failure_is_a_reward(tmp_path: Path) -> None:
    async with run_server(tmp_path) as (client, _):
        archive = packed(task_folder(tmp_path / "a"))
        hangs = agent("support.coin:CallAndWait", override_timeout_sec=10.0, max_timeout_sec=1.0)
        timeout = await client.run(request(agent=hangs, timeout_multiplier=0.2), archive)
        assert (timeout.status, timeout.rewards) == ("timeout", {"reward": 0.25, "speed": 0.5})
        assert "agent_timeout" in (timeout.error or "")
        silent = await client.run(request(), packed(task_folder(tmp_path / "b", test="exit 1")))
        assert (silent.status, silent.rewards) == ("failed", None)
        assert "reward.json" in (silent.error or "")
        retried = await client.run(request(max_retries=1, agent=agent("api.compat.test_harbor_runs:Breaks")), archive)
        assert (retried.status, retried.rewards, retried.retry_count) == ("failed", None, 1)
        ungraded = await client.run(request(verifier={"disable": True}), archive)
        assert (ungraded.status, ungraded.rewards, ungraded.error) == ("completed", None, None)


async def test_a_dropped_connection_ends_no_run(tmp_path: Path) -> None:
    archive = packed(task_folder(tmp_path / "swe-1"))
    metadata = request(agent=agent("support.coin:OneCall", kwargs={"seconds": 0.5}))
    async with run_server(tmp_path) as (client, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.post("/api/v1/runs", metadata, archive, **{"Idempotency-Key": "k1"})
        run_id = await client.begin(metadata, archive, **{"Idempotency-Key": "k1"})
        assert (await client.ended(run_id)).status == "completed"
        code, body = await client.post(
            "/api/v1/runs/async", {**metadata, "task_id": "x"}, archive, **{"Idempotency-Key": "k1"}
        )
        assert (code, b"Idempotency-Key" in body) == (409, True)
        assert len(json.loads((await client.get("/v1/results?after=0&wait=1"))[1])["groups"]) == 1


async def test_runs_belong_to_a_tenant(tmp_path: Path) -> None:
    archive = packed(task_folder(tmp_path / "swe-1"))
    async with run_server(tmp_path, token="operator-token-1") as (client, _):
        async with httpx.AsyncClient() as http:
            operator = Owner(http, client.url, "operator-token-1")
            tokens = {
                name: (await operator.call("POST", "/tokens", {"name": name, "role": "submit"})).json()["text"]
                for name in ("alice", "bob")
            }
        alice, bob = (
            HarborClient(client.http, client.url, {"Authorization": f"Bearer {tokens[name]}"})
            for name in ("alice", "bob")
        )
        assert (await client.post("/api/v1/runs/async", request(), archive))[0] == 401
        plain = request()
        code, body = await alice.post("/api/v1/runs/async", plain, archive)
        run_id = json.loads(body)["run_id"]
        assert code == 200
        for part in ("status", "result"):
            assert (await bob.get(f"/api/v1/runs/async/{run_id}/{part}"))[0] == 404
        assert (await alice.get(f"/api/v1/runs/async/{run_id}/status"))[0] == 200
        async with client.http.post(f"{client.url}/sessions/s1", headers=alice.headers) as reply:
            assert reply.status == 200
        bound = {**plain, "llm_proxy_url": "http://h/s1/v1"}
        assert (await bob.post("/api/v1/runs/async", bound, archive))[0] == 400, "no session of bob's"


REFUSALS: Mapping[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"odd": 1}, "odd"),
    "unknown agent": ({"agent": {"name": "terminus-2"}}, "agent.name"),
    "no model": ({"agent": {"name": "oracle"}}, "agent.name"),
    "two agents": ({"agent": {"name": "codex", "import_path": "a:B"}}, "agent"),
    "agent option": ({"agent": {"name": "codex", "kwargs": {"odd": 1}}}, "agent.kwargs"),
    "turns": ({"agent": {"name": "claude-code", "kwargs": {"max_turns": 0}}}, "agent.kwargs.max_turns"),
    "retries": ({"max_retries": 11}, "max_retries"),
    "multiplier": ({"timeout_multiplier": 0.01}, "timeout_multiplier"),
    "override": ({"environment_overrides": {"type": "docker"}}, "environment_overrides.type"),
    "network": ({"environment_overrides": {"network_mode": "public"}}, "environment_overrides.network_mode"),
    "kubernetes": ({"environment_kwargs": {"namespace": "x"}}, "environment_kwargs.namespace"),
    "variables": ({"environment_kwargs": {"extra_env": {"A": 1}}}, "environment_kwargs.extra_env"),
    "temperature": ({"agent": {"import_path": TOOLS, "kwargs": {"temperature": -1.0}}}, "agent.kwargs.temperature"),
    "another proxy": ({"llm_proxy_url": "http://h:1/a/b/v1"}, "llm_proxy_url"),
    "unknown session": ({"llm_proxy_url": "http://h:1/none/v1"}, "llm_proxy_url"),
    "a session key": ({"llm_proxy_url": "http://h:1/s/k"}, "llm_proxy_url"),
    "no url": ({"llm_proxy_url": "http://[/a"}, "llm_proxy_url"),
    "two proxies": ({"llm_proxy_url": "http://h/a", "agent": agent(TOOLS, llm_proxy_url="http://h/b")}, "agent.llm"),
}


async def test_what_cannot_be_translated_is_refused_by_name(tmp_path: Path) -> None:
    archive = packed(task_folder(tmp_path / "swe-1"))
    async with run_server(tmp_path) as (client, _):
        for name, (changes, field) in REFUSALS.items():
            code, body = await client.post("/api/v1/runs/async", request(**changes), archive)
            assert code in (400, 422), (name, body)
            assert json.loads(body)["detail"].startswith(field), (name, body)
        public = packed(task_folder(tmp_path / "public", toml=""))
        code, body = await client.post("/api/v1/runs/async", request(), public)
        assert code == 422
        assert b"environment_overrides" in body
        assert str(tmp_path).encode() not in body
        assert b"/tmp" not in body, "paths of this machine are not shown"
        code, body = await client.post("/api/v1/runs/async", request(), archive, **{"Idempotency-Key": "k" * 300})
        assert (code, b"Idempotency-Key" in body) == (422, True)
        offline = request(environment_overrides={"network_mode": "no-network", "env": {"A": "b"}, "cpus": 1})
        assert (await client.run(offline, public)).status == "completed"


async def test_a_task_takes_no_variable_of_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "hunter2")
    toml = '[environment]\nnetwork_mode = "no-network"\nenv = { A = "${SECRET_OF_THE_SERVICE}" }\n'
    async with run_server(tmp_path) as (client, _):
        code, body = await client.post("/api/v1/runs/async", request(), packed(task_folder(tmp_path / "a", toml=toml)))
        assert code == 422
        assert b"SECRET_OF_THE_SERVICE" in body
        assert b"hunter2" not in body


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for entry, data in members:
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return written.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


OUTSIDE = Path("/tmp") / f"outrider-was-here-{os.getpid()}"
"""A file that an archive tries to write outside of its folder."""
ARCHIVES: dict[str, Callable[[], bytes]] = {
    "outside": lambda: tar_of((entry("../a"), b"x")),
    "absolute": lambda: tar_of((entry(str(OUTSIDE)), b"x")),
    "link": lambda: tar_of((entry("t/a", tarfile.SYMTYPE, "/etc/passwd"), b"")),
    "hard link": lambda: tar_of((entry("t/a", tarfile.LNKTYPE, "/etc/passwd"), b"")),
    "device": lambda: tar_of((entry("t/a", tarfile.CHRTYPE), b"")),
    "pipe": lambda: tar_of((entry("t/a", tarfile.FIFOTYPE), b"")),
    "twice": lambda: tar_of((entry("t/a"), b"x"), (entry("t/a"), b"y")),
    "file and folder": lambda: tar_of((entry("t"), b"x"), (entry("t/a"), b"y")),
    "long name": lambda: tar_of((entry("t/" + "a" * 300), b"y")),
    "deep": lambda: tar_of((entry("a/" * 100 + "b"), b"y")),
    "bomb": lambda: gzip.compress(bytes(64 << 20)),
    "big file": lambda: tar_of((entry("t/a"), bytes(65 << 20))),
    "zeros": lambda: tar_of((entry("t/a"), bytes(40 << 20))),
    "sparse": lambda: tar_of((entry("t/a", tarfile.GNUTYPE_SPARSE), b"")),
    "long header": lambda: tar_of((entry("t/a", tarfile.GNUTYPE_LONGNAME), bytes(2 << 20)), (entry("t/b"), b"")),
    "long toml": lambda: tar_of(
        (entry("t/task.toml"), os.urandom(1 << 20).hex().encode()), (entry("t/instruction.md"), b"x")
    ),
    "many": lambda: tar_of(*((entry(f"t/{number}"), b"") for number in range(5000))),
    "empty": lambda: b"",
    "no gzip": lambda: b"PK\3\4" + bytes(100),
    "cut": lambda: packed(Path(__file__).parent / "golden")[:200],
    "no task": lambda: tar_of((entry("t/a"), b"x")),
    "two tasks": lambda: tar_of((entry("t/task.toml"), b""), (entry("u/task.toml"), b"")),
    "broken toml": lambda: tar_of((entry("t/task.toml"), b"["), (entry("t/instruction.md"), b"x")),
    "no tests": lambda: tar_of(
        (entry("t/task.toml"), b'[environment]\nnetwork_mode="no-network"'), (entry("t/x"), b"")
    ),
}
"""Each test makes its own archive: making all of them takes a second in every worker that collects the tests."""


@pytest.mark.parametrize("name", ARCHIVES)
async def test_hostile_archives_are_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    async with run_server(tmp_path) as (client, _):
        code, body = await client.post("/api/v1/runs/async", request(), ARCHIVES[name]())
        assert code in (413, 422), (code, body)
        assert json.loads(body)["detail"].startswith("task_archive"), body
        assert not [name for name in os.listdir(temporary) if name.startswith("outrider-run-")], "nothing is left"
        assert OUTSIDE.name not in os.listdir(OUTSIDE.parent)


BODIES = {
    "no type": ("", b"x"),
    "json": ("application/json", b"{}"),
    "no boundary": ("multipart/form-data", b"x"),
    "no end": ("multipart/form-data; boundary=b", b"--b\r\n"),
    "no headers": ("multipart/form-data; boundary=b", b"--b\r\nx\r\n--b--"),
    "no name": ("multipart/form-data; boundary=b", b"--b\r\nA: b\r\n\r\nx\r\n--b--"),
    "unknown part": (
        "multipart/form-data; boundary=b",
        b'--b\r\nContent-Disposition: form-data; name="odd"\r\n\r\nx\r\n--b--',
    ),
    "one part": (
        "multipart/form-data; boundary=b",
        b"--b\r\nContent-Disposition: form-data; name=metadata\r\n\r\n{}\r\n--b--",
    ),
    "many parts": ("multipart/form-data; boundary=b", b"--b\r\n\r\n" * 100_000 + b"--b--"),
    "twice": (
        "multipart/form-data; boundary=b",
        b'--b\r\nContent-Disposition: form-data; name="metadata"\r\n\r\n{}\r\n' * 2 + b"--b--",
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_odd_bodies_are_refused(tmp_path: Path, name: str) -> None:
    kind, body = BODIES[name]
    async with run_server(tmp_path) as (client, _):
        for path in ("/api/v1/runs", "/api/v1/runs/async"):
            async with client.http.post(client.url + path, data=body, headers={"Content-Type": kind}) as reply:
                assert reply.status == 422, await reply.text()


async def test_the_wire_is_as_before(tmp_path: Path) -> None:
    archive = packed(task_folder(tmp_path / "swe-1"))
    bound = request(llm_proxy_url="http://h/swe-1-x/v1")
    lines = []
    async with run_server(tmp_path) as (client, _):
        await client.http.post(f"{client.url}/sessions/swe-1-x")

        async def note(title: str, code: int, body: bytes) -> None:
            shown = body.decode()
            for pattern, name in CHANGING:
                shown = pattern.sub(name, shown)
            lines.append(f"{title}\n    {code} {shown}\n")

        await note(f"POST /api/v1/runs {json.dumps(request())}", *await client.post("/api/v1/runs", request(), archive))
        code, body = await client.post("/api/v1/runs/async", bound, archive)
        await note(f"POST /api/v1/runs/async {json.dumps(bound)}", code, body)
        run_id = json.loads(body)["run_id"]
        await client.ended(run_id)
        for path in (f"{run_id}/status", f"{run_id}/result", "none/status", "none/result"):
            await note(
                f"GET /api/v1/runs/async/{path}".replace(run_id, "g-GROUP"),
                *await client.get(f"/api/v1/runs/async/{path}"),
            )
        for name, (changes, _) in REFUSALS.items():
            await note(f"POST, {name}", *await client.post("/api/v1/runs/async", request(**changes), archive))
        await note("POST, no archive", *await client.post("/api/v1/runs/async", request(), b""))
    text = "".join(lines)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    [
        "job_id",
        "task_id",
        "task_path",
        "agent",
        "timeout_multiplier",
        "max_retries",
        "verifier",
        "environment_overrides",
        "environment_kwargs",
        "llm_proxy_url",
    ]
)
AGENT_FIELDS = st.sampled_from(["name", "import_path", "kwargs", "llm_proxy_url", "max_timeout_sec", "model_name"])


async def test_random_requests_get_no_5xx(tmp_path: Path) -> None:
    cases: list[tuple[Any, bytes, str]] = []
    good = packed(task_folder(tmp_path / "swe-1"))

    @given(
        st.dictionaries(FIELDS, VALUES, max_size=2),
        st.dictionaries(AGENT_FIELDS, VALUES, max_size=2),
        st.integers(0, len(good)),
        st.binary(max_size=3),
        st.text(max_size=10),
    )
    def collect(fields: dict[str, Any], of_agent: dict[str, Any], cut: int, put: bytes, path: str) -> None:
        body = {**request(), **fields}
        if isinstance(body.get("agent"), dict) and "agent" not in fields:
            body["agent"] = {**body["agent"], **of_agent}
        archive = good if cut % 2 else good[:cut] + put + good[cut + len(put) :]
        cases.append((body, archive, path))

    collect()
    async with run_server(tmp_path) as (client, service):
        for body, archive, _ in cases:
            code, reply = await client.post("/api/v1/runs/async", body, archive)
            assert code < 500, (body, reply)
            if code == 200:
                await service.cancel(json.loads(reply)["run_id"])
        for _, _, path in cases:
            for part in ("status", "result"):
                code, reply = await client.get(f"/api/v1/runs/async/{quote(path, safe='')}/{part}")
                assert code < 500, (path, reply)
