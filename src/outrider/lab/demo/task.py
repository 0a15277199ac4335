"""The demo's task: find the zone of an item by reading the file that has the item's name.

Invariant: the zone is drawn at random for each episode and is only in the sandbox. So an agent must read the right
file; a guess is right 1 time in 16.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec

from outrider.evaluators.base import Outcome
from outrider.messages import Message, Role
from outrider.trajectory import Verdict

ITEMS = (
    *("acorn", "almond", "anise", "apple", "apricot", "aspen", "barley", "basil", "beech", "birch"),
    *("carrot", "cedar", "celery", "cherry", "clover", "cocoa", "cress", "daisy", "elm", "fennel"),
    *("fern", "fig", "garlic", "ginger", "grape", "hazel", "heather", "ivy", "kale", "larch"),
    *("leek", "lemon", "lentil", "lily", "lotus", "mango", "maple", "melon", "mint", "nettle"),
    *("oak", "onion", "papaya", "parsley", "pepper", "rye", "thyme", "willow"),
)
ZONES = (
    *("agate", "amber", "azure", "beryl", "coral", "crimson", "garnet", "indigo"),
    *("ivory", "jade", "onyx", "opal", "quartz", "ruby", "scarlet", "topaz"),
)
PHRASINGS = ("Where is {item}?", "Please find {item}.", "In which zone is {item}?")

TURNS = 4
"""Maximum model calls of a session. Two are enough. More calls allow a policy to recover from reading a wrong file."""

MAX_TOKENS = 48


TASK_FILE = """\
# A task of the kind for which the demo's model was made: run it with `outrider run`.
instruction = "Where is maple?"

[harness]
agent = "tools"
options = { tools = ["bash"], max_turns = 4 }

[runtime]
prepare = [{ write = "zone: jade\\n", to = "maple" }]

[evaluator]
kind = "callable"
path = "outrider.lab.demo.task:grade"
options = { item = "maple", zone = "jade" }

[sampling]
temperature = 1.0
max_tokens = 48
"""
"""A task file for `outrider run` with one episode. docs/quickstart.md shows the same file."""


class Episode(msgspec.Struct, frozen=True):
    """One instance of the task: an item, its zone, and the question for the agent."""

    item: str
    zone: str
    question: str


def make_task(source: int | random.Random) -> Episode:
    """Draw an episode. A seed always gives the same episode. A random generator gives a new episode at each call."""
    rng = random.Random(source) if isinstance(source, int) else source
    item = rng.choice(ITEMS)
    return Episode(item, rng.choice(ZONES), rng.choice(PHRASINGS).format(item=item))


def command_for(item: str) -> str:
    """Return the command that reads an item's file."""
    return f"cat {item}"


def file_for(zone: str) -> str:
    """Return the content of an item's file."""
    return f"zone: {zone}\n"


def answer_for(zone: str) -> str:
    """Return the answer that names this zone."""
    return f"It is in {zone}."


def group_spec(episode: Episode, n: int, *, runtime: str = "namespace") -> dict[str, Any]:
    """Return the body of `POST /v1/groups` for `n` sessions of an episode."""
    task = {
        "instruction": episode.question,
        "harness": {"agent": "tools", "options": {"tools": ["bash"], "max_turns": TURNS, "tool_seconds": 10.0}},
        "runtime": {"kind": runtime, "prepare": [{"write": file_for(episode.zone), "to": episode.item}]},
        "evaluator": {
            "kind": "callable",
            "path": "outrider.lab.demo.task:grade",
            "options": {"item": episode.item, "zone": episode.zone},
        },
        "limits": {"session_seconds": 120.0, "agent_seconds": 60.0},
        "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": MAX_TOKENS},
        "labels": {"item": episode.item, "zone": episode.zone},
    }
    return {"task": task, "n": n}


def grade(outcome: Outcome) -> Verdict:
    """Grade a session. The reward is 1.0 if the agent read the right file and gave the right answer, else 0.0."""
    options = outcome.task.evaluator.options
    return score(outcome.transcript, item=options["item"], zone=options["zone"])


def score(transcript: Sequence[Message], *, item: str, zone: str) -> Verdict:
    """Grade a transcript. The verdict's metrics are called_right_file and answered_right_zone, each 0 or 1."""
    called = False
    for call in (call for message in transcript for call in message.tool_calls if call.name == "bash"):
        try:
            command = json.loads(call.arguments)["command"]
        except (ValueError, KeyError, TypeError):
            continue
        # the command may have repeated spaces
        if isinstance(command, str) and " ".join(command.split()) == command_for(item):
            called = True
    last = transcript[-1] if transcript else None
    answered = (
        last is not None
        and last.role is Role.ASSISTANT
        and not last.tool_calls
        and last.content.strip() == answer_for(zone)
    )
    return Verdict(
        reward=float(called and answered),
        metrics={"called_right_file": float(called), "answered_right_zone": float(answered)},
    )
