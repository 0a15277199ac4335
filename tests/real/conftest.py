"""Fixtures with real programs: an installed preset, the demo's policy, and vLLM for CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

import outrider
from outrider.harnesses.install import install
from support.later import safetensors

from .vllm_cpu import CONTEXT_TOKENS, SharedVllm, VllmServer, vllm_environment

FOLDER = Path(__file__).parent
SYNONYMS = {"<think>": "It", "</think>": " in"}
LAST = "test_vllm_policy.py"
"""The file whose tests run last, because they change the weights of the shared server and then stop the server."""
TEST_SECONDS = 1200  # the first test also waits until its program is installed and started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path == FOLDER / LAST)
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> None:
    """Installs the program of the module's PRESET, in $OUTRIDER_HOME if that is set, so that later runs are quick."""
    install(request.module.PRESET)


@pytest.fixture(scope="session")
def policy_folder() -> Path:
    """The demo's tiny policy: config.json, model.safetensors, tokenizer.json, chat_template.jinja."""
    return Path(outrider.__file__).parent / "lab" / "demo" / "policy"


@pytest.fixture(scope="session")
def vllm_prefix() -> Path:
    """A Python environment with vLLM for CPU, installed if it is missing. Skips if vLLM cannot be installed."""
    return vllm_environment(install=True)


@pytest.fixture(scope="session")
def roomy_policy(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the policy with three changes:

    - Its configuration declares a context that is long enough for an agent's prompts. The policy was trained with far
      shorter ones, so its output there is meaningless, but its log-probabilities are well defined.
    - The marks of reasoning, which were not in its training, get the embeddings of two frequent words, so that the
      policy reasons now and then.
    - It has its own output layer, because vLLM for CPU (0.32) does not update a tied output layer when it reloads.
    """
    folder = tmp_path_factory.mktemp("policy") / "policy"
    shutil.copytree(policy_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": CONTEXT_TOKENS, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    make_synonyms(folder, SYNONYMS)
    weights = safetensors.load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_synonyms(folder: Path, synonyms: Mapping[str, str]) -> None:
    """Copy the embedding of each value's token to its key's token. The embedding is tied, so the model reads and
    samples both tokens alike."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    weights = safetensors.load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    for word, meaning in synonyms.items():
        (row,), (like,) = (tokenizer.encode(text, add_special_tokens=False).ids for text in (word, meaning))
        rows[row] = rows[like]
    safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_vllm(vllm_prefix: Path, roomy_policy: Path) -> AsyncIterator[SharedVllm]:
    shared = SharedVllm(vllm_prefix, roomy_policy)
    try:
        yield shared
    finally:
        await shared.close()


@pytest_asyncio.fixture(loop_scope="session")
async def vllm_url(shared_vllm: SharedVllm) -> AsyncIterator[VllmServer]:
    """The vLLM server of all tests of the session, with the model of `roomy_policy`. A start takes a minute."""
    yield await shared_vllm.server()
    await shared_vllm.drop_if_ended()
