"""Engines that take only messages. The ids that such an engine reports are captured, and recorded ids are never spliced
into a prompt."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.constraint import Constraint, ConstraintKind
from outrider.dialects.base import Completion
from outrider.engines.base import Capability, ChatChunk, ChatRequest, EngineHealth
from outrider.engines.pool.pool import EnginePool
from outrider.errors import RequestError
from outrider.lifecycle import StopReason
from outrider.messages import Message, Role, images_in
from outrider.sessions.calls.call import ModelBackend
from outrider.sessions.calls.on_message_engine import CapturedTurns
from outrider.sessions.conversation import Conversation
from outrider.spec import Limits, SamplingSpec
from outrider.tokens.rendering.renderer import make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.tokens.samples import build_samples, count_session
from outrider.trajectory import (
    FinishReason,
    ForkCause,
    JoinKind,
    LogprobKind,
    SessionResult,
    TokenMode,
    Turn,
    unpack_ids,
)
from support.tokenizer import write_tokenizer

from .world import BASH, World, chat_request, picture, text_of

USER = {"role": "user", "content": "hello"}
RESULT = SessionResult(session_id="s", group_id="g", sample_index=0, attempt=1, stop_reason=StopReason.COMPLETED)


class Told:
    """A chat engine that reports the given pairs (prompt ids, output ids), one per call, and no ids for a call whose
    entry is None."""

    name = "told"
    logprob_kind = LogprobKind.RAW
    constraints = frozenset({ConstraintKind.JSON_OBJECT})
    capabilities = frozenset[Capability]()

    def __init__(self, ids: Sequence[tuple[list[int], list[int]] | None], mode: TokenMode = TokenMode.CAPTURE) -> None:
        self.mode = mode
        self.requests: list[ChatRequest] = []
        self._ids = list(ids)

    async def start(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def health(self) -> EngineHealth:
        return EngineHealth(ok=True)

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        self.requests.append(request)
        told = self._ids.pop(0)
        yield ChatChunk(text="hel")
        yield ChatChunk(text="lo")
        yield ChatChunk(
            finish=FinishReason.STOP,
            reply=Message(role=Role.ASSISTANT, content="hello"),
            prompt_ids=told[0] if told else None,
            output_ids=told[1] if told else None,
            logprobs=[-0.5] * len(told[1]) if told else None,
        )


@asynccontextmanager
async def told(
    folder: Path, *ids: tuple[list[int], list[int]] | None, engine: Told | None = None
) -> AsyncIterator[tuple[World, list[Turn]]]:
    write_tokenizer(folder)
    turns: list[Turn] = []

    async def record(turn: Turn) -> None:
        turns.append(turn)

    async with EnginePool(patience=1.0) as pool:
        await pool.add_engine(engine or Told(ids))
        backend = ModelBackend(renderer=make_renderer(Tokenizer.load(folder), "qwen3"), pool=pool, model="policy")

        def new() -> Conversation:
            return Conversation(
                backend,
                session_key="s-1-1",
                limits=Limits(),
                sampling=SamplingSpec(),
                history="recorded",
                record=record,
            )

        world = World(new, None, turns)  # type: ignore[arg-type]  # it has no scripted engine
        yield world, turns
        await world.conversation.close()


async def test_a_prompt_that_extends_the_record_is_appended(tmp_path: Path) -> None:
    async with told(tmp_path, ([1, 2, 3], [7, 8]), ([1, 2, 3, 7, 8, 4], [9])) as (world, turns):
        steps = await world.steps(USER)
        assert text_of(steps) == "hello"
        assert isinstance(steps[-1], Completion)
        await world.ask(USER, {"role": "assistant", "content": "hello"}, USER)
    assert [(turn.join, turn.mode, turn.drift_tokens) for turn in turns] == [
        (JoinKind.ROOT, TokenMode.CAPTURE, 0),
        (JoinKind.APPEND, TokenMode.CAPTURE, 0),
    ]
    assert unpack_ids(turns[1].prompt_delta).tolist() == [4]


async def test_a_prompt_that_extends_a_restored_record_is_appended(tmp_path: Path) -> None:
    """The conversation is restored from its two stored turns, as after a restart. The third turn is appended and stores
    only its new message."""
    first, second, third = ([1, 2, 3], [7, 8]), ([1, 2, 3, 7, 8, 4], [9]), ([1, 2, 3, 7, 8, 4, 9, 5], [6])
    async with told(tmp_path, first, second, third) as (world, turns):
        hello = {"role": "assistant", "content": "hello"}
        await world.ask(USER)
        await world.ask(USER, hello, USER)
        before = world.conversation
        world.conversation = world._new()
        await world.conversation.resume(list(turns), [])
        assert world.conversation.turns == world.conversation.replies == 2
        await world.ask(USER, hello, USER, hello, USER)
        await before.close()
    assert [(turn.index, turn.parent, turn.join, turn.conversation) for turn in turns] == [
        (0, None, JoinKind.ROOT, 0),
        (1, 0, JoinKind.APPEND, 0),
        (2, 1, JoinKind.APPEND, 0),
    ]
    assert len(turns[2].messages) == 1


async def test_a_prompt_that_drifted_stands_alone_and_is_counted(tmp_path: Path) -> None:
    async with told(tmp_path, ([1, 2, 3], [7, 8]), ([1, 2, 3, 5, 8, 4], [9])) as (world, turns):
        await world.ask(USER)
        await world.ask(USER, {"role": "assistant", "content": "hello"}, USER)
    drifted = turns[1]
    assert (drifted.join, drifted.cause, drifted.parent) == (JoinKind.FORK, ForkCause.CAPTURE_DRIFT, None)
    assert drifted.drift_tokens == 1
    assert count_session(turns).tokens.drift == 1
    samples = build_samples(turns, RESULT)
    assert [sample.mode for sample in samples] == [TokenMode.CAPTURE, TokenMode.CAPTURE]
    assert [sum(sample.loss_mask) for sample in samples] == [2, 1]


async def test_an_engine_without_ids_leaves_turns_that_never_train(tmp_path: Path) -> None:
    async with told(tmp_path, None) as (world, turns):
        await world.ask(USER)
    [turn] = turns
    assert (turn.mode, turn.logprob_kind, turn.output_ids) == (TokenMode.TEXT, LogprobKind.NONE, b"")
    assert turn.reply is not None
    assert turn.reply.content == "hello"
    assert count_session(turns).tokens.sampled == 0
    assert build_samples(turns, RESULT) == []


ASKED = {"top_k": 64, "min_p": 0.1, "presence_penalty": 0.5, "min_tokens": 3, "enable_thinking": False}


async def test_what_openais_api_has_no_words_for_is_noted_in_text_mode(tmp_path: Path) -> None:
    engine = Told([None, None], TokenMode.TEXT)
    async with told(tmp_path, engine=engine) as (world, turns):
        await world.ask(USER, **ASKED, stop_token_ids=[3])
        await world.ask(USER)
    sent = engine.requests[0].sampling
    assert (sent.top_k, sent.min_p, sent.presence_penalty, sent.min_tokens) == (-1, 0, 0.5, 0)
    assert set(turns[0].ignored) == {"top_k", "min_p", "min_tokens", "thinking", "stop_token_ids"}
    assert turns[0].sampling["top_k"] == -1
    assert turns[1].ignored == ()


async def test_an_engine_that_renders_is_told_of_thinking_and_given_tools_beside_a_form(tmp_path: Path) -> None:
    engine = Told([([1], [2])])
    async with told(tmp_path, engine=engine) as (world, _):
        await world.ask(USER, **ASKED, response_format={"type": "json_object"}, tools=[BASH])
        with pytest.raises(RequestError, match="cannot constrain"):
            await world.ask(USER, guided_regex="a")
        [turn] = world.turns
    [request] = engine.requests
    assert (request.thinking, request.sampling.top_k, len(request.tools)) == (False, 64, 1)
    assert request.sampling.constraint == Constraint(ConstraintKind.JSON_OBJECT)
    assert (turn.ignored, turn.altered, turn.sampling["thinking"]) == ((), True, False)


def test_of_several_earlier_turns_the_longest_that_fits_is_the_parent() -> None:
    record = CapturedTurns()
    record.place([1], [2], shown=[b""] * 2)
    record.place([1, 2, 3], [4], shown=[b""] * 4)
    placed = record.place([1, 2, 3, 4, 5], [6], shown=[b""] * 6)
    assert (placed.parent, unpack_ids(placed.delta).tolist(), placed.known_messages) == (1, [5], 4)


async def test_tokens_are_counted_but_those_of_images_are_not_known(tmp_path: Path) -> None:
    async with told(tmp_path, None) as (world, turns):
        assert await world.conversation.count(chat_request(USER)) > 0
        with pytest.raises(RequestError, match="not known before the call"):
            await world.conversation.count(chat_request(USER, picture(b"one")))
        assert turns == []


async def test_the_same_ids_with_another_image_do_not_extend_the_record(tmp_path: Path) -> None:
    """Images of one size have the same ids, so images are distinguished by their digests."""
    said = {"role": "assistant", "content": "hello"}
    ids = (([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 5], [7]))
    async with told(tmp_path, *ids) as (world, turns):
        await world.ask(USER)
        await world.ask(USER, said, picture(b"one"))
        await world.ask(USER, said, picture(b"two"), said, picture(b"three"))
        await world.ask(USER, said, picture(b"one"), said, picture(b"three"))
    assert [(turn.join, turn.parent) for turn in turns[2:]] == [(JoinKind.APPEND, 0), (JoinKind.APPEND, 1)]
    shown = [[(image.turn, image.message) for image in sample.images] for sample in build_samples(turns, RESULT)]
    assert sorted(shown) == [[(1, 2), (3, 4)], [(2, 2), (2, 4)]]


async def test_a_replaced_image_alone_is_a_rewritten_history(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "hello"}
    async with told(tmp_path, ([1], [2]), ([1, 2, 3], [4])) as (world, turns):
        await world.ask(USER, picture(b"one"))
        await world.ask(USER, picture(b"two"), said, USER)
    [_, turn] = turns
    assert (turn.join, turn.cause, turn.forked_from) == (JoinKind.FORK, ForkCause.HISTORY_REWRITTEN, 0)
    assert (turn.parent, turn.drift_tokens) == (None, 0)


async def test_an_image_that_moved_into_the_known_history_is_not_lost(tmp_path: Path) -> None:
    """A client may merge two messages. The image is then in a message whose number is already recorded."""
    async with told(tmp_path, ([1], [2]), ([1, 2, 3], [4])) as (world, turns):
        await world.ask(USER)
        await world.ask({"role": "user", "content": "hello"}, picture(b"new"))
    assert [image.digest for message in turns[1].messages for image in images_in(message)] != []


async def test_a_tools_image_is_given_to_the_engine_and_a_text_for_its_other_files(tmp_path: Path) -> None:
    """The engine gets a text in place of a tool's PDF. The turn whose request adds the PDF records this in
    `ignored`."""
    engine = Told([([1], [2]), ([1, 2, 3], [4])])
    said = {"role": "assistant", "content": "hello"}
    document = {"type": "file", "file": {"file_data": "data:application/pdf;base64,QUJD"}}
    result = {"role": "tool", "tool_call_id": "c", "content": [*picture(b"one")["content"], document]}
    async with told(tmp_path, engine=engine) as (world, turns):
        with pytest.raises(RequestError, match="not known before the call"):
            await world.conversation.count(chat_request(USER, said, result))
        await world.ask(USER, said, result)
        await world.ask(USER, said, result, said, USER)
    [image] = images_in(engine.requests[0].messages[2])
    assert image.data == b"one"
    assert engine.requests[0].messages[2].content == "[application/pdf, 3 bytes: this model does not read such files]"
    assert engine.requests[1].messages[:3] == engine.requests[0].messages
    assert [(turn.join, turn.ignored) for turn in turns] == [
        (JoinKind.ROOT, ("results.application/pdf",)),
        (JoinKind.APPEND, ()),
    ]


async def test_a_call_that_continues_a_turn_names_the_turns_ids(tmp_path: Path) -> None:
    """Servers that render messages may keep these ids (NeMo RL's servers do), so that the next prompt extends the
    ids."""
    said = {"role": "assistant", "content": "hello"}
    rewritten = {"role": "assistant", "content": "hello!"}
    engine = Told([([1], [2]), ([1, 2, 3], [4]), None, None, None, None])
    engine.capabilities = frozenset({Capability.KEEPS_IDS})
    async with told(tmp_path, engine=engine) as (world, _):
        await world.ask(USER)
        await world.ask(USER, said, USER)
        await world.ask(USER, said, USER, said, USER)
        await world.ask(USER, rewritten, USER)
        await world.ask(USER, rewritten, USER, said, USER)
        await world.ask({"role": "system", "content": "s"}, USER, said, USER)
    assert [request.known_ids for request in engine.requests] == [None, [1, 2], [1, 2, 3, 4], None, None, None]
