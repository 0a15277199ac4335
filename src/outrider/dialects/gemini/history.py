"""Converts the contents of a Google request to messages, and restores call ids that some clients change or drop.

A content (Google's form of a message) is read once per session. If a user's content has no tool results, reading it
decodes only its role. Invariants: a call from one of our replies keeps its original id, even if the client changes or
drops the id; `raw(i)` contains the ids with which message `i` is parsed.

One content can become several messages, because each tool result becomes a message. Adjacent contents of role `model`
become one message, because some clients store each chunk of a stream as a separate content and send the chunks back.

Some clients drop or replace our ids, or put the tool's name before an id. So a call gets the first of these ids that
exists:

1. the id in the request, if it is one of ours;
2. the id in the call's thought signature;
3. the id recorded for our reply at the same position of the history. A position is identified by a digest of the
   message and everything before it, without ids and thoughts;
4. if no call of the message has an id in the request: the id from an earlier reply with the same text and calls. Each
   earlier reply is used for only one message of the request;
5. the id in the request, even if it is not one of ours;
6. `call_` and a number.

The ids chosen at a position do not change later, unless what is stored exceeds MAX_STORED. A tool result belongs to the
call with the same id. If no call has this id, the tool result belongs to one of the calls in the latest model message:
the first call of the same function that has no result yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import xxhash
from msgspec import Raw

from outrider.dialects.base import Memory
from outrider.dialects.gemini.contents import (
    WirePart,
    arguments_on_wire,
    check_model_parts,
    model_message,
    parts_of,
    reply_text,
    role_of,
    signed_id,
    system_message,
    tool_message,
    user_message,
)
from outrider.dialects.reading import decode, is_absent, refuse
from outrider.media import check_attachments
from outrider.messages import Message, Role

EXACT_INTEGER = 2**53
"""Floats represent integers exactly up to this number. Whole floats up to this number are treated as integers, because
a client may send 3.0 back as 3."""

KEPT_READERS = 64
"""Maximum number of `_HistoryReader`s stored for a session. They belong to the latest requests of the agent and its
sub-agents. A request that continues the history of a stored reader reads only its new contents."""

KEPT_IN_READERS = 1 << 17
"""Maximum number of messages and calls in all stored `_HistoryReader`s together. The newest is stored even if it has
more."""

MAX_STORED = 64 << 20
"""Maximum number of bytes stored for a session, apart from the readers. Above this limit, everything stored so far is
dropped when the next request is read. Only a session with an unusually large number of new contents reaches this limit.
The calls of a client that drops ids may then get other ids than before."""
ENTRY_BYTES = 256
"""Approximate memory of one stored object with its dictionary entry, in bytes, without texts and arguments."""

_FUNCTION = (b"unction", rb"\u006", rb"\u007")
"""A content without any of these byte strings has no tool result. The first is a part of the keys `functionResponse`
and `function_response`. The other two begin JSON escapes of lower-case letters, which a client may use in a key."""

digest = xxhash.xxh3_128_digest


class _Call(msgspec.Struct, frozen=True, gc=False):
    """A call in the history. `signed` is the id in the call's thought signature. `_one_spelling` has normalised
    `arguments`."""

    name: str
    id: str | None
    signed: str | None
    arguments: bytes


class _PartRange(msgspec.Struct, frozen=True, gc=False):
    """The parts [start, stop) of a user's content. They become one message. `stop` is None for the end of the content.
    If `is_answer` is True, the message is a tool result, and `name` and `id` belong to the answered call."""

    start: int
    stop: int | None = None
    is_answer: bool = False
    name: str | None = None
    id: str | None = None


class _ReadContent(msgspec.Struct, frozen=True, gc=False):
    """The stored facts about one content of a conversation. A user's content has `ranges`; a model's content has the
    fields below `ranges`. `reply_digest` is the digest of the model's text and calls, without ids and thoughts.
    `hosted` has the names of the fields that tools on Google's servers wrote."""

    role: Role
    digest: bytes
    ranges: tuple[_PartRange, ...] = ()
    text: str = ""
    calls: tuple[_Call, ...] = ()
    reply_digest: bytes = b""
    hosted: tuple[str, ...] = ()

    @property
    def text_size(self) -> int:
        """The number of characters of all texts, names and ids, and of bytes of the calls' arguments."""
        size = len(self.text) + sum(map(len, self.hosted))
        for call in self.calls:
            size += len(call.name) + len(call.id or "") + len(call.signed or "") + len(call.arguments)
        for one in self.ranges:
            size += len(one.name or "") + len(one.id or "")
        return size


