"""The work to classify a session's turns is proportional to their number, whatever the agent does."""

from __future__ import annotations

import cProfile
import pstats
import random
import time
from collections.abc import Callable

import msgspec
import pytest

from outrider.messages import Message, ParsedMessages, Role, ToolCall
from outrider.tokens.branches import segments
from outrider.tokens.samples import count_session
from outrider.tokens.tree import request_index
from outrider.tokens.tree import tree as tree_module
from outrider.tokens.tree.request_index import PromptNode
from outrider.tokens.tree.tree import MAX_SEEN_PREFIXES, Joined, TokenTree
from outrider.trajectory import (
    FinishReason,
    ForkCause,
    JoinKind,
    LogprobKind,
    Turn,
    TurnTimings,
    pack_ids,
    pack_logprobs,
)
from support.steps import run_inline

from .harnesses import CODER, TASK, assistant, system, user
from .renderers import family_renderer

TURNS = 200


class Record:
    """A session's turns as they are stored."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    def add(self, parent: int | None, *messages: Message, cause: ForkCause | None = None, **fields: object) -> int:
        """Add a turn whose reply calls a tool. Returns its index."""
        index = len(self.turns)
        call = ToolCall(f"c{index}", "task", f'{{"prompt": "Look for the callers of number {index}."}}')
        turn = Turn(
            index=index,
            parent=parent,
            conversation=self.turns[parent].conversation if parent is not None else index,
            tools=b"tools",
            join=JoinKind.FORK if cause else JoinKind.ROOT if parent is None else JoinKind.APPEND,
            cause=cause,
            prompt_length=1,
            prompt_delta=pack_ids([index]),
            output_ids=pack_ids([1]),
            logprobs=pack_logprobs([0.0]),
            logprob_kind=LogprobKind.RAW,
            versions=(),
            finish=FinishReason.STOP,
            dialect="test",
            engine="test",
            sampling={},
            messages=messages,
            reply=Message(role=Role.ASSISTANT, content=f"Reply number {index} of many.", tool_calls=(call,)),
            timings=TurnTimings(received=0.0, first_token=None, finished=0.0),
        )
        self.turns.append(msgspec.structs.replace(turn, **fields))
        return index


def sub_agents(record: Record, turns: int) -> None:
    main = record.add(None, CODER, TASK)
    while len(record.turns) < turns:
        last = record.add(
            None, system("You help."), user(f"Look for the callers of number {main}."), agent_id=f"{main}"
        )
        for _ in range(3):
            last = record.add(last, user("Go on."), agent_id=f"{main}")
        main = record.add(main, user("Go on."))


def questions(record: Record, turns: int) -> None:
    for number in range(turns):
        plain = assistant(f"This is the answer to question {number}.")
        record.add(None, CODER, user(f"Question {number}?"), tools=b"", reply=plain)


def edits(record: Record, turns: int) -> None:
    """Two lines side by side, each quoting the other's replies."""
    record.add(None, CODER, TASK)
    for number in range(1, turns):
        quoted = assistant(f"Reply number {number - 1} of many.")
        edited = (quoted, user(f"Step {number}.")) if number > 1 else (user("Step 1."),)
        record.add(max(0, number - 2), *edited, cause=ForkCause.HISTORY_REWRITTEN, forked_from=number - 1)


def steps_back(record: Record, turns: int) -> None:
    main = record.add(None, CODER, TASK)
    while len(record.turns) < turns:
        record.add(main, user("Or else?"))
        main = record.add(main, user("Go on."))


def retries(record: Record, turns: int) -> None:
    for _ in range(turns):
        record.add(None, CODER, TASK, prompt_delta=pack_ids([0]), conversation=0)


def other_heads(record: Record, turns: int) -> None:
    """Many questions about one turn, each with a system prompt of its own."""
    record.add(None, CODER, TASK)
    for number in range(1, turns):
        about = (system(f"It is {number}."), TASK, assistant("Reply number 0 of many."), user("Well?"))
        record.add(None, *about, cause=ForkCause.SYSTEM_CHANGED, forked_from=0)


