"""What each turn was for, on hand-made sessions in the shape of every client we know."""

from __future__ import annotations

import pytest

from outrider.tokens.branches import RULES, TURN_RULES, Lineage
from outrider.trajectory import BranchKind, BranchPolicy

from .harnesses import Agent, Harness, assistant, system, tool, user

TASK = user("Fix the failing test in the parser module.")
CODER = system("You are a coding agent.")
CODING = tool("bash", "edit", "task")
EXPLORING = tool("grep", "read")
SUMMARY = "The parser fails on empty input.\nI changed parse() in parser.py.\nNext: run the tests again."
MAIN = ("main", None, 0, "")
ALL = dict.fromkeys(BranchKind, BranchPolicy.TRAIN)


def a_main(harness: Harness, *, steps: int = 2) -> Agent:
    main = Agent(harness, [CODER, TASK], CODING)
    for _ in range(steps):
        main.step()
    return main


def test_claude_code_asks_for_its_quota_and_a_topic_before_it_begins() -> None:
    harness = Harness()
    harness.call([user("quota")], "Ok.")
    topic = system("Analyze if this message indicates a new conversation topic, and extract a title of 2-3 words.")
    harness.call([topic, TASK], '{"isNewTopic": true}')
    a_main(harness).end()
    assert harness.told() == [("auxiliary", None, 1, "quota"), ("auxiliary", None, 1, "topic"), MAIN, MAIN, MAIN]
    assert [sample.turns for sample in harness.rollout.check_samples()] == [(2, 3, 4)]


def test_claude_codes_sub_agents_interleave_and_say_who_they_are() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("task", prompt="Search for all callers of parse().")
    explorer = system("You are a file search specialist.")
    agents = [
        Agent(harness, [explorer, user(f"<reminder/>\nSearch for {what}")], EXPLORING, agent=name)
        for name, what in (("a1", "all callers of parse()."), ("a2", "its tests"))
    ]
    for agent in agents:
        agent.step("grep")
    main.step()
    for agent in agents:
        agent.end()
    main.end()
    one, two = ("subagent", 0, 1, "a1"), ("subagent", 0, 1, "a2")
    assert harness.told() == [MAIN, one, two, MAIN, one, two, MAIN]


def test_a_sub_agent_is_called_by_its_type_else_by_what_its_client_calls_it() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("task", prompt="Search for all callers of parse().", subagent_type="Explore")
    main.step("task", prompt="Then read the changelog.")
    Agent(harness, [user("Search for all callers of parse().")], EXPLORING, agent="a1").end()
    Agent(harness, [user("Then read the changelog.")], EXPLORING, agent="a2").end()
    assert harness.told()[2:] == [("subagent", 0, 1, "Explore"), ("subagent", 1, 1, "a2")]


def test_codex_names_the_threads_of_its_agents_and_what_started_them() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING, agent="t1")
    main.step("spawn", message="Search for all callers of parse().")
    sub = [CODER, user("Search for all callers of parse().")]
    first = harness.call(sub, "I call grep.", EXPLORING, agent="t2", of="t1", purpose="collab_spawn")
    main.step("wait", targets=["t2"])
    rest = [*sub, first, user("Go on.")]
    harness.call(rest, SUMMARY, EXPLORING, agent="t2", of="t1", purpose="collab_spawn")
    main.end()
    agent = ("subagent", 0, 1, "t2")
    assert harness.told() == [MAIN, agent, MAIN, agent, MAIN]


def test_a_sub_agent_without_headers_is_known_by_its_prompt() -> None:
    """Qwen Code and Gemini CLI: the tool call's text is what the conversation begins with."""
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step()
    main.step("task", description="look", prompt="Search for all callers of parse().", subagent_type="general")
    sub = Agent(harness, [system("You help."), user("Search for all callers of parse().")], EXPLORING)
    sub.step("task", prompt="Read the changelog and sum it up.")
    inner = Agent(harness, [system("You read."), user("Read the changelog and sum it up.")], tool("read"))
    inner.end("Nothing of note in it.")
    sub.end("There are three callers.")
    main.end()
    told = harness.told()
    assert told[2:4] == [("subagent", 1, 1, "general"), ("subagent", 2, 2, "task")]
    assert told[4] == told[2]
    assert told[5] == MAIN