class HistoryMemory:
    """The stored history of one session.

    - `contents`: what was read from each content, by the content's digest.
    - `given_ids`: all ids of calls in our replies.
    - `ids_by_path`: the ids of the calls at a position of the history, by the position's digest.
    - `ids_by_reply`: the ids of the calls in our replies, by the digest of the reply's text and calls.
    - `readers`: the readers of the latest requests, by the digest of the requests' contents.

    Requests are stored before they are known to be served, so the memory is limited (MAX_STORED).
    """

    def __init__(self) -> None:
        self.contents: dict[bytes, _ReadContent] = {}
        self.given_ids: set[str] = set()
        self.ids_by_path: dict[bytes, tuple[str, ...]] = {}
        self.ids_by_reply: dict[bytes, list[tuple[str, ...]]] = {}
        self.readers: dict[bytes, _HistoryReader] = {}
        self._size = 0

    def count(self, objects: int, size: int = 0) -> None:
        """Count `objects` that are stored now, and `size` bytes of their texts."""
        self._size += ENTRY_BYTES * objects + size

    def limit(self) -> None:
        """Above MAX_STORED, drop everything stored so far. Called only before a request is read. Requests are read one
        at a time, so no reader is at work then."""
        if self._size > MAX_STORED:
            self.contents.clear()
            self.given_ids.clear()
            self.ids_by_path.clear()
            self.ids_by_reply.clear()
            self.readers.clear()
            self._size = 0


class _Span(msgspec.Struct, frozen=True, gc=False):
    """The place of a message in the request. `contents` are the indexes of its contents, and [start, stop) is its range
    of parts. `ids` are the ids of the message's calls, or the id of the call that a tool result answers. Messages with
    equal `key` are parsed to equal messages."""

    key: bytes
    role: Role
    contents: tuple[int, ...] = ()
    start: int = 0
    stop: int | None = None
    ids: tuple[str | None, ...] = ()


