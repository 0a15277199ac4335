"""Images in TRL's GRPOTrainer: the real trainer computes log-probabilities and gradients from ids and pixels."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from api.test_vision import CALL, vision_service
from outrider.client.client import Client
from outrider.errors import InvalidField
from outrider.schemas import GroupView
from outrider.tokens.rendering.image_grids import PLACEHOLDER, ImageSettings, read_image_settings
from outrider.trainers.trl import (
    Rollouts,
    RolloutWorker,
    ServiceLogprobs,
    placeholders_of,
    rows_of,
    service_reward,
    steps_dataset,
)
from outrider.trainers.weight_publishing import PolicyWeights
from outrider.trajectory import Sample
from outrider.vision.pixels import pixels_of
from support.service import END
from support.vision import picture, task
from support.vision_model import write_vision_model

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # warnings of TRL, transformers and torch are not ours
]
SAMPLES = 2
TURNS: list[list[tuple[str, list[int | str]]]] = [
    [("look", [0]), ("tool", [30, 1]), ("bye", [])],
    [("no picture", []), ("tool", []), ("bye", [])],
]
"""The first prompt has pictures; the picture with the number 30 is scaled down. The second prompt has no picture."""
REPLIES = [CALL, f"done{END}", f"bye{END}"]
LIMIT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "vision"
    write_vision_model(folder)
    return folder


def processor_of(folder: Path) -> Any:
    """Return the model's processor without its part for videos, which needs torchvision."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class ImageProcessor(Qwen3VLProcessor):  # type: ignore[misc]  # transformers has no types
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Accept any argument, and None as the processor of videos."""

    return ImageProcessor(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder),
        video_processor=None,
        chat_template="unused",
    )


def numbered(number: int) -> dict[str, Any]:
    return task("chat", TURNS[number % 2])


def expected_logprobs(model: Any, ids: list[int], samples: list[Sample], settings: ImageSettings) -> Any:
    """Return the log-probabilities of a row, computed from the files of its pictures, without the bridge and TRL."""
    import torch

    [sample] = [sample for sample in samples if sample.ids.tolist() == ids][:1]
    inputs: dict[str, Any] = {}
    if sample.images:
        files = {
            image.digest: picture(32 * (2 + seed), 64, seed=seed)
            for image, seed in zip(sample.images, (0, 30, 1), strict=True)
        }
        pixels = [pixels_of(files[image.digest], settings).values(settings) for image in sample.images]
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for image in sample.images:
            assert image.span is not None
            kinds[0, slice(*image.span)] = 1
        inputs = {
            "pixel_values": torch.from_numpy(np.concatenate(pixels)),
            "image_grid_thw": torch.tensor([image.grid for image in sample.images]),
            "mm_token_type_ids": kinds,
        }
    rows = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=rows, attention_mask=torch.ones_like(rows), **inputs).logits
    return logits[0, :-1].log_softmax(-1).gather(1, rows[0, 1:, None])[:, 0]


@pytest.mark.parametrize("beta", [0.0, 0.1])
async def test_the_trainer_computes_logprobs_and_gradients_from_ids_and_pixels(
    tmp_path: Path, folder: Path, beta: float
) -> None:
    import torch
    from transformers import AutoModelForImageTextToText
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    outputs: list[dict[str, Any]] = []
    micro: list[dict[str, Any]] = []
    groups: list[GroupView] = []

    def keep(group: GroupView) -> bool:
        groups.append(group)
        return True

    class Trainer(ServiceLogprobs, GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            outputs.append(super()._generate_and_score_completions(inputs))
            outputs[-1]["advantages"] = torch.linspace(-1, 1, len(outputs[-1]["advantages"]))
            return outputs[-1]

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
            micro.append(inputs)
            return super()._compute_loss(model, inputs)

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    first = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        beta=beta,
        per_device_train_batch_size=2,
        steps_per_generation=2,
        num_generations=SAMPLES,
        max_steps=2,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
    )
    settings = read_image_settings(folder, "qwen3-vl", LIMIT)
    assert settings is not None

    def train(url: str) -> Any:
        with (
            Client(url) as client,
            PolicyWeights(client, model=folder) as weights,
            Rollouts(client, numbered, weights, inflight=2, informative=keep, measure=True) as rollouts,
        ):
            trainer = Trainer(
                model,
                reward_funcs=service_reward,
                args=arguments,
                train_dataset=steps_dataset(8),
                processing_class=processor_of(folder),
                rollout_func=rollouts,
            )
            trainer.train()
            samples = [client.group(group.id, samples=True).samples or () for group in groups]
            return trainer, rollouts, [sample for some in samples for sample in some]

    async with vision_service(tmp_path, REPLIES, image_tokens=LIMIT) as (_, client, _engine):
        trainer, rollouts, samples = await asyncio.to_thread(train, str(client.url))
    moved = {
        name: float((old - new).abs().max())
        for (name, old), new in zip(first.named_parameters(), model.parameters(), strict=True)
    }
    assert min(change for name, change in moved.items() if "visual.blocks" in name) > 0
    model.load_state_dict(first.state_dict())
    output = outputs[0]
    assert sorted(output["num_images"]) == [0, 0, 3, 3]
    assert rollouts.history[0].compared_tokens > 0
    # Two micro-batches of two rows each, in TRL's own order, each with the images of its rows.
    assert sum(len(inputs["image_grid_thw"]) for inputs in micro[:2]) == 6
    for inputs in micro[:2]:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        names = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
        with torch.no_grad():
            made, *_ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, width, **{name: inputs.get(name) for name in names}
            )
        for row in range(len(ids)):
            own = ids[row][mask[row] == 1].tolist()
            wanted = expected_logprobs(first, own, samples, settings)
            length = int(inputs["completion_mask"][row].sum())
            assert float((made[row, :length] - wanted[-length:]).abs().max()) < 1e-4
            if beta:
                reference = inputs["ref_per_token_logps"][row, :length]
                assert float((reference - wanted[-length:]).abs().max()) < 1e-4


async def test_a_placeholder_that_the_model_has_sampled_ends_the_row(tmp_path: Path, folder: Path) -> None:
    placeholders = placeholders_of(processor_of(folder))
    stray = f"bye{PLACEHOLDER}bye{END}"
    async with vision_service(tmp_path, [CALL, f"done{END}", stray]) as (_, client, _engine):
        [done] = await client.wait([(await client.submit({"task": numbered(0)})).id])
        group = await client.group(done.id, samples=True)
    [sample] = group.samples or ()
    at = int(np.flatnonzero(sample.ids == next(iter(placeholders)))[-1])
    [row] = rows_of(group, placeholders).rows
    assert [*row.prompt_ids, *row.completion_ids] == sample.ids[:at].tolist()
    assert (len(row.images), row.cut) == (3, int(sample.loss_mask[at:].sum()))
    assert row.cut > 1


async def test_images_are_refused_by_name_where_a_trainer_has_no_place_for_them(tmp_path: Path) -> None:
    async with vision_service(tmp_path, REPLIES) as (_, client, _engine):
        [done] = await client.wait([(await client.submit({"task": numbered(0), "n": 2})).id])
        group = await client.group(done.id, samples=True)
    with pytest.raises(InvalidField, match="processing_class makes no pixel values") as refused:
        rows_of(group, placeholders_of(SimpleNamespace(eos_token_id=1)))
    assert "AutoProcessor" in (refused.value.hint or "")
    with pytest.raises(InvalidField, match="AsyncGRPOTrainer's rows have no place"):
        next(RolloutWorker._rows(object.__new__(RolloutWorker), group, 0))