def test_opencodes_title_call_and_its_sub_agents_parent() -> None:
    harness = Harness()
    titles = system("You are a title generator.\nName the topic, without quotation marks. Do not summarize.")
    harness.call([titles, user("Generate a title:\n"), TASK], "Fixing the parser")
    main = a_main(harness)
    sub = [system("You explore."), user("Look around, thoroughly.")]
    harness.call(sub, "There is a parser.", EXPLORING, agent="ses_2", of="ses_1")
    main.end()
    assert harness.told() == [("auxiliary", None, 1, "title"), MAIN, MAIN, ("subagent", 2, 1, "ses_2"), MAIN]


def test_gemini_clis_router_and_loop_checks() -> None:
    harness = Harness()
    router = system("You are a specialized Task Routing AI. Choose a model by complexity.")
    harness.call([router, TASK], '{"model_choice": "flash"}')
    main = a_main(harness)
    checker = system("You identify when a conversational AI is stuck in a loop.")
    for _ in range(2):
        harness.call([checker, *main.history[1:], user("Is it stuck?")], '{"confidence": 0.1}')
        main.step()
    ask = user("Determine who should logically speak next: the user or the model.")
    main.end()
    harness.call([*main.history[1:], ask], '{"next_speaker": "user"}')
    told = harness.told()
    assert told[0] == ("auxiliary", None, 1, "router")
    assert [told[at] for at in (3, 5)] == [("auxiliary", 2, 1, "loop-check"), ("auxiliary", 4, 1, "loop-check")]
    assert told[-1] == ("auxiliary", 7, 1, "next-speaker")
    assert [line for line in told if line[0] != "auxiliary"] == [MAIN] * 5


def test_claude_code_compacts_in_its_own_conversation() -> None:
    harness = Harness()
    main = a_main(harness)
    ask = user("Your task is to create a detailed summary of the conversation so far.")
    wrapped = f"<analysis>\nLet me think about what to write.\n</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    harness.call([*main.history, ask], wrapped, CODING)
    opening = user(f"This session is being continued from a previous conversation.\nSummary:\n{SUMMARY}")
    rest = Agent(harness, [CODER, opening], CODING)
    rest.step()
    rest.end()
    continued = ("compaction", 2, 1, "continued")
    assert harness.told() == [MAIN, MAIN, ("compaction", 1, 1, "summary"), continued, continued]
    samples = harness.rollout.check_samples()
    assert [(sample.label, sample.turns) for sample in samples] == [
        ("", (0, 1)),
        ("summary", (0, 1, 2)),
        ("continued", (3, 4)),
    ]
    assert [sum(sample.loss_mask) for sample in samples] == [
        len(harness.rollout.gave[0]) + len(harness.rollout.gave[1]),
        len(harness.rollout.gave[2]),
        len(harness.rollout.gave[3]) + len(harness.rollout.gave[4]),
    ]


def test_the_history_that_was_summed_up_is_told_from_a_sub_agents_with_the_same_tools() -> None:
    harness = Harness()
    main = a_main(harness)
    written = "\n".join(message.content for message in main.history)
    for ask in ([*main.history, user("Sum it up.")], [system("Summarize."), user(written)]):
        harness.call(ask, SUMMARY, CODING if len(ask) > 2 else ())
        sub = Agent(harness, [system("You help."), user("Search for all callers of parse().")], CODING, agent="a1")
        sub.step()
        sub.step()
        before = len(harness.rollout.turns)
        Agent(harness, [CODER, user(f"So far:\n{SUMMARY}")], CODING).end()
        assert harness.lines()[before].main_line
        assert harness.told()[before] == ("compaction", 2, 1, "continued")
        harness = Harness()
        a_main(harness)


