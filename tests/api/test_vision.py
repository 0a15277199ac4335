"""Images on an engine that takes token ids, from the agent's request to the trainer's sample, in every dialect."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import math
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image as Pillow

from outrider.client.client import AsyncClient
from outrider.config import ModelConfig
from outrider.engines.base import Capability, Chunk, EngineOptions, GenerateRequest
from outrider.errors import ErrorRecord
from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.lab.fakes.engine_servers import ServeSettings
from outrider.lab.fakes.engine_servers.app import DEFAULT_SETTINGS, EngineProtocol, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.lifecycle import StopReason
from outrider.messages import images_in
from outrider.service import model_backends
from outrider.service.service import Service
from outrider.sessions.conversation import IMAGE_SECONDS
from outrider.sessions.priority_semaphore import PrioritySemaphore
from outrider.spec import EngineSpec
from outrider.tokens.rendering.image_grids import PLACEHOLDER, read_image_settings
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import Sample, SampleImage, TokenMode
from outrider.vision.pixels import pixels_of, vllm_item
from outrider.vision.preparer import DecodingProcess
from support.clock import pass_time
from support.pictures import PATHS
from support.service import END, running_service, say
from support.vision import REFUSALS, conversation, picture, task
from support.vision_model import write_vision_tokenizer

MERGED = 4
PROTOCOLS: tuple[EngineProtocol, ...] = ("vllm", "sglang")
CALL = f'<tool_call>\n{{"name": "screenshot", "arguments": {{}}}}\n</tool_call>{END}'


@asynccontextmanager
async def vision_service(
    tmp_path: Path,
    replies: Sequence[str],
    *,
    protocol: EngineProtocol = "vllm",
    served: ServeSettings = DEFAULT_SETTINGS,
    kind: type[ScriptedEngine] = ScriptedEngine,
    **settings: Any,
) -> AsyncIterator[tuple[Service, AsyncClient, ScriptedEngine]]:
    """Yield a service with a model that reads images, its client, and the engine behind the server's protocol."""
    folder = tmp_path / "vision"
    write_vision_tokenizer(folder)
    script = EngineOptions(name="scripted", tokenizer=str(folder), options={"replies": list(replies)})
    engine = kind(script)
    if protocol == "sglang" and served is DEFAULT_SETTINGS:
        images = read_image_settings(folder, "qwen3-vl", 1 << 20)
        served = ServeSettings(tokenizer=Tokenizer.load(folder), images=images)
    model = ModelConfig(tokenizer=str(folder), renderer="qwen3-vl", **settings)
    async with serving(engine_app(engine, protocol, served)) as server:
        spec = EngineSpec(kind=protocol, name="sees", url=server)
        async with (
            running_service(tmp_path=tmp_path, model=model, engines=(spec,)) as (service, url),
            AsyncClient(url) as client,
        ):
            yield service, client, engine


async def sample_of(client: AsyncClient, asked: dict[str, Any]) -> Sample:
    """Run a task and return the only row of its only session."""
    [done] = await client.wait([(await client.submit({"task": asked})).id])
    assert done.sessions[0].last_error is None, done.sessions[0].last_error
    [sample] = await client.samples(done.sessions[0].id)
    return sample


async def error_of(client: AsyncClient, given: dict[str, Any]) -> ErrorRecord:
    """Run a session that must end with an error and without a verdict. Returns the error."""
    group = await client.submit({"task": given | {"max_attempts": 1}})
    [done] = await client.wait([group.id])
    result = done.sessions[0].result
    assert result is not None
    assert result.verdict is None
    assert result.error is not None
    return result.error


async def refusal_of(client: AsyncClient, asked: dict[str, Any]) -> str:
    """Return the reply that refused a call of the task's only session."""
    REFUSALS.clear()
    await client.wait([(await client.submit({"task": asked | {"max_attempts": 1}})).id])
    [refusal] = REFUSALS
    return refusal


