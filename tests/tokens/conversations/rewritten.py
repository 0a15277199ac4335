"""Histories that a program cuts or edits, and requests that it sends again."""

from __future__ import annotations

import msgspec

from outrider.messages import Role

from ..harnesses import user
from ..strategies import hermes_call
from .script import Session, conversation


@conversation(one_history=True)
def message_removed_from_the_middle(session: Session) -> None:
    """The program removes a failed attempt from the history. The conversation is still the same."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Free some disk space.")
    agent.does("bash", "/var 97 %", command="df").does("bash", "command not found", command="duh /var")
    agent.does("bash", "/var/log 40 GB", command="du /var")
    del agent.history[3:5]
    agent.does("bash", "ok", command="truncate -s 0 /var/log/syslog")
    agent.says("I freed 40 GB in /var/log.")


@conversation(replaces=True)
def history_trimmed_from_the_front(session: Session) -> None:
    """The task stays; the oldest calls are removed."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Count the lines of every module.")
    for number in range(5):
        agent.does("bash", f"{number}0 m{number}.py", command=f"wc -l m{number}.py")
        if len(agent.history) > 5:
            del agent.history[1:3]
    agent.says("There are 100 lines.")


@conversation(one_history=True)
def note_moved_off_the_first_message(session: Session) -> None:
    """A reminder moves from the first message to the end of the history, and is then removed."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears(
        "List the files.\n<note>No todos yet.</note>"
    )
    agent.does("bash", "a.py b.py", command="ls")
    agent.history[0] = user("List the files.")
    agent.history.append(user("<note>No todos yet.</note>"))
    agent.does("bash", "a.py", command="ls a.py")
    del agent.history[3]
    agent.says("There are a.py and b.py.")


@conversation(one_history=True)
def answer_after_an_abort_and_an_unused_one(session: Session) -> None:
    """The first request is cut off and sent again. The second one is answered badly and sent again."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("List the files.")
    agent.cut("I will now li")
    agent.does("bash", "a.py b.py", command="ls")
    agent.unused("I cannot see any files, sorry.")
    agent.says("There are a.py and b.py.")


@conversation(one_history=True)
def failed_attempts_removed_again_and_again(session: Session) -> None:
    """A failed call is removed from the history as soon as the next call succeeds."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Build all three packages.")
    for name in ("one", "two", "three"):
        agent.does("bash", "error: no such flag", command=f"build --quick {name}")
        agent.does("bash", f"{name} is built", command=f"build {name}")
        del agent.history[-4:-2]
    agent.says("All three are built.")


@conversation(replaces=True)
def window_that_loses_the_task(session: Session) -> None:
    """Each request has only the newest messages, beginning with a user message, so the task is soon lost."""
    agent = session.agent("main", "You are a tutor.").hears("Teach me to count in Danish.")
    for number, (said, asked) in enumerate(
        (("En.", "And two?"), ("To.", "And three?"), ("Tre.", "And four?"), ("Fire.", "Thanks!"))
    ):
        agent.says(f"{said} That is number {number + 1} in Danish.")
        agent.hears(asked)
        agent.history = agent.history[-5:]
    agent.says("You are welcome!")


@conversation(one_history=True)
def old_results_blanked(session: Session) -> None:
    """SWE-agent: all results but the last are replaced by a line."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("Find the slow query.")
    for number in range(4):
        agent.does("bash", f"{number} ms\n" * 5, thought=f"I try number {number}.", command=f"explain q{number}")
        agent.history[:-1] = [
            msgspec.structs.replace(one, content="Old environment output: (5 lines omitted)")
            if one.role is Role.TOOL
            else one
            for one in agent.history[:-1]
        ]
    agent.says("Query 3 is the slow one.")


@conversation(one_history=True)
def note_at_the_end_of_each_request(session: Session) -> None:
    """Each request ends with a reminder, which is removed afterwards."""
    agent = session.agent("main", "You are a coding agent.", "bash").hears("List the files.")
    for number in range(3):
        agent.hears(f"<reminder>You have {9 - number} calls left.</reminder>")
        agent.does("bash", f"file{number}.py", command=f"ls {number}")
        del agent.history[-3]
    agent.says("There are three files.")


