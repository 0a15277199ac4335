"""Polar's interface byte by byte: transcripts of calls and replies, and random requests.

A transcript (`tests/api/compat/golden/polar/*.txt`) has a line for each call (method, path, body) and the status and
body of its reply. Values that differ from run to run are replaced by their names. `GOLDEN=write` writes the transcripts
anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from api.compat.test_polar import task
from support.service import call, running_service, say
from support.waiting import until

FOLDER = Path(__file__).with_name("golden") / "polar"
CHANGING = (
    (re.compile(r"s-[0-9a-f]{16}-"), "s-GROUP-"),
    (re.compile(r"g-[0-9a-f]{16}"), "g-GROUP"),
    (re.compile(r"call_[0-9a-f]{12}"), "call_ID"),
    (re.compile(r"http://127\.0\.0\.1:\d+"), "http://SERVICE"),
)
NUMBERS = re.compile(
    r'"(\w+_ms|created_at|updated_at|age_seconds|idle_seconds|timestamp|last_heartbeat|max_\w+_workers|available_\w+)":'
    r"[0-9.e+-]+"
)
Steps = list[tuple[str, str, Any]]

TASK: dict[str, Any] = {
    "task_id": "golden-1",
    "instruction": "Say hello.",
    "num_samples": 1,
    "agent": {"import_path": "tools", "model_name": "small"},
    "runtime": {"kwargs": {"kind": "memory"}},
    "builder": {"strategy": "prefix_merging", "config": {"end_of_turn_token_id": 2}},
    "evaluator": {"strategy": "session_completed"},
    "metadata": {"group_id": 3, "policy_version": 0},
}
TRANSCRIPTS: dict[str, Steps] = {
    "1-a-task": [
        ("POST", "/rollout/task/submit", TASK),
        ("WAIT", "/rollout/task/golden-1", None),
        ("GET", "/rollout/task/golden-1", None),
        ("GET", "/tasks", None),
        ("GET", "/tasks/golden-1/sessions", None),
        ("GET", "/rollout/status", None),
        ("DELETE", "/rollout/task/golden-1", None),
    ],
    "2-per-request": [
        ("POST", "/rollout/task/submit", TASK | {"builder": {"strategy": "per_request"}}),
        ("WAIT", "/rollout/task/golden-1", None),
        ("GET", "/rollout/task/golden-1", None),
    ],
    "3-refusals": [
        ("POST", "/rollout/task/submit", TASK | {"odd": 1}),
        ("POST", "/rollout/task/submit", [1]),
        ("POST", "/rollout/task/submit", TASK | {"agent": {"harness": "swe_agent"}}),
        ("GET", "/rollout/task/none", None),
        ("DELETE", "/rollout/task/none", None),
        ("DELETE", "/rollout/task/none?register_if_missing=true", None),
        ("POST", "/rollout/task/submit", TASK | {"task_id": "none"}),
        ("GET", "/tasks?limit=0", None),
        ("POST", "/nodes/register", {"node_id": "n"}),
        ("POST", "/sessions", {"session_id": "a/b"}),
        ("GET", "/sessions/s-none", None),
    ],
    "4-gateway": [
        ("GET", "/gateway/", None),
        ("GET", "/health", None),
        ("GET", "/gateway/health", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/tokenize", {"model": "small", "text": "hello"}),
        ("GET", "/nodes", None),
        ("POST", "/admin/inference/pause?timeout_seconds=5", None),
        ("POST", "/admin/inference/resume", None),
        ("GET", "/sessions", None),
    ],
}


def stable(text: str) -> str:
    for pattern, name in CHANGING:
        text = pattern.sub(name, text)
    return NUMBERS.sub(lambda found: f'"{found[1]}":N', text)


async def transcript(url: str, steps: Steps) -> Iterator[str]:
    lines = []
    async with aiohttp.ClientSession() as http:
        for method, path, body in steps:
            if method == "WAIT":

                async def done(path: str = path) -> bool:
                    async with http.get(f"{url}{path}") as reply:
                        return (await reply.json())["status"] not in ("running", "cancelling")

                await until(done)
                continue
            async with http.request(method, f"{url}{path}", json=body) as reply:
                text = await reply.text()
                assert reply.content_type == "application/json"
            lines.append(f"> {method} {path} {'' if body is None else json.dumps(body)}".rstrip())
            lines.append(f"< {reply.status} {stable(text)}")
    return iter(lines)


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_transcript(tmp_path: Path, name: str) -> None:
    replies = [call("echo one"), say("done")]
    async with running_service(tmp_path=tmp_path, replies=replies, compat=("polar",)) as (_, url):
        seen = "\n".join(await transcript(f"{url}/polar", TRANSCRIPTS[name])) + "\n"
    path = FOLDER / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(seen)
    assert seen == path.read_text()


SUBMIT = ("POST", "/rollout/task/submit")
ROUTES = (
    *(SUBMIT,) * 12,
    ("GET", "/health"),
    ("GET", "/rollout/task/{text}"),
    ("DELETE", "/rollout/task/{text}"),
    ("GET", "/rollout/status"),
    ("GET", "/tasks"),
    ("GET", "/tasks/{text}/sessions"),
    ("GET", "/nodes"),
    ("GET", "/nodes/{text}"),
    ("DELETE", "/nodes/{text}"),
    ("POST", "/nodes/register"),
    ("POST", "/callbacks/session_result"),
    ("GET", "/gateway/health"),
    ("GET", "/sessions"),
    ("POST", "/sessions"),
    ("GET", "/sessions/{text}"),
    ("DELETE", "/sessions/{text}"),
    ("GET", "/sessions/{text}/completions"),
    ("GET", "/v1/models"),
    ("POST", "/v1/tokenize"),
    ("POST", "/v1/messages"),
    ("POST", "/admin/inference/pause"),
    ("POST", "/admin/inference/resume"),
    ("PUT", "/tasks"),
)
ODD_TEXTS = ("t1", "..", "%00", "a/b", "s-none", "x" * 300, "0", "1e999", "nan")
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(ODD_TEXTS))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
FIELDS = (
    *("task_id", "instruction", "num_samples", "dispatch_priority", "early_stop_min_usable_sessions"),
    *("timeout_seconds", "runtime", "agent", "builder", "evaluator", "callback_url", "metadata"),
)
INNER = {
    "runtime": ("backend", "image", "prepare", "eval_prepare", "env", "network", "workdir", "cpus", "gpus", "kwargs"),
    "agent": ("harness", "import_path", "model_name", "settings", "env", "mcp_servers", "custom_shell"),
    "builder": ("strategy", "config"),
    "evaluator": ("strategy", "config", "env", "refresh_runtime"),
}


@st.composite
def tasks(draw: st.DrawFn) -> dict[str, Any]:
    """A task that is valid except for at most two fields, most of them in its parts."""
    made: dict[str, Any] = json.loads(json.dumps(TASK | {"task_id": draw(st.sampled_from(["a", "b", "c"]))}))
    for field in draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        part = made.get(field)
        if field in INNER and isinstance(part, dict) and draw(st.booleans()):
            part[draw(st.sampled_from(INNER[field]))] = draw(VALUES)
        else:
            made[field] = draw(VALUES)
    return made


CALLS = st.tuples(
    st.sampled_from(ROUTES),
    st.one_of(TEXTS, st.sampled_from(["a", "b"])),
    st.one_of(st.binary(max_size=20), VALUES.map(json.dumps), *(tasks().map(json.dumps),) * 4),
    st.dictionaries(st.sampled_from(["limit", "status", "since", "task_id", "harness", "register_if_missing"]), TEXTS),
)


async def test_no_request_at_random_is_an_error_of_the_service(tmp_path: Path) -> None:
    """Clients can read every reply: a refusal other than 404 and 405 has only a `detail`, and no status is 500 or
    above, except 503 for a task that this machine cannot run now."""
    examples: list[Any] = []

    @given(st.lists(CALLS, min_size=1, max_size=6))
    def collect(calls: Any) -> None:
        examples.extend(calls)

    await asyncio.to_thread(collect)
    async with (
        running_service(tmp_path=tmp_path, compat=("polar",)) as (_, url),
        aiohttp.ClientSession() as http,
    ):
        for (method, path), text, body, query in examples:
            quoted = path.replace("{text}", "".join(f"%{byte:02x}" for byte in text.encode("utf-8", "replace")))
            target = URL(f"{url}/polar{quoted}", encoded=True)
            async with http.request(method, target, data=body, params={**query, "timeout_seconds": "5"}) as reply:
                shown = (method, path, text, body, query, await reply.text())
                assert reply.status < 500 or (reply.status, (method, path)) == (503, SUBMIT), shown
                if reply.status >= 400 and reply.status not in (404, 405):
                    assert list(await reply.json()) == ["detail"], shown
        async with http.post(f"{url}/polar/rollout/task/submit", json=task("after")) as reply:
            assert reply.status == 200
