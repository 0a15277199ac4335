"""Histories that a program cuts, edits, or asks about again."""

from __future__ import annotations

from ..harnesses import user
from .script import Session, conversation


@conversation()
def message_removed_from_the_middle(session: Session) -> None:
    """The program takes a failed attempt out of the history: it is still the same conversation."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Free some disk space.")
    agent.does("bash", "/var 97 %", command="df").does("bash", "command not found", command="duh /var")
    agent.does("bash", "/var/log 40 GB", command="du /var")
    del agent.history[3:5]
    agent.does("bash", "ok", command="truncate -s 0 /var/log/syslog")
    agent.says("I freed 40 GB in /var/log.")


@conversation()
def history_trimmed_from_the_front(session: Session) -> None:
    """The task stays, the oldest calls go."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Count the lines of every module.")
    for number in range(5):
        agent.does("bash", f"{number}0 m{number}.py", command=f"wc -l m{number}.py")
        if len(agent.history) > 5:
            del agent.history[1:3]
    agent.says("There are 100 lines.")


@conversation()
def note_moved_off_the_first_message(session: Session) -> None:
    """A reminder is behind the first message only as long as that is the newest."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears(
        "List the files.\n<note>No todos yet.</note>"
    )
    agent.does("bash", "a.py b.py", command="ls")
    agent.history[0] = user("List the files.")
    agent.history.append(user("<note>No todos yet.</note>"))
    agent.does("bash", "a.py", command="ls a.py")
    del agent.history[3]
    agent.says("There are a.py and b.py.")


@conversation()
def answer_after_an_abort_and_an_unused_one(session: Session) -> None:
    """A request is cut off, sent again, answered badly, and sent again."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("List the files.")
    agent.cut("I will now li")
    agent.does("bash", "a.py b.py", command="ls")
    agent.unused("I cannot see any files, sorry.")
    agent.says("There are a.py and b.py.")
