"""The kinds of the calls that continue a conversation with other tools or another system prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outrider.messages import Message, ToolSpec
from outrider.trajectory import BranchKind, ForkCause

from .harnesses import CODER, CODING, EXPLORING, MAIN, SUMMARY, TASK, Agent, Harness, a_main, system, tool, user

TESTER, TESTING = system("You are a testing agent."), tool("run_tests", "give_back")
SUB_AGENT = "subagent"


def on(parent: int) -> tuple[str, int, int, str]:
    """The entry of `Harness.told` for the main conversation that continues from turn `parent` behind another head."""
    return ("main", parent, 0, "")


def takes_over(before: Agent, opening: Message | None, tools: Sequence[ToolSpec], *said: Message) -> Agent:
    """Return another agent that continues the history of `before`."""
    history = [message for message in before.history if message.role.value != "system"]
    return Agent(before.harness, [*([opening] if opening else []), *history, *said], tuple(tools))


def all_of_it_trains(harness: Harness, *, rows: int) -> None:
    samples = harness.rollout.check_samples()
    assert len(samples) == rows
    assert sum(sum(sample.loss_mask) for sample in samples) == sum(map(len, harness.rollout.gave))


def test_an_agent_that_is_resumed_with_one_tool_fewer_is_the_same_agent() -> None:
    harness = Harness()
    main = a_main(harness)
    main.end()
    rest = takes_over(main, CODER, CODING[:-1], user("Go on, and mind the title of the page."))
    rest.end()
    assert harness.told() == [MAIN, MAIN, MAIN, on(2)]
    assert harness.rollout.tree.forks == {ForkCause.TOOLS_CHANGED: 1}
    all_of_it_trains(harness, rows=2)
    assert [line.main_line for line in harness.lines()] == [True] * 4


def test_agents_hand_over_to_each_other_in_one_conversation() -> None:
    """OpenAI Agents SDK: a tool call hands over to the other agent, whose first request ends with the result of the
    call."""
    harness = Harness()
    coder = Agent(harness, [CODER, TASK], CODING)
    coder.step("transfer_to_tester", reason="it is to be tested")
    tester = takes_over(coder, TESTER, TESTING)
    tester.step("run_tests")
    tester.step("give_back")
    coder = takes_over(tester, CODER, CODING)
    coder.step()
    tester = takes_over(coder, TESTER, TESTING)
    tester.end()
    assert harness.told() == [MAIN, on(0), on(0), on(2), on(3)]
    assert [sample.turns for sample in harness.rollout.check_samples()] == [(0, 3), (1, 2, 4)]
    assert harness.rollout.tree.forks == {ForkCause.TOOLS_AND_SYSTEM_CHANGED: 3}
    all_of_it_trains(harness, rows=2)


@pytest.mark.parametrize("tools", [(), TESTING])
def test_another_agent_that_answers_at_once_is_the_main_conversations_end(tools: tuple[ToolSpec, ...]) -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("transfer_to_writer")
    takes_over(main, system("You summarize the work for the user."), tools).end()
    assert harness.told() == [MAIN, on(0)]
    all_of_it_trains(harness, rows=2)


def test_another_agent_that_is_asked_after_the_end_goes_on_too() -> None:
    harness = Harness()
    main = a_main(harness)
    main.end()
    takes_over(main, TESTER, TESTING, user("Now you: does it hold?")).end()
    assert harness.told() == [MAIN, MAIN, MAIN, on(2)]


def test_a_last_answer_without_tools_is_the_main_conversations() -> None:
    """Clients that have no steps left send the last request without tools."""
    harness = Harness()
    main = a_main(harness)
    takes_over(main, CODER, (), user("You are out of steps. Answer now.")).end()
    assert harness.told() == [MAIN, MAIN, on(1)]


def test_a_clock_in_the_system_prompt_makes_no_agents() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    for minute in range(4):
        main.history[0] = system(f"You are a coding agent. It is 12:0{minute}.")
        main.step()
    assert harness.told() == [MAIN, on(0), on(1), on(2)]
    assert harness.rollout.tree.forks == {ForkCause.SYSTEM_CHANGED: 3}
    all_of_it_trains(harness, rows=4)


def test_a_sub_agent_that_is_shown_the_history_is_one_all_the_same() -> None:
    """The caller continues from its own history, which does not contain the sub-agent's messages."""
    harness = Harness()
    main = a_main(harness)
    sub = takes_over(main, TESTER, TESTING, user("Test it."))
    sub.step("run_tests")
    sub.end()
    main.step()
    main.end()
    assert [kind for kind, *_ in harness.told()] == ["main", "main", SUB_AGENT, SUB_AGENT, "main", "main"]
    assert [line.main_line for line in harness.lines()] == [True, True, False, False, True, True]


