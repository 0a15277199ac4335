"""The facts that the doctor of runs extracts from prompts, tool results and turns."""

from __future__ import annotations

import msgspec
import pytest

from outrider.messages import Message, Role, ToolCall
from outrider.service.diagnosis.prompts import SHOWN_CHARACTERS, ChangedLine, changed_line, head_of
from outrider.service.diagnosis.session_facts import FactsReader, SessionFacts, shows_failure
from outrider.trajectory import ForkCause, JoinKind, Turn, VersionSpan

from .ailing import SYSTEM, a_turn, commands, conversation

KINDS = {
    "date or time": [
        ("Today is 2026-11-29.", "Today is 2026-11-30."),
        ("Today is Sunday, Nov 29.", "Today is Monday, Nov 30."),
        ("It is 10:59 now", "It is 11:00 now"),
    ],
    "path": [
        ("Working directory: /work/a1", "Working directory: /work/b2"),
        ("cwd=~/one", "cwd=~/two"),
        (r"cd C:\one", r"cd C:\two"),
    ],
    "id": [
        ("session 3f2a9c01", "session 77b1e4d0"),
        ("id: 123e4567-e89b-12d3-a456-426614174000", "id: 00000000-e89b-12d3-a456-426614174001"),
        ("session s-0019a4e2b6c1f3d2-0", "session s-0019a4e2b6c1f3d2-1"),
    ],
    "number": [("You have 5 tries.", "You have 6 tries.")],
    "text": [("You are Ada.", "You are Bob.")],
}


@pytest.mark.parametrize(("kind", "pair"), [(kind, pair) for kind, pairs in KINDS.items() for pair in pairs])
def test_the_line_that_changes_is_named_with_its_kind(kind: str, pair: tuple[str, str]) -> None:
    before, after = (f"{SYSTEM}\n{line}\nBe brief." for line in pair)
    assert changed_line(before, after) == ChangedLine(10, *pair, kind)


def test_a_line_that_is_added_or_removed_is_named() -> None:
    longer = SYSTEM.replace("Rule 3", "Look at 12 files.\nRule 3")
    assert changed_line(SYSTEM, longer) == ChangedLine(5, "Rule 3: be careful.", "Look at 12 files.", "number")
    assert changed_line(longer, SYSTEM) == ChangedLine(5, "Look at 12 files.", "Rule 3: be careful.", "number")
    assert changed_line(SYSTEM, f"{SYSTEM}\nmore") == ChangedLine(10, "", "more", "text")


def test_equal_prompts_and_prompts_of_other_agents_have_no_changed_line() -> None:
    assert changed_line(SYSTEM, SYSTEM) is None
    assert changed_line(SYSTEM, "Write a title.") is None
    lines = SYSTEM.split("\n")
    half = "\n".join([*lines[:4], *(f"other {line}" for line in lines[4:])])
    assert changed_line(SYSTEM, half) is None
    more = "\n".join([*lines[:5], *(f"other {line}" for line in lines[5:])])
    assert changed_line(SYSTEM, more) is not None


def test_a_single_line_is_compared_by_its_characters() -> None:
    found = changed_line("You are an agent in /work/a. Be careful.", "You are an agent in /work/b. Be careful.")
    assert found is not None
    assert found.kind == "path"
    assert changed_line("You are an agent.", "Write a title for this text.") is None


def test_what_two_lines_have_in_common_counts_once() -> None:
    assert changed_line("aaaa", "aaaaaaaaa") is None
    found = changed_line(f"{SYSTEM}\na 5 5", f"{SYSTEM}\na 5 5 5")
    assert found is not None
    assert found.kind == "number"


def test_a_long_line_is_cut_around_the_change() -> None:
    line = "word " * 500
    found = changed_line(f"{SYSTEM}\n{line}2026-11-29 {line}", f"{SYSTEM}\n{line}2026-11-30 {line}")
    assert found is not None
    assert "2026-11-29" in found.before
    assert "2026-11-30" in found.after
    assert len(found.before) <= SHOWN_CHARACTERS + 2
    assert found.before[0] == found.before[-1] == "…"


def test_keys_of_sessions_are_not_shown() -> None:
    keys = [f"outrider_{letter * 40}" for letter in "ab"]
    found = changed_line(*(f"{SYSTEM}\nkey {key}" for key in keys))
    assert found is not None
    assert keys[0] not in found.before
    assert keys[1] not in found.after


def test_the_beginning_of_a_conversation_ends_with_the_first_reply() -> None:
    messages = [
        Message(role=Role.SYSTEM, content="a"),
        Message(role=Role.USER, content="b"),
        Message(role=Role.ASSISTANT, content="c"),
        Message(role=Role.USER, content="d"),
    ]
    assert head_of(messages) == "a\nb"


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("bash: rg: command not found", True),
        ("[exit code 127]", True),
        ("some output\n[exit code 1]", True),
        ("x" * 1000 + "\n[exit code 1]", True),
        ("Error: no such file", True),
        ("FileNotFoundError: [Errno 2]", True),
        ("Traceback (most recent call last):", True),
        ('{"error": "no route"}', True),
        ('{"is_error": true, "content": ""}', True),
        ("Unknown tool: find", True),
        ("the request timed out", True),
        ("process exited with code 2", True),
        ('{"returncode": 1}', True),
        ("", False),
        ("main.py  README.md", False),
        ("[exit code 0]", False),
        ('{"error": null, "content": "ok"}', False),
        ("12 errors were fixed", False),
        ("def error(): pass", False),
        ("all tests passed", False),
        ("exit code 0", False),
    ],
)
def test_results_of_tools_that_show_a_failure(result: str, failed: bool) -> None:
    assert shows_failure(result) is failed


