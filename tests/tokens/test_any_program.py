"""Sessions of random programs, which open, continue, rewrite, quote and mix conversations."""

from __future__ import annotations

import random

import msgspec
import pytest

from outrider.messages import Message, Role
from outrider.tokens.branches.classify import lineages
from outrider.trajectory import BranchKind, FinishReason

from .harnesses import IM_END, assistant, system, tool, user
from .renderers import family_renderer, small_tokenizer
from .rollout import Rollout
from .strategies import hermes_call

HEADS = (
    ((system("You are a coding agent."),), tool("bash")),
    ((system("You help."),), tool("search")),
    ((system("You write titles."),), ()),
    ((), ()),
)
DECLARED = (None, None, None, BranchKind.MAIN, BranchKind.SUBAGENT, BranchKind.COMPACTION, BranchKind.AUXILIARY)
AGENTS = (None, None, "a1", "a2")
UNUSED = (BranchKind.RETRY, BranchKind.ABORTED)


class Program:
    """Plays a session. `chance` determines all that the program and the model do."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.rollout = Rollout(family_renderer("qwen3"))
        self.histories: list[list[Message]] = []
        self.replies: list[str] = ["Nothing yet."]

    def text(self) -> str:
        """A text that the program sends: its own words, earlier replies, a whole history, or a reply in summary
        tags."""
        some = self.chance.choice(self.replies)
        history = self.chance.choice(self.histories) if self.histories else []
        return self.chance.choice(
            (
                f"Do step {self.chance.randrange(100)} of the work.",
                "Write a title.",
                some,
                f"The helper said:\n{some}",
                "\n".join(self.chance.choices(self.replies, k=3)),
                "\n".join(message.content for message in history),
                f"<summary>\n{some}\n</summary>",
            )
        )

    def reply(self) -> str:
        number = len(self.replies)
        return self.chance.choice(
            (
                f"This is reply number {number} of the model.",
                "Done.",
                "",
                f'{{"answer": "Number {number} is the answer."}}',
                f"<summary>\nThe work of {number} steps is done.\nNothing is left.\n</summary>",
                f"I look.\n{hermes_call('bash', {'command': f'make part {number} of it'})}",
            )
        )

    def request(self) -> list[Message]:
        """A new history, or an earlier one: continued, repeated, cut, edited, or with another history's reply."""
        if not self.histories or self.chance.random() < 0.3:
            return [user(self.text())]
        history = list(self.chance.choice(self.histories))
        match self.chance.randrange(6):
            case 0:
                history.append(user(self.text()))
            case 1:
                history = [message for message in history if message.role is not Role.ASSISTANT] or history
            case 2:
                history = [user(self.text()), *history[-self.chance.randrange(1, 4) :]]
            case 3 if len(history) > 2:
                del history[self.chance.randrange(1, len(history) - 1)]
            case 4:
                history += [assistant(self.chance.choice(self.replies)), user(self.text())]
        if history[-1].role is Role.ASSISTANT:
            history.append(user(self.text()))
        return history

    def turn(self) -> None:
        head, tools = self.chance.choice(HEADS)
        requests = [self.request() for _ in range(self.chance.choice((1, 1, 1, 2, 3)))]
        joined = [self.rollout.join([*head, *request], tools) for request in requests]
        for request, one in zip(requests, joined, strict=True):
            cut = self.chance.random() < 0.1
            finish = FinishReason.ABORT if cut else FinishReason.STOP
            said = self.reply()
            ids = [*small_tokenizer().encode(said), IM_END]
            reply = self.rollout.answer(one, ids, tools=tools, finish=finish)
            self.rollout.turns[-1] = msgspec.structs.replace(
                self.rollout.turns[-1],
                agent_id=self.chance.choice(AGENTS),
                parent_agent_id=self.chance.choice(AGENTS),
                purpose=self.chance.choice((None, None, None, "title", "compaction")),
                declared=self.chance.choice(DECLARED),
                declared_label=self.chance.choice(("", "x")),
            )
            if not cut:
                self.histories.append([*request, reply])
                self.replies.append(reply.content)


@pytest.mark.parametrize("seed", range(60))
def test_every_session_has_labels_rows_and_counts_that_agree(seed: int) -> None:
    chance = random.Random(seed)
    program = Program(chance)
    for _ in range(chance.randrange(1, 20)):
        program.turn()
    turns = program.rollout.turns
    program.rollout.check_samples()
    for turn, line in zip(turns, lineages(turns), strict=True):
        assert (line.kind is BranchKind.ABORTED) == (turn.finish is FinishReason.ABORT)
        if turn.declared is not None and line.kind not in UNUSED:
            assert line.kind is turn.declared
        if line.kind is BranchKind.RETRY:
            assert line.parent is not None
            assert turns[line.parent].finish is not FinishReason.ABORT