def kill_decoders() -> None:
    """Kill the processes that decode images and read documents for this process."""
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    decoders = [pid for pid in children if b"outrider.vision.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert decoders
    for pid in decoders:
        os.kill(int(pid), signal.SIGKILL)


def check_images(folder: Path, sample: Sample, pictures: Sequence[bytes]) -> None:
    """Check that each picture is in the row with its digest, its grid and, at its span, as many placeholders as the
    grid has tokens. No other id of the row is a placeholder, and no placeholder trains."""
    pad = Tokenizer.load(folder).convert_tokens_to_ids(PLACEHOLDER)
    assert [image.digest for image in sample.images] == [hashlib.sha256(data).hexdigest() for data in pictures]
    ids = sample.ids.tolist()
    places: set[int] = set()
    for image in sample.images:
        assert image.span is not None
        assert image.grid is not None
        start, end = image.span
        assert end - start == math.prod(image.grid) // MERGED > 0
        assert set(ids[start:end]) == {pad}
        places |= set(range(start, end))
    assert {at for at, token_id in enumerate(ids) if token_id == pad} == places
    assert not any(sample.loss_mask[at] for at in places)


def spans_of(images: Sequence[SampleImage]) -> list[tuple[int, int]]:
    return [image.span for image in images if image.span is not None]


def sent_spans(request: GenerateRequest) -> list[tuple[int, int]]:
    return [(image.span.start, image.span.start + image.span.length) for image in request.images]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dialect", PATHS)
async def test_images_reach_the_engine_and_the_sample_and_history_grows_by_delta(
    tmp_path: Path, dialect: str, protocol: EngineProtocol
) -> None:
    turns = [("look", [0]), ("and here", [1, 0]), ("bye", [])]
    replies = [say("one"), say("two"), say("three")]
    async with vision_service(tmp_path, replies, protocol=protocol) as (_, client, engine):
        sample = await sample_of(client, task(dialect, turns))
        assert sample.mode is TokenMode.TOKENS
        pictures = [picture(64, 64, seed=0), picture(96, 64, seed=1), picture(64, 64, seed=0)]
        check_images(tmp_path / "vision", sample, pictures)
        assert [image.grid for image in sample.images] == [(1, 4, 4), (1, 4, 6), (1, 4, 4)]
        first, second, third = engine.requests
        assert [len(request.images) for request in engine.requests] == [1, 3, 3]
        assert sent_spans(third) == sent_spans(second) == spans_of(sample.images)
        assert [image.item for image in second.images[::2]] == [first.images[0].item] * 2
        settings = read_image_settings(tmp_path / "vision", "qwen3-vl", 1 << 20)
        assert settings is not None
        assert [image.item for image in third.images] == [vllm_item(pixels_of(data, settings)) for data in pictures]
        ids = sample.ids.tolist()
        for request in engine.requests:
            prompt = request.input_ids.tolist()
            assert ids[: len(prompt)] == prompt
        assert (await client.image(sample.images[1].digest)).data == pictures[1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dialect", PATHS)
async def test_images_of_a_tools_result_reach_the_engine_and_the_sample(
    tmp_path: Path, dialect: str, protocol: EngineProtocol
) -> None:
    turns = [("look", []), ("tool", [2])]
    async with vision_service(tmp_path, [CALL, say("done")], protocol=protocol) as (_, client, engine):
        sample = await sample_of(client, task(dialect, turns))
        check_images(tmp_path / "vision", sample, [picture(128, 64, seed=2)])
        assert len(sample.turns) == 2
        text = Tokenizer.load(tmp_path / "vision").decode(sample.ids.tolist())
        response = text.partition("<tool_response>")[2].partition("</tool_response>")[0]
        assert PLACEHOLDER * 8 in response
        assert [len(request.images) for request in engine.requests] == [0, 1]


async def test_a_picture_that_cannot_be_decoded_is_refused_and_a_tools_is_described(tmp_path: Path) -> None:
    broken = "\x89PNG no picture"
    async with vision_service(tmp_path, [CALL, say("done")]) as (_, client, engine):
        refused = await refusal_of(client, task("chat", [("look", [broken])]))
        assert "the image is none of PNG, JPEG, WEBP, GIF, BMP" in refused
        assert not engine.requests
        sample = await sample_of(client, task("chat", [("look", []), ("tool", [broken])]))
        assert sample.images == ()
        text = Tokenizer.load(tmp_path / "vision").decode(sample.ids.tolist())
        assert "the image cannot be read]" in text


async def test_a_placeholder_in_a_text_is_refused(tmp_path: Path) -> None:
    async with vision_service(tmp_path, [say("one")]) as (_, client, engine):
        for pictures in ([], [0]):
            assert "placeholder of an image" in await refusal_of(client, task("chat", [(f"a{PLACEHOLDER}b", pictures)]))
        assert not engine.requests


async def test_a_model_served_without_images_refuses_them(tmp_path: Path) -> None:
    async with vision_service(tmp_path, [say("one")], image_tokens=0) as (_, client, engine):
        assert "given text only" in await refusal_of(client, task("chat", [("look", [0])]))
        assert not engine.requests


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_larger_images_are_scaled_to_the_tokens_of_the_setting(tmp_path: Path, protocol: EngineProtocol) -> None:
    async with vision_service(tmp_path, [say("one")], protocol=protocol, image_tokens=16) as (_, client, _engine):
        sample = await sample_of(client, task("chat", [("look", [8])]))
        [image] = sample.images
        assert image.grid is not None
        assert 8 <= math.prod(image.grid) // MERGED <= 16


async def test_a_server_whose_model_takes_other_pixels_is_refused(tmp_path: Path) -> None:
    settings = ServeSettings(pixel_form="float32")
    async with vision_service(tmp_path, [say("one")], served=settings) as (_, client, engine):
        refused = await refusal_of(client, task("chat", [("look", [0])]))
        assert "takes pixels as float32" in refused
        assert "--mm-device-do-normalize" in refused
        assert not engine.requests


async def test_servers_without_a_place_for_images_refuse_them(tmp_path: Path) -> None:
    settings = ServeSettings(generate_route=False)
    async with vision_service(tmp_path, [say("one")], served=settings) as (_, client, engine):
        refused = await refusal_of(client, task("chat", [("look", [0])]))
        assert "has no route /inference/v1/generate" in refused
        assert not engine.requests


async def test_the_reply_of_a_server_that_ignores_images_is_an_error_of_the_engine(tmp_path: Path) -> None:
    settings = ServeSettings()
    async with vision_service(tmp_path, [say("one")], protocol="sglang", served=settings) as (_, client, _engine):
        error = await error_of(client, task("chat", [("look", [0])]))
        assert "has read another prompt" in error.message


class Blind(ScriptedEngine):
    """An engine whose server ignores images."""

    capabilities = ScriptedEngine.capabilities | {Capability.READS_PATCHES}


async def test_an_engine_that_does_not_report_the_images_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "vision"
    write_vision_tokenizer(folder)
    options = {"replies": [f"one{END}"]}
    engine = Blind(EngineOptions(name="blind", tokenizer=str(folder), options=options))
    model = ModelConfig(tokenizer=str(folder), renderer="qwen3-vl")
    async with (
        running_service(tmp_path=tmp_path, model=model, engine=engine) as (_, url),
        AsyncClient(url) as client,
    ):
        assert "does not report that it has read the 1 images" in await refusal_of(
            client, task("chat", [("look", [0])])
        )


class Slow(ScriptedEngine):
    """An engine that ends no reply before `go` is set. `inside` is the number of requests that it has got."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.go = asyncio.Event()
        self.inside = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.inside += 1
        await self.go.wait()
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk


async def test_calls_wait_for_memory_for_their_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = 1 << 15 | 1 << 9  # about the size of an image of 64x64 pixels, as sent
    room = PrioritySemaphore(3 * one)
    monkeypatch.setattr(model_backends, "image_room", lambda: room)
    async with vision_service(tmp_path, [say("one")], kind=Slow) as (_, client, engine):
        assert isinstance(engine, Slow)
        group = await client.submit({"task": task("chat", [("look", [0])]), "n": 8})
        async with asyncio.timeout(60):
            while (engine.inside, room.waiting) != (3, 5):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        engine.go.set()
        [done] = await client.wait([group.id])
        assert [session.last_error for session in done.sessions] == [None] * 8
        assert room.taken == (0,)
        assert engine.inside == 8


async def test_a_decoder_that_fails_is_an_error_of_the_service_and_no_reward(tmp_path: Path) -> None:
    """`test_pixels.py` shows that a decoder that hangs fails in the same way."""
    async with vision_service(tmp_path, [say("one")]) as (_, client, engine):
        await sample_of(client, task("chat", [("look", [0])]))
        kill_decoders()
        error = await error_of(client, task("chat", [("look", [1])]))
        assert error.code == "service_error"
        assert "the process that decodes images failed" in error.message
        assert len(engine.requests) == 1


async def test_an_agent_that_waits_for_memory_for_pixels_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = PrioritySemaphore(1 << 20)
    monkeypatch.setattr(model_backends, "image_room", lambda: room)
    async with vision_service(tmp_path, [say("one")]) as (_, client, engine):
        slot = await room.take((1 << 20,))
        asked = task("chat", [("look", [0])]) | {"max_attempts": 1, "limits": {"agent_seconds": IMAGE_SECONDS + 1}}
        group = await client.submit({"task": asked})
        async with asyncio.timeout(60):
            while not room.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await pass_time(IMAGE_SECONDS + 3, step=0.1)  # longer than the agent may run
        assert (room.waiting, len(engine.requests)) == (1, 0)
        slot.release()
        [done] = await client.wait([group.id])
        result = done.sessions[0].result
        assert result is not None
        assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)


async def test_a_call_that_is_given_up_before_its_engine_gets_it_is_no_silence_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.sessions.conversation.IMAGE_SECONDS", 0.1)
    room = PrioritySemaphore(1 << 20)
    monkeypatch.setattr(model_backends, "image_room", lambda: room)
    async with vision_service(tmp_path, [say("one")]) as (_, client, engine):
        slot = await room.take((1 << 20,))
        error = await error_of(client, task("chat", [("look", [0])], patience=1.5))
        assert (error.code, "the decoder of images" in error.message) == ("service_error", True)
        assert not engine.requests
        slot.release()


class Crowd:
    """An agent that sends 8 calls at once, each with its own picture, and gives the calls up after 3.5 s."""

    def __init__(self, options: object) -> None:
        self._bodies = [conversation("chat", [("look", [picture(64, 64, seed=seed)])], []) for seed in range(8)]

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        url = context.endpoint.base_url + PATHS["chat"]
        timeout = aiohttp.ClientTimeout(total=3.5)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            posts = [http.post(url, json=body) for body in self._bodies]
            await asyncio.gather(*posts, return_exceptions=True)
        return HarnessOutcome()


@pytest.mark.deep
async def test_a_session_that_waits_behind_its_own_images_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each picture takes 0.5 s, and a wait is overdue after 2 s. Here the last calls wait longer, but behind pictures
    of their own session, so their waits are not overdue."""
    ask = DecodingProcess.ask

    async def slow(*given: Any) -> Any:
        await asyncio.sleep(0.5)
        return await ask(*given)

    monkeypatch.setattr("outrider.sessions.conversation.IMAGE_SECONDS", 2.0)
    monkeypatch.setattr(DecodingProcess, "ask", slow)
    async with vision_service(tmp_path, [say("one")] * 8) as (_, client, engine):
        asked = task("chat", []) | {"harness": {"agent": "api.test_vision:Crowd"}, "max_attempts": 1}
        [done] = await client.wait([(await client.submit({"task": asked})).id])
        result = done.sessions[0].result
        assert result is not None
        assert (result.stop_reason, result.error) == (StopReason.COMPLETED, None)
        assert 0 < len(engine.requests) < 8


def bytes_seen(outcome: Outcome) -> float:
    """Return the number of bytes of the images in the transcript."""
    return float(sum(len(image.data) for message in outcome.transcript for image in images_in(message)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_session_with_images_is_graded_again_with_its_images(tmp_path: Path, protocol: EngineProtocol) -> None:
    turns = [("look", [0]), ("and here", [1, 0])]
    async with vision_service(tmp_path, [say("one"), say("two")], protocol=protocol) as (_, client, engine):
        [first] = await client.wait([(await client.submit({"task": task("chat", turns)})).id])
        [before] = await client.samples(first.sessions[0].id)
        calls = len(engine.requests)
        evaluator = {"kind": "callable", "path": "api.test_vision:bytes_seen"}
        [again] = await client.wait([(await client.regrade(first.id, {"evaluator": evaluator})).id])
        [after] = await client.samples(again.sessions[0].id)
        pictures = [picture(64, 64, seed=0), picture(96, 64, seed=1), picture(64, 64, seed=0)]
        assert after.reward == sum(map(len, pictures))
        assert (before.reward, after.images, after.ids.tolist()) == (1.0, before.images, before.ids.tolist())
        assert [(await client.image(image.digest)).data for image in after.images] == pictures
        assert len(engine.requests) == calls


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("orientation", [1, 6])
async def test_a_turned_photograph_is_read_upright(tmp_path: Path, orientation: int, protocol: EngineProtocol) -> None:
    photograph = Pillow.open(io.BytesIO(picture(128, 64)))
    exif = photograph.getexif()
    exif[0x112] = orientation
    file = io.BytesIO()
    photograph.save(file, "JPEG", exif=exif)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    asked = task("chat", [("ignored", [])], extra=body)
    async with vision_service(tmp_path, [say("one")], protocol=protocol) as (_, client, engine):
        sample = await sample_of(client, asked)
        assert [image.grid for image in sample.images] == [(1, 8, 4) if orientation == 6 else (1, 4, 8)]
        check_images(tmp_path / "vision", sample, [file.getvalue()])
        settings = read_image_settings(tmp_path / "vision", "qwen3-vl", 1 << 20)
        assert settings is not None
        [read] = engine.requests[0].images
        assert read.item == vllm_item(pixels_of(file.getvalue(), settings))
