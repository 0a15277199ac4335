"""The contents of a Google request as messages, and how calls that lost their ids find them again.

It decodes a content once per session, and of a user's that answers no call nothing but the role. Invariant: a call
that we made keeps the id we gave it, whatever the client does to ids; `raw(i)` holds the ids that message `i` was read
with.

One content can be several messages (each tool's answer is one), and several adjacent contents of role `model` are one
message: clients that keep a stream's chunks as they came send them back so.

Clients keep our ids, drop them, put the tool's name in front, or replace them. A call's id is therefore sought, in
this order, in: the id it carries, where we gave it out; its thought signature, which holds our id; what we answered at
this very place (the digest of everything before it and of what it says, ids and thoughts aside); for calls that carry
no id, an earlier reply that said the same; the id it carries, whoever made it. A call that has none of these is
numbered. What was decided for a place stays decided. A tool's answer takes the id of the call that its own id names,
else of the first call of its name that waits for an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec
import xxhash
from msgspec import Raw

from outrider.dialects.base import Memory
from outrider.dialects.gemini.fields import absent
from outrider.dialects.gemini.parts import (
    FunctionCall,
    WirePart,
    arguments_on_wire,
    check_model_parts,
    model_message,
    parts_of,
    role_of,
    said,
    signed_id,
    system_message,
    tool_message,
    user_message,
)
from outrider.dialects.json import decode, refuse
from outrider.messages import Message, Role

EXACT_INTEGER = 2**53
"""Up to here a float and an integer are the same JSON number to every client."""

KEPT_WALKS = 64
"""Histories that a session can go on with at the cost of what is new: its latest requests, sub-agents' included."""

_FUNCTION = (b"unction", rb"\u006", rb"\u007")
"""Without these in its bytes a content answers no call. The last two escape the letters of the first."""

digest = xxhash.xxh3_128_digest


class _Call(msgspec.Struct, frozen=True, gc=False):
    """A call in the history: `signed` is the id in its signature, `spelled` its arguments in one spelling."""

    name: str
    id: str | None
    signed: str | None
    spelled: bytes


class _Stretch(msgspec.Struct, frozen=True, gc=False):
    """Parts of a user's content that are one message: [start, stop), a tool's answer or not."""

    start: int
    stop: int | None = None
    is_answer: bool = False
    name: str | None = None
    id: str | None = None


class _Seen(msgspec.Struct, frozen=True, gc=False):
    """A content as the history needs it."""

    role: Role
    digest: bytes
    stretches: tuple[_Stretch, ...] = ()
    text: str = ""
    calls: tuple[_Call, ...] = ()
    words: bytes = b""
    hosted: tuple[str, ...] = ()


class Answers:
    """What one session said before: its calls by where and what, every content that was decoded, and how the latest
    requests were read, by the digest of their contents."""

    def __init__(self) -> None:
        self.seen: dict[bytes, _Seen] = {}
        self.given: set[str] = set()
        self.by_place: dict[bytes, tuple[str, ...]] = {}
        self.by_words: dict[bytes, list[tuple[str, ...]]] = {}
        self.walks: dict[bytes, _Walk] = {}


class _Slot(msgspec.Struct, frozen=True, gc=False):
    """A message: the contents and parts it is made of, and the ids it was given. `key` determines all of that."""

    key: bytes
    role: Role
    contents: tuple[int, ...] = ()
    start: int = 0
    stop: int | None = None
    ids: tuple[str | None, ...] = ()


class GeminiMessages:
    """`WireMessages` over a system instruction (b"" for none) and contents. `hosted` names what Google's own tools did
    in them, which is not shown."""

    __slots__ = ("_answers", "_contents", "_decoded", "_place", "_slots", "_system", "hosted")

    def __init__(self, system: bytes | Raw, contents: Sequence[Raw], memory: Memory) -> None:
        self._system = Raw(bytes(system))
        self._contents = contents
        self._decoded: tuple[int, list[WirePart]] = (-1, [])
        self._answers: Answers = memory.setdefault("answers", Answers())
        walk = _Walk.along(self._answers, contents)
        self._place = walk.place
        self._slots = walk.slots
        self.hosted = sorted(walk.hosted)
        if not absent(system):
            self._slots.insert(0, _Slot(b"s" + digest(bytes(system)), Role.SYSTEM))

    def __len__(self) -> int:
        return len(self._slots)

    def raw(self, index: int) -> bytes:
        return self._slots[index].key

    def head(self, count: int) -> bytes:
        return b"\0".join([slot.key for slot in self._slots[:count]])

    def size(self, index: int) -> int:
        slot = self._slots[index]
        return sum(len(self._contents[at]) for at in slot.contents) if slot.contents else len(self._system)

    def parse(self, index: int) -> Message:
        slot = self._slots[index]
        if slot.role is Role.SYSTEM:
            return system_message(self._system, "systemInstruction")
        first = f"contents[{slot.contents[0]}]"
        parts = [part for at in slot.contents for part in self._parts(at)]
        match slot.role:
            case Role.ASSISTANT:
                return model_message(parts, [call_id or "" for call_id in slot.ids])
            case Role.TOOL:
                return tool_message(parts[slot.start], f"{first}.parts[{slot.start}]", slot.ids[0])
            case _:
                return user_message(parts[slot.start : slot.stop], first, slot.start)

    def _parts(self, at: int) -> list[WirePart]:
        """The parts of a content. The newest is kept, because each tool's answer in it is a message of its own."""
        if self._decoded[0] != at:
            self._decoded = (at, parts_of(self._contents[at], f"contents[{at}]"))
        return self._decoded[1]

    def answered(self, reply: Message) -> None:
        """Remember what this request was answered with."""
        if not reply.tool_calls:
            return
        ids = tuple([call.id for call in reply.tool_calls])
        calls = [
            (call.name, _spelled(Raw(arguments_on_wire(call.arguments)), "functionCall.args"))
            for call in reply.tool_calls
        ]
        words = _words(reply.content, calls)
        self._answers.given.update(ids)
        self._answers.by_place[digest(self._place + words)] = ids
        self._answers.by_words.setdefault(words, []).append(ids)


