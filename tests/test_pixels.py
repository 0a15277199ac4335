"""Images in the form that a model takes: the grid, the patches, and the process that decodes images."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from outrider.errors import InvalidField, ServiceError
from outrider.messages import image_from_bytes
from outrider.tokens.rendering.image_grids import ImageForm, ImageSettings, read_image_settings
from outrider.vision.messages import ImageAnswer, ImageRequest
from outrider.vision.pixels import MAX_PIXELS, UnreadableImage, decoded, pixels_of, png_item
from outrider.vision.preparer import DecodingProcess, ImagePreparer, PreparedImage, UnreadImage, item_size
from support.vision import picture
from support.vision_model import PREPROCESSOR, write_vision_tokenizer

SETTINGS = ImageSettings(
    patch=16, merge=2, frames=2, least=4096, most=262144, mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2)
)
SIZES = [(64, 64), (640, 480), (1280, 720), (33, 31), (10, 300), (1000, 20), (600, 600)]


@asynccontextmanager
async def a_preparer(**options: Any) -> AsyncIterator[ImagePreparer]:
    preparer = ImagePreparer(SETTINGS, DecodingProcess(), **options)
    try:
        yield preparer
    finally:
        await preparer.process.close()


def as_file(image: Pillow.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few hundred bytes whose head has this width and height."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(100_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def processor() -> Any:
    """The model's own processor."""
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return pil.Qwen2VLImageProcessorPil(
        patch_size=SETTINGS.patch,
        merge_size=SETTINGS.merge,
        temporal_patch_size=SETTINGS.frames,
        size={"shortest_edge": SETTINGS.least, "longest_edge": SETTINGS.most},
        image_mean=list(SETTINGS.mean),
        image_std=list(SETTINGS.std),
    )


@pytest.mark.deep  # transformers takes seconds to import
@pytest.mark.transformers
@pytest.mark.parametrize("size", SIZES)
def test_grids_and_pixels_are_those_of_the_models_own_processor(processor: Any, size: tuple[int, int]) -> None:
    data = picture(*size)
    theirs = processor(images=[Pillow.open(io.BytesIO(data))], return_tensors="np")
    ours = pixels_of(data, SETTINGS)
    assert [list(ours.grid)] == theirs["image_grid_thw"].tolist()
    assert np.abs(ours.values(SETTINGS) - theirs["pixel_values"]).max() < 1e-6


@pytest.mark.deep  # transformers takes seconds to import
@pytest.mark.transformers
@pytest.mark.parametrize("size", SIZES)
def test_a_png_for_an_engine_has_the_same_patches_as_the_image(processor: Any, size: tuple[int, int]) -> None:
    data = picture(*size, kind="JPEG")
    grid, item = png_item(data, SETTINGS)
    ours, png = pixels_of(data, SETTINGS), base64.b64decode(item)
    assert len(item) < len(ours.levels.tobytes()) * 2 // 3 + 4096
    assert grid == ours.grid
    assert (pixels_of(png, SETTINGS).levels == ours.levels).all()
    theirs = processor(images=[Pillow.open(io.BytesIO(png))], return_tensors="np")
    assert np.abs(ours.values(SETTINGS) - theirs["pixel_values"]).max() < 1e-6


