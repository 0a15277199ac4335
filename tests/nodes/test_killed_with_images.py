"""A node process is killed while its sessions show images: the sessions run again, with images in their samples."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.config import ModelConfig
from outrider.engines.base import EngineOptions
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lab.fakes.engine_servers.app import EngineProtocol, engine_app, serving
from outrider.lab.fakes.engine_servers.asgi import ServeSettings
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import StopReason
from outrider.service.admission import validate_group
from outrider.spec import EngineSpec
from outrider.tokens.rendering.image_grids import read_image_settings
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.service import say
from support.vision import conversation, picture
from support.vision_model import write_vision_tokenizer

from .conftest import Starts
from .test_processes import ends, node_processes

SESSIONS = 4
TURNS = [("look", [picture(64, 64)]), ("and here", [picture(96, 64, seed=1)])]
REPLIES = ["one", "two"]


class Waiter:
    """An agent that shows an image, waits until the folder has a file `door`, and shows another one."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._folder = Path(options["folder"])

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        async with aiohttp.ClientSession() as http:
            for count in (1, 2):
                body = conversation("messages", TURNS[:count], REPLIES)
                async with http.post(context.endpoint.base_url + "/v1/messages", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                (self._folder / f"{os.getpid()}-{id(self)}").touch()
                while not (self._folder / "door").exists():  # noqa: ASYNC110  # another process makes it
                    await asyncio.sleep(0.01)
        return HarnessOutcome()


@pytest.mark.deep
@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
async def test_sessions_with_images_run_again_after_their_process_was_killed(
    start: Starts, tmp_path: Path, protocol: EngineProtocol
) -> None:
    folder = tmp_path / "vision"
    write_vision_tokenizer(folder)
    script = {"replies": [say(reply) for reply in REPLIES]}
    engine = ScriptedEngine(EngineOptions(name="e", tokenizer=str(folder), options=script))
    images = read_image_settings(folder, "qwen3-vl", 1 << 20)
    served = ServeSettings(tokenizer=Tokenizer.load(folder), images=images)
    model = ModelConfig(tokenizer=str(folder), renderer="qwen3-vl")
    async with (
        serving(engine_app(engine, protocol, served)) as url,
        start(model=model, engines=(EngineSpec(kind=protocol, name="e", url=url),)) as running,
    ):
        task = {
            "instruction": "look",
            "harness": {
                "agent": "nodes.test_killed_with_images:Waiter",
                "options": {"folder": str(running.folder)},
            },
            "runtime": {"kind": "memory"},
            "evaluator": {"kind": "completed"},
        }
        submitted = await running.service.submit(validate_group({"task": task, "n": SESSIONS}))
        async with asyncio.timeout(60):  # each session has shown its first image
            while len(list(running.folder.iterdir())) < SESSIONS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        waiting = Counter(int(path.name.partition("-")[0]) for path in running.folder.iterdir())
        killed = min(node_processes())
        os.kill(killed, signal.SIGKILL)
        running.open("door")
        view = await running.done(submitted)
    assert ends(view) == {StopReason.COMPLETED: SESSIONS}
    assert Counter(session.attempt for session in view.sessions)[2] == waiting[killed] > 0
    for sample in view.samples or ():
        assert [image.grid for image in sample.images] == [(1, 4, 4), (1, 4, 6)]
        spans = [image.span for image in sample.images if image.span is not None]
        [read] = {
            tuple((image.span.start, image.span.start + image.span.length) for image in request.images)
            for request in engine.requests
            if request.input_ids.tolist() == sample.ids[: len(request.input_ids)].tolist() and len(request.images) == 2
        }
        assert list(read) == spans