def facts_of(turns: list[Turn]) -> SessionFacts:
    reader = FactsReader("s")
    for turn in turns:
        reader.add(turn)
    return reader.facts


def test_a_result_counts_once_although_a_fork_repeats_it() -> None:
    turns = conversation(turns=3, result="[exit code 1]")
    again = (*turns[0].messages, *turns[1].messages)
    turns.append(a_turn(3, parent=None, join=JoinKind.FORK, cause=ForkCause.HISTORY_REWRITTEN, messages=again))
    facts = facts_of(turns)
    assert (facts.tools["bash"].results, facts.tools["bash"].failed) == (2, 2)
    assert (facts.calls, facts.turns) == (2, 4)


def test_a_result_without_a_recorded_call_does_not_count() -> None:
    message = Message(role=Role.TOOL, content="[exit code 1]", tool_call_id="unknown")
    assert facts_of([a_turn(0, messages=(message,))]).tools == {}


def test_made_up_tools_have_a_bound() -> None:
    calls = tuple(ToolCall(id=f"c{at}", name=f"tool-{at}", arguments="{}") for at in range(300))
    results = tuple(Message(role=Role.TOOL, content="ok", tool_call_id=call.id) for call in calls)
    reply = Message(role=Role.ASSISTANT, tool_calls=calls)
    facts = facts_of([a_turn(0, reply=reply), a_turn(1, messages=results)])
    assert (facts.calls, len(facts.tools)) == (300, 100)


def test_programs_have_a_bound_and_are_counted_once() -> None:
    reader = FactsReader("s")
    ran = [(f"/bin/program-{number} -x", 127, 1.0) for number in range(300)]
    reader.add_commands([*commands(*ran), *commands(("/bin/program-0 -y", 127, 2.0))])
    assert len(reader.facts.programs) == len(reader.facts.missing) == 100
    assert reader.facts.programs["program-0"] == 2.0  # the later entry with the same number
    going_on = msgspec.structs.replace(commands(("sleep 9", 0, 9.0))[0], end=None)
    other = FactsReader("s")
    other.add_commands([going_on, msgspec.structs.replace(commands(("  ", 127, 1.0))[0], number=1)])
    assert (other.facts.programs, other.facts.missing) == ({}, [])


def test_what_the_cache_could_have_kept() -> None:
    first = a_turn(0, prompt_length=500, cached_tokens=0)
    facts = facts_of([first, a_turn(1, prompt_length=700, cached_tokens=410)])
    assert (facts.cacheable, facts.missed) == (510, 100)
    assert facts_of([first, a_turn(1, prompt_length=700, cached_tokens=None)]).cacheable == 0
    short = a_turn(0, prompt_length=100)
    assert facts_of([short, a_turn(1, prompt_length=700, cached_tokens=0)]).cacheable == 0
    other = a_turn(1, prompt_length=700, cached_tokens=0, join=JoinKind.FORK, parent=0)
    assert facts_of([first, other]).cacheable == 0


def test_a_wait_for_new_weights_is_no_wait() -> None:
    first, same, newer, mixed = (
        a_turn(at, versions=versions)
        for at, versions in enumerate(
            (
                (VersionSpan(3, 0, 10),),
                (VersionSpan(3, 0, 10),),
                (VersionSpan(4, 0, 10),),
                (VersionSpan(4, 0, 5), VersionSpan(5, 5, 10)),
            )
        )
    )
    assert facts_of([first, same]).waits == [1.0]
    assert facts_of([first, same, newer, mixed]).waits == [1.0]
    assert facts_of([first, a_turn(1, versions=())]).waits == [1.0]
    assert facts_of([first]).first_wait == 1.0


def test_versions_of_spans_without_tokens_do_not_count() -> None:
    facts = facts_of([a_turn(0, versions=(VersionSpan(1, 0, 0), VersionSpan(5, 0, 4), VersionSpan(6, 4, 10)))])
    assert (facts.oldest, facts.newest) == (5, 6)
    assert facts_of([a_turn(0, versions=())]).oldest is None


def test_a_changed_system_prompt_is_compared_with_that_of_its_conversation() -> None:
    turns = conversation(system=f"{SYSTEM}\ncwd: /work/a")
    head = (Message(role=Role.SYSTEM, content=f"{SYSTEM}\ncwd: /work/b"), *turns[0].messages[1:])
    fork = a_turn(2, parent=None, join=JoinKind.FORK, cause=ForkCause.SYSTEM_CHANGED, forked_from=1, messages=head)
    facts = facts_of([*turns, fork])
    assert facts.changed == ChangedLine(10, "cwd: /work/a", "cwd: /work/b", "path")
    assert len(facts.heads) == 1
    rewritten = msgspec.structs.replace(fork, cause=ForkCause.HISTORY_REWRITTEN)
    assert facts_of([*turns, rewritten]).changed is None
