"""Histories that are summarised, cut or edited, in hand-made sessions with the requests of known clients."""

from __future__ import annotations

from outrider.trajectory import BranchKind, BranchPolicy

from .harnesses import CODER, CODING, EXPLORING, MAIN, SUMMARY, TASK, Agent, Harness, a_main, assistant, system, user

ALL = dict.fromkeys(BranchKind, BranchPolicy.TRAIN)


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
    """The answer of such a call is a summary, whether or not a call continues from it. Its depth is the summarised
    agent's plus one."""
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
    """A moved note, a return to an earlier point and a rewritten answer all stay in the main conversation."""
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


def test_a_session_that_compacts_often_has_no_row_without_something_to_train() -> None:
    """Each request for a summary begins with the history that it summarises."""
    harness = Harness()
    agent = a_main(harness)
    for number in range(3):
        text = f"{SUMMARY}\nSo much for part {number} of the work."
        harness.call([*agent.history, user("Your task is to create a summary.")], text, CODING)
        agent = Agent(harness, [CODER, user(f"Continued from before:\n{text}")], CODING)
        agent.step()
    samples = harness.rollout.check_samples()
    assert [(sample.kind.value, sample.label, sample.turns) for sample in samples] == [
        ("main", "", (0, 1)),
        ("compaction", "summary", (0, 1, 2)),
        ("compaction", "summary", (3, 4)),
        ("compaction", "summary", (5, 6)),
        ("compaction", "continued", (7,)),
    ]
    assert sum(sum(sample.loss_mask) for sample in samples) == sum(map(len, harness.rollout.gave))
    masked = harness.rollout.check_samples(ALL | {BranchKind.COMPACTION: BranchPolicy.MASK})
    assert [sample.turns for sample in masked] == [(0, 1), (0, 1, 2), (3, 4), (3,), (5, 6), (5,), (7,)]
