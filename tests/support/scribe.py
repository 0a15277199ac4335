"""A task whose agent needs no program, and whose sessions are numbered in the order in which they start.

The sessions of each task name are counted from 0. The options give the behaviour of sessions by their numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from outrider.evaluators.base import Outcome
from outrider.harnesses.base import HarnessContext, HarnessOutcome
from outrider.messages import Message, Role


class Scribe:
    """An agent that makes two model calls. The options `fails`, `rewrites` and `titles` are lists of session numbers.

    - `fails`: these sessions raise an error.
    - `rewrites`: these sessions make a third call, with another first reply in the history, which gives them a second
      row.
    - `titles`: these sessions make a last call for a title. No later call contains its reply.
    - `seconds`: delays of the first sessions before their first call, by session number.
    """

    started: ClassVar[Counter[str]] = Counter()

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    async def init(self, context: HarnessContext) -> None:
        pass

    async def run(self, context: HarnessContext) -> HarnessOutcome:
        name = self._options["name"]
        number = self.started[name]
        self.started[name] += 1
        if number in self._options["fails"]:
            raise ValueError("the scribe fell ill")
        seconds = self._options["seconds"]
        await asyncio.sleep(seconds[number] if number < len(seconds) else 0)
        asked = Message(role=Role.USER, content=context.task.instruction)
        reply = await context.model.chat([asked])
        await context.model.chat([asked, reply, Message(role=Role.USER, content="and then?")])
        if number in self._options["rewrites"]:
            other = Message(role=Role.ASSISTANT, content="something else")
            await context.model.chat([asked, other, Message(role=Role.USER, content="and then?")])
        if number in self._options["titles"]:
            wanted = Message(role=Role.SYSTEM, content="Write a title for the conversation.")
            await context.model.chat([wanted, asked])
        return HarnessOutcome(answer=str(number))


def grade(outcome: Outcome) -> dict[str, Any]:
    """Return the reward of the session's number; the last reward is repeated. The rewards of turns and rows are the
    same for all sessions."""
    number = int(outcome.harness.answer or 0)
    options = outcome.task.evaluator.options
    rewards = options["rewards"]
    return {
        "reward": rewards[min(number, len(rewards) - 1)],
        "metrics": {"number": float(number)},
        "turns": options["turns"],
        "rows": options["rows"],
    }


def scribe_task(
    name: str,
    *,
    rewards: Sequence[float] = (1.0,),
    fails: Sequence[int] = (),
    rewrites: Sequence[int] = (),
    titles: Sequence[int] = (),
    seconds: Sequence[float] = (),
    turns: Mapping[str, float] | None = None,
    rows: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return a task for `Scribe`. No other test may use the same name. A failed session is not retried."""
    sessions = {"fails": list(fails), "rewrites": list(rewrites), "titles": list(titles)}
    options = {"name": name, **sessions, "seconds": list(seconds)}
    return {
        "harness": {"agent": "support.scribe:Scribe", "options": options},
        "runtime": {"kind": "memory"},
        "evaluator": {
            "kind": "callable",
            "path": "support.scribe:grade",
            "options": {
                "rewards": [float(reward) for reward in rewards],
                "turns": dict(turns or {}),
                "rows": dict(rows or {}),
            },
        },
        "max_attempts": 1,
    }
