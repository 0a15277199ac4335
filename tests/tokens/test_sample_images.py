"""A sample lists the images that its ids show, in their order."""

from __future__ import annotations

from outrider.messages import Image, Message, Role, Text, image_from_bytes, image_from_url
from outrider.tokens.samples import build_samples
from outrider.trajectory import FinishReason, JoinKind, LogprobKind, SampleImage, TokenMode, Turn, TurnTimings, pack_ids

from .rollout import RESULT

CAT, DOG = image_from_bytes("image/png", b"cat"), image_from_bytes("image/jpeg", b"a dog")
THERE = image_from_url("https://example.org/x.png")
SYSTEM = Message(role=Role.SYSTEM, content="Look well.")
SAID = Message(role=Role.ASSISTANT, content="Seen.")


def user(*images: Image) -> Message:
    return Message(role=Role.USER, content="look", parts=(*images, Text("look")) if images else ())


def a_turn(index: int, parent: int | None, *messages: Message) -> Turn:
    return Turn(
        index=index,
        parent=parent,
        join=JoinKind.ROOT if parent is None else JoinKind.APPEND,
        prompt_length=3 * (index + 1),
        prompt_delta=pack_ids([index, 1, 2]),
        output_ids=pack_ids([9]),
        logprobs=b"",
        logprob_kind=LogprobKind.NONE,
        versions=(),
        finish=FinishReason.STOP,
        mode=TokenMode.CAPTURE,
        dialect="chat",
        engine="e",
        sampling={},
        messages=messages,
        reply=SAID,
        timings=TurnTimings(received=0.0, first_token=None, finished=1.0),
    )


def named(turn: int, message: int, image: Image) -> SampleImage:
    media_type, size = image.media_type, len(image.data)
    return SampleImage(turn=turn, message=message, digest=image.digest, media_type=media_type, size=size, url=image.url)


def test_they_are_told_by_turn_and_message() -> None:
    turns = [a_turn(0, None, SYSTEM, user(CAT)), a_turn(1, 0, user()), a_turn(2, 1, user(), user(THERE, DOG, CAT))]
    [sample] = build_samples(turns, RESULT)
    assert sample.images == (named(0, 1, CAT), named(2, 6, THERE), named(2, 6, DOG), named(2, 6, CAT))


def test_each_branch_has_those_of_its_own_path() -> None:
    turns = [a_turn(0, None, user(CAT)), a_turn(1, 0, user(DOG)), a_turn(2, 0, user(THERE))]
    images = {sample.turns: sample.images for sample in build_samples(turns, RESULT)}
    assert images == {
        (0, 1): (named(0, 0, CAT), named(1, 2, DOG)),
        (0, 2): (named(0, 0, CAT), named(2, 2, THERE)),
    }


def test_without_images_there_are_none() -> None:
    [sample] = build_samples([a_turn(0, None, SYSTEM, user())], RESULT)
    assert sample.images == ()
