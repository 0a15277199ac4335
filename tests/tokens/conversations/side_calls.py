"""Calls beside the work, whose answers nothing uses."""

from __future__ import annotations

from .script import Session, conversation


@conversation()
def quota_topic_and_title(session: Session) -> None:
    """Older Claude Code: three side calls before the first call of the agent."""
    session.ask("side", "quota", "#")
    session.ask(
        "side", "Fix the tests", '{"isNewTopic": true, "title": "Fix tests"}', says="Analyze if this is a new topic."
    )
    session.ask("side", "Fix the tests", "Fixing tests", says="Write a title of three words.")
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Fix the tests")
    agent.does("bash", "2 failed", command="make test").says("They pass now.")


@conversation()
def next_speaker_and_loop_checks(session: Session) -> None:
    """Gemini CLI: a router first, and checks about the history."""
    session.ask("side", "Fix the tests", '{"model_choice": "flash"}', says="You are a Task Routing AI.")
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Fix the tests")
    agent.does("bash", "2 failed", command="make test")
    agent.aside(
        "side",
        "Is the agent stuck?",
        '{"confidence": 0.1}',
        says="You identify when an AI is stuck in a loop.",
        tools="",
    )
    agent.does("bash", "0 failed", command="make test").says("They pass now.")
    agent.aside("side", "Determine who should logically speak next.", '{"next_speaker": "user"}', tools="")


@conversation()
def command_prefixes(session: Session) -> None:
    """Claude Code: a call for the prefix of each command."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Show the last commit.")
    for command, prefix in (("git log -1", "git log"), ("git show HEAD | head", "git show")):
        agent.calls("bash", command=command)
        session.ask("side", f"Command: {command}", prefix, says="Extract the command prefix.")
        agent.gets(f"output of {command}")
    agent.says("The last commit fixes the parser.")
