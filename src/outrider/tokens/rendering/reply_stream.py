"""Converts sampled ids to a reply. Visible text and reasoning are returned while the ids arrive, and the complete
message is returned at the end.

Text is held back only while it may be part of a tool call, a stop string or a marker. Invariant: the streamed pieces,
joined, equal the reply's text and reasoning. A client may assemble the reply from the stream and send the reply back;
the reply is then recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.tokens.rendering.renderer import ParsedCalls, Renderer


class _State(Enum):
    LEADING = auto()  # no visible text yet; the marker that opens reasoning may still come
    REASONING = auto()
    CONTENT = auto()
    HELD = auto()  # a tool call has begun; all text is held back until the turn is parsed
    STOPPED = auto()  # a stop string was found; later text is dropped


class ReplyPart(msgspec.Struct, frozen=True):
    text: str
    reasoning: str


NOTHING = ReplyPart("", "")


class FinishedReply(msgspec.Struct, frozen=True):
    """A finished reply. `malformed` counts the tool calls that could not be parsed and became text. `rest` is the part
    of the reply that earlier calls of `push` have not returned."""

    message: Message
    malformed: int
    rest: ReplyPart


class _Ends:
    """The markers that can end the current part of a reply, and the state that follows each of them."""

    def __init__(self, states: dict[str, _State]) -> None:
        self.states = states
        self._openers = tuple({marker[:1] for marker in states})

    def may_begin_in(self, text: str) -> bool:
        """Return True if the text may contain a marker or the beginning of a marker. If the result is False, the text
        certainly contains neither."""
        return any(map(text.__contains__, self._openers))


class ReplyStream:
    """Converts the ids of one turn to a reply. Call `push` with the ids as they arrive, and at the end call `finish`
    once.

    The reply ends before the first stop id or the first `stop` string, whichever is earlier. The stop ids are the model
    family's own and those in `stop_ids`. If the request has no tools, all markup of tool calls is text. If the request
    has tools, only malformed calls become text. A call without an id gets an id that is made from `call_id`. Set
    `held_to_calls` if a grammar forced the model to write only tool calls (`call_grammar.py`).
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
        held_to_calls: bool = False,
    ) -> None:
        self._renderer = renderer
        self._tail = prompt_tail
        self._tools = tools
        self._stop = tuple(stop)
        self._call_id = call_id
        self._held_to_calls = held_to_calls
        self._decoder = renderer.tokenizer.stream()
        self._stops = frozenset((*renderer.stop_ids, *stop_ids))
        self._ids: list[int] = []
        self._end: int | None = None  # the position of the first stop id, None until it is found
        self._pending = ""  # text that is decoded but not emitted yet
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
        """Add sampled ids. Returns the text and the reasoning that are now visible."""
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
            # Families without known markers are not streamed. Their own parser makes the reply from the whole turn.
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
            spoken = self._ids[: self._end]
            if self._held_to_calls:
                # A grammar constrains only the text, so the model may have sampled a marker as several tokens. The
                # parser recognises only the single token of a marker. So encode the text again, which gives this token.
                tokenizer = self._renderer.tokenizer
                spoken = tokenizer.encode(tokenizer.decode(spoken))
            parsed = self._renderer.parse(self._tail, spoken, self._tools)
            malformed = len(parsed.malformed)
            if parsed.calls or parsed.malformed:
                self._held_from = _State.CONTENT
            if parsed.calls:
                calls, left = self._split(left, parsed, spoken)
        flushed = self._emit(self._held_from, self._cut(left), final=True)
        message = Message(
            role=Role.ASSISTANT,
            content="".join(self._text),
            reasoning="".join(self._reasoning) or None,
            tool_calls=calls,
        )
        rest = ReplyPart(drained.text + flushed.text, drained.reasoning + flushed.reasoning)
        return FinishedReply(message, malformed, rest)

    def _split(self, held: str, parsed: ParsedCalls, spoken: Sequence[int]) -> tuple[tuple[ToolCall, ...], str]:
        """Split the held-back text into tool calls and the text around them. `spoken` are the ids that the parser got.

        The parser finds markers by their ids, but this class finds markers by their text. The beginning of a call may
        therefore already have been sent as text. Such a call remains text."""
        decode = self._renderer.tokenizer.decode
        pieces: list[tuple[str, ToolCall | None]] = []
        at = 0
        for call, (start, end) in zip(self._named(parsed.calls), parsed.spans, strict=True):
            # For MiniMax, all calls of one block have the span of the whole block.
            start = max(start, at)
            pieces += [(decode(spoken[at:start]), None), (decode(spoken[start:end]), call)]
            at = max(at, end)
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
        text, markup = "".join(left), self._renderer.markup
        if calls and markup is not None and markup.calls_close:
            text = text.replace(markup.call_open, "", 1).replace(markup.calls_close, "", 1)
        return tuple(calls), text

    def _cut(self, text: str) -> str:
        """Return the text before the first stop string."""
        for stop in self._stop:
            text = text.partition(stop)[0]
        return text

    def _named(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call.id or f"call_{self._call_id}_{number}", call.name, call.arguments)
            for number, call in enumerate(calls)
        )

    def _drain(self, *, final: bool) -> ReplyPart:
        """Process the pending text until the state no longer changes. Returns the text that cannot become part of a
        marker or a call any more. If `final` is True, no more text follows."""
        before = self._state
        part = self._step(final=final)
        while self._state is not before:
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
                # If the marker that closes reasoning comes later in the text, the apparent tool call was part of the
                # reasoning.
                shown, close, behind = self._pending.partition(self._think_close)
                if close:
                    self._state, self._pending = _State.CONTENT, behind
                    return self._emit(_State.REASONING, shown, final=True)
            case _State.STOPPED:
                self._pending = ""
        return NOTHING

    def _emit_to_marker(self, ends: _Ends, *, final: bool) -> ReplyPart:
        """Emit the text before the first marker, and enter the state that follows this marker. Without a marker, emit
        all text except an end that may be the beginning of a marker."""
        state = self._state
        if not ends.may_begin_in(self._pending):  # fast path: most tokens contain no part of a marker
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
        # Hold back the longest end of the text that may be the beginning of a marker.
        for marker in markers if not final else ():
            for length in range(min(len(marker) - 1, len(pending)), keep, -1):
                if pending.endswith(marker[:length]):
                    keep = length
                    break
        shown, self._pending = pending[: len(pending) - keep], pending[len(pending) - keep :]
        return self._emit(state, shown, final=final)

    def _emit(self, state: _State, shown: str, *, final: bool) -> ReplyPart:
        """Append to the text or the reasoning, and return what was appended. White space at the beginning is dropped.
        White space at the end is held back until more text follows, and is dropped if none follows."""
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
