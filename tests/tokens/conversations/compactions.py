"""Histories that a program replaces by summaries, once or repeatedly."""

from __future__ import annotations

from ..harnesses import assistant, user
from .script import Agent, Session, Use, conversation

SUMMARIES = (
    "The parser fails on empty input.\nI changed parse() in parser.py.\nNext: run the tests again.",
    "parse() is fixed, and its tests pass.\nThe changelog lacks an entry.\nNext: write the entry.",
    "Parser and changelog are done.\nThe version is still 1.\nNext: set the version to 2.",
)


def coder(session: Session) -> Agent:
    return session.agent("main", "You are a coding agent.", "bash edit").hears("Fix the parser, then release it.")


def works(agent: Agent, part: int) -> None:
    agent.does("bash", f"part {part}: 2 failed", thought=f"I test part {part}.", command=f"make test{part}")
    agent.does("edit", f"part {part}: edited", thought=f"I edit part {part}.", path=f"part{part}.py")


@conversation()
def summary_asked_at_the_historys_end(session: Session) -> None:
    """Form (a), Claude Code: the agent itself writes the summary, in reply to a request at the end of its history."""
    agent = coder(session)
    for part, text in enumerate(SUMMARIES):
        works(agent, part)
        said = agent.aside(
            "summary",
            "Your task is to create a detailed summary.",
            f"<analysis>\nHm.\n</analysis>\n<summary>\n{text}\n</summary>",
        )
        agent.begins_anew(user(f"This session is being continued.\n{said.split('<summary>')[1][:-10]}"))
    agent.says("Version 2 is released.")


@conversation()
def summary_of_a_text_without_the_opening(session: Session) -> None:
    """Form (b): the summariser's request does not contain the task. From the second request on, it contains the last
    summary and the messages after it."""
    agent = coder(session)
    skip, before = 1, ""
    for part, text in enumerate(SUMMARIES):
        works(agent, part)
        asked = f"{before}New events:\n{agent.written_out(skip=skip)}\nUpdate the summary."
        said = session.ask("summary", asked, text, says="You condense the work of an agent.")
        agent.begins_anew(user("Fix the parser, then release it."), user(f"Summary of what was done:\n{said}"))
        skip, before = 2, f"Previous summary:\n{said}\n"
    agent.says("Version 2 is released.")


@conversation()
def condenser_that_keeps_the_first_events(session: Session) -> None:
    """Form (c), OpenHands: the first and the last events stay; a summary message replaces the middle."""
    agent = coder(session)
    works(agent, 0)
    first, before = list(agent.history[:3]), ""
    for part, text in enumerate(SUMMARIES, 1):
        works(agent, part)
        forgotten = agent.written_out(skip=4 if before else 3).splitlines()[:-2]
        events = "\n".join(f"<EVENT>{line}</EVENT>" for line in forgotten)
        asked = f"You maintain the context of an agent.\n<PREVIOUS SUMMARY>\n{before}\n</PREVIOUS SUMMARY>\n{events}"
        before = session.ask("summary", f"{asked}\nNow summarize the events.", text)
        agent.begins_anew(*first, user(before), *agent.history[-2:])
    agent.says("Version 2 is released.")


@conversation()
def condenser_that_reads_previews(session: Session) -> None:
    """OpenHands' SDK: the condenser's request has only a short preview of each event, so it quotes almost nothing of
    the history."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Find the commit that broke the build.")
    before = ""
    for part, text in enumerate(("Commits a to c are good.", "Commits a to f are good.\nThe search goes on at g.")):
        for commit in "abc" if part == 0 else "def":
            agent.does("bash", f"HEAD is now at {commit}: built in 61 s, no error", command=f"git bisect good {commit}")
        previews = "<EVENT>\nActionEvent (agent)\n  Action: ExecuteBashAction\n</EVENT>\n" * 3
        before = session.ask(
            "summary", f"<PREVIOUS SUMMARY>\n{before}\n</PREVIOUS SUMMARY>\n{previews}Summarize.", text
        )
        agent.begins_anew(agent.history[0], user(before), *agent.history[-2:])
    agent.says("Commit g broke the build.")


@conversation()
def codex_summaries(session: Session) -> None:
    """Codex: the request for the summary has no tools. The user's messages stay before the summary."""
    agent = coder(session)
    first = list(agent.history)
    for part, text in enumerate(SUMMARIES):
        works(agent, part)
        said = agent.aside("summary", "Create a handoff summary for another LLM.", text, tools="")
        agent.begins_anew(*first, user(f"Another language model started to solve this problem. Its summary:\n{said}"))
    agent.says("Version 2 is released.")


@conversation()
def gemini_snapshots(session: Session) -> None:
    """Gemini CLI: a snapshot replaces the old part of the history, and the newest messages stay. The request for the
    next snapshot contains the last one."""
    agent = coder(session)
    for part, text in enumerate(SUMMARIES):
        works(agent, part)
        snapshot = f"<state_snapshot>\n{text}\n</state_snapshot>"
        other = agent.hands_over("You compress histories into a snapshot.", use="summary")
        del other.history[-2:]
        said = other.hears("First, reason. Then, generate the <state_snapshot>.").says(
            f"<scratchpad>Hm.</scratchpad>\n{snapshot}"
        )
        agent.begins_anew(user(said), assistant("Got it. Thanks for the additional context!"), *agent.history[-2:])
    agent.says("Version 2 is released.")


