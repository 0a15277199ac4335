"""Images of a session in verl 0.9.1: verl's own worker makes pixel values of them, which a model of transformers
accepts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from api.test_vision import CALL, vision_service
from outrider.client.client import AsyncClient
from outrider.errors import InvalidField
from outrider.schemas import GroupView
from outrider.tokens.rendering.image_grids import PLACEHOLDER, read_image_settings
from outrider.trainers.pictures import image_in_grid
from outrider.trainers.trajectories import Trajectory, trajectories_of
from outrider.trainers.verl import OutriderWorker, outputs_of
from outrider.trainers.verl_rows import Terms, VerlSettings, columns_of
from outrider.vision.pixels import pixels_of
from support.service import END
from support.vision import picture, task
from support.vision_model import write_vision_model

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(300)]
TURNS = [("look", [0]), ("tool", [30, 1]), ("bye", [])]
"""The picture with the number 30 has more pixels than the model takes, so the service scales it down."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "vision"
    write_vision_model(folder)
    return folder


class ImageProcessor(Qwen3VLProcessor):  # type: ignore[misc]  # transformers has no types
    """The model's processor without its part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
        """Accept any argument, and None as the processor of videos."""


def vision_processor(folder: Path) -> Any:
    """Return the processor as verl's `hf_processor` makes it, with the model's `get_rope_index`."""
    processor = ImageProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder),
        video_processor=None,
        chat_template="unused",
    )
    processor.config = AutoConfig.from_pretrained(folder)
    for name in ("get_rope_index", "get_vision_position_ids"):
        setattr(processor, name, MethodType(getattr(Qwen3VLModel, name), processor))
    return processor


def terms_with(processor: Any, **changes: Any) -> Terms:
    media = frozenset({processor.image_token_id, processor.video_token_id})
    given: dict[str, Any] = {
        "prompt_length": 64,
        "response_length": 4096,
        "logprobs": True,
        "sampling": {},
        "media_ids": media,
    }
    return Terms(**given | changes)


async def session_of(client: AsyncClient) -> GroupView:
    [done] = await client.wait([(await client.submit({"task": task("chat", TURNS)})).id])
    return await client.group(done.id, samples=True)


def taken(group: GroupView, settings: VerlSettings) -> Trajectory:
    [trajectory] = trajectories_of(group, settings, logprobs=True, images=True)
    return trajectory


def worker_with(processor: Any) -> Any:
    worker = object.__new__(OutriderWorker)
    worker.processor, worker.tokenizer, worker.mm_processor_kwargs = processor, processor.tokenizer, {}
    return worker


async def test_verls_worker_has_the_ids_and_pixels_of_the_engine(tmp_path: Path, folder: Path) -> None:
    processor = vision_processor(folder)
    image_settings = read_image_settings(folder, "qwen3-vl", 60)
    assert image_settings is not None
    replies = [CALL, f"done{END}", f"bye{END}"]
    async with vision_service(tmp_path, replies, image_tokens=60) as (_, client, _engine):
        group = await session_of(client)
        settings = VerlSettings(url=str(client.url))
        trajectory = taken(group, settings)
        [sample] = group.samples or ()
        assert [image.grid for image in sample.images][:1] == [(1, 4, 4)]
        terms = terms_with(processor)
        [output] = await outputs_of(trajectory, settings, terms, processor, step=0)
        ids = torch.tensor(output.prompt_ids + output.response_ids)
        assert ids.tolist() == sample.ids.tolist()
        inputs = worker_with(processor)._compute_multi_modal_inputs(output, ids)
        assert inputs["image_grid_thw"].tolist() == [list(image.grid or ()) for image in sample.images]
        files = [picture(64, 64, seed=0), picture(32 * 32, 64, seed=30), picture(96, 64, seed=1)]
        expected = np.concatenate([pixels_of(data, image_settings).values(image_settings) for data in files])
        assert np.abs(inputs["pixel_values"].numpy() - expected).max() < 1e-6
        positions = worker_with(processor)._compute_position_ids(ids[None], torch.ones_like(ids)[None], dict(inputs))
        assert positions.shape == (1, 4, len(ids))
        model = AutoModelForImageTextToText.from_pretrained(folder)
        with torch.no_grad():
            logits = model(
                input_ids=ids[None],
                position_ids=positions.transpose(0, 1)[1:],
                pixel_values=inputs["pixel_values"],
                image_grid_thw=inputs["image_grid_thw"],
            ).logits
        assert logits.shape[1] == len(ids)
        assert torch.isfinite(logits).all()

        # verl's response length cuts the row within an image: the row ends before the image
        second, third = (image.span or (0, 0) for image in sample.images[1:])
        for length, last in ((second[0] + 5, second[0]), (third[0] + 1, third[0])):
            [fields] = columns_of(trajectory, settings, replace(terms, response_length=length - 64), step=0)
            assert 64 + len(fields["response_ids"]) == last
            assert len(fields["images"]) == (1 if last == second[0] else 2)
            assert fields["extra_fields"]["outrider"]["cut_tokens"] > 0


async def test_a_placeholder_that_the_model_has_sampled_ends_the_row(tmp_path: Path, folder: Path) -> None:
    processor = vision_processor(folder)
    async with vision_service(tmp_path, [CALL, f"done{END}", f"bye{PLACEHOLDER}bye{END}"]) as (_, client, _engine):
        group = await session_of(client)
    [sample] = group.samples or ()
    at = int(np.flatnonzero(sample.ids == processor.image_token_id)[-1])
    assert sample.loss_mask[at]
    trajectory = taken(group, VerlSettings(url="http://127.0.0.1:1"))
    [fields] = columns_of(trajectory, VerlSettings(url="http://127.0.0.1:1"), terms_with(processor), step=0)
    assert 64 + len(fields["response_ids"]) == at
    assert len(fields["images"]) == 3
    assert fields["extra_fields"]["outrider"]["cut_tokens"] == int(sample.loss_mask[at:].sum()) > 1


async def test_without_a_processor_images_are_refused(tmp_path: Path) -> None:
    async with vision_service(tmp_path, [CALL, f"done{END}", f"bye{END}"]) as (_, client, _engine):
        group = await session_of(client)
    [trajectory] = trajectories_of(group, VerlSettings(url="http://127.0.0.1:1"), logprobs=True)
    assert isinstance(trajectory.error, InvalidField)
    assert "has images" in trajectory.error.message


def test_a_processor_that_would_divide_an_image_otherwise_is_refused(folder: Path) -> None:
    processor = vision_processor(folder)
    read = partial(image_in_grid, image_processor=processor.image_processor, trainer="verl", field="model")
    shown = read(picture(640, 480), (1, 12, 16)).picture
    assert isinstance(shown, Image.Image)
    assert shown.size == (256, 192)
    with pytest.raises(InvalidField, match="has read an image as the grid"):
        read(picture(2048, 2048), (1, 128, 128))