class GeminiHistory:
    """Implements `WireMessages` for a system instruction (b"" for none) and contents. `hosted` has the names of the
    fields that tools on Google's servers wrote; the model does not see them. Raises RequestError for errors in new
    contents. If a user's content has no tool results, only `parse` checks its parts."""

    __slots__ = ("_contents", "_decoded", "_memory", "_place", "_spans", "_system", "hosted")

    def __init__(self, system: bytes | Raw, contents: Sequence[Raw], memory: Memory) -> None:
        self._system = Raw(bytes(system))
        self._contents = contents
        self._decoded: tuple[int, list[WirePart]] = (-1, [])
        self._memory: HistoryMemory = memory.setdefault("history", HistoryMemory())
        reader = _HistoryReader.read(self._memory, contents)
        self._place = reader.place
        self._spans = reader.spans
        self.hosted = sorted(reader.hosted)
        if not is_absent(system):
            self._spans.insert(0, _Span(b"s" + digest(bytes(system)), Role.SYSTEM))

    def __len__(self) -> int:
        return len(self._spans)

    def raw(self, index: int) -> bytes:
        return self._spans[index].key

    def head(self, count: int) -> bytes:
        return b"\0".join([span.key for span in self._spans[:count]])

    def role(self, index: int) -> Role:
        return self._spans[index].role

    def size(self, index: int) -> int:
        span = self._spans[index]
        return sum([len(self._contents[at]) for at in span.contents]) if span.contents else len(self._system)

    def parse(self, index: int) -> Message:
        message = self._parse(index)
        check_attachments(message.parts, self, index)
        return message

    def _parse(self, index: int) -> Message:
        span = self._spans[index]
        if span.role is Role.SYSTEM:
            return system_message(self._system, "systemInstruction")
        parts: list[WirePart] = []
        for at in span.contents:
            # The last decoded content is cached, because this method is called for each tool result in the content.
            if self._decoded[0] != at:
                self._decoded = (at, parts_of(self._contents[at], f"contents[{at}]"))
            parts += self._decoded[1]
        first = f"contents[{span.contents[0]}]"
        match span.role:
            case Role.ASSISTANT:
                return model_message(parts, [call_id or "" for call_id in span.ids])
            case Role.TOOL:
                return tool_message(parts[span.start], f"{first}.parts[{span.start}]", span.ids[0])
            case _:
                return user_message(parts[span.start : span.stop], first, span.start)

    def answered(self, reply: Message) -> None:
        """Record the ids of the calls in `reply`, the reply to this request."""
        if not reply.tool_calls:
            return
        ids = tuple([call.id for call in reply.tool_calls])
        calls = [
            (call.name, _one_spelling(Raw(arguments_on_wire(call.arguments)), "functionCall.args"))
            for call in reply.tool_calls
        ]
        reply_digest = _reply_digest(reply.content, calls)
        self._memory.count(2 + len(ids))
        self._memory.given_ids.update(ids)
        self._memory.ids_by_path[digest(self._place + reply_digest)] = ids
        self._memory.ids_by_reply.setdefault(reply_digest, []).append(ids)


class _WaitingCalls:
    """The calls of the latest model message whose results have not been read yet, as pairs of name and id, in order.

    A message may have tens of thousands of calls, so a call is found by a dictionary and not by a search."""

    def __init__(self, calls: Iterable[tuple[str, str]] = ()) -> None:
        self._calls = dict(enumerate(calls))
        self._by_name: dict[str, list[int]] = {}
        self._by_id: dict[str, list[int]] = {}
        for number, (name, call_id) in reversed(self._calls.items()):  # so that `_take` finds the first one at the end
            self._by_name.setdefault(name, []).append(number)
            self._by_id.setdefault(call_id, []).append(number)

    def copy(self) -> _WaitingCalls:
        return _WaitingCalls(self._calls.values())

    def take_id(self, call_id: str) -> str | None:
        """Remove the first call with this id, and return the id. Returns None if no such call is waiting."""
        return self._take(self._by_id.get(call_id))

    def take_name(self, name: str | None) -> str | None:
        """Remove the first call of the function `name`, and return its id. Returns None if no such call is waiting."""
        return self._take(None if name is None else self._by_name.get(name))

    def _take(self, numbers: list[int] | None) -> str | None:
        while numbers:
            taken = self._calls.pop(numbers.pop(), None)
            if taken is not None:
                return taken[1]
        return None


