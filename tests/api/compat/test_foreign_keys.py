"""Groups of the native API whose idempotency keys have the form of another system's keys: no other interface accesses
these groups.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from outrider.spec import GroupSpec
from support.coin import coin_task
from support.service import running_service

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALLS: tuple[tuple[str, str, Any, int], ...] = (
    ("POST", "/prorl/start", None, 200),
    ("POST", "/prorl/cancel", {"job_id": "n"}, 404),
    ("GET", "/polar/rollout/task/n", None, 404),
    ("DELETE", "/polar/rollout/task/n", None, 404),
    ("DELETE", "/polar/rollout/task/n?register_if_missing=true", None, 409),
    ("GET", "/polar/sessions/n", None, 404),
    ("POST", "/polar/sessions", {"session_id": "n"}, 409),
    ("DELETE", "/polar/sessions/n", None, 404),
    ("POST", "/verl/sessions/n", None, 409),
    ("GET", "/verl/sessions/n", None, 404),
    ("POST", "/verl/n/v1/chat/completions", CHAT, 404),
    ("POST", "/verl/sessions/n/reset", None, 404),
    ("POST", "/verl/sessions/n/complete", None, 404),
    ("DELETE", "/verl/sessions/n", None, 404),
)


async def test_no_wire_touches_a_group_of_the_native_api(tmp_path: Path) -> None:
    compat = ("prorl", "polar", "verl")
    async with running_service(tmp_path=tmp_path, compat=compat) as (service, url), aiohttp.ClientSession(url) as http:
        task = coin_task(1, seconds=3600.0)
        for key in ("prorl:n", "polar:n", "polar-session:n", "verl:n"):
            await service.submit(GroupSpec.model_validate({"task": task, "n": 1, "idempotency_key": key}))
        for method, path, body, status in CALLS:
            async with http.request(method, path, json=body) as reply:
                assert reply.status == status, (method, path, await reply.text())
        assert [group.cancelled for group in await service.store.groups()] == [False] * 4
