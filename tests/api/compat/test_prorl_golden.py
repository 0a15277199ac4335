"""ProRL's wire transcripts: one exchange for each kind of reply, as recorded in `golden/prorl.jsonl`.

`python -m api.compat.test_prorl_golden` writes the file anew.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from outrider.api.compat.prorl_request import AGENTS_OWN, REFUSABLE, SAMPLED, SamplingParameters
from outrider.config import ProrlHandlerConfig
from support.prorl import ProrlClient
from support.service import call, say
from support.waiting import until

from .prorl_world import instance, prorl_service

GOLDEN = Path(__file__).parent / "golden" / "prorl.jsonl"
PAGE = Path(__file__).parents[3] / "docs" / "compat" / "prorl.md"
TIMES = {"init_time", "run_time", "eval_time", "others_time", "counted_elapsed", "init", "run", "eval", "others"}


def masked(value: Any) -> Any:
    """Return the value with everything masked that differs between two runs: times, the ids of groups and sessions, and
    the lines of a traceback."""
    if isinstance(value, dict):
        return {name: 0.5 if name in TIMES and type(one) is float else masked(one) for name, one in value.items()}
    if isinstance(value, list):
        return [masked(one) for one in value]
    if isinstance(value, str):
        value = re.sub(r"^Traceback \(most recent call last\):\n(  .*\n)+", "TRACEBACK\n", value, flags=re.MULTILINE)
        return re.sub(r"\b([gs])-[0-9a-f]{16}", r"\1-ID", value)
    return value


async def exchanges(tmp_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    replies = [call("echo one"), say("done")]

    async def send(name: str, client: ProrlClient, method: str, path: str, body: Any = None) -> None:
        status, content = await client.send(method, path, body)
        found.append(
            {
                "name": name,
                "call": f"{method} {path}",
                "body": body,
                "status": status,
                "reply": masked(json.loads(content)),
            }
        )

    async with prorl_service(tmp_path, replies=replies) as (_, client), asyncio.TaskGroup() as tasks:
        job = {"instance": instance(source="tools"), "sampling_params": {"temperature": 0.5}, "job_id": "j1"}
        await send("not running", client, "POST", "/process", job)
        await send("start", client, "POST", "/start")
        await send("start again", client, "POST", "/start")
        await send("a job", client, "POST", "/process", job)
        await send("another request", client, "POST", "/process", job | {"sampling_params": {}})
        await send("unknown parameter", client, "POST", "/process", job | {"sampling_params": {"temprature": 1}})
        await send(
            "unknown source", client, "POST", "/process", job | {"instance": instance(source="x"), "job_id": "j2"}
        )
        await send(
            "not graded", client, "POST", "/process", {"instance": instance(source="failing"), "sampling_params": {}}
        )
        hanging = {"instance": instance(source="coin", seconds=3600.0), "sampling_params": {}, "job_id": "j3"}
        waiting = tasks.create_task(send("a cancelled job", client, "POST", "/process", hanging))

        async def runs() -> bool:
            return (await client.status()).run == 1

        await until(runs)
        await send("status", client, "GET", "/status")
        await send("cancel", client, "POST", "/cancel", {"job_id": "j3"})
        await waiting
        await send("cancel again", client, "POST", "/cancel", {"job_id": "j3"})
        await send("cancel an unknown job", client, "POST", "/cancel", {"job_id": "j4"})
        await send("no server", client, "POST", "/add_llm_server", {"address": "none"})
        await send("nothing to clear", client, "POST", "/clear_llm_server")
        await send("stop", client, "POST", "/stop")
        await send("stop again", client, "POST", "/stop")
    return found


async def test_the_wire_is_as_recorded(tmp_path: Path) -> None:
    recorded = {one["name"]: one for one in map(json.loads, GOLDEN.read_text().splitlines())}
    # The exchanges are compared by name, because a cancelled job may end before its cancellation.
    found = {one["name"]: one for one in await exchanges(tmp_path)}
    assert found.keys() == recorded.keys()
    for name, one in found.items():
        assert one == recorded[name], name


def test_the_page_has_every_parameter_field_and_route() -> None:
    text = PAGE.read_text()
    parameters = text.split("## Sampling parameters")[1].split("## Results")[0]
    assert set(re.findall(r"`(\w+)`", parameters)) >= set(SamplingParameters.model_fields)
    assert set(SAMPLED) | set(AGENTS_OWN) | set(REFUSABLE) <= set(SamplingParameters.model_fields)
    handlers = text.split("## Handlers")[1].split("## Routes")[0]
    assert set(re.findall(r"`(\w+)`", handlers)) >= set(ProrlHandlerConfig.model_fields)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(one) + "\n" for one in asyncio.run(exchanges(Path(folder)))]
    GOLDEN.write_text("".join(lines))
    sys.exit()
