"""Images on a real vLLM: ids, pixel values and grids of every row reproduce its log-probabilities in transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from outrider.client.client import AsyncClient
from outrider.config import ModelConfig
from outrider.spec import EngineSpec
from support.pictures import PATHS
from support.service import running_service
from support.vision import task
from support.vision_model import write_vision_model

from .vision_logprobs import assert_agrees, without_images
from .vllm_cpu import VllmServer, vllm_server

pytestmark = pytest.mark.real

TURNS = [("look", [0]), ("and here", [1, 2]), ("bye", []), ("once more", [0])]
SWITCHES = ("--limit-mm-per-prompt", '{"image":8,"video":0}', "--skip-mm-profiling")


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision") / "model"
    write_vision_model(folder, context=16384)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vision_server(vllm_prefix: Path, vision_folder: Path) -> AsyncIterator[VllmServer]:
    async with vllm_server(vllm_prefix, vision_folder, switches=SWITCHES) as server:
        yield server


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("dialect", PATHS)
async def test_logprobs_are_recomputed_from_ids_pixels_and_grids(
    vision_server: VllmServer, vision_folder: Path, tmp_path: Path, dialect: str
) -> None:
    spec = EngineSpec(kind="vllm", name="real", url=vision_server.url, model=vision_server.model)
    model = ModelConfig(tokenizer=str(vision_folder), renderer="qwen3-vl")
    asked = task(dialect, TURNS) | {"sampling": {"max_tokens": 24, "seed": 7}}
    async with (
        running_service(tmp_path=tmp_path, model=model, engines=(spec,)) as (_, url),
        AsyncClient(url) as client,
    ):
        [done] = await client.wait([(await client.submit({"task": asked})).id])
        assert done.sessions[0].last_error is None, done.sessions[0].last_error
        samples = await client.samples(done.sessions[0].id)
        images = {
            digest: (await client.image(digest)).data
            for digest in {image.digest for sample in samples for image in sample.images}
        }
    assert max(len(sample.images) for sample in samples) >= 1
    for sample in samples:
        gap = assert_agrees(sample, images, vision_folder)
        print(
            f"{dialect}: row {sample.row}, {len(sample.images)} images, {sample.trained_tokens} tokens, gap {gap:.2e}"
        )
        if sample.images:  # the comparison would fail for other images
            trained = sample.logprobs[sample.loss_mask == 1]
            assert np.abs(trained - np.asarray(without_images(sample, vision_folder))).max() > 1e-3
