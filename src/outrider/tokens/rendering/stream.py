"""One reply as it is sampled: ids in, visible text and reasoning out, the whole message at the end.

Text is held back only while it may still be part of a tool call, a stop string or a marker. The reply's text
is by construction the concatenation of what was streamed, so a client that echoes it is recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.tokens.rendering.renderer import ParsedCalls, Renderer


class _State(Enum):
    LEADING = auto()  # before anything visible: a reasoning opener may follow
    REASONING = auto()
    CONTENT = auto()
    HELD = auto()  # inside a tool call, or what may be one
    STOPPED = auto()  # past a stop string


class ReplyPart(msgspec.Struct, frozen=True):
    text: str
    reasoning: str


class Reply(msgspec.Struct, frozen=True):
    """A finished reply, and how many malformed tool calls were given back as text."""

    message: Message
    malformed: int
    rest: ReplyPart


class ReplyStream:
    """Reads one turn. `push` the ids as they come, then `finish` once.

    The turn is over at its first stop id, the family's or one of `stop_ids`. Without tools in the request, tool-call
    markup is plain text; with them, whatever is not a well-formed call comes back as text. `call_id` names the calls of
    formats that carry no id of their own.
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
        self._spoken: int | None = None
        self._pending = ""
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
            self._first = _State.REASONING if renderer.thinking(prompt_tail) else _State.CONTENT
            self._content_ends = dict.fromkeys(self._stop, _State.STOPPED)
            if self._call_open is not None:
                self._content_ends[self._call_open] = _State.HELD
            self._reasoning_ends = {self._think_close: _State.CONTENT, **self._content_ends}

    def push(self, ids: Sequence[int]) -> ReplyPart:
        """What becomes visible with these ids."""
        known = len(self._ids)
        self._ids.extend(ids)
        if self._spoken is None:
            stop = next((at for at, token in enumerate(ids) if token in self._stops), None)
            if stop is not None:
                self._spoken = known + stop
            self._pending += self._decoder.push(ids[:stop])
        return self._drain(final=False)

    def finish(self) -> Reply:
        """The whole reply. `rest` is what `push` had still held back."""
        self._pending += self._decoder.finish()
        if self._renderer.markup is None:
            return self._finish_unstreamed()
        first = self._drain(final=True)
        calls, malformed, extra = self._tool_calls()
        flushed = self._emit(self._held_from, self._cut(extra), final=True)
        text, reasoning = first.text + flushed.text, first.reasoning + flushed.reasoning
        whole_reasoning = "".join(self._reasoning)
        message = Message(
            role=Role.ASSISTANT,
            content="".join(self._text),
            reasoning=whole_reasoning or None,
            tool_calls=calls,
        )
        return Reply(message, malformed, ReplyPart(text, reasoning))

    def _tool_calls(self) -> tuple[tuple[ToolCall, ...], int, str]:
        """The calls, the number of malformed ones, and the held text that is no call."""
        if self._state is not _State.HELD:
            return (), 0, ""
        held, self._pending = self._pending, ""
        parsed = self._renderer.parse(self._tail, self._ids, self._tools)
        if not parsed.calls:
            if parsed.malformed:
                self._held_from = _State.CONTENT
            return (), len(parsed.malformed), held
        self._held_from = _State.CONTENT
        calls, left = self._split(held, parsed)
        return calls, len(parsed.malformed), left

    def _split(self, held: str, parsed: ParsedCalls) -> tuple[tuple[ToolCall, ...], str]:
        """The calls within the held text, and the text around them. A call that began before it was shown as
        text (the family's parser reads markers by id, this stream by their text) stays text."""
        decode = self._renderer.tokenizer.decode
        spoken = self._ids[: self._spoken]
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
        for stop in self._stop:
            text = text.partition(stop)[0]
        return text

    def _finish_unstreamed(self) -> Reply:
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
        return Reply(message, len(parsed.malformed), ReplyPart(content, parsed.reasoning or ""))

    def _named(self, calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        return tuple(
            ToolCall(call.id or f"call_{self._call_id}_{number}", call.name, call.arguments)
            for number, call in enumerate(calls)
        )

    def _drain(self, *, final: bool) -> ReplyPart:
        """Walk the pending text through the states, emitting what can no longer change its meaning."""
        text: list[str] = []
        reasoning: list[str] = []
        while True:
            before = self._state
            part = self._step(final=final)
            if part is not None:
                text.append(part.text)
                reasoning.append(part.reasoning)
            if self._state is before:  # a step that stays in its state has done all it can with this text
                return ReplyPart("".join(text), "".join(reasoning))

    def _step(self, *, final: bool) -> ReplyPart | None:
        match self._state:
            case _State.LEADING:
                return self._leading(final=final)
            case _State.REASONING:
                return self._visible(self._reasoning_ends, final=final)
            case _State.CONTENT:
                return self._visible(self._content_ends, final=final)
            case _State.HELD:
                return self._held()
            case _State.STOPPED:
                self._pending = ""
                return None

    def _leading(self, *, final: bool) -> ReplyPart | None:
        stripped = self._pending.lstrip()
        if stripped.startswith(self._think_open):
            self._pending = stripped[len(self._think_open) :]
            self._state = _State.REASONING
        elif final or (stripped and not self._think_open.startswith(stripped)):
            self._state = self._first
        return None

    def _visible(self, markers: dict[str, _State], *, final: bool) -> ReplyPart | None:
        """Emit up to the first marker, or up to what may become one."""
        found = [(at, marker) for marker in markers if (at := self._pending.find(marker)) >= 0]
        state = self._state
        if found:
            at, marker = min(found)
            shown, self._state = self._pending[:at].rstrip(), markers[marker]
            keep_from = len(shown) if self._state is _State.HELD else at + len(marker)
            self._pending = self._pending[keep_from:]
            self._held_from = state
            return self._emit(state, shown, final=True)
        keep = 0 if final else _overlap(self._pending, markers)
        shown, self._pending = (
            self._pending[: len(self._pending) - keep],
            self._pending[len(self._pending) - keep :],
        )
        return self._emit(state, shown, final=final)

    def _held(self) -> ReplyPart | None:
        """Reasoning that mentions a call stays reasoning if it is closed properly after all."""
        if self._held_from is _State.REASONING and self._renderer.markup is not None:
            shown, close, rest = self._pending.partition(self._think_close)
            if close:
                self._state, self._pending = _State.CONTENT, rest
                return self._emit(_State.REASONING, shown, final=True)
        return None

    def _emit(self, state: _State, shown: str, *, final: bool) -> ReplyPart:
        """Add to the channel. White space at its start is dropped; at its end it waits for what follows."""
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


def _overlap(text: str, markers: dict[str, _State]) -> int:
    """Length of the longest end of `text` that a marker could begin with."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
