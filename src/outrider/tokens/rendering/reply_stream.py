"""Turns sampled ids into a reply as they arrive: visible text and reasoning first, the whole message at the end.

Text is held back only while it may still be part of a tool call, a stop string or a marker. Invariant: the reply's text
and reasoning are the concatenation of the streamed pieces. So a reply that a client assembled from the stream is
recognised when the client sends it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.tokens.rendering.renderer import ParsedCalls, Renderer


class _State(Enum):
    LEADING = auto()  # before any visible text: the marker that opens reasoning may follow
    REASONING = auto()
    CONTENT = auto()
    HELD = auto()  # after the marker of a tool call: all text waits until the turn is parsed
    STOPPED = auto()  # after a stop string


class ReplyPart(msgspec.Struct, frozen=True):
    text: str
    reasoning: str


NOTHING = ReplyPart("", "")


class FinishedReply(msgspec.Struct, frozen=True):
    """A finished reply. `malformed` is the number of unparsable tool calls, which became text. `rest` is the part of
    the reply not yet returned by `push`."""

    message: Message
    malformed: int
    rest: ReplyPart


class _Ends:
    """The markers that end a part of a reply, each with the state that follows."""

    def __init__(self, states: dict[str, _State]) -> None:
        self.states = states
        self._openers = tuple({marker[:1] for marker in states})

    def may_begin_in(self, text: str) -> bool:
        """Return True if a marker, or the beginning of a marker, can be in the text."""
        return any(map(text.__contains__, self._openers))


class ReplyStream:
    """Reads one turn: `push` the ids as they arrive, then `finish` once.

    The reply ends before its first stop id (the family's or one of `stop_ids`) and before the first of the `stop`
    strings. Without tools in the request, tool-call markup is plain text. With tools, markup
    that is no well-formed call becomes text. A call without an id of its own gets an id made from `call_id`.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        prompt_tail: Sequence[int],
        tools: Sequence[ToolSpec],
        stop: Sequence[str],
        stop_ids: Sequence[int] = (),
        call_id: str,
    ) -> None:
        self._renderer = renderer
        self._tail = prompt_tail
        self._tools = tools
        self._stop = tuple(stop)
        self._call_id = call_id
        self._decoder = renderer.tokenizer.stream()
        self._stops = frozenset((*renderer.stop_ids, *stop_ids))
        self._ids: list[int] = []
        self._end: int | None = None  # the position of the first stop id
        self._pending = ""  # decoded text, not emitted yet
        self._held_from = _State.CONTENT
        self._text: list[str] = []
        self._reasoning: list[str] = []
        markup = renderer.markup
        if markup is None:
            self._state = _State.HELD
        else:
            self._think_open, self._think_close = markup.think_open, markup.think_close
            self._call_open = markup.call_open if tools else None
            self._state = _State.LEADING
            self._first = _State.REASONING if renderer.opens_reasoning(prompt_tail) else _State.CONTENT
            content_ends = dict.fromkeys(self._stop, _State.STOPPED)
            if self._call_open is not None:
                content_ends[self._call_open] = _State.HELD
            self._content_ends = _Ends(content_ends)
            self._reasoning_ends = _Ends({self._think_close: _State.CONTENT, **content_ends})

    def push(self, ids: Sequence[int]) -> ReplyPart:
        """Add ids. Returns the newly visible text and reasoning."""
        known = len(self._ids)
        self._ids.extend(ids)
        if self._end is None:
            if not self._stops.isdisjoint(ids):
                stop = next(at for at, token in enumerate(ids) if token in self._stops)
                self._end = known + stop
                ids = ids[:stop]
            self._pending += self._decoder.push(ids)
        return self._drain(final=False)

    def finish(self) -> FinishedReply:
        self._pending += self._decoder.finish()
        if self._renderer.markup is None:
            # A family without markup is not streamed: the reply is the output of its parser.
            parsed = self._renderer.parse(self._tail, self._ids, self._tools)
            unasked = () if self._tools else parsed.spans
            markup = (self._renderer.tokenizer.decode(self._ids[start:end]) for start, end in unasked)
            content = self._cut("\n".join(part for part in (parsed.content, *parsed.malformed, *markup) if part))
            message = Message(
                role=Role.ASSISTANT,
                content=content,
                reasoning=parsed.reasoning or None,
                tool_calls=self._named(parsed.calls) if self._tools else (),
            )
            return FinishedReply(message, len(parsed.malformed), ReplyPart(content, parsed.reasoning or ""))
        drained = self._drain(final=True)
        calls: tuple[ToolCall, ...] = ()
        malformed, left = 0, ""
        if self._state is _State.HELD:
            left, self._pending = self._pending, ""
            parsed = self._renderer.parse(self._tail, self._ids, self._tools)
            malformed = len(parsed.malformed)
            if parsed.calls or parsed.malformed:
                self._held_from = _State.CONTENT
            if parsed.calls:
                calls, left = self._split(left, parsed)
        flushed = self._emit(self._held_from, self._cut(left), final=True)
        message = Message(
            role=Role.ASSISTANT,
            content="".join(self._text),
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls,
        )
        rest = ReplyPart(drained.text + flushed.text, drained.reasoning + flushed.reasoning)
        return FinishedReply(message, malformed, rest)

    def _split(self, held: str, parsed: ParsedCalls) -> tuple[tuple[ToolCall, ...], str]:
        """Split the held text into calls and the text around them. A call whose beginning was already shown as text
        stays text. Such calls exist because the family's parser finds markers by their ids, but this stream finds them
        by their text."""
        decode = self._renderer.tokenizer.decode
        spoken = self._ids[: self._end]
        pieces: list[tuple[str, ToolCall | None]] = []
        at = 0
        for call, (start, end) in zip(self._named(parsed.calls), parsed.spans, strict=True):
            pieces += [(decode(spoken[at:start]), None), (decode(spoken[start:end]), call)]
            at = end
        pieces.append((decode(spoken[at:]), None))
        shown = sum(len(text) for text, _ in pieces) - len(held)
        calls: list[ToolCall] = []
        left: list[str] = []
        for text, made in pieces:
            if made is not None and shown <= 0:
                calls.append(made)
            else:
                left.append(text[max(shown, 0) :])
            shown -= len(text)
        return tuple(calls), "".join(left)

    def _cut(self, text: str) -> str:
        """The text before the first stop string."""
        for stop in self._stop:
            text = text.partition(stop)[0]
        return text

    def _named(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call.id or f"call_{self._call_id}_{number}", call.name, call.arguments)
            for number, call in enumerate(calls)
        )

    def _drain(self, *, final: bool) -> ReplyPart:
        """Move the pending text through the states and emit the text whose meaning can no longer change. With `final`,
        no more text follows."""
        before = self._state
        part = self._step(final=final)
        while self._state is not before:  # a step that stays in its state has done all it can with this text
            before = self._state
            more = self._step(final=final)
            part = ReplyPart(part.text + more.text, part.reasoning + more.reasoning)
        return part

    def _step(self, *, final: bool) -> ReplyPart:
        match self._state:
            case _State.CONTENT:
                return self._emit_to_marker(self._content_ends, final=final)
            case _State.REASONING:
                return self._emit_to_marker(self._reasoning_ends, final=final)
            case _State.LEADING:  # ends when the text shows whether the model itself opens reasoning
                stripped = self._pending.lstrip()
                if stripped.startswith(self._think_open):
                    self._pending = stripped[len(self._think_open) :]
                    self._state = _State.REASONING
                elif final or (stripped and not self._think_open.startswith(stripped)):
                    self._state = self._first
            case _State.HELD if self._held_from is _State.REASONING:
                # Text from the marker of a tool call on is reasoning after all if the marker that closes reasoning
                # follows.
                shown, close, behind = self._pending.partition(self._think_close)
                if close:
                    self._state, self._pending = _State.CONTENT, behind
                    return self._emit(_State.REASONING, shown, final=True)
            case _State.STOPPED:
                self._pending = ""
        return NOTHING

    def _emit_to_marker(self, ends: _Ends, *, final: bool) -> ReplyPart:
        """Emit the text up to the first marker and enter the marker's state. Without a marker, emit all but a possible
        beginning of a marker."""
        state = self._state
        if not ends.may_begin_in(self._pending):  # so for nearly all tokens
            shown, self._pending = self._pending, ""
            return self._emit(state, shown, final=final)
        markers = ends.states
        found = [(at, marker) for marker in markers if (at := self._pending.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            shown, self._state = self._pending[:at].rstrip(), markers[marker]
            keep_from = len(shown) if self._state is _State.HELD else at + len(marker)
            self._pending = self._pending[keep_from:]
            self._held_from = state
            return self._emit(state, shown, final=True)
        pending, keep = self._pending, 0
        for marker in markers if not final else ():  # keep the longest end that may begin a marker
            for length in range(min(len(marker) - 1, len(pending)), keep, -1):
                if pending.endswith(marker[:length]):
                    keep = length
                    break
        shown, self._pending = pending[: len(pending) - keep], pending[len(pending) - keep :]
        return self._emit(state, shown, final=final)

    def _emit(self, state: _State, shown: str, *, final: bool) -> ReplyPart:
        """Append to the text or the reasoning. White space at the beginning of either is dropped. White space at the
        end waits for more text, and is dropped if none follows."""
        channel = self._reasoning if state is _State.REASONING else self._text
        if not channel:
            shown = shown.lstrip()
        if final or self._state is not state:
            shown = shown.rstrip()
        else:
            kept = shown.rstrip()
            self._pending = shown[len(kept) :] + self._pending
            shown = kept
        if shown:
            channel.append(shown)
        return ReplyPart("", shown) if state is _State.REASONING else ReplyPart(shown, "")
