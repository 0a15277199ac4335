"""The conversation of `openai_agent.py`, held by an in-process agent of Outrider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role

QUESTIONS = ("Where is it?", "Read it.", "What does it say?", "Thank you.")
ANSWERS = ("It is in a file.", "The file is empty.", "It says nothing.", "You are welcome.")
SCRIPT = [
    {"when": question, "reply": f"{answer}<|im_end|>"} for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
][::-1]
"""The engine's replies. The newest question comes first, because a prompt has the earlier questions, too."""


class Questions:
    """Asks QUESTIONS in one conversation."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """No options."""

    async def init(self, context: HarnessContext) -> None:
        """Nothing to prepare."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        messages: list[Message] = []
        for question in QUESTIONS:
            messages.append(Message(role=Role.USER, content=question))
            messages.append(await context.model.chat(messages))
        return HarnessOutcome(answer=messages[-1].content)


def one(outcome: Any) -> float:
    return 1.0
