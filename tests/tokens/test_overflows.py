"""Histories that became too long for the model, and how clients shorten them."""

from __future__ import annotations

import pytest

from outrider.messages import Message, Role, ToolSpec

from .harnesses import CODER, CODING, EXPLORING, SUMMARY, TASK, Agent, Harness, a_main, system, user


@pytest.mark.parametrize("tools", [CODING, EXPLORING, ()], ids=["same", "other", "no"])
@pytest.mark.parametrize("opening", [[CODER, TASK], [CODER], [system("You write notes.")]], ids=len)
@pytest.mark.parametrize(("front", "back"), [(2, 0), (3, 2), (6, 2)])
@pytest.mark.parametrize("role", [Role.USER, Role.ASSISTANT])
def test_a_summary_of_what_fits_after_an_overflow_is_a_compaction(
    tools: tuple[ToolSpec, ...], opening: list[Message], front: int, back: int, role: Role
) -> None:
    """A request that is too long leaves no turn. The client then leaves out the front of its history, often the newest
    messages too, and requests a summary of the rest."""
    harness = Harness()
    main = a_main(harness, steps=5)
    harness.rollout.join([*main.history, user("Too long.")], CODING)
    rest = main.history[2:]
    asked = [*opening, *rest[front : len(rest) - back], user("Write down what was done.")]
    summary = harness.call(asked, SUMMARY, tools)
    shown = summary if role is Role.ASSISTANT else user(f"So far:\n{SUMMARY}")
    after = Agent(harness, [CODER, TASK, shown, user("Go on.")], CODING)
    after.step()
    after.end()
    continued = ("compaction", 5, 1, "continued")
    assert harness.told()[5:] == [("compaction", 4, 1, "summary"), continued, continued]
    assert [line.main_line for line in harness.lines()[5:]] == [False, True, True]


def test_a_client_that_keeps_the_newest_messages_only_writes_no_summaries() -> None:
    """In the requests, each answer follows earlier messages and replaces none of them."""
    harness = Harness()
    history = [CODER, TASK]
    for number in range(5):
        reply = harness.call([CODER, *history[1:][-5:]], f"This is what I have to say, part {number}.", CODING)
        history += [reply, user(f"Go on with {number}.")]
    assert {label for kind, _, _, label in harness.told()} == {"", "trimmed"}
