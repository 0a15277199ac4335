"""A service with ProRL's interface, handlers for the kinds of row that the tests use, and instances for these
handlers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.config import ProrlConfig, ProrlHandlerConfig
from outrider.service.service import Service
from support.prorl import ProrlClient
from support.service import running_service

COIN = """
instruction = "{row.question}"
harness = { agent = "support.coin:OneCall", options = { seconds = "{row.seconds}" } }
runtime = { kind = "memory" }
evaluator = { kind = "callable", path = "support.coin:grade", options = { reward = "{row.reward_model.ground_truth}" } }
"""
TOOLS = """
instruction = "{row.question}"
harness = { agent = "tools" }
runtime = { kind = "memory" }
evaluator = { kind = "command", run = "true" }
"""
FAILING = COIN.replace("{row.reward_model.ground_truth}", "none")
HANGING = COIN.replace("support.coin:OneCall", "support.coin:CallAndWait")
BRANCHING = COIN.replace("support.coin:OneCall", "api.compat.test_wire_rows:Branching")
MATHS = """
harness = { agent = "tools" }
runtime = { kind = "memory" }
"""


def instance(number: int = 0, *, source: str = "coin", seconds: float = 0.0, reward: Any = 1.0) -> dict[str, Any]:
    return {
        "data_source": source,
        "instance_id": f"i{number}",
        "trajectory_id": number,
        "question": f"Question {number}.",
        "seconds": seconds,
        "reward_model": {"ground_truth": reward},
    }


@asynccontextmanager
async def prorl_service(
    tmp_path: Path, *, wait_seconds: float | None = None, **settings: Any
) -> AsyncIterator[tuple[Service, ProrlClient]]:
    """Yield a service and a client. ProRL's server is not started."""
    handlers = {}
    tasks = {"coin": COIN, "tools": TOOLS, "failing": FAILING, "hanging": HANGING, "branching": BRANCHING}
    for name, text in {**tasks, "maths": MATHS}.items():
        file = tmp_path / f"{name}.toml"
        file.write_text(text)
        rows = "verl" if name == "maths" else None
        sources = {"coin": ("swebench", "deepcoder*")}.get(name, ())
        ignored = {"coin": ("strict_loop_detector",)}.get(name, ())
        handlers[name] = ProrlHandlerConfig(task=file, rows=rows, data_sources=sources, ignored=ignored)
    own = ProrlConfig(handlers=handlers, wait_seconds=wait_seconds)
    async with (
        running_service(tmp_path=tmp_path, compat=("prorl",), prorl=own, **settings) as (service, url),
        ProrlClient(url) as client,
    ):
        yield service, client
