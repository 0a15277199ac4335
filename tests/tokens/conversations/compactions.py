"""Histories that a program replaces by summaries, once or again and again."""

from __future__ import annotations

from ..harnesses import user
from .script import Agent, Session, conversation

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
    """Form (a), as Claude Code: the agent itself is asked, behind its history."""
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
    """Form (b): the summariser never sees the task; from the second on it sees the last summary and what came after."""
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
    """Form (c), as OpenHands: the first events stay, a summary message replaces the middle, the end stays."""
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