def test_codex_asks_for_its_summary_without_tools_and_compacts_twice() -> None:
    harness = Harness()
    before = [CODER, user("<environment_context>Linux</environment_context>"), TASK]
    agent = Agent(harness, before, CODING)
    texts = [SUMMARY, "The tests pass now.\nOnly the changelog is left to write."]
    for text in texts:
        agent.step()
        agent.step()
        harness.call([*agent.history, user("Write a handoff summary for another model.")], text)
        agent = Agent(harness, [*before, user(f"Another model began. Its summary:\n{text}")], CODING)
    agent.end()
    first, second = ("compaction", 2, 1, "continued"), ("compaction", 5, 2, "continued")
    assert harness.told() == [
        *(MAIN, MAIN, ("compaction", 1, 1, "summary")),
        *(first, first, ("compaction", 4, 2, "summary")),
        second,
    ]


def test_codex_says_which_call_compacts_whose_history() -> None:
    """Its summary is one whether or not anything goes on from it, and is below the agent whose history it sums up."""
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING, agent="t1")
    main.step("spawn", message="Search for all callers of parse().")
    opening = [CODER, user("Search for all callers of parse().")]
    sub = Agent(harness, opening, EXPLORING, agent="t2")
    sub.step("grep")
    asked = [*sub.history, user("Write a handoff summary.")]
    harness.call(asked, SUMMARY, agent="t2", of="t1", purpose="compaction")
    rest = [*opening, user(f"Another model began. Its summary:\n{SUMMARY}")]
    Agent(harness, rest, EXPLORING, agent="t2").end()
    main.step()
    asked = [*main.history, user("Write a handoff summary.")]
    harness.call(asked, "What is left: all of it.", agent="t1", purpose="compaction")
    assert harness.told()[2:] == [
        ("compaction", 1, 2, "summary"),
        ("compaction", 2, 2, "continued"),
        MAIN,
        ("compaction", 4, 1, "summary"),
    ]


def test_gemini_cli_compacts_and_keeps_the_end_of_its_history() -> None:
    harness = Harness()
    environment = user("This is the Gemini CLI. The date is set.")
    main = Agent(harness, [CODER, environment, assistant("Got it."), TASK], CODING)
    for _ in range(3):
        main.step()
    compressor = system("You compress histories into a snapshot of state.")
    snapshot = f"<state_snapshot>\n{SUMMARY}\n</state_snapshot>"
    harness.call([compressor, *main.history[1:-2], user("Generate the <state_snapshot>.")], snapshot)
    kept = [environment, assistant("Got it."), user(snapshot), assistant("Got it. Thanks!"), *main.history[-2:]]
    rest = Agent(harness, [CODER, *kept], CODING)
    rest.step()
    rest.end()
    assert harness.told()[3:] == [("compaction", 2, 1, "summary")] + [("compaction", 3, 1, "continued")] * 2
    assert harness.rollout.turns[4].cause is not None


def test_pi_writes_its_history_out_for_the_summary() -> None:
    harness = Harness()
    main = a_main(harness, steps=3)
    written = "\n".join(f"[{message.role}]: {message.content}" for message in main.history[1:])
    harness.call([system("You are a context summarization assistant."), user(written)], SUMMARY)
    opening = user(f"The conversation before this point was compacted:\n<summary>\n{SUMMARY}\n</summary>")
    Agent(harness, [CODER, opening, *main.history[-2:]], CODING).end()
    assert harness.told()[3:] == [("compaction", 2, 1, "summary"), ("compaction", 3, 1, "continued")]