@pytest.mark.deep
@pytest.mark.parametrize("shape", [sub_agents, questions, edits, steps_back, retries, other_heads])
def test_twice_the_turns_take_twice_the_work(shape: Callable[[Record, int], None]) -> None:
    """Work is counted in function calls, whose number does not depend on the machine's load."""
    calls = []
    for turns in (TURNS, 2 * TURNS):
        record = Record()
        shape(record, turns)
        profile = cProfile.Profile()
        profile.runcall(count_session, record.turns)
        calls.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]  # missing in typeshed
    assert calls[1] < 2.6 * calls[0], calls


def test_requests_that_quote_many_replies_take_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request quotes all replies, so the work would grow with the number of requests times the square of the
    replies' length. It is done in the thread that reads the requests of all sessions."""
    monkeypatch.setattr(segments, "MAX_SEARCHED", 10**8, raising=False)
    chance, record = random.Random(0), Record()
    quoted: list[str] = []
    for number in range(50):
        lines = ["".join(chance.choices("abcdefgh ", k=16)) for _ in range(300)]
        quoted += lines
        record.add(None, CODER, user(f"Question {number}?"))
        record.turns[-1] = msgspec.structs.replace(record.turns[-1], reply=assistant("\n".join(lines)))
    chance.shuffle(quoted)
    for number in range(10):
        record.add(None, CODER, user(f"{number}\n" + "\n".join(quoted)))
    begun = time.thread_time()
    tokens = count_session(record.turns).tokens
    assert time.thread_time() - begun < 4
    assert (tokens.sampled, tokens.trained, tokens.dropped) == (60, 60, 0)


@pytest.mark.deep
def test_what_a_tree_keeps_of_ever_new_messages_is_bounded() -> None:
    """A request may have tens of thousands of messages, and a session hundreds of such requests."""
    tree = TokenTree(family_renderer(), "recorded")
    for request in range(4):
        messages = [Message(role=Role.USER, content=f"{request} {at}") for at in range(MAX_SEEN_PREFIXES // 3)]
        run_inline(tree.join(ParsedMessages(messages), (), b""))
    assert len(tree._first_with_prefix) <= MAX_SEEN_PREFIXES + MAX_SEEN_PREFIXES // 3 + 1


def kept_prompts(tree: TokenTree) -> set[PromptNode]:
    return {*tree._first_with_prefix.values(), *(prompt for same in tree._prompts.values() for prompt in same)}


def joined(tree: TokenTree, *messages: Message) -> Joined:
    return run_inline(tree.join(ParsedMessages(messages), (), b""))


def test_what_a_tree_keeps_of_failed_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the engine refuses, or that the agent gives up at once, makes no turn, and no limit ends such
    calls."""
    most = 100_000
    monkeypatch.setattr(tree_module, "MAX_UNANSWERED", most, raising=False)
    tree = TokenTree(family_renderer(), "recorded")
    answered = joined(tree, TASK).prompt
    tree.commit(answered, [1, 2, 3], assistant("Done."))
    for number in range(60):
        joined(tree, TASK, assistant("Done."), user(f"{number} " + "word " * 2000))
        assert sum(len(prompt.delta) for prompt in kept_prompts(tree)) < most
        joined(tree, user(f"{number} " + "word " * 2000))
        assert sum(len(prompt.delta) for prompt in kept_prompts(tree)) < most
    repeated = joined(tree, TASK)
    assert (repeated.kind, repeated.prompt) == (JoinKind.RETRY, answered)


def test_a_reply_to_a_dropped_prompt_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_UNANSWERED", 20_000, raising=False)
    tree = TokenTree(family_renderer(), "recorded")
    running = joined(tree, TASK).prompt
    for number in range(10):
        joined(tree, user(f"{number} " + "word " * 2000))
        assert joined(tree, user(f"{number} " + "word " * 2000), user("more")).kind is JoinKind.FORK
    assert running not in kept_prompts(tree)
    again = joined(tree, TASK).prompt
    assert again.ids().tolist() == running.ids().tolist()
    sampled = [1, 2, family_renderer().stop_ids[0]]
    for prompt, text in ((running, "One."), (again, "Two.")):
        turn = tree.commit(prompt, sampled, assistant(text))
        assert joined(tree, TASK, assistant(text), user("Go on.")).prompt.parent is turn


def test_the_stored_digests_of_tools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_index, "MAX_TOOL_KEYS", 10, raising=False)
    tree = TokenTree(family_renderer(), "recorded")
    for number in range(30):
        run_inline(tree.measure(ParsedMessages((TASK,)), (), b"[%d]" % number))
    assert len(tree._indexer._tools) <= 10