def test_an_image_that_a_server_would_scale_again_is_not_made_a_png() -> None:
    data = picture(32 * 190, 32)
    few = ImageSettings(patch=16, merge=2, frames=2, least=4096, most=4096, mean=(0.5,) * 3, std=(0.5,) * 3)
    assert pixels_of(data, few).grid == (1, 2, 54)
    with pytest.raises(UnreadableImage, match="too narrow: the engine would scale it again"):
        png_item(data, few)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "none of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of PNG"),
        (as_file(Pillow.new("RGB", (8, 8)), "TIFF"), "none of PNG"),
        (picture(640, 480)[:300], "cannot be decoded"),
        (bomb(60_000, 60_000), "bomb"),
        (bomb(8000, 8000), f"more than {MAX_PIXELS:,}"),
        (bomb(7000, 7000), "cannot be decoded"),
        (as_file(Pillow.new("1", (3000, 9))), "200 times"),
    ],
)
def test_unreadable_images_have_a_reason(data: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        pixels_of(data, SETTINGS)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "I;16", "CMYK"])
def test_any_mode_is_shown_in_three_colours(mode: str) -> None:
    shown = decoded(as_file(Pillow.new(mode, (8, 8)), "JPEG" if mode == "CMYK" else "PNG"))
    assert (shown.mode, shown.size) == ("RGB", (8, 8))
    if mode in ("RGBA", "LA"):
        assert shown.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_orientation_says(orientation: int) -> None:
    image = Pillow.new("RGB", (64, 96), "red")
    image.paste("blue", (0, 0, 32, 48))
    exif = image.getexif()
    exif[0x112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    turned = ImageOps.exif_transpose(Pillow.open(io.BytesIO(file.getvalue())))
    shown = decoded(file.getvalue())
    assert shown.size == ((96, 64) if orientation > 4 else (64, 96))
    assert np.array_equal(np.asarray(shown), np.asarray(turned))


def test_damaged_exif_data_turns_nothing() -> None:
    file = io.BytesIO()
    Pillow.new("RGB", (64, 96)).save(file, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decoded(file.getvalue()).size == (64, 96)


def many_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG of side x side pixels whose last scan, of 99 bytes, is repeated."""
    file = io.BytesIO()
    Pillow.new("L", (side, side), 90).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rindex(b"\xff\xc4") : -2]
    return data[:-2] + last * scans + b"\xff\xd9"


@pytest.mark.deep
async def test_an_image_that_takes_minutes_is_unreadable_and_no_fault_of_the_service() -> None:
    async with a_preparer(cpu_seconds=1.0) as preparer:
        slow = many_scans(7000, 4000)
        assert len(slow) < 1_000_000
        assert await preparer.prepare(image_from_bytes("image/jpeg", slow)) == UnreadImage(
            "the image takes too long to decode"
        )
        assert isinstance(await preparer.prepare(image_from_bytes("image/png", picture(64, 64))), PreparedImage)


async def test_images_are_decoded_in_one_process_and_each_once() -> None:
    async with a_preparer() as preparer:
        image = image_from_bytes("image/png", picture(96, 64))
        both = await asyncio.gather(preparer.prepare(image), preparer.prepare(image))
        assert isinstance(both[0], PreparedImage)
        assert both[0] is both[1] is preparer.kept(image.digest, ImageForm.PATCHES)
        assert both[0].grid == (1, 4, 6)
        assert 0 <= item_size(SETTINGS, both[0].grid) - len(both[0].item) < 512
        png = await preparer.prepare(image, ImageForm.PNG)
        assert isinstance(png, PreparedImage)
        assert png is preparer.kept(image.digest, ImageForm.PNG)
        assert (png.grid, base64.b64decode(png.item)[:4]) == (both[0].grid, b"\x89PNG")
        broken = await preparer.prepare(image_from_bytes("image/png", b"no"))
        assert isinstance(broken, UnreadImage)
        assert isinstance(
            await preparer.prepare(image_from_bytes("image/gif", picture(64, 64, kind="GIF"))), PreparedImage
        )


async def test_a_killed_process_is_the_services_fault_and_the_next_image_gets_another() -> None:
    async with a_preparer() as preparer:
        await preparer.prepare(image_from_bytes("image/png", picture(64, 64)))
        for number, error in ((signal.SIGKILL, ServiceError), (signal.SIGSEGV, None)):
            assert preparer.process.id is not None
            os.kill(preparer.process.id, number)
            other = image_from_bytes("image/png", picture(64, 64, seed=int(number)))
            if error is not None:
                with pytest.raises(error, match="decodes images failed"):
                    await preparer.prepare(other)
            else:  # SIGSEGV, as if the image had made the decoder crash
                assert isinstance(await preparer.prepare(other), UnreadImage)
            assert isinstance(await preparer.prepare(other), PreparedImage)


async def test_a_process_that_hangs_is_the_services_fault_and_is_replaced() -> None:
    async with a_preparer() as preparer:
        await preparer.prepare(image_from_bytes("image/png", picture(64, 64)))
        hanging, other = preparer.process.id, image_from_bytes("image/png", picture(64, 96))
        assert hanging is not None
        os.kill(hanging, signal.SIGSTOP)
        request = ImageRequest(other.data, SETTINGS, ImageForm.PATCHES, 10.0)
        with pytest.raises(ServiceError, match="an image was not decoded within"):
            await preparer.process.ask(request, ImageAnswer, "an image", seconds=0.1)
        assert isinstance(await preparer.prepare(other), PreparedImage)
        with pytest.raises(ProcessLookupError):
            os.kill(hanging, 0)


async def test_the_process_ends_with_its_preparer() -> None:
    async with a_preparer() as preparer:
        await preparer.prepare(image_from_bytes("image/png", picture(64, 64)))
        process_id = preparer.process.id
    assert preparer.process.id is None
    assert process_id is not None
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_settings_come_from_the_models_folder(tmp_path: Path) -> None:
    write_vision_tokenizer(tmp_path)
    found = read_image_settings(tmp_path, "qwen3-vl", 64)
    assert found is not None
    assert (found.patch, found.merge, found.most) == (16, 2, 64 * 32 * 32)
    assert read_image_settings(tmp_path, "qwen3-vl", 0) is None
    assert read_image_settings(tmp_path, "qwen3", 64) is None
    assert read_image_settings(tmp_path / "other", "qwen3-vl", 64) is None


@pytest.mark.parametrize(
    "changed",
    [{"image_processor_type": "CLIPImageProcessor"}, {"do_normalize": False}, {"patch_size": 0}, {"image_std": [1]}],
)
def test_other_image_processors_are_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | changed))
    with pytest.raises(InvalidField, match="image processor"):
        read_image_settings(tmp_path, "qwen3-vl", 64)
