"""A task that needs no program: its agent calls the model once, and its reward is fixed or drawn at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role


class OneCall:
    """An agent that makes one model call, after `seconds`."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._seconds = float(options.get("seconds", 0.0))

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await asyncio.sleep(self._seconds)
        await context.model.chat([Message(role=Role.USER, content=context.task.instruction)])
        return HarnessOutcome()


class CallAndWait(OneCall):
    """An agent that makes one model call and never ends."""

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        await super().run(context)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


def grade(outcome: Outcome) -> float:
    """Return the reward given in the options. Without one, return 0 or 1 at random if `teaches` is true, otherwise
    1."""
    options = outcome.task.evaluator.options
    if "reward" in options:
        return float(options["reward"])
    return float(random.random() < 0.5 or not options["teaches"])


def coin_task(
    number: int, *, teaches: bool = False, seconds: float = 0.0, reward: float | None = None
) -> dict[str, Any]:
    options: dict[str, Any] = {"teaches": teaches} if reward is None else {"reward": reward}
    return {
        "instruction": f"Prompt {number}.",
        "harness": {"agent": "support.coin:OneCall", "options": {"seconds": seconds}},
        "runtime": {"kind": "memory"},
        "evaluator": {"kind": "callable", "path": "support.coin:grade", "options": options},
    }