class _HistoryReader:
    """Reads contents in order, and makes a `_Span` for each message. `place` is the digest of all contents read so far,
    without the ids and thoughts in the model's contents."""

    def __init__(self, memory: HistoryMemory) -> None:
        self.place = b""
        self.spans: list[_Span] = []
        self.hosted: set[str] = set()
        self._memory = memory
        self._model_run: list[_ReadContent] = []
        self._used: set[tuple[str, ...]] = set()
        self._taken: set[str] = set()
        self._known: dict[str, str] = {}
        self._waiting = _WaitingCalls()
        self._calls = 0
        self._number = 0
        """The number to try next for a call without an id. Every number from `_calls` up to it (exclusive) is taken."""

    @classmethod
    def read(cls, memory: HistoryMemory, contents: Sequence[Raw]) -> _HistoryReader:
        """Return a reader that has read all of `contents`. Stored readers may have read a beginning of
        `contents`. The reader with the longest beginning is then copied, and the copy reads the rest. Raises
        RequestError."""
        memory.limit()
        digests = [digest(raw) for raw in contents]
        paths = list(accumulate(digests, lambda path, one: digest(path + one)))
        start = next((done for done in range(len(paths), 0, -1) if paths[done - 1] in memory.readers), 0)
        reader = memory.readers[paths[start - 1]]._copy() if start else cls(memory)
        for index in range(start, len(contents)):
            content = memory.contents.get(digests[index])
            if content is None:
                content = _read_content(contents[index], digests[index], f"contents[{index}]")
                memory.count(1 + len(content.ranges) + len(content.calls), content.text_size)
                memory.contents[digests[index]] = content
            if content.role is Role.ASSISTANT:
                reader._model_run.append(content)
                reader.hosted.update(content.hosted)
            else:
                reader._end_model_run(index)
                reader._add_user(content, index)
        if reader._model_run:
            reader._end_model_run(len(contents))
        else:
            # Removing and reinserting an entry moves it to the end of the dictionary, so the first entry is always the
            # oldest.
            memory.readers.pop(paths[-1], None)
            memory.readers[paths[-1]] = reader._copy()
            size = sum(kept._size for kept in memory.readers.values())
            while len(memory.readers) > 1 and (len(memory.readers) > KEPT_READERS or size > KEPT_IN_READERS):
                size -= memory.readers.pop(next(iter(memory.readers)))._size
        return reader

    @property
    def _size(self) -> int:
        """The number of messages and calls."""
        return len(self.spans) + self._calls

    def _copy(self) -> _HistoryReader:
        """Return an independent copy. The copy omits `_model_run`. So call this method only directly after a user's
        content: `_model_run` is empty there."""
        other = _HistoryReader(self._memory)
        other.place, other._calls, other._number = self.place, self._calls, self._number
        other.spans, other._waiting = list(self.spans), self._waiting.copy()
        other.hosted = set(self.hosted)
        other._used, other._taken, other._known = set(self._used), set(self._taken), dict(self._known)
        return other

    def _end_model_run(self, stop: int) -> None:
        """Make one message of the current run of adjacent model contents, if any. `stop` is the index of the first
        content after the run."""
        if not self._model_run:
            return
        run, self._model_run = self._model_run, []
        calls: Sequence[_Call] = run[0].calls
        reply_digest = run[0].reply_digest
        if len(run) > 1:
            calls = [call for content in run for call in content.calls]
            text = "".join([content.text for content in run])
            reply_digest = _reply_digest(text, [(call.name, call.arguments) for call in calls])
        self.place = digest(self.place + reply_digest)
        ids = self._ids_of(calls, reply_digest) if calls else ()
        if calls:
            self._calls += len(calls)
            self._used.add(ids)
            self._taken.update(ids)
            self._waiting = _WaitingCalls((call.name, call_id) for call, call_id in zip(calls, ids, strict=True))
            self._known.update({call.id: call_id for call, call_id in zip(calls, ids, strict=True) if call.id})
        key = b"m%d:" % len(run) + b"".join([content.digest for content in run]) + "\0".join(ids).encode()
        self.spans.append(_Span(key, Role.ASSISTANT, tuple(range(stop - len(run), stop)), ids=ids))

    def _ids_of(self, calls: Sequence[_Call], reply_digest: bytes) -> tuple[str, ...]:
        """Return the ids of a message's calls, chosen as the module's docstring describes. `reply_digest` is the digest
        of the message's text and calls."""
        memory = self._memory
        ours: list[str | None] = []
        used: set[str] = set()
        for call in calls:
            own = call.id if call.id in memory.given_ids else call.signed
            # A client may attach the first call's signature to all calls of a reply, so only the first use of an id is
            # accepted.
            ours.append(None if own in used else own)
            if own is not None:
                used.add(own)
        if None not in ours:
            return tuple([call_id for call_id in ours if call_id is not None])
        recorded = memory.ids_by_path.get(self.place)
        if recorded is None and not any(call.id for call in calls):
            recorded = next((ids for ids in memory.ids_by_reply.get(reply_digest, ()) if ids not in self._used), None)
        ids: list[str] = []
        for index, (call, own) in enumerate(zip(calls, ours, strict=True)):
            found = own or (recorded[index] if recorded is not None else call.id)
            if not found:  # take a number that no other call in this history has
                number = max(self._calls + index, self._number)
                while f"call_{number}" in self._taken or f"call_{number}" in used:
                    number += 1
                found, self._number = f"call_{number}", number + 1
            ids.append(found)
            used.add(found)
        if self.place not in memory.ids_by_path:
            memory.count(1 + len(ids))
            memory.ids_by_path[self.place] = tuple(ids)
        return tuple(ids)

    def _add_user(self, content: _ReadContent, index: int) -> None:
        """Make the messages that a user's content becomes. `index` is the content's index in the request."""
        self.place = digest(self.place + content.digest)
        for one in content.ranges:
            if not one.is_answer:
                key = b"u%d:" % one.start + content.digest
                self.spans.append(_Span(key, Role.USER, (index,), one.start, one.stop))
                continue
            known = self._known.get(one.id) if one.id else None
            answered = self._waiting.take_id(known) if known else self._waiting.take_name(one.name)
            call_id = answered or known or one.id or None
            key = b"t%d:" % one.start + content.digest + (call_id or "").encode()
            self.spans.append(_Span(key, Role.TOOL, (index,), one.start, ids=(call_id,)))


