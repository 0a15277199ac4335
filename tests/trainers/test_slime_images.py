"""Images in slime: the rows of a rollout have the inputs from which slime's model reads images."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from api.test_vision import CALL, MERGED, vision_service
from outrider.errors import InvalidField
from outrider.tokens.rendering.image_grids import PLACEHOLDER, read_image_settings
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.trainers import slime
from outrider.vision.pixels import pixels_of
from support.service import END
from support.vision import picture, task

from .slime_world import DataSource, Sample, TrainingSide, slime_args, slime_modules

TURNS: list[tuple[str, list[int | str]]] = [("look", [0]), ("tool", [30, 1]), ("bye", [])]
"""The picture with the number 30 has more pixels than the model takes, so the service scales it down."""
NO_PICTURE: list[tuple[str, list[int | str]]] = [("none", []), ("tool", []), ("bye", [])]
REPLIES = [CALL, f"done{END}", f"bye{END}"]
LIMIT = 60

Loader = Callable[..., Any]

pytestmark = pytest.mark.transformers


def processor_of(path: str, **_: Any) -> Any:
    """Stands for slime's `load_processor`, which loads the processor of transformers."""
    [pad] = Tokenizer.load(Path(path)).encode(PLACEHOLDER)
    return SimpleNamespace(image_processor=image_processor(path), image_token_id=pad)


def image_processor(path: str, **changes: Any) -> Any:
    # Imported here: transformers and torch take seconds, and every worker imports this file to collect its tests.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(path, **changes)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torch")
    pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for name in ("OUTRIDER_URL", "OUTRIDER_TOKEN", "OUTRIDER_SLIME"):
        monkeypatch.delenv(name, raising=False)
    with slime_modules(load_processor=processor_of):
        yield


def prompts(*turns: list[tuple[str, list[int | str]]]) -> list[Sample]:
    return [Sample(prompt="look", metadata={"task": task("chat", each)}) for each in turns]


def expected(folder: Path) -> np.ndarray[Any, Any]:
    settings = read_image_settings(folder, "qwen3-vl", LIMIT)
    assert settings is not None
    files = [picture(64, 64, seed=0), picture(32 * 32, 64, seed=30), picture(96, 64, seed=1)]
    return np.concatenate([pixels_of(data, settings).values(settings) for data in files])


async def test_the_rows_of_a_rollout_have_the_pixels_that_the_engine_has_read(tmp_path: Path) -> None:
    folder = tmp_path / "vision"
    async with vision_service(tmp_path, REPLIES, image_tokens=LIMIT) as (_, client, _engine):
        args = slime_args(str(client.url), hf_checkpoint=str(folder))
        source = DataSource(args, prompts(TURNS, NO_PICTURE))
        output = await asyncio.to_thread(slime.generate_rollout, args, 0, source)
        await asyncio.to_thread(slime.close, source)
        groups = {
            group.labels["slime.prompt"]: await client.group(group.id, samples=True) for group in await client.groups()
        }
    side = TrainingSide(args, output)
    pad = processor_of(str(folder)).image_token_id
    wanted = expected(folder)
    for number, sample in enumerate(side.samples):
        [ours] = [row for row in groups[str(sample.group_index)].samples or () if row.sample_index == number % 2]
        assert sample.tokens == ours.ids.tolist()
        inputs = sample.multimodal_train_inputs
        if sample.group_index == 1:
            assert inputs is None
            continue
        assert inputs is not None
        assert inputs["image_grid_thw"].tolist() == [list(image.grid or ()) for image in ours.images]
        assert np.abs(inputs["pixel_values"].numpy() - wanted).max() < 1e-6
    # a micro-batch of samples with and without images
    joined = side.multimodal_inputs([2, 0, 3, 1])
    tokens = [token for number in (2, 0, 3, 1) for token in side.samples[number].tokens]
    assert tokens.count(pad) * MERGED == sum(math.prod(grid) for grid in joined["image_grid_thw"].tolist())
    assert len(joined["pixel_values"]) == tokens.count(pad) * MERGED
    assert source._prompts[0].multimodal_train_inputs is None


async def test_a_sampled_placeholder_ends_the_row_of_slimes_own_loop(tmp_path: Path) -> None:
    folder = tmp_path / "vision"
    replies = [CALL, f"done{END}", f"bye{PLACEHOLDER}bye{END}"]
    async with vision_service(tmp_path, replies, image_tokens=LIMIT) as (_, client, _engine):
        args = slime_args(str(client.url), hf_checkpoint=str(folder))
        [prompt] = prompts(TURNS)
        prompt.index = prompt.group_index = 0
        made = await slime.custom_generate(args, prompt, {"temperature": 1.0})
        [group] = await client.groups()
        [ours] = (await client.group(group.id, samples=True)).samples or ()
    pad = processor_of(str(folder)).image_token_id
    at = int(np.flatnonzero(ours.ids == pad)[-1])
    assert made.tokens == ours.ids[:at].tolist()
    assert len(made.loss_mask) == len(made.rollout_log_probs) == made.response_length == at - ours.prompt_length
    assert made.metadata["outrider"]["cut_tokens"] == int(ours.loss_mask[at:].sum()) > 1
    assert np.abs(made.multimodal_train_inputs["pixel_values"].numpy() - expected(folder)).max() < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "makes no pixel values"),
        ({"patch_size": 14}, "has read an image as the grid"),
    ],
)
async def test_a_processor_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    def load(path: str, **_: Any) -> Any:
        if not changes:
            return None
        made = processor_of(path)
        made.image_processor = image_processor(path, **changes)
        return made

    async with vision_service(tmp_path, REPLIES) as (_, client, _engine):
        args = slime_args(str(client.url), hf_checkpoint=str(tmp_path / "vision"))
        [prompt] = prompts(TURNS)
        prompt.index = prompt.group_index = 0
        with slime_modules(load_processor=load), pytest.raises(InvalidField, match=message):
            await slime.custom_generate(args, prompt, {"temperature": 1.0})
