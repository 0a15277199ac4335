"""A scripted model, a harness's context, and a sandbox, for the tests of this folder."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.harnesses.base import HarnessContext, ModelEndpoint
from outrider.messages import Message, Role, ToolCall
from outrider.sandbox.runtimes.base import Runtime
from outrider.spec import EvaluatorSpec, HarnessSpec, Limits, TaskSpec
from support.sandboxes import process_sandbox

ENDPOINT = ModelEndpoint(base_url="http://127.0.0.1:9/s/key-1", api_key="key-1", model="policy")


class ScriptedModel:
    """Returns or raises its replies one by one, and records the messages and tool names of each call."""

    def __init__(self, *replies: Message | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[list[Message]] = []
        self.tools: list[list[str]] = []

    async def chat(self, messages: Any, *, tools: Any = (), **_: Any) -> Message:
        self.asked.append(list(messages))
        self.tools.append([tool["function"]["name"] for tool in tools])
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def says(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def calls(*pairs: tuple[str, str]) -> Message:
    made = tuple(ToolCall(f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(pairs))
    return Message(role=Role.ASSISTANT, tool_calls=made)


def results(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role is Role.TOOL]


def context(runtime: Runtime, harness: HarnessSpec, *replies: Message | Exception, **task: Any) -> HarnessContext:
    spec = TaskSpec(
        instruction=task.pop("instruction", "do it"),
        harness=harness,
        evaluator=EvaluatorSpec(run="true"),
        limits=Limits(agent_seconds=30),
    )
    return HarnessContext(task=spec, runtime=runtime, endpoint=ENDPOINT, model=ScriptedModel(*replies))


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with process_sandbox(tmp_path) as runtime:
        yield runtime