def _read_content(raw: Raw, key: bytes, where: str) -> _ReadContent:
    """Parse a new content; `key` is the content's digest. Raises RequestError."""
    if role_of(raw, where) is not Role.ASSISTANT:
        data = bytes(raw)
        if not any(letters in data for letters in _FUNCTION):
            return _ReadContent(Role.USER, key, (_PartRange(0),))
        # Each tool result becomes a message, and so does each run of other parts between tool results. Empty parts
        # before a run are dropped.
        ranges: list[_PartRange] = []
        start: int | None = None
        for index, part in enumerate(parts_of(raw, where)):
            if (answer := part.function_response) is not None:
                if start is not None:
                    ranges.append(_PartRange(start, index))
                    start = None
                ranges.append(_PartRange(index, index + 1, is_answer=True, name=answer.name, id=answer.id))
            elif start is None and part.kinds:
                start = index
        if start is not None or not ranges:
            ranges.append(_PartRange(start or 0))
        return _ReadContent(Role.USER, key, tuple(ranges))
    parts = parts_of(raw, where)
    check_model_parts(parts, where)
    calls: list[_Call] = []
    for index, part in enumerate(parts):
        if (call := part.function_call) is not None:
            arguments = _one_spelling(call.args, f"{where}.parts[{index}].functionCall.args")
            calls.append(_Call(call.name, call.id or None, signed_id(part.thought_signature), arguments))
    text = reply_text(parts)
    return _ReadContent(
        Role.ASSISTANT,
        key,
        text=text,
        calls=tuple(calls),
        reply_digest=_reply_digest(text, [(call.name, call.arguments) for call in calls]),
        hosted=tuple([name for part in parts for name in part.hosted]),
    )


def _reply_digest(text: str, calls: Sequence[tuple[str, bytes]]) -> bytes:
    """Return the digest of the model's text and calls, without ids and thoughts. `calls` are pairs of name and
    arguments."""
    return digest(msgspec.json.encode([text.strip(), [[name, Raw(arguments)] for name, arguments in calls]]))


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= EXACT_INTEGER else value


_NUMBERS: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any], float_hook=_number)


def _one_spelling(arguments: Raw, where: str) -> bytes:
    """Return the arguments as JSON with sorted keys, and with whole numbers as integers, because clients may change the
    order of keys and write 3.0 as 3. Raises RequestError if the arguments are not an object."""
    if is_absent(arguments):
        return b"{}"
    value = decode(_NUMBERS, arguments, where)
    try:
        return msgspec.json.encode(value, order="sorted")
    except RecursionError as error:
        refuse(where, "nested too deeply", error)
