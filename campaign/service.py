"""The service of a campaign: the service of `outrider serve`, with short pauses and with hooks for injected faults.

On SIGUSR1 the leases of all attempts under way expire, as when a node is cut off without noticing: the sessions
return to the queue, and the old attempts run on beside the new ones until the store refuses them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path

from campaign.seams import Knobs
from outrider.api.server import serving
from outrider.cli.event_loop import run_service, short_pauses
from outrider.concurrency.chores import Failures
from outrider.concurrency.retries import RetryPolicy
from outrider.config import Config, LanesConfig, ModelConfig, PluginsConfig
from outrider.errors import OutriderError
from outrider.nodes import joined
from outrider.service.assembly import open_service
from outrider.service.retry_store import retry_store
from outrider.service.service import Service
from outrider.spec import EngineSpec

TOKENIZER = Path(__file__).parent.parent / "src" / "outrider" / "lab" / "demo" / "policy"
LANES = LanesConfig(init=6, run=32, eval=8)
HASTY = RetryPolicy(first=0.1, longest=0.5)
"""Waits between a session's failed attempts, in seconds. They are short, because a run takes only seconds."""

STOP_SECONDS = 1.0
"""Grace period of the sessions under way after a SIGTERM. It is so short that some sessions end, and others are
interrupted."""

log = logging.getLogger("campaign")


def main(folder: str, port: str, engine: str, store: str, processes: str, elsewhere: str) -> None:
    """Serve until SIGTERM.

    `folder` is the folder of the run. `engine` and `store` are URLs; `store` is empty for SQLite. `processes` is the
    number of processes that run sessions. Unless `elsewhere` is empty, the service treats machines that join as unable
    to reach the engine.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until its handler is installed, the signal would end the process
    Knobs(Path(folder) / "knobs").apply_state()
    if elsewhere:
        setattr(joined, "host_id", lambda: "another machine than theirs")  # noqa: B010  # mypy does not find this name in the module
    config = Config(
        port=int(port),
        processes=int(processes),
        data=Path(folder) / "data",
        store=store or None,
        model=ModelConfig(tokenizer=str(TOKENIZER), renderer="template:qwen3"),
        lanes=LANES,
        plugins=PluginsConfig(allow=("campaign.tasks",)),
        engines=(EngineSpec(kind="vllm", url=engine),),
    )
    try:
        run_service(_serve(config))
    except* OutriderError as failed:  # such as an engine that is down: the supervisor starts the service again
        log.error("the service cannot run: %s", failed.exceptions)
        raise SystemExit(1) from None


async def _serve(config: Config) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    async with open_service(config, pauses=HASTY) as (service, node), asyncio.TaskGroup() as tasks:
        loop.add_signal_handler(signal.SIGUSR1, lambda: tasks.create_task(_lapse(service)))
        async with (
            serving(service, node) as url,
            short_pauses(lambda: not service.scheduler.under_way, service.failures),
        ):
            log.info("ready at %s", url)
            await stopped.wait()
            await service.run_dry(STOP_SECONDS)


async def _lapse(service: Service) -> None:
    lapsed = await retry_store(lambda: service.store.recover(now=float("inf")), Failures())
    log.info("the leases of %d attempts have lapsed", len(lapsed))
    service.scheduler.wake()