class _Open(msgspec.Struct, gc=False):
    """A call that waits for its answer."""

    name: str
    id: str


class _Walk:
    """The contents in order, put into slots. `place` is the digest of all that came before. Each walk begins as a copy
    of the latest ones' that went furthest along the same contents."""

    def __init__(self, answers: Answers) -> None:
        self.place = b""
        self.slots: list[_Slot] = []
        self.hosted: set[str] = set()
        self._answers = answers
        self._run: list[_Seen] = []
        self._used: set[tuple[str, ...]] = set()
        self._taken: set[str] = set()
        self._known: dict[str, str] = {}
        self._open: list[_Open] = []
        self._calls = 0

    @classmethod
    def along(cls, answers: Answers, contents: Sequence[Raw]) -> _Walk:
        """The walk to the end of `contents`. Raises RequestError."""
        shorts = [digest(raw) for raw in contents]
        paths = list(accumulate(shorts, lambda path, short: digest(path + short)))
        start = next((done for done in range(len(paths), 0, -1) if paths[done - 1] in answers.walks), 0)
        walk = answers.walks[paths[start - 1]]._copy() if start else cls(answers)
        for index in range(start, len(contents)):
            walk._add(_seen(answers, contents[index], shorts[index], f"contents[{index}]"), index)
        if walk._run:
            walk._end_run(len(contents))
        else:
            answers.walks.pop(paths[-1], None)
            answers.walks[paths[-1]] = walk._copy()
            if len(answers.walks) > KEPT_WALKS:
                del answers.walks[next(iter(answers.walks))]
        return walk

    def _copy(self) -> _Walk:
        """One that can go on by itself; only at the end of a user's content."""
        other = _Walk(self._answers)
        other.place, other._calls = self.place, self._calls
        other.slots, other._open = list(self.slots), list(self._open)
        other.hosted = set(self.hosted)
        other._used, other._taken, other._known = set(self._used), set(self._taken), dict(self._known)
        return other

    def _add(self, seen: _Seen, index: int) -> None:
        if seen.role is Role.ASSISTANT:
            self._run.append(seen)
            self.hosted.update(seen.hosted)
        else:
            self._end_run(index)
            self._user(seen, index)

    def _end_run(self, stop: int) -> None:
        """The model's contents up to `stop`, which are one message."""
        if not self._run:
            return
        run, self._run = self._run, []
        calls: Sequence[_Call] = run[0].calls
        words = run[0].words
        if len(run) > 1:
            calls = [call for seen in run for call in seen.calls]
            words = _words("".join([seen.text for seen in run]), [(call.name, call.spelled) for call in calls])
        self.place = digest(self.place + words)
        ids = self._ids(calls, words) if calls else ()
        if calls:
            self._calls += len(calls)
            self._used.add(ids)
            self._taken.update(ids)
            self._open = [_Open(call.name, call_id) for call, call_id in zip(calls, ids, strict=True)]
            self._known.update({call.id: call_id for call, call_id in zip(calls, ids, strict=True) if call.id})
        key = b"m%d:" % len(run) + b"".join([seen.digest for seen in run]) + "\0".join(ids).encode()
        self.slots.append(_Slot(key, Role.ASSISTANT, tuple(range(stop - len(run), stop)), ids=ids))

    def _ids(self, calls: Sequence[_Call], words: bytes) -> tuple[str, ...]:
        """The ids of a message's calls (module heading)."""
        ours = self._told(calls)
        if None not in ours:
            return tuple([call_id for call_id in ours if call_id is not None])
        recorded = self._answers.by_place.get(self.place)
        if recorded is None and not any(call.id for call in calls):
            recorded = next((ids for ids in self._answers.by_words.get(words, ()) if ids not in self._used), None)
        ids: list[str] = []
        for index, (call, told) in enumerate(zip(calls, ours, strict=True)):
            kept = recorded[index] if recorded is not None else call.id
            ids.append(told or kept or self._number(index, [*ours, *ids]))
        self._answers.by_place.setdefault(self.place, tuple(ids))
        return tuple(ids)

    def _number(self, index: int, beside: Sequence[str | None]) -> str:
        """An id that no other call of this history has."""
        number = self._calls + index
        while (made_up := f"call_{number}") in self._taken or made_up in beside:
            number += 1
        return made_up

    def _told(self, calls: Sequence[_Call]) -> list[str | None]:
        """Each call's id as we gave it, where it carries that, or its signature does."""
        given = self._answers.given
        ids: list[str | None] = [call.id if call.id in given else call.signed for call in calls]
        return [None if call_id in ids[:index] else call_id for index, call_id in enumerate(ids)]

    def _user(self, seen: _Seen, index: int) -> None:
        self.place = digest(self.place + seen.digest)
        for stretch in seen.stretches:
            if stretch.is_answer:
                call_id = self._answered_call(stretch)
                key = b"t%d:" % stretch.start + seen.digest + (call_id or "").encode()
                self.slots.append(_Slot(key, Role.TOOL, (index,), stretch.start, ids=(call_id,)))
            else:
                key = b"u%d:" % stretch.start + seen.digest
                self.slots.append(_Slot(key, Role.USER, (index,), stretch.start, stretch.stop))

    def _answered_call(self, answer: _Stretch) -> str | None:
        """The id of the call that a tool answers; its own where nothing is known of one."""
        known = self._known.get(answer.id) if answer.id else None
        waiting = [call for call in self._open if (call.id == known if known else call.name == answer.name)]
        if waiting:
            self._open.remove(waiting[0])
            return waiting[0].id
        return known or answer.id or None


