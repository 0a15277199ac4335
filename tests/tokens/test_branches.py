"""Kind, parent, depth and label of each turn, in hand-made sessions with the requests of known clients: agents and side
calls."""

from __future__ import annotations

import time

import msgspec

from outrider.messages import Message, Role
from outrider.tokens.branches.classify import lineages
from outrider.tokens.branches.segments import SegmentedSession
from outrider.trajectory import BranchKind

from .harnesses import (
    CODER,
    CODING,
    EXPLORING,
    MAIN,
    SUMMARY,
    TASK,
    Agent,
    Harness,
    a_main,
    assistant,
    result,
    system,
    tool,
    user,
)
from .strategies import hermes_call


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
    """Qwen Code and Gemini CLI: a sub-agent's conversation begins with the text of the tool call."""
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
    harness.call([user("Which command prefix has rm -rf?")], "rm", tool("verdict"))
    harness.call([user("Search for all callers of parse().")], "There are none.", EXPLORING)
    main.end()
    assert harness.told()[1:3] == [("auxiliary", 0, 1, "command-prefix"), ("subagent", 0, 1, "task")]


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
    harness = Harness()
    main = a_main(harness, steps=1)
    harness.call([user("What is this?")], "An answer.", purpose="of its own")
    main.end()
    assert harness.told()[1] == ("unsure", 0, 1, "of its own")


def test_calls_of_one_sort_are_agents_side_by_side() -> None:
    """A program that sends unrelated questions: no call is a side call of another."""
    harness = Harness()
    for number in range(3):
        harness.call([user(f"Question {number}?")], f"Answer {number}.")
    assert [line.kind for line in harness.lines()] == [BranchKind.MAIN, BranchKind.SUBAGENT, BranchKind.SUBAGENT]


def test_the_main_conversation_may_have_no_tools_and_begin_last() -> None:
    """mini-swe-agent in text mode, after a router call that has a tool."""
    harness = Harness()
    harness.call([system("You are a Task Routing AI."), TASK], "Take the large one.", tool("choose"))
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


def test_an_empty_reply_is_no_sign_of_a_history() -> None:
    """A reply that consists of thinking has an empty text, which clients send back in any conversation."""
    empty = Message(role=Role.ASSISTANT, content="")
    spoken = Message(role=Role.ASSISTANT, content="Done.")
    session = SegmentedSession([])
    assert session.replies_among([empty, Message(role=Role.USER, content="Done.")]) == set()
    assert session.replies_among([empty, spoken]) == session.replies_among([spoken]) != set()


def test_what_a_client_declares_beats_what_the_rules_would_guess() -> None:
    harness = Harness()
    declared = ["subagent/planner", "main", "auxiliary/naming"]
    plan = [system("You plan."), TASK]
    harness.call(plan, "First read the parser, then fix it.", CODING, declared=declared[0])
    work = [system("You work."), user("Follow the plan.")]
    harness.call(work, "It is done.", declared=declared[1])
    harness.call([system("You work."), user("What would you call it?")], "The repair", declared=declared[2])
    assert [line.kind.value + "/" + line.label for line in harness.lines()] == [declared[0], "main/", declared[2]]
    assert [line.main_line for line in harness.lines()] == [False, True, False]


def test_a_declaration_of_one_call_in_a_conversation_is_that_calls_alone() -> None:
    harness = Harness()
    main = a_main(harness, steps=1)
    harness.call([*main.history, user("Name it.")], "Parser", CODING, declared="auxiliary/naming")
    main.end()
    assert harness.told() == [MAIN, ("auxiliary", 0, 1, "naming"), MAIN]


def test_an_answer_that_a_later_call_quotes_is_work() -> None:
    """Both prompts have the words of side calls. Only the use of the answers distinguishes the calls."""
    answer = '```json\n{"loop": "A loop over \\"tokens\\" never ends."}\n```'
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    harness.call([system("Look for a loop."), user("parse()")], answer)
    harness.call([system("Find the topic."), user("parse()")], "The topic is lexing.")
    main.step("ask", found='{"answer": "A loop over \\"tokens\\" never ends."}')
    main.end()
    assert [line.kind.value for line in harness.lines()] == ["subagent", "auxiliary", "main", "main"]


def test_votes_that_are_all_counted_are_all_used() -> None:
    harness = Harness()
    votes = ["I vote for the red one.", "I vote for the green one.", "I vote for the blue one."]
    for vote in votes:
        harness.call([system("You vote."), TASK], vote)
    harness.call([system("You count."), user("The votes:\n" + "\n".join(votes))], "No majority.")
    assert [line.kind.value for line in harness.lines()] == ["subagent", "subagent", "subagent", "main"]