@conversation()
def opencode_summaries(session: Session) -> None:
    """OpenCode: the summary is an assistant message, after a question that the program makes up."""
    agent = coder(session)
    for part, text in enumerate(SUMMARIES):
        works(agent, part)
        said = agent.aside(
            "summary", "Provide a detailed prompt for continuing.", text, says="You summarize.", tools=""
        )
        agent.begins_anew(user("What did we do so far?"), assistant(said), user("Continue if you have next steps."))
    agent.says("Version 2 is released.")


@conversation()
def running_summary_in_the_system_prompt(session: Session) -> None:
    """LangMem: the summary stands at the end of the system prompt and is extended each time. The newest messages
    stay."""
    agent = coder(session)
    head, asked = agent.head, "Create a summary of the conversation above:"
    for part, text in enumerate(SUMMARIES):
        works(agent, part)
        other = session.agent("summary")
        other.history = list(agent.history[:-2])
        said = other.hears(asked).says(text)
        agent.begins_anew(*agent.history[-2:])
        agent.head = f"{head}\nSummary of the conversation so far: {said}"
        asked = f"This is a summary so far: {said}\nExtend it by the new messages above:"
    agent.says("Version 2 is released.")


@conversation()
def sub_agents_summaries_without_the_opening(session: Session) -> None:
    """A helper's history is replaced twice. The requests for its summaries do not contain the helper's task."""
    main = session.agent("main", "You lead.", "task").hears("Audit the code.")
    main.calls("task", prompt="Look for unsafe calls in all modules.")
    sub = session.agent("helper", "You audit.", "bash edit").hears("Look for unsafe calls in all modules.")
    before = ""
    for part, text in enumerate(("m0 has eval().\nm1 to m4 are open.", "m0 and m3 have eval().\nNothing is open.")):
        works(sub, part)
        asked = f"{before}Recent events:\n{sub.written_out(skip=1)}\nCondense them."
        before = session.ask("summary", asked, text, says="You condense the work of agents.")
        sub.begins_anew(user("Look for unsafe calls in all modules."), user(f"Progress: {before}"))
    main.gets(sub.says("eval() is called in m0 and m3."))
    main.says("There are two unsafe calls.")


@conversation()
def summary_of_a_text_protocol_agent(session: Session) -> None:
    """aider: neither the agent nor the summariser has tools. The request for a summary leaves out the history's first
    message."""
    agent = session.agent("main", "Act as a developer. Write edits as blocks.").hears("Add type hints to a.py.")
    for part, text in enumerate(
        ("I asked you to add type hints.\nYou did it for f().", "Type hints are in f() and g().")
    ):
        for step in range(2):
            agent.says(f"a.py\n<<<<\ndef f{part}{step}(x)\n====\ndef f{part}{step}(x: int)\n>>>>")
            agent.hears(f"mypy: {3 - step} errors in part {part}")
        summariser = session.agent("summary", "Briefly summarize this partial conversation.")
        said = summariser.hears(f"# CHAT\n{agent.written_out(skip=1)}").says(text)
        agent.begins_anew(
            user(f"I spoke to you previously about a number of things.\n{said}"), assistant("Ok."), user("Go on.")
        )
    agent.says("All of a.py has type hints.")


@conversation()
def summary_in_the_arguments_of_a_call(session: Session) -> None:
    """The agent passes its summary as the argument of a tool call. The program begins a new history with that text."""
    agent = coder(session)
    agent.tools = "bash edit save_progress"
    for part, text in enumerate(SUMMARIES[:2]):
        works(agent, part)
        agent.use = Use.SUMMARY
        agent.hears("Your context is nearly full. Call save_progress.").calls("save_progress", summary=text)
        agent.use = Use.MAIN
        agent.begins_anew(user(f"Fix the parser, then release it.\nProgress so far:\n{text}"))
    agent.says("Version 2 is released.")


@conversation()
def two_halves_summed_up_apart(session: Session) -> None:
    """Pi, if one turn is too long: one call summarises the history, another one the beginning of the turn, and the
    program joins both texts."""
    agent = coder(session)
    works(agent, 0)
    works(agent, 1)
    head = "You are a context summarization assistant."
    lines = agent.written_out().splitlines()
    old = session.ask("summary", "\n".join(lines[:4]) + "\nSummarize.", SUMMARIES[0], says=head)
    turn = session.ask("summary", "\n".join(lines[4:]) + "\nSummarize the turn's beginning.", SUMMARIES[1], says=head)
    agent.begins_anew(user(f"<summary>\n{old}\n---\n{turn}\n</summary>"), *agent.history[-2:])
    agent.says("Version 2 is released.")


@conversation()
def summary_of_one_line(session: Session) -> None:
    """A summary of one line. The new history begins with the task."""
    agent = coder(session)
    for part, text in enumerate(("Part 0 is edited.", "Parts 0 and 1 are edited, 2 is next.")):
        works(agent, part)
        said = session.ask("summary", f"Say in one line what was done:\n{agent.written_out(skip=1)}", text)
        agent.begins_anew(user("Fix the parser, then release it."), user(f"(Earlier: {said})"))
    agent.says("Version 2 is released.")
