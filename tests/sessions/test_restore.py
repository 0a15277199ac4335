"""A conversation is restored from its stored turns, and continues as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from outrider.errors import EngineRejected, EngineUnavailable, ServiceError
from outrider.lifecycle import StopReason
from outrider.messages import image_from_bytes
from outrider.sessions.calls.request_settings import MAX_SEEDED_CALLS, calls_seeded, derived_seed
from outrider.sessions.calls.token_allowance import Allowance, LimitReached
from outrider.spec import Limits, SamplingSpec
from outrider.store.sqlite import sqlite_store
from outrider.trajectory import FinishReason, ForkCause, JoinKind, TokenMode, Turn, unpack_ids
from store.world import group_row, start, submit

from .test_capture import Told, told
from .world import BASH, a_world, call_markup, echoed, picture

USER = {"role": "user", "content": "hello there"}
MORE = {"role": "user", "content": "and then?"}
SAID = {"role": "assistant", "content": "hello"}


async def test_an_agent_goes_on_from_every_id_that_was_sampled(tmp_path: Path) -> None:
    async with a_world(tmp_path, [call_markup("ls"), "done<|im_end|>"]) as world:
        first = await world.ask(USER, tools=[BASH])
        await world.restart()
        answer = {"role": "tool", "tool_call_id": first.reply.tool_calls[0].id, "content": "a.txt"}
        await world.ask(USER, echoed(first), answer, tools=[BASH])
        given = [request.input_ids.tolist() for request in world.engine.requests]
        one, two = world.turns
        assert (two.index, two.parent, two.join, two.conversation) == (1, 0, JoinKind.APPEND, 0)
        assert given[1] == given[0] + unpack_ids(one.output_ids).tolist() + unpack_ids(two.prompt_delta).tolist()


async def test_a_reply_that_was_stored_and_did_not_arrive_is_asked_for_again(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]) as world:
        await world.ask(USER)
        await world.restart()
        second = await world.ask(USER)
        await world.restart()
        await world.ask(USER, echoed(second), MORE)
        _, retry, onward = world.turns
        assert (retry.join, retry.forked_from) == (JoinKind.RETRY, 0)
        assert (onward.join, onward.parent) == (JoinKind.APPEND, 1)


async def test_the_counts_go_on(tmp_path: Path) -> None:
    dying = {"reply": "some words here<|im_end|>", "fail": "unavailable", "after": 2}
    replies = ["one<|im_end|>", dying, "two<|im_end|>"]
    async with a_world(tmp_path, replies, limits=Limits(response_tokens=1000)) as world:
        await world.ask(USER)
        with pytest.raises(EngineUnavailable):
            await world.ask(MORE)
        assert [turn.finish for turn in world.turns] == [FinishReason.STOP, FinishReason.ABORT]
        before = world.conversation
        await world.restart()
        after = world.conversation
        assert (after.turns, after.step_turns, after.replies) == (before.turns, before.step_turns, before.replies)
        assert (after.turns, after.replies, after.failure, after.open) == (2, 1, None, True)
        sampled = [len(unpack_ids(turn.output_ids)) for turn in world.turns]
        await world.ask(MORE, max_tokens=5000)
        assert world.turns[-1].sampling["max_tokens"] == 1000 - sum(sampled)


async def test_the_turn_limit_counts_the_turns_before(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], limits=Limits(turns=2)) as world:
        await world.ask(USER)
        await world.restart()
        await world.ask(USER)
        await world.restart()
        with pytest.raises(LimitReached):
            await world.ask(USER)
        assert world.limits_told == [StopReason.MAX_TURNS]


async def test_the_token_limit_counts_the_tokens_before(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["many many many words<|im_end|>"], limits=Limits(response_tokens=5)) as world:
        assert (await world.ask(USER, max_tokens=3)).completion_tokens == 3
        await world.restart()
        assert (await world.ask(USER)).completion_tokens == 2
        await world.restart()
        with pytest.raises(LimitReached):
            await world.ask(USER)


async def test_what_was_sampled_is_not_promised_again() -> None:
    allowance = Allowance(5)
    allowance.restore(3)
    with await allowance.share(10) as share:
        assert (share.promised, share.take(10), allowance.unsampled) == (2, 2, 0)


async def test_seeds_go_on_behind_those_of_calls_that_failed(tmp_path: Path) -> None:
    replies = ["x<|im_end|>", {"reply": "x", "fail": "rejected", "after": 0}, "x<|im_end|>"]
    async with a_world(tmp_path, replies, sampling=SamplingSpec(seed=7), sample_index=3) as world:
        await world.ask(USER)
        with pytest.raises(EngineRejected):
            await world.ask(USER)
        await world.ask(USER)
        await world.restart()
        await world.ask(USER)
        assert [turn.sampling["seed"] for turn in world.turns] == [derived_seed(7, 3, call) for call in (1, 3, 4)]


def test_seeds_that_the_task_does_not_give_are_not_looked_for_for_ever() -> None:
    assert calls_seeded(7, 3, ()) == 0
    assert calls_seeded(7, 3, [derived_seed(7, 3, call) for call in (5, 2)]) == 5
    assert calls_seeded(7, 3, [derived_seed(7, 3, MAX_SEEDED_CALLS + 1)]) is None


async def test_a_prompt_with_thinking_switched_is_known_again(tmp_path: Path) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    async with a_world(tmp_path, ["</think>\n\nx<|im_end|>"]) as world:
        await world.ask(USER, **off)
        assert world.turns[0].sampling["thinking"] is False
        await world.restart()
        await world.ask(USER, **off)
        await world.ask(USER)
        assert [(turn.join, turn.cause) for turn in world.turns[1:]] == [
            (JoinKind.RETRY, None),
            (JoinKind.FORK, ForkCause.SIBLING),
        ]


async def test_a_session_without_turns_begins(tmp_path: Path) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], sampling=SamplingSpec(seed=7)) as world:
        await world.restart()
        await world.ask(USER)
        assert (world.turns[0].index, world.turns[0].sampling["seed"]) == (0, derived_seed(7, 0, 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda turn: msgspec.structs.replace(turn, step=1), "later step"),
        (lambda turn: msgspec.structs.replace(turn, mode=TokenMode.TEXT), "no token ids"),
        (lambda turn: msgspec.structs.replace(turn, mode=TokenMode.CAPTURE), "only some of its turns"),
        (lambda turn: msgspec.structs.replace(turn, index=2), "turn 1 is not stored"),
        (lambda turn: msgspec.structs.replace(turn, sampling={"seed": 5}), "seeds"),
    ],
)
async def test_what_cannot_go_on_is_said(tmp_path: Path, change: Callable[[Turn], Turn], why: str) -> None:
    async with a_world(tmp_path, ["x<|im_end|>"], sampling=SamplingSpec(seed=7)) as world:
        await world.ask(USER)
        await world.ask(USER)
        world.turns[1] = change(world.turns[1])
        with pytest.raises(ServiceError, match=why) as refused:
            await world.restart()
        assert refused.value.retryable
        assert refused.value.hint


async def test_captured_turns_go_on(tmp_path: Path) -> None:
    ids = (([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]), ([9, 2, 3], [7]), ([1, 2, 8], [5]))
    async with told(tmp_path, *ids) as (world, turns):
        await world.ask(USER)
        await world.ask(USER, SAID, picture(b"one"))
        await world.restart()
        await world.ask(USER, SAID, picture(b"one"), SAID, MORE)
        await world.restart()
        await world.ask(USER, SAID, MORE)
        await world.restart()
        await world.ask({"role": "system", "content": "Be brief."}, USER, SAID, MORE)
    assert [(turn.join, turn.parent, turn.cause, turn.forked_from, turn.conversation) for turn in turns[2:]] == [
        (JoinKind.APPEND, 1, None, None, 0),
        (JoinKind.FORK, None, ForkCause.CAPTURE_DRIFT, 2, 0),
        (JoinKind.FORK, 0, ForkCause.SYSTEM_CHANGED, 3, 1),
    ]
    assert turns[3].drift_tokens == 4


async def test_captured_turns_with_another_image_do_not_extend_the_record(tmp_path: Path) -> None:
    async with told(tmp_path, ([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])) as (world, turns):
        await world.ask(USER)
        await world.ask(USER, SAID, picture(b"one"))
        await world.restart()
        await world.ask(USER, SAID, picture(b"two"), SAID, MORE)
    assert [turn.parent for turn in turns] == [None, 0, 0]


async def test_captured_turns_that_come_to_another_place_are_refused(tmp_path: Path) -> None:
    async with told(tmp_path, ([1], [2]), ([1, 2, 3], [4])) as (world, turns):
        await world.ask(USER)
        await world.ask(USER, SAID, MORE)
        turns[1] = msgspec.structs.replace(turns[1], conversation=1)
        with pytest.raises(ServiceError, match="turn 1 does not follow"):
            await world.restart()


async def test_turns_without_ids_are_refused(tmp_path: Path) -> None:
    async with told(tmp_path, engine=Told([None], TokenMode.TEXT)) as (world, _):
        await world.ask(USER)
        with pytest.raises(ServiceError, match="no token ids"):
            await world.restart()


@pytest.mark.parametrize("images", [True, False])
async def test_turns_are_restored_as_a_store_gives_them(tmp_path: Path, images: bool) -> None:
    """Stored turns come with the bytes of their images or without."""
    shown = picture(b"one")
    async with (
        sqlite_store(tmp_path / "store.db") as store,
        told(tmp_path, ([1], [2]), ([1, 2, 3], [4])) as (world, turns),
    ):
        await submit(store, group_row())
        await start(store, "g.0")
        await world.ask(USER, shown)
        await store.add_turn("g.0", 1, turns[0])
        turns[:] = await store.turns("g.0", images=images)
        [image] = [part for message in turns[0].messages for part in message.parts]
        assert image == image_from_bytes("image/png", b"one") or not images
        await world.restart()
        await world.ask(USER, shown, SAID, MORE)
        assert (turns[1].parent, turns[1].join) == (0, JoinKind.APPEND)