def test_a_history_whose_beginning_was_rewritten_stays_the_main_conversation() -> None:
    """The client moves a note from its first message to its last."""
    harness = Harness()
    note = "\n<note>Today is Monday.</note>"
    reply = harness.call(
        [CODER, user(TASK.content + note)], "Next I look.\n" + hermes_call("bash", {"command": "ls"}), CODING
    )
    main = Agent(harness, [CODER, TASK, reply, result(reply, "parser.py" + note)], CODING)
    main.step()
    main.end()
    assert harness.told() == [MAIN, *([("main", 0, 0, "")] * 2)]


def test_a_message_taken_out_of_the_middle_leaves_the_kind() -> None:
    harness = Harness()
    main = a_main(harness, steps=3)
    del main.history[4:6]
    main.end("Done.")
    assert [line.kind.value for line in harness.lines()] == ["main"] * 4
    main.history = [*main.history[:2], main.history[-1], user("Is it?")]
    main.end("It is.")
    assert harness.told()[4][::3] == ("compaction", "trimmed")


def test_an_answer_of_one_line_that_hands_over_is_no_summary() -> None:
    harness = Harness()
    supervisor = [system("You supervise."), TASK]
    for agent in ("writer", "tester"):
        harness.call(supervisor, f"Next I call.\n{hermes_call('transfer', {'to': agent})}", tool("transfer"))
        harness.call([system(f"You are the {agent}."), *supervisor[1:]], "Over to QA.")
        supervisor.append(user(f"[{agent}]: Over to QA."))
    harness.call(supervisor, "Finished.", tool("transfer"))
    assert "compaction" not in [line.kind.value for line in harness.lines()]


def test_the_second_summary_is_one_though_its_request_has_not_the_opening() -> None:
    harness = Harness()
    writer = system("You write summaries of what an agent did.")
    agent = Agent(harness, [CODER, TASK], CODING)
    last = ""
    for number in range(3):
        agent.step()
        agent.step()
        written = "\n".join(message.content for message in agent.history[2:])
        last = f"Round {number}: parse() was read, and the tests were run again."
        harness.call([writer, user(f"Events:\n{written}")], last)
        agent = Agent(harness, [CODER, TASK, user(f"What happened so far:\n{last}")], CODING)
    agent.end()
    told = harness.told()
    assert [line[3] for line in told] == [*("", "", "summary"), *(["continued"] * 2 + ["summary"]) * 2, "continued"]
    assert [line[1] for line in told][-1] == 8


def test_a_turn_that_is_declared_main_is_in_the_transcript_and_has_depth_0() -> None:
    harness = Harness()
    main = a_main(harness, steps=1)
    sub = [system("You help."), TASK]
    reply = harness.call(sub, "I take over.", declared="subagent")
    harness.call([*sub, reply, user("Go on.")], "It is done.", declared="main")
    main.end()
    assert [(line.kind.value, line.depth, line.main_line) for line in harness.lines()][1:3] == [
        ("subagent", 1, False),
        ("main", 0, True),
    ]
    harness = Harness()
    main = a_main(harness, steps=2)
    harness.call([CODER, user("Another beginning."), *main.history[2:]], "A summary.", CODING, declared="compaction")
    harness.call([CODER, user("A third one."), *main.history[2:]], "Done.", CODING, declared="main")
    assert [line.depth for line in harness.lines() if line.kind is BranchKind.MAIN] == [0, 0, 0]


def test_a_question_that_was_cut_off_and_asked_anew_is_work_if_its_answer_is_used() -> None:
    harness = Harness()
    main = Agent(harness, [CODER, TASK], CODING)
    main.step("ask", found="later")
    for question, answer in (("Which topic?", "It is about parsers."), ("Which one?", "The second one of them.")):
        harness.call([user("Find it."), assistant("Hm."), user(question)], "cut", cut=True)
        harness.call([user("Find it."), assistant("Well."), user(question)], answer)
        main.history.append(user(f"The helper says: {answer}"))
    main.end()
    assert [line.kind.value for line in harness.lines()][1:] == ["aborted", "subagent"] * 2 + ["main"]


def test_a_reply_of_many_tags_fences_or_lines_takes_no_time() -> None:
    """A policy that repeats itself writes such replies."""
    harness = Harness()
    main = a_main(harness, steps=1)
    turns = harness.rollout.turns
    lines = "\n".join(f"This is line {number} of them." for number in range(50_000))
    for text in ("<summary>" * 30_000, "```json\n" * 30_000, "```" + "\n" * 100_000, lines):
        turns[-1] = msgspec.structs.replace(turns[-1], reply=assistant(text), messages=(user("x" * 1_000_000),))
        began = time.process_time()
        lineages([*turns, msgspec.structs.replace(turns[0], index=len(turns), messages=(user("Hello."),))])
        assert time.process_time() - began < 2
    main.end()
