"""A tree that is restored from stored turns joins all later requests as the tree that recorded them."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from time import thread_time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.concurrency.offload import PIECE_BYTES
from outrider.errors import ServiceError
from outrider.messages import Message, ParsedMessages, Role, ToolSpec
from outrider.store.rows import pack, turn_from
from outrider.tokens.rendering.renderer import History, Renderer
from outrider.tokens.tree.stored_turns import arrivals
from outrider.tokens.tree.tree import Joined, TokenTree
from outrider.trajectory import FinishReason, ForkCause, JoinKind, Turn, TurnTimings, pack_ids
from support.steps import run_inline

from .any_session import Clients, Move, moves
from .renderers import FAMILIES, family_renderer
from .rollout import Rollout, raw_of, restored
from .strategies import TOOLS


def told(joined: Joined) -> tuple[object, ...]:
    """All that a turn, and a later request, is told by where a request joined."""
    prompt = joined.prompt
    return (
        joined.kind,
        joined.cause,
        joined.forked_from,
        joined.added,
        prompt.parent.index if prompt.parent else None,
        prompt.delta,
        prompt.length,
        prompt.conversation,
        prompt.tools_digest,
        prompt.thinking,
        prompt.first_turn,
    )


class Twins(Rollout):
    """A session on two trees: the one that saw all of it, and from `begin` on one that was restored from its turns.
    They have to say the same of everything."""

    def __init__(self, renderer: Renderer, history: History = "recorded") -> None:
        super().__init__(renderer, history)
        self.restored: TokenTree | None = None
        self._pairs: list[tuple[Joined, Joined]] = []

    def begin(self) -> None:
        self.restored = restored(self.renderer, self.history, self.turns)
        assert self.restored.forks == self.tree.forks

    def join(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Joined:
        joined = super().join(messages, tools)
        if self.restored is not None:
            other = run_inline(self.restored.join(ParsedMessages(messages), tools, raw_of(tools)))
            assert told(other) == told(joined)
            assert self.restored.forks == self.tree.forks
            self._pairs.append((joined, other))
        return joined

    def answer(
        self,
        joined: Joined,
        output: Sequence[int],
        *,
        tools: Sequence[ToolSpec] = (),
        finish: FinishReason = FinishReason.STOP,
    ) -> Message:
        reply = super().answer(joined, output, tools=tools, finish=finish)
        if self.restored is not None:
            [other] = [other for one, other in self._pairs if one is joined]
            node = self.restored.commit(other.prompt, output, self.turns[-1].reply)
            assert node.index == self.turns[-1].index
            assert other.prompt.first_turn == joined.prompt.first_turn
        return reply


@pytest.mark.parametrize("history", ["recorded", "template"])
@given(st.lists(moves, min_size=3, max_size=16), st.lists(moves, min_size=3, max_size=12), st.sampled_from(FAMILIES))
def test_after_any_session_both_trees_say_the_same(
    history: History, before: list[Move], after: list[Move], family: str
) -> None:
    twins = Twins(family_renderer(family), history)
    clients = Clients(twins)
    for number, move in enumerate(before):
        clients.act(*move)
        if clients.open and number % 4 == 3:
            clients.finish(0)
    clients.finish_all()
    twins.begin()
    for move in after:
        clients.act(*move)
    clients.finish_all()
    twins.check_samples()


@given(st.lists(moves, min_size=3, max_size=16), st.sampled_from(FAMILIES))
def test_any_session_goes_on_exactly_however_often_the_service_dies(made: list[Move], family: str) -> None:
    """With calls in flight, which their clients make again."""
    clients = Clients(Rollout(family_renderer(family)))
    for number, move in enumerate(made):
        clients.act(*move)
        if number % 3 == 2:
            clients.restart()
    clients.finish_all()
    clients.rollout.check_samples()


SYSTEM = Message(role=Role.SYSTEM, content="You are a helpful assistant.")
OTHER = Message(role=Role.SYSTEM, content="You are an expert.")
QUESTION = Message(role=Role.USER, content="Read the file.")
AGAIN = Message(role=Role.USER, content="And again.")
NOW = Message(role=Role.USER, content="And now?")
FEWER: tuple[ToolSpec, ...] = ()


def said(family: str, text: str) -> list[int]:
    """Ids that no tokenizer would have chosen for the text, behind an end of the thoughts that the prompt opens."""
    tokenizer = family_renderer(family).tokenizer
    thought = "" if family == "qwen3" else "hm\n</think>\n\n"
    return [*tokenizer.encode(thought), *(token for letter in text for token in tokenizer.encode(letter)), 2]


class Talk:
    """SYSTEM and QUESTION, an answer that is known by sampled ids, AGAIN, and another answer: two turns."""

    def __init__(self, family: str = "qwen3") -> None:
        self.family = family
        self.twins = Twins(family_renderer(family))
        self.history: list[Message] = [QUESTION]
        for _ in range(2):
            self.history += [self.ask(self.history, "Yes."), AGAIN]

    def join(self, messages: Sequence[Message], system: Message = SYSTEM, tools: Sequence[ToolSpec] = TOOLS) -> Joined:
        return self.twins.join([system, *messages], tools)

    def ask(
        self, messages: Sequence[Message], text: str, system: Message = SYSTEM, tools: Sequence[ToolSpec] = TOOLS
    ) -> Message:
        return self.twins.answer(self.join(messages, system, tools), said(self.family, text), tools=tools)


def outcome(joined: Joined) -> tuple[JoinKind, ForkCause | None, int | None]:
    return joined.kind, joined.cause, joined.prompt.parent.index if joined.prompt.parent else None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_goes_on_where_it_was(family: str) -> None:
    talk = Talk(family)
    talk.twins.begin()
    first, second = talk.history[1], talk.history[3]
    assert outcome(talk.join(talk.history)) == (JoinKind.APPEND, None, 1)
    assert outcome(talk.join([QUESTION])) == (JoinKind.RETRY, None, None)
    assert outcome(talk.join(talk.history[:3])) == (JoinKind.RETRY, None, 0)
    assert outcome(talk.join([QUESTION, first, NOW])) == (JoinKind.FORK, ForkCause.SIBLING, 0)
    edited = [QUESTION, first, NOW, second, AGAIN]
    assert outcome(talk.join(edited)) == (JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, 0)
    assert outcome(talk.join([AGAIN])) == (JoinKind.ROOT, None, None)
    talk.ask(talk.history, "Done.")
    talk.twins.check_samples()


@pytest.mark.parametrize("family", FAMILIES)
def test_agents_that_hand_over_and_back_do_so_across_restarts(family: str) -> None:
    talk = Talk(family)
    history = talk.history
    for number in range(4):
        talk.twins.begin()
        system, tools = ((OTHER, FEWER), (SYSTEM, TOOLS))[number % 2]
        history = [*history, talk.ask(history, f"Answer {number}.", system, tools), AGAIN]
    assert [turn.parent for turn in talk.twins.turns] == [None, 0, None, 1, 2, 3]
    assert [sample.turns for sample in talk.twins.check_samples()] == [(0, 1, 3, 5), (2, 4)]


@pytest.mark.parametrize("head", [[OTHER], [OTHER, SYSTEM], []])
def test_thoughts_that_were_dropped_behind_another_head_are_still_known(head: list[Message]) -> None:
    talk = Talk("qwen3.5")
    silent = [msgspec.structs.replace(message, reasoning=None) for message in talk.history]
    twins = talk.twins
    reply = twins.answer(twins.join([*head, *silent], TOOLS), said("qwen3.5", "Well."), tools=TOOLS)
    twins.begin()
    assert outcome(twins.join([*head, *talk.history, reply, AGAIN], TOOLS)) == (JoinKind.APPEND, None, 2)


def test_what_a_client_was_not_given_cannot_be_gone_on_from() -> None:
    twins = Twins(family_renderer("qwen3"))
    twins.answer(twins.join([QUESTION]), said("qwen3", "Hel")[:-1], finish=FinishReason.ABORT)
    twins.begin()
    nothing = Message(role=Role.ASSISTANT)
    assert outcome(twins.join([QUESTION, nothing, AGAIN])) == (JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, None)
    assert outcome(twins.join([QUESTION])) == (JoinKind.RETRY, None, None)


def test_conversations_count_on_behind_one_whose_call_failed() -> None:
    twins = Twins(family_renderer("qwen3"))
    twins.join([OTHER, QUESTION])
    reply = twins.answer(twins.join([SYSTEM, QUESTION]), said("qwen3", "Yes."))
    twins.begin()
    assert twins.join([SYSTEM, AGAIN]).prompt.conversation == 2
    assert twins.join([SYSTEM, QUESTION, reply, AGAIN]).prompt.conversation == 1


def test_a_fork_whose_first_call_failed_is_counted() -> None:
    talk = Talk()
    fork = [*talk.history[:2], NOW]
    talk.join(fork)
    talk.ask(fork, "Now.")
    assert talk.twins.turns[-1].join is JoinKind.RETRY
    talk.twins.begin()  # compares the counts
    assert talk.twins.tree.forks == {ForkCause.SIBLING: 1}


def test_a_fork_beside_a_call_that_failed_is_counted_as_it_was_recorded() -> None:
    talk = Talk()
    talk.join([*talk.history, NOW])
    talk.ask(talk.history, "Done.")
    assert talk.twins.turns[-1].cause is ForkCause.SIBLING
    talk.twins.begin()  # compares the counts
    assert talk.twins.tree.forks == {ForkCause.SIBLING: 1}


def test_of_equal_answers_that_came_side_by_side_the_same_is_gone_on_from() -> None:
    """With a clock that tells nothing, too."""
    twins = Twins(family_renderer("qwen3"))
    one, two = twins.join([QUESTION]), twins.join([QUESTION])
    reply = twins.answer(one, said("qwen3", "Yes."))
    onward = twins.join([QUESTION, reply, AGAIN])
    twins.answer(two, said("qwen3", "Yes."))
    twins.answer(onward, said("qwen3", "Done."))
    assert [turn.parent for turn in twins.turns] == [None, None, 0]
    times = twins.turns[0].timings
    twins.turns = [msgspec.structs.replace(turn, timings=times) for turn in twins.turns]
    twins.begin()
    assert outcome(twins.join([QUESTION, reply, AGAIN])) == (JoinKind.APPEND, None, 1)


def test_the_request_that_came_first_is_the_one_that_later_ones_forked_from() -> None:
    twins = Twins(family_renderer("qwen3"))
    first, second = twins.join([SYSTEM, QUESTION, AGAIN]), twins.join([SYSTEM, QUESTION, NOW])
    twins.answer(second, said("qwen3", "Second."))
    twins.answer(first, said("qwen3", "First."))
    twins.begin()
    assert twins.join([SYSTEM, QUESTION, QUESTION]).forked_from == 1


def test_calls_came_in_the_order_of_their_times() -> None:
    talk = Talk()
    [turn, *_] = talk.twins.turns

    def at(*times: tuple[int, int, int | None]) -> list[list[int]]:
        turns = [
            msgspec.structs.replace(
                turn, index=index, parent=parent, timings=TurnTimings(received=came, first_token=None, finished=ended)
            )
            for index, (came, ended, parent) in enumerate(times)
        ]
        return [[one.index for one in came] for came in arrivals(turns)]

    assert at((1, 2, None), (3, 4, 0), (5, 6, 1)) == [[0], [1], [2]]
    assert at((2, 3, None), (1, 4, None)) == [[1, 0], []]
    assert at((2, 3, None), (1, 4, 0)) == [[0], [1]], "a reply cannot be quoted before it was given"
    assert at((5, 6, None), (1, 2, None)) == [[0], [1]], "the clock was set back"


def test_recorded_ids_stay_though_they_would_be_put_together_otherwise_now() -> None:
    """As by a later version of the renderer: the record is what the model was given."""
    talk = Talk()
    talk.ask(talk.history, "Well.", OTHER)
    renderer = talk.twins.renderer
    whole = pack_ids(renderer.render([OTHER, *talk.history], TOOLS))
    turn = talk.twins.turns[2]
    assert turn.prompt_delta != whole
    other = msgspec.structs.replace(turn, prompt_delta=whole, prompt_length=len(whole) // 4)
    tree = restored(renderer, "recorded", [*talk.twins.turns[:2], other])
    again = run_inline(tree.join(ParsedMessages([OTHER, *talk.history]), TOOLS, raw_of(TOOLS)))
    assert (again.kind, again.prompt.delta) == (JoinKind.RETRY, whole)
    onward = ParsedMessages([OTHER, *talk.history, turn.reply or QUESTION, NOW])
    assert run_inline(tree.join(onward, TOOLS, raw_of(TOOLS))).kind is JoinKind.APPEND


def changed(at: int, **fields: object) -> Callable[[list[Turn]], list[Turn]]:
    return lambda turns: [*turns[:at], msgspec.structs.replace(turns[at], **fields), *turns[at + 1 :]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda turns: turns[1:], "turn 0 is not stored, but turn 1 is"),
        (lambda turns: [turns[0], *turns[2:]], "turn 1 is not stored, but turn 2 is"),
        (changed(1, parent=1), "not before it"),
        (changed(1, forked_from=7), "not before it"),
        (changed(0, reply=None), "turn 0, which has no reply"),
        (changed(0, tool_specs=()), "the tools of turn 0"),
        (changed(1, prompt_length=3), "the prompt of turn 1"),
        (changed(2, prompt_delta=pack_ids([3])), "the prompt of turn 2"),
        (changed(0, prompt_delta=pack_ids([3])), "rendered otherwise"),
        (changed(0, messages=()), "cannot render"),
        (changed(0, messages=(Message(role=Role.SYSTEM, content="x"),)), "rendered otherwise"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change: Callable[[list[Turn]], list[Turn]], why: str) -> None:
    talk = Talk()
    talk.ask([QUESTION], "Or so.")
    assert talk.twins.turns[2].join is JoinKind.RETRY
    with pytest.raises(ServiceError, match=why) as refused:
        restored(talk.twins.renderer, "recorded", change(talk.twins.turns))
    assert refused.value.retryable
    assert refused.value.hint


def test_another_renderer_does_not_go_on() -> None:
    talk = Talk("qwen3")
    with pytest.raises(ServiceError, match="another tokenizer or chat template"):
        restored(family_renderer("qwen3.5"), "recorded", talk.twins.turns)


class Unchecked(Rollout):
    """Without the second opinion, which reads the whole history again for every call."""

    def _check(self, joined: Joined, messages: list[Message], tools: Sequence[ToolSpec]) -> None:
        self._meant[id(joined.prompt)] = messages


def long_session(turns: int, words: int, sampled: int) -> list[bytes]:
    """The stored turns of a conversation."""
    rollout = Unchecked(family_renderer("qwen3"))
    messages = [SYSTEM, QUESTION]
    for number in range(turns):
        reply = rollout.answer(rollout.join(messages, TOOLS), [*range(300, 299 + sampled), 2], tools=TOOLS)
        messages += [reply, Message(role=Role.USER, content=f"{number}{' hello' * words}")]
    assert len(rollout.given[-1]) > turns * (words + sampled) * 0.9
    return [pack(turn) for turn in rollout.turns]


def test_a_hundred_turns_with_100k_tokens_are_restored_at_once() -> None:
    """In pieces, so that it can be done beside the event loop."""
    turns = [turn_from(packed) for packed in long_session(100, words=800, sampled=200)]
    tree = TokenTree(family_renderer("qwen3"), "recorded")
    start = thread_time()
    pieces = list(tree.restore(turns))
    assert thread_time() - start < 1
    assert len(pieces) >= 100
    assert max(pieces) < 2 * PIECE_BYTES


@pytest.mark.deep
def test_a_restored_call_of_2000_tokens_keeps_less_than_10_kilobytes() -> None:
    stored = long_session(100, words=1500, sampled=500)
    gc.collect()
    tracemalloc.start()
    tree = TokenTree(family_renderer("qwen3"), "recorded")
    run_inline(tree.restore([turn_from(packed) for packed in stored]))
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] / 100
    tracemalloc.stop()
    assert tree.forks == {}
    assert kept < 9_800, f"{kept:.0f} bytes a call"
