"""Properties of the Google dialect over generated replies: streamed, in one piece, and sent back by clients."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider.dialects.base import Completion, Memory
from outrider.messages import Delta, Message, Role, ToolCall
from outrider.tokens.tree.canonical import message_key
from outrider.trajectory import FinishReason
from support.gemini import ARRAY, DIALECT, EVENTS, GENERATE, chunks, messages, model, parts_in, read, stream, text, user

TEXT = st.text(max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(TEXT, JSON, max_size=3)
STEP = st.builds(Delta, text=TEXT, reasoning=TEXT)


@st.composite
def completions(draw: st.DrawFn) -> tuple[list[Delta], Completion]:
    """The deltas of a reply, and the finished reply. Arguments have any spelling, and sometimes are no JSON object."""
    steps = draw(st.lists(STEP, max_size=5))
    ids = draw(st.lists(st.text(min_size=1, max_size=6), max_size=3, unique=True))
    calls = []
    for call_id in ids:
        dumped = json.dumps(draw(ARGUMENTS), indent=draw(st.sampled_from([None, 1])), ensure_ascii=draw(st.booleans()))
        arguments = draw(
            st.just(dumped) | st.sampled_from(["", "[1]", '{"a": NaN}', '{"a": 1', '"x"', r'{"a": "\ud800"}'])
        )
        calls.append(ToolCall(call_id, draw(st.text(min_size=1, max_size=6)), arguments))
    reply = Message(
        role=Role.ASSISTANT,
        content="".join(step.text for step in steps),
        reasoning="".join(step.reasoning for step in steps) or None,
        tool_calls=tuple(calls),
    )
    done = Completion(
        id="r1",
        created=1,
        model="m",
        reply=reply,
        finish=draw(st.sampled_from(FinishReason)),
        prompt_tokens=2,
        completion_tokens=len(steps),
    )
    return steps, done


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of a client that adds up a reply's parts."""
    return {
        "thoughts": "".join(part["text"] for part in parts if part.get("thought")),
        "text": "".join(part["text"] for part in parts if "text" in part and not part.get("thought")),
        "calls": [part for part in parts if "functionCall" in part],
    }


@given(completions(), st.booleans(), st.booleans())
def test_a_stream_says_what_the_one_piece_reply_says(
    said: tuple[list[Delta], Completion], thoughts: bool, events: bool
) -> None:
    steps, done = said
    asked: dict[str, Any] = {"generationConfig": {"thinkingConfig": {"includeThoughts": thoughts}}}
    whole = json.loads(DIALECT.reply(read(user(text("x")), **asked), done))
    written = stream(read(user(text("x")), call=EVENTS if events else ARRAY, **asked), steps, done)
    got = chunks(written, events=events)
    assert joined(parts_in(got)) == joined(parts_in([whole]))
    assert all(part for part in parts_in([*got, whole]))
    for name in ("usageMetadata", "modelVersion", "responseId"):
        assert got[-1][name] == whole[name]
    finish = [chunk["candidates"][0].get("finishReason") for chunk in got]
    assert finish == [None] * (len(got) - 1) + [whole["candidates"][0]["finishReason"]]


def reordered(value: Any, dice: random.Random) -> Any:
    """The same JSON value as another client's encoder writes it: keys in any order, whole floats as integers."""
    if isinstance(value, dict):
        pairs = [(key, reordered(inner, dice)) for key, inner in value.items()]
        dice.shuffle(pairs)
        return dict(pairs)
    if isinstance(value, list):
        return [reordered(inner, dice) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 and dice.random() < 0.5:
        return int(value)
    return value


def echoed(parts: list[dict[str, Any]], dice: random.Random) -> list[dict[str, Any]]:
    """A reply's parts as a client may send them back, in one content or several."""
    habits = {habit: dice.random() < 0.5 for habit in ("thoughts", "ids", "renames", "signatures", "joins", "splits")}
    if not habits["thoughts"]:
        parts = [part for part in parts if not part.get("thought")]
    sent: list[dict[str, Any]] = []
    for part in parts:
        if "functionCall" in part:
            sent.append(_call_echoed(part, habits, dice))
        elif habits["joins"] and sent and "text" in sent[-1] and sent[-1].get("thought") == part.get("thought"):
            sent[-1]["text"] += part["text"]
        else:
            sent.append(dict(part))
    return [model(part) for part in sent] if habits["splits"] and sent else [model(*sent)]


def _call_echoed(part: dict[str, Any], habits: dict[str, bool], dice: random.Random) -> dict[str, Any]:
    call = dict(part["functionCall"], args=reordered(part["functionCall"]["args"], dice))
    if not habits["ids"]:
        del call["id"]
    elif habits["renames"]:
        call["id"] = f"{call['name']}__{call['id']}"
    name = dice.choice(["functionCall", "function_call"])
    if habits["signatures"]:
        return {name: call, "thoughtSignature": part["thoughtSignature"]}
    return {name: call, **dice.choice([{}, {"thoughtSignature": "skip_thought_signature_validator"}])}


@given(completions(), st.randoms(use_true_random=False), st.sampled_from([GENERATE, EVENTS, ARRAY]))
def test_what_we_said_is_recognised_when_it_comes_back(
    said: tuple[list[Delta], Completion], dice: random.Random, call: Any
) -> None:
    steps, done = said
    memory: Memory = {}
    start = user(text("x"))
    request = read(start, call=call, memory=memory, generationConfig={"thinkingConfig": {"includeThoughts": True}})
    if call is GENERATE:
        parts = parts_in([json.loads(DIALECT.reply(request, done))])
    else:
        parts = parts_in(chunks(stream(request, steps, done), events=call is EVENTS))
    back = echoed(parts, dice)
    for _ in range(2):
        again = messages(read(start, *back, user(text("y")), memory=memory))
        assert len(again) == 3
        recorded, sent = message_key(done.reply), message_key(again[1])
        assert sent.body == recorded.body
        assert sent.reasoning in (None, recorded.reasoning)
        assert [c.id for c in again[1].tool_calls] == [c.id for c in done.reply.tool_calls]