@conversation(one_history=True)
def clock_in_the_system_prompt(session: Session) -> None:
    """The system prompt differs in each request."""
    agent = session.agent("main", "", "bash").hears("Wait for the build.")
    for minute in range(4):
        agent.head = f"You are an agent. It is 12:0{minute}."
        agent.does("bash", "still building", command=f"status {minute}")
    agent.says("I give up.")


@conversation(one_history=True)
def unreadable_answers_asked_again(session: Session) -> None:
    """The program drops an answer that does not parse, and sends the same request again."""
    agent = session.agent("main", "Answer in JSON only.").hears("Which city is the capital of Peru?")
    agent.unused("Sure! The capital is Lima.")
    agent.unused('{"city": ')
    agent.says('{"city": "Lima"}')
    agent.hears("And of Chile?").says('{"city": "Santiago"}')


@conversation(one_history=True)
def unreadable_answers_with_the_error_shown(session: Session) -> None:
    """An answer that does not parse stays in the history, followed by the error, so it was used."""
    agent = session.agent("main", "Answer in JSON only.").hears("Which city is the capital of Peru?")
    agent.says("Sure! The capital is Lima.")
    agent.hears("JSONDecodeError at 1:1. Answer in JSON only.").says('{"city": "Lima"}')


@conversation(one_history=True)
def best_of_three_actions(session: Session) -> None:
    """Each request is sent three times at once; the program picks one answer by its own score."""
    agent = session.agent("main", "You play chess.", "move").hears("You are white.")
    for moves in (("e4", "a4", "h4"), ("Nf3", "Na3", "Nh3")):
        calls = [hermes_call("move", {"to": move}) for move in moves]
        others = [agent.hands_over(agent.head, agent.tools, use="unused") for _ in moves[1:]]
        session.at_once((others[0], calls[1]), (agent, calls[0]), (others[1], calls[2]))
        agent.gets("Black answers.")
    agent.says("I offer a draw.")


@conversation(one_history=True)
def user_goes_back(session: Session) -> None:
    """The user takes the last question back and asks a different one."""
    agent = session.agent("main", "You help.", "bash").hears("Show the log.")
    agent.does("bash", "error at 9", command="cat log").says("There is an error at 9.")
    back = list(agent.history)
    agent.hears("Why?").does("bash", "disk full", command="df").says("The disk is full.")
    agent.begins_anew(*back).hears("Delete the log.").does("bash", "ok", command="rm log").says("The log is gone.")


@conversation()
def two_histories_from_one_state(session: Session) -> None:
    """A tree search over histories: both children of a state continue, and one of them is the outcome."""
    agent = session.agent("main", "You prove theorems.", "tactic").hears("Prove that 1 + 1 = 2.")
    agent.does("tactic", "1 goal left", text="intro")
    other = agent.hands_over(agent.head, agent.tools, use="helper")
    session.at_once((other, hermes_call("tactic", {"text": "simp"})), (agent, hermes_call("tactic", {"text": "rfl"})))
    other.gets("1 goal left").does("tactic", "error", text="ring")
    agent.gets("no goals left").says("It is proved by rfl.")


@conversation(replaces=True, has_transcript=False)
def broken_answer_repaired(session: Session) -> None:
    """LangChain's OutputFixingParser: another call repairs the JSON, and the history has the repaired text."""
    agent = session.agent("main", "Answer in JSON only.").hears("Which city is the capital of Peru?")
    broken = agent.says('{"city": "Lima", "country": "Pe')
    repair = f"Completion:\n{broken}\nError: unterminated string at 27.\nPlease try again."
    del agent.history[-1]
    agent.said(session.ask("helper", repair, '{"city": "Lima", "country": "Peru"}'))
    agent.hears("And of Chile?").says('{"city": "Santiago", "country": "Chile"}')