def test_a_sub_agent_beside_its_caller_is_one_too() -> None:
    harness = Harness()
    main = a_main(harness)
    sub = takes_over(main, TESTER, TESTING, user("Test it."))
    for agent in (sub, main, sub, main):
        agent.step()
    sub.end()
    assert [kind for kind, *_ in harness.told()][2:] == [SUB_AGENT, "main", SUB_AGENT, "main", SUB_AGENT]


def test_a_user_who_goes_back_and_takes_another_agent_is_in_the_main_conversation() -> None:
    harness = Harness()
    main = a_main(harness)
    back = Agent(harness, main.history, CODING)
    main.end()
    other = takes_over(back, TESTER, TESTING, user("No, test it first."))
    other.step("run_tests")
    other.end()
    assert harness.told() == [MAIN, MAIN, MAIN, on(1), on(1)]


def test_a_history_that_another_named_agent_is_given_is_that_agents() -> None:
    harness = Harness()
    main = a_main(harness)
    history = [TESTER, *main.history[1:], user("Test it.")]
    reply = harness.call(history, "All of it passes.", TESTING, agent="a1")
    harness.call([*history, reply, user("Sure?")], "Quite sure.", TESTING, agent="a1")
    assert harness.told()[2:] == [("subagent", 1, 1, "a1")] * 2


def test_questions_about_the_history_are_side_calls_or_unsure() -> None:
    """Questions with the words of a side call, or with a purpose, are side calls. A judge's question between two calls
    is unsure."""
    harness = Harness()
    main = a_main(harness)
    harness.call([*main.history[1:], user("Write a title of five words.")], "Fixing the parser")
    harness.call([CODER, *main.history[1:], user("What was this?")], "A fix.", purpose="title")
    harness.call([system("You judge."), *main.history[1:], user("Is it any good?")], "It is.", tool("verdict"))
    main.step()
    main.end()
    harness.call([*main.history[1:], user("Write a commit message.")], "Fix the parser")
    side = ("auxiliary", 1, 1)
    assert harness.told()[2:] == [
        (*side, "title"),
        (*side, "title"),
        ("unsure", 1, 1, ""),
        MAIN,
        MAIN,
        ("auxiliary", 6, 1, "commit"),
    ]


def test_a_summary_by_another_agent_stays_a_summary() -> None:
    harness = Harness()
    main = a_main(harness)
    summariser = system("You write notes for whoever comes next.")
    harness.call([summariser, *main.history[1:], user("Write them.")], SUMMARY)
    rest = Agent(harness, [CODER, user(f"What was done:\n{SUMMARY}")], CODING)
    rest.step()
    rest.end()
    continued = ("compaction", 2, 1, "continued")
    assert harness.told()[2:] == [("compaction", 1, 1, "summary"), continued, continued]
    assert harness.lines()[3].main_line


def test_of_an_agent_that_took_over_the_compaction_is_known_too() -> None:
    harness = Harness()
    main = a_main(harness)
    other = takes_over(main, TESTER, TESTING)
    other.step("run_tests")
    harness.call([*other.history, user("Sum it up.")], SUMMARY, TESTING)
    Agent(harness, [TESTER, user(f"So far:\n{SUMMARY}")], TESTING).end()
    assert harness.told()[2:] == [on(1), ("compaction", 2, 1, "summary"), ("compaction", 3, 1, "continued")]
    assert harness.lines()[4].main_line


def test_an_answer_that_only_another_agent_went_on_with_was_used() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("transfer_to_tester")
    harness.call([CODER, TASK], "I will not do it.", CODING)
    takes_over(main, TESTER, TESTING).end()
    assert harness.told() == [MAIN, ("retry", 0, 0, ""), on(0)]


def test_an_answer_that_a_history_quotes_was_used() -> None:
    """The client inserts a message before the answer, so no recorded ids continue from it."""
    harness = Harness()
    first = harness.call([CODER, TASK], "I will look at the parser.", CODING)
    harness.call([CODER, TASK], "I will not do it.", CODING)
    harness.call([CODER, TASK, user("Please."), first, user("Go on.")], "Found it.", CODING)
    assert [kind for kind, *_ in harness.told()] == ["main", "retry", "main"]


def test_a_new_conversation_with_the_same_first_words_is_a_sub_agents() -> None:
    harness = Harness()
    main = a_main(harness)
    sub = Agent(harness, [TESTER, TASK], EXPLORING)
    sub.step("grep")
    sub.end()
    main.end()
    assert [line.kind for line in harness.lines()][2:4] == [BranchKind.SUBAGENT] * 2
    assert not harness.rollout.causes