def _seen(answers: Answers, raw: Raw, short: bytes, where: str) -> _Seen:
    """The content as it was seen before, else decoded. Raises RequestError."""
    seen = answers.seen.get(short)
    if seen is None:
        seen = answers.seen[short] = _read(raw, short, where)
    return seen


def _read(raw: Raw, short: bytes, where: str) -> _Seen:
    if role_of(raw, where) is Role.ASSISTANT:
        parts = parts_of(raw, where)
        check_model_parts(parts, where)
        calls = [
            _call(part.function_call, part.thought_signature, f"{where}.parts[{index}].functionCall.args")
            for index, part in enumerate(parts)
            if part.function_call is not None
        ]
        text = said(parts)
        words = _words(text, [(call.name, call.spelled) for call in calls])
        hosted = tuple([name for part in parts for name in part.hosted])
        return _Seen(Role.ASSISTANT, short, text=text, calls=tuple(calls), words=words, hosted=hosted)
    data = bytes(raw)
    if not any(letters in data for letters in _FUNCTION):
        return _Seen(Role.USER, short, (_Stretch(0),))
    return _Seen(Role.USER, short, _stretches(raw, where))


def _stretches(raw: Raw, where: str) -> tuple[_Stretch, ...]:
    """A user's parts by message; empty parts beside a tool's answer are no message."""
    found: list[_Stretch] = []
    start: int | None = None
    parts = parts_of(raw, where)
    for index, part in enumerate(parts):
        if (answer := part.function_response) is not None:
            if start is not None:
                found.append(_Stretch(start, index))
                start = None
            found.append(_Stretch(index, index + 1, is_answer=True, name=answer.name, id=answer.id))
        elif start is None and part.kinds:
            start = index
    if start is not None or not found:
        found.append(_Stretch(start or 0))
    return tuple(found)


def _call(call: FunctionCall, signed: str | None, where: str) -> _Call:
    return _Call(call.name, call.id or None, signed_id(signed), _spelled(call.args, where))


def _words(text: str, calls: Sequence[tuple[str, bytes]]) -> bytes:
    """The digest of what the model said, ids and thoughts aside."""
    return digest(msgspec.json.encode([text.strip(), [[name, Raw(spelled)] for name, spelled in calls]]))


def _spelled(args: Raw, where: str) -> bytes:
    """Arguments in one spelling, however a client writes them. Raises RequestError where they are no object."""
    if absent(args):
        return b"{}"
    value = decode(_NUMBERS, args, where)
    try:
        return msgspec.json.encode(value, order="sorted")
    except RecursionError as error:
        refuse(where, "nested too deeply", error)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= EXACT_INTEGER else value


_NUMBERS: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any], float_hook=_number)
