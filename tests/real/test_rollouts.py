"""Whole rollouts: real agent programs in real sandboxes, through the service, on the scripted engine and on vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.api.server import serving
from outrider.client.client import AsyncClient
from outrider.config import Config, ModelConfig, PluginsConfig
from outrider.harnesses.install import install
from outrider.lifecycle import StopReason
from outrider.schemas import GroupView
from outrider.service.assembly import open_service
from outrider.spec import EngineSpec
from outrider.trajectory import TokenMode

from .logprobs import assert_agrees
from .vllm_cpu import VllmServer

pytestmark = pytest.mark.real

HARNESSES = ["mini-swe-agent", "pi"]
ROLLOUT_SECONDS = 300.0
END = "<|im_end|>"


def call(command: str) -> str:
    arguments = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{arguments}\n</tool_call>{END}"


SCRIPTS = {
    "mini-swe-agent": [
        "I will write the file. " + call("echo hello > out.txt"),
        call("cat out.txt"),
        call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "pi": [
        "<think>\nFirst write, then look.\n</think>\n\nWriting it now." + call("echo hello > out.txt"),
        call("cat out.txt"),
        "All done." + END,
    ],
}


def a_group(harness: str, **task: Any) -> dict[str, Any]:
    return {
        "task": {
            "instruction": "Write the word hello into the file out.txt in the working directory.",
            "harness": {"preset": harness},
            "runtime": {"kind": "namespace"},
            "evaluator": {"kind": "command", "run": '[ "$(cat out.txt)" = hello ]'},
            "limits": {"agent_seconds": 240},
            "max_attempts": 1,
            **task,
        },
        "n": 2,
    }


@asynccontextmanager
async def a_service(folder: Path, policy: Path, engine: EngineSpec, *, renderer: str) -> AsyncIterator[AsyncClient]:
    config = Config(
        port=0,
        data=folder,
        plugins=PluginsConfig(allow=("*",)),
        model=ModelConfig(tokenizer=str(policy), renderer=renderer),
        engines=(engine,),
    )
    async with open_service(config) as opened, serving(*opened) as url, AsyncClient(url) as client:
        yield client


async def finished(client: AsyncClient, group: dict[str, Any]) -> GroupView:
    submitted = await client.submit(group)
    async with asyncio.timeout(ROLLOUT_SECONDS):
        async for done in client.follow(samples=True):
            if done.id == submitted.id:
                return done
    raise AssertionError("the results ended")


def assert_whole_record(group: GroupView) -> None:
    """Check that no token drifted or is missing, and that every row is token-exact."""
    assert group.samples
    for session in group.sessions:
        assert session.result is not None
        tokens = session.result.tokens
        assert tokens.drift == 0
        assert tokens.sampled == tokens.trained + tokens.masked + tokens.dropped
        assert tokens.sampled > 0
    for sample in group.samples:
        assert sample.mode is TokenMode.TOKENS
        assert len(sample.ids) == len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions)


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_real_agent_finishes_its_task_on_the_scripted_engine(
    harness: str, policy_folder: Path, tmp_path: Path
) -> None:
    await asyncio.to_thread(install, harness)
    engine = EngineSpec(kind="scripted", options={"replies": SCRIPTS[harness]})
    async with a_service(tmp_path, policy_folder, engine, renderer="qwen3") as client:
        group = await finished(client, a_group(harness))
        assert_whole_record(group)
        for session in group.sessions:
            assert session.result is not None
            assert session.result.error is None, session.result.error
            assert session.result.stop_reason is StopReason.COMPLETED
            assert session.result.verdict is not None
            assert session.result.verdict.reward == 1.0
            turns = await client.turns(session.id)
            assert [turn.join for turn in turns] == ["root", "append", "append"]
            assert {turn.dialect for turn in turns} == {"chat"}
        assert group.samples is not None
        assert len(group.samples) == len(group.sessions), "three turns that only append are one row"


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_real_agent_on_a_real_vllm_leaves_exact_logprobs(
    harness: str, vllm_url: VllmServer, tmp_path: Path
) -> None:
    """The tiny policy cannot solve the task, but the record of its attempt is exact."""
    await asyncio.to_thread(install, harness)
    engine = EngineSpec(kind="vllm", url=vllm_url.url, model=vllm_url.model)
    limits = {"agent_seconds": 240, "turns": 3}
    async with a_service(tmp_path, vllm_url.model_folder, engine, renderer="qwen3") as client:
        group = await finished(client, a_group(harness, limits=limits, sampling={"max_tokens": 40}))
        for session in group.sessions:
            assert session.result is not None
            assert session.result.error is None, session.result.error
        assert_whole_record(group)
        assert group.samples is not None
        gap = await asyncio.to_thread(assert_agrees, group.samples, vllm_url.model_folder, 1e-4)
        print(f"{harness}: {len(group.samples)} rows, largest gap of a log-probability {gap:.1e}")
