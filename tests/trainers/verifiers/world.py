"""verifiers' environment of rows, and its environment server with prime-rl's use of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient, EnvServer
from verifiers.v1.utils.loaders import resolve_env_config

ID = "outrider-rollouts"


def rows_file(folder: Path, tasks: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "say it", "task": task}) + "\n" for task in tasks))
    return path


def env_config(rows: Path, settings: Mapping[str, Any], *, env: str = "", **agent: Any) -> Any:
    """Return the environment's configuration, as a table [env] of a TOML file gives it."""
    return resolve_env_config(
        {
            "id": env,
            "taskset": {"id": ID, "rows": str(rows)},
            "agent": {"harness": {"id": ID, "outrider": dict(settings)}, "runtime": {"type": "subprocess"}, **agent},
        }
    )


class Orchestrator:
    """Runs episodes as `prime_rl.orchestrator.envs.Env.run` and `TrainEnv` do (commit 559b4477, 21 August 2026)."""

    def __init__(self, config: Any, client: EnvClient) -> None:
        self.tasks = list(vf.load_taskset(config.taskset))
        self._client = client

    async def run(self, number: int = 0, *, base_url: str = "http://unused/v1", salt: str = "0") -> Any:
        """Run and return the episode of a task. Checks, as the dispatcher does, that the episode's task is the
        dispatched one."""
        task = self.tasks[number]
        sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_completion_tokens": 64}
        episode = await self._client.run(
            client=vf.TrainClientConfig(base_url=base_url),
            model="policy",
            sampling=vf.SamplingConfig(**sampling, extra_body={"cache_salt": salt}),
            task_data=task.data.model_dump(mode="json"),
        )
        assert (episode.task.key, episode.task.hash) == (task.key, task.hash)
        return episode


@asynccontextmanager
async def prime_rl(
    folder: Path, tasks: Sequence[Mapping[str, Any]], url: str, **agent: Any
) -> AsyncIterator[Orchestrator]:
    """Run verifiers' environment server, with tasks on the service at `url`, and yield prime-rl's use of the server."""
    config = env_config(rows_file(folder, tasks), {"url": url}, **agent)
    async with orchestrating(config) as orchestrator:
        yield orchestrator


@asynccontextmanager
async def orchestrating(config: Any) -> AsyncIterator[Orchestrator]:
    """Run verifiers' environment server on a free port, and yield prime-rl's use of the server."""
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    client = EnvClient(server.address)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.run())
        try:
            await client.wait_for_server_startup(timeout=20, interval=0.1)
            yield Orchestrator(config, client)
        finally:
            await client.close()
            serving.cancel()