def test_opencode_keeps_its_summary_as_an_assistants_message() -> None:
    harness = Harness()
    main = a_main(harness)
    asked = user("Provide a detailed prompt for continuing our conversation.")
    summary = harness.call([system("You summarize conversations."), *main.history[1:], asked], SUMMARY)
    Agent(harness, [CODER, user("What did we do so far?"), summary, user("Continue.")], CODING).end()
    assert harness.told()[2:] == [("compaction", 1, 1, "summary"), ("compaction", 2, 1, "continued")]


def test_a_history_cut_to_its_end_names_what_it_was_cut_from() -> None:
    harness = Harness()
    main = a_main(harness, steps=3)
    rest = Agent(harness, [CODER, TASK, *main.history[-2:]], CODING)
    rest.step()
    rest.end()
    trimmed = ("compaction", 2, 1, "trimmed")
    assert harness.told() == [MAIN, MAIN, MAIN, trimmed, trimmed]


def test_a_sub_agents_own_compaction_stays_below_it() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("task", prompt="Search for all callers of parse().")
    sub = Agent(harness, [system("You help."), user("Search for all callers of parse().")], EXPLORING)
    sub.step("grep")
    harness.call([*sub.history, user("Sum it up.")], SUMMARY, EXPLORING)
    Agent(harness, [system("You help."), user(f"So far:\n{SUMMARY}")], EXPLORING).end()
    main.end()
    assert harness.told()[1:] == [
        ("subagent", 0, 1, "task"),
        ("compaction", 1, 2, "summary"),
        ("compaction", 2, 2, "continued"),
        MAIN,
    ]
    assert [line.main_line for line in harness.lines()] == [True, False, False, False, True]


def test_other_edits_of_the_history_stay_what_they_were() -> None:
    """A note that moves, and a user who goes back to an earlier point, are still the main conversation."""
    harness = Harness()
    main = a_main(harness)
    note = user("Remember: be brief, and mind the style guide.")
    for _ in range(2):
        harness.call([*main.history, note], "Another answer in plain words.", CODING)
        main.step()
    harness.call([*main.history[:3], user("No, look elsewhere first.")], "As you say, elsewhere.", CODING)
    rewritten = [CODER, TASK, assistant("Something else was said."), user("Go on then, please.")]
    harness.call(rewritten, "Going on from there.", CODING)
    assert {(kind, depth) for kind, _, depth, _ in harness.told()} == {("main", 0)}


def test_a_commit_message_and_a_web_page_are_side_calls() -> None:
    harness = Harness()
    main = a_main(harness, steps=1)
    main.step("fetch", url="http://example.test/a", prompt="What does the page say of parsers?")
    harness.call([user("Web page content:\n---\nx\n---\nWhat does the page say of parsers?")], "Nothing at all.")
    main.end()
    harness.call([system("Write a commit message for the diff."), user("+ x = 1")], "Set x to 1")
    assert harness.told()[2] == ("auxiliary", 1, 1, "web-page")
    assert harness.told()[4] == ("auxiliary", 3, 1, "commit")


def test_one_call_with_tools_of_its_own_is_a_side_call_unless_it_was_asked_for() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("task", prompt="Search for all callers of parse().")
    harness.call([user("Is rm -rf dangerous here?")], "No, it is not.", tool("verdict"))
    harness.call([user("Search for all callers of parse().")], "There are none.", EXPLORING)
    main.end()
    assert harness.told()[1:3] == [("auxiliary", 0, 1, ""), ("subagent", 0, 1, "task")]


def test_a_sub_agent_that_answers_at_once_without_tools_is_one_if_it_says_so() -> None:
    harness = Harness()
    main = a_main(harness, steps=1)
    harness.call([system("You plan."), user("Plan it.")], "First this, then that.", agent="planner")
    Agent(harness, [system("You explore."), user("Look.")], EXPLORING, agent="scout").step("grep")
    harness.call([system("Summarize the page."), user("The page.")], "It is short.", agent="scout")
    main.end()
    assert harness.told()[1:4] == [
        ("subagent", 0, 1, "planner"),
        ("subagent", 0, 1, "scout"),
        ("auxiliary", 2, 2, "summary"),
    ]


