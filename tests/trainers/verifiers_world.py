"""A vLLM server as prime-rl starts it, and prime-rl's reading of a trace, for tests with and without the packages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.engines.base import EngineOptions
from outrider.lab.fakes.engine_servers import ServeSettings, engine_app, serving
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.tokenizer import write_tokenizer


@asynccontextmanager
async def model_server(
    tmp_path: Path, replies: Sequence[str | dict[str, Any]]
) -> AsyncIterator[tuple[ScriptedEngine, str]]:
    """Yield an engine behind vLLM's protocol, as prime-rl starts one, and its URL."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    fake = ScriptedEngine(EngineOptions(name="fake", tokenizer=str(folder), options={"replies": list(replies)}))
    await fake.start()
    app = engine_app(fake, "vllm", ServeSettings(tokenizer=Tokenizer.load(folder), labels=False))
    try:
        async with serving(app) as url:
            yield fake, url
    finally:
        await fake.close()


def paths(nodes: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the nodes of each path from a root to a leaf, in the order of the leaves."""
    parents = {node["parent"] for node in nodes}
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path: list[Mapping[str, Any]] = []
        at: int | None = leaf
        while at is not None:
            path.append(nodes[at])
            at = nodes[at]["parent"]
        yield path[::-1]


def training_samples(nodes: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[bool], list[float]]]:
    """Return the ids, masks and log-probabilities that prime-rl trains on.

    Written after `prime_rl.orchestrator.trajectories.trace_to_samples` and `iter_trainable_branches` (commit 559b4477,
    21 August 2026), with `Branch.spread` of verifiers: prime-rl itself cannot be installed without CUDA.
    """
    found = []
    trained: set[int] = set()
    for path in paths(nodes):
        ids: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        for node in path:
            assert len(node["mask"]) == len(node["token_ids"])
            assert len(node["logprobs"]) == sum(node["mask"])
            ids += node["token_ids"]
            rest = iter(node["logprobs"])
            logprobs += [next(rest) if one else 0.0 for one in node["mask"]]
            fresh = node["sampled"] and any(node["mask"]) and id(node) not in trained
            mask += node["mask"] if fresh else [False] * len(node["mask"])
            trained |= {id(node)} if fresh else set()
        if any(mask):
            found.append((ids, mask, logprobs))
    return found
