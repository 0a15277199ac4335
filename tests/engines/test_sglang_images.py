"""Images in prompts of token ids on SGLang: what the adapter sends, and which replies it refuses."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engines.contract import collect
from engines.routers import fake_router, worlds_of
from engines.worlds import HASTY, scripted
from outrider.engines.adapters.sglang import IDS_PER_TOKEN, SGLangEngine, collapsed
from outrider.engines.adapters.vllm import VLLMEngine
from outrider.engines.base import Capability, Chunk, EngineOptions, GenerateRequest, RequestImage, SamplingParams
from outrider.engines.pool.pool import EnginePool
from outrider.engines.pool.waits import Overdue
from outrider.errors import EngineMisbehaved, EngineRejected, EngineUnavailable
from outrider.lab.fakes.engine_servers import ServeSettings
from outrider.lab.fakes.engine_servers.app import engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.tokens.rendering.image_grids import PLACEHOLDER, ImageForm, ImageSettings, read_image_settings
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trajectory import ImageSpan
from outrider.vision.pixels import pixels_of, png_item, vllm_item
from support.vision import picture
from support.vision_model import write_vision_tokenizer

REPLY = "it is a gradient<|im_end|>"


async def gather(chunks: AsyncIterator[Chunk], given: list[Chunk]) -> None:
    async for chunk in chunks:
        given.append(chunk)


class World:
    """A tokenizer with the ids of images, the settings of its image processor, and prompts with pictures."""

    def __init__(self, folder: Path) -> None:
        write_vision_tokenizer(folder)
        self.folder = folder
        self.tokenizer = Tokenizer.load(folder)
        settings = read_image_settings(folder, "qwen3-vl", 1 << 20)
        assert settings is not None
        self.settings: ImageSettings = settings
        self.pad = self.id_of(PLACEHOLDER)

    def id_of(self, token: str) -> int:
        [found] = self.tokenizer.encode(token)
        return found

    def request(self, pictures: Sequence[bytes], before: Sequence[int] = (5, 6), **sampling: Any) -> GenerateRequest:
        start, end = self.id_of("<|vision_start|>"), self.id_of("<|vision_end|>")
        ids, images = list(before), []
        for data in pictures:
            grid, item = png_item(data, self.settings)
            count = self.settings.tokens_of(grid)
            span = ImageSpan(hashlib.sha256(data).hexdigest(), len(ids) + 1, count, grid)
            images.append(RequestImage(span=span, item=item, form=ImageForm.PNG))
            ids += [start, *[self.pad] * count, end]
        return GenerateRequest(
            request_id="r" * 8,
            session_key="s",
            input_ids=np.array([*ids, 7], dtype=np.int32),
            sampling=SamplingParams(**({"max_tokens": 32, "temperature": 0.0} | sampling)),
            images=tuple(images),
        )

    @asynccontextmanager
    async def engine(self, **settings: Any) -> AsyncIterator[tuple[SGLangEngine, ScriptedEngine]]:
        fake = scripted(self.folder, replies=[REPLY], context_tokens=1 << 17)
        served = ServeSettings(tokenizer=self.tokenizer, **({"images": self.settings} | settings))
        async with serving(engine_app(fake, "sglang", served)) as url:
            engine = SGLangEngine(EngineOptions(name="sees", url=url), retry=HASTY)
            await engine.start()
            try:
                yield engine, fake
            finally:
                await engine.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "vision")


@pytest.mark.parametrize("incremental", [False, True])
async def test_the_engine_reads_the_ids_and_the_patches_of_the_request(world: World, incremental: bool) -> None:
    pictures = [picture(64, 64), picture(96, 64, seed=1), picture(1000, 700, seed=2, kind="JPEG")]
    asked = world.request(pictures)
    async with world.engine(incremental=incremental) as (engine, fake):
        whole = await collect(engine.generate(asked))
        [read] = fake.requests
    assert world.tokenizer.decode(whole.ids) == REPLY
    assert read.input_ids.tolist() == asked.input_ids.tolist()
    places = [(image.span.start, image.span.length, image.span.grid) for image in asked.images]
    assert [(image.span.start, image.span.length, image.span.grid) for image in read.images] == places
    assert [image.item for image in read.images] == [vllm_item(pixels_of(data, world.settings)) for data in pictures]


def test_a_prompt_is_sent_with_one_placeholder_for_each_image(world: World) -> None:
    asked = world.request([picture(64, 64), picture(96, 64)])
    short = collapsed(asked.input_ids, asked.images, "sees").tolist()
    assert short.count(world.pad) == 2
    assert [id for id in short if id != world.pad] == [id for id in asked.input_ids.tolist() if id != world.pad]


async def test_the_server_reads_expanded_placeholders_as_images_that_are_missing(world: World) -> None:
    """The rule of the real server: one placeholder for each image. With more, its handler fails."""
    asked = world.request([picture(64, 64)])
    expanded = msgspec.structs.replace(asked.images[0], span=ImageSpan("d" * 64, 3, 1, (1, 2, 2)))
    async with world.engine() as (engine, fake):
        short = collapsed(asked.input_ids, asked.images, "sees")
        more = np.insert(short, 3, world.pad)
        with pytest.raises(EngineRejected, match="the model itself has sampled"):
            await collect(engine.generate(msgspec.structs.replace(asked, input_ids=more, images=(expanded,))))
        twice = (expanded, msgspec.structs.replace(expanded, span=ImageSpan("d" * 64, 4, 1, (1, 2, 2))))
        body = engine.body(msgspec.structs.replace(asked, input_ids=more, images=twice), "/generate", str, 0)
        written = msgspec.json.decode(b"".join(body))
        written["image_data"].pop()
        with pytest.raises(EngineUnavailable):
            await engine.control("/generate", written)
        assert not fake.requests


async def test_a_sampled_placeholder_is_refused_by_name_only_beside_images(world: World) -> None:
    async with world.engine() as (engine, fake):
        with pytest.raises(EngineRejected, match="placeholder of an image that the model itself has sampled"):
            await collect(engine.generate(world.request([picture(64, 64)], before=[5, world.pad, 6])))
        assert not fake.requests
        await collect(engine.generate(world.request([], before=[5, world.pad, 6])))
        assert fake.requests[0].input_ids.tolist() == [5, world.pad, 6, 7]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"keeps_ids": False}, "has read another prompt"),
        ({"images": None}, "has read another prompt"),
        ({"reports_prompts": False}, "does not report the ids of a prompt with images"),
    ],
)
async def test_a_server_that_reads_another_prompt_gives_no_token(
    world: World, settings: dict[str, Any], reason: str
) -> None:
    letters = [world.tokenizer.encode(letter)[0] for letter in "the"]  # the tokenizer has one id for the whole word
    assert world.tokenizer.encode("the") != letters
    asked = world.request([picture(64, 64)], before=letters)
    async with world.engine(**settings) as (engine, _):
        given: list[Chunk] = []
        with pytest.raises(EngineMisbehaved, match=reason):
            await gather(engine.generate(asked), given)
        assert not given


async def test_a_server_with_another_image_processor_gives_no_token(world: World) -> None:
    smaller = msgspec.structs.replace(world.settings, most=64 * 64)
    asked = world.request([picture(640, 480)])
    async with world.engine(images=smaller) as (engine, fake):
        with pytest.raises(EngineMisbehaved, match="has read another prompt") as raised:
            await collect(engine.generate(asked))
        assert len(fake.requests[0].input_ids) < len(asked.input_ids)
    assert "--mm-process-config" in (raised.value.hint or "")


async def test_a_file_that_the_server_cannot_decode_is_refused(world: World) -> None:
    asked = world.request([picture(64, 64)])
    broken = msgspec.structs.replace(asked.images[0], item=b"aGk=")
    async with world.engine() as (engine, fake):
        with pytest.raises(EngineRejected, match="Could not decode image"):
            await collect(engine.generate(msgspec.structs.replace(asked, images=(broken,))))
        assert not fake.requests


async def test_long_prompts_with_images_have_fewer_events_and_the_same_tokens(world: World) -> None:
    long = world.request([picture(64, 64)], before=[5] * (3 * IDS_PER_TOKEN))
    async with world.engine(incremental=True) as (engine, _):
        few = await collect(engine.generate(long))
        many = await collect(engine.generate(world.request([picture(64, 64)])))
    assert few.ids == many.ids
    body = msgspec.json.decode(b"".join(engine.body(long, "/generate", str, 0)))
    assert body["sampling_params"]["stream_interval"] == 4
    assert few.chunks <= 1 + -(-len(few.ids) // 4)
    plain = msgspec.json.decode(b"".join(engine.body(world.request([]), "/generate", str, 0)))
    assert not {"image_data", "return_prompt_token_ids"} & set(plain)
    assert "stream_interval" not in plain["sampling_params"]


async def test_images_are_not_sent_through_a_router(world: World, tokenizer_folder: Path) -> None:
    async with worlds_of("sglang", fake_router, tokenizer_folder)() as routed, routed.engine() as engine:
        with pytest.raises(EngineRejected, match="through which no images are sent"):
            await collect(engine.generate(world.request([picture(64, 64)])))


class ReadsPatches(ScriptedEngine):
    """An engine that takes images in the form of vLLM."""

    capabilities = ScriptedEngine.capabilities | {Capability.READS_PATCHES}


async def test_an_engine_that_takes_another_form_is_not_given_the_images(world: World) -> None:
    other = ReadsPatches(EngineOptions(name="patches", tokenizer=str(world.folder), options={"replies": [REPLY]}))
    async with EnginePool() as pool:
        await pool.add_engine(other)
        with pytest.raises(EngineUnavailable, match="takes images as patches, and not as png"):
            [_ async for _ in pool.calls.generate(world.request([picture(64, 64)]), Overdue())]
    assert not other.requests


async def test_new_weights_after_images_are_warned_of_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with world.engine() as (engine, _):
        await engine.set_version(1)
        assert "SGLANG_VLM_CACHE_SIZE_MB" not in caplog.text
        await collect(engine.generate(world.request([picture(64, 64)])))
        await engine.set_version(2)
        await engine.update_weights(str(world.folder), 3)
    assert caplog.text.count("start SGLang with SGLANG_VLM_CACHE_SIZE_MB=0") == 1


def test_vllm_encodes_an_image_again_with_new_weights(world: World) -> None:
    engine = VLLMEngine(EngineOptions(name="sees", url="http://127.0.0.1:1"))
    asked = world.request([picture(64, 64), picture(96, 64)])
    hashes = []
    for salt in ("run-1", "run-1", "run-2"):
        body = b"".join(engine.body(asked, engine.route, partial(str, salt), 0))
        hashes.append(msgspec.json.decode(body)["features"]["mm_hashes"]["image"])
    assert hashes[0] == hashes[1]
    assert len({one for pair in hashes for one in pair}) == 4