def test_a_purpose_that_is_known_decides() -> None:
    harness = Harness()
    main = a_main(harness, steps=1)
    harness.call([user("Hello?"), assistant("Yes."), user("Name it.")], "A name.", CODING, purpose="title")
    harness.call([user("What is this?")], "An answer.", CODING, purpose="of its own")
    main.end()
    assert harness.told()[1:3] == [("auxiliary", 0, 1, "title"), ("subagent", 0, 1, "")]


def test_calls_of_one_sort_are_agents_side_by_side() -> None:
    """An agent in Python that asks many questions at once: none is a side call of another."""
    harness = Harness()
    for number in range(3):
        harness.call([user(f"Question {number}?")], f"Answer {number}.")
    assert [line.kind for line in harness.lines()] == [BranchKind.MAIN, BranchKind.SUBAGENT, BranchKind.SUBAGENT]


def test_the_main_conversation_may_have_no_tools_and_begin_last() -> None:
    """mini-swe-agent in text mode, behind a router that has a tool."""
    harness = Harness()
    harness.call([system("Choose."), TASK], "Take the large one.", tool("choose"))
    history = [CODER, TASK]
    for number in range(2):
        history += [harness.call(history, f"Run command {number}."), user("Observation: ok")]
    assert [line.kind for line in harness.lines()] == [BranchKind.AUXILIARY, BranchKind.MAIN, BranchKind.MAIN]


def test_a_session_that_ended_early_has_a_main_conversation_all_the_same() -> None:
    harness = Harness()
    harness.call([system("You write titles."), TASK], "Fixing the parser")
    harness.call([CODER, TASK], "cut", CODING, cut=True)
    assert harness.told() == [("auxiliary", None, 1, "title"), ("aborted", None, 0, "")]
    assert harness.rollout.check_samples() == []


def test_retries_and_cut_off_answers_say_what_took_their_place() -> None:
    harness = Harness()
    main = a_main(harness, steps=1)
    harness.call(main.history, "Not used.", CODING)
    harness.call(main.history, "cut", CODING, cut=True)
    main.end()
    assert harness.told() == [MAIN, ("retry", 3, 0, ""), ("aborted", 0, 0, ""), MAIN]


def test_the_policy_of_a_kind_takes_its_own_tokens_only() -> None:
    harness = Harness()
    main = a_main(harness)
    harness.call([*main.history, user("Sum it all up.")], SUMMARY, CODING)
    Agent(harness, [CODER, user(f"So far:\n{SUMMARY}")], CODING).end()
    gave = list(map(len, harness.rollout.gave))
    only = harness.rollout.check_samples(ALL | {BranchKind.MAIN: BranchPolicy.DROP})
    assert [(sample.turns, sum(sample.loss_mask)) for sample in only] == [((0, 1, 2), gave[2]), ((3,), gave[3])]
    masked = harness.rollout.check_samples(ALL | {BranchKind.COMPACTION: BranchPolicy.MASK})
    assert [(sample.reward, sum(sample.loss_mask)) for sample in masked] == [
        (1.0, gave[0] + gave[1]),
        (None, 0),
        (None, 0),
    ]


def test_every_rule_decides_in_some_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions above, once more: a rule that never applied would be one that nobody needs."""
    seen: set[str] = set()
    lines = Harness.lines

    def noting(harness: Harness) -> list[Lineage]:
        found = lines(harness)
        seen.update(line.rule for line in found)
        return found

    monkeypatch.setattr(Harness, "lines", noting)
    for name, session in list(globals().items()):
        if name.startswith("test_") and session is not test_every_rule_decides_in_some_session:
            session()
    assert seen == {rule.name for rule in (*RULES, *TURN_RULES)}
