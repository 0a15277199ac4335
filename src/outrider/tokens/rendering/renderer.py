"""The renderer seam: messages to ids, and sampled ids back to a message, for one model family.

The only module that knows the `renderers` package (pinned, 0.1.x). It knows no session and no engine.
Invariant: what `bridge` and `rejoin` return is appended to the ids so far, which it never changes; when the family
cannot prove that, they return None and the caller must branch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import renderers
from pydantic import TypeAdapter, ValidationError
from renderers.base import ToolCallParseStatus

from outrider.errors import InvalidField, RequestError
from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.tokens.rendering.markup import MARKUP, Markup
from outrider.tokens.rendering.plain import plain_conversation, plain_new
from outrider.tokens.rendering.skeleton import Skeleton
from outrider.tokens.rendering.template import ChatTemplate
from outrider.tokens.rendering.tokenizer import Tokenizer
from outrider.tokens.tree.canonical import EVERYTHING, SHOWN, Shown

History = Literal["recorded", "template"]


class Opening(msgspec.Struct, frozen=True):
    """How a prompt ends that has the model think, or not, against the family's default: with `after` in the place of
    `before`."""

    thinking: bool
    before: list[int]
    after: list[int]


WINDOW_FAMILIES = frozenset({"qwen3", "qwen3.5", "qwen3.6"})
"""Families whose bridge and parser were checked (tests/tokens) to look back no further than the last turn
close, so that they are given the prompt's tail instead of all of it."""

UNRENDERABLE = (ValueError, TypeError, KeyError, AssertionError, RecursionError)
"""What `renderers` and chat templates raise for a conversation that they cannot express."""

CALL_STATUSES = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL})
"""Well-formed calls. One of a tool nobody offered is a call too: the harness answers it."""


class ParsedCalls(msgspec.Struct, frozen=True):
    """What the family's parser found in a turn: its well-formed calls, each with its half-open span in the
    output ids, the text of the malformed ones, and, for families that are not streamed, the plain content and
    reasoning."""

    calls: tuple[ToolCall, ...]
    spans: tuple[tuple[int, int], ...]
    malformed: tuple[str, ...]
    content: str
    reasoning: str | None


class Halves(msgspec.Struct, frozen=True):
    """A prompt's ids: the tools and the system messages at its beginning, and the messages after them."""

    head: list[int]
    history: list[int]


class Renderer(Protocol):
    """One model family's rules. Ids are plain lists; all methods are pure.

    `render`, `halves`, `bridge` and `rejoin` raise RequestError for a conversation the family cannot express.
    """

    family: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    markup: Markup | None
    shown: Shown

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The whole prompt, ending where the model is to speak."""
        ...

    def halves(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Halves | None:
        """The same prompt, cut before the first message that is not the system's; None where that cannot be done."""
        ...

    def bridge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        """The ids to append to prompt + output so that they show `new`; None when that cannot be proved."""
        ...

    def rejoin(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        """The same for `messages[covered:]` with assistant messages among them: prompt + output show
        `messages[:covered]`."""
        ...

    def tail_start(self, prompt: Sequence[int]) -> int:
        """Where the part of a prompt begins that `bridge`, `parse` and `thinking` need to see."""
        ...

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt itself opens the model's reasoning."""
        ...

    @property
    def switches_thinking(self) -> bool:
        """Whether the end of a prompt can turn thinking on and off."""
        ...

    def opening(self, thinking: bool | None) -> Opening | None:
        """The end of a prompt that asks for this; None for the usual end, also where thinking cannot be switched."""
        ...

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedCalls: ...


class FamilyRenderer:
    """`Renderer` over the `renderers` package; `template` replaces the family's own whole-prompt rendering
    for models fine-tuned on a template of their own.

    A system message that is not at the beginning is shown as a user's where the family or the template refuses it
    there, and several at the beginning as one; `render`, `bridge` and `rejoin` do so alike.
    """

    def __init__(self, tokenizer: Tokenizer, family: str, *, template: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.markup = MARKUP.get(family)
        self._template = template
        self._layout = Skeleton(tokenizer) if family in WINDOW_FAMILIES else None
        self._keeping = _create(tokenizer, family, retention="all", layout=self._layout)
        self._following = _create(tokenizer, family, retention=None, layout=self._layout)
        self._parsing = _create(tokenizer, family, retention="all")
        self.stop_ids = tuple(self._keeping.get_stop_token_ids())
        self._stops = frozenset(self.stop_ids)
        self.shown = SHOWN.get(family, EVERYTHING) if template is None else EVERYTHING
        self._late_system = self._takes_late_system()

    def _takes_late_system(self) -> bool:
        """Whether the family and the template render a system message behind others."""
        spoken = [Message(role=role, content="x") for role in (Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.USER)]
        plain = plain_conversation(spoken, late_system=True)
        try:
            self._parsing.render_ids(plain, add_generation_prompt=True)
            if self._template is not None:
                self._template.render(plain, [])
        except UNRENDERABLE:
            return False
        return True

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        plain = plain_conversation(messages, late_system=self._late_system)
        try:
            if self._template is not None:
                return self.tokenizer.encode(self._template.render(plain, list(tools)))
            ids = self._keeping.render_ids(plain, tools=list(tools) or None, add_generation_prompt=True)
            return self._filled(ids)
        except UNRENDERABLE as error:
            raise RequestError(f"the {self.family} template cannot render these messages: {error}") from error

    def halves(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Halves | None:
        lead = next((at for at, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
        if self._template is not None or lead == len(messages):
            return None
        try:
            plain = plain_conversation(messages, late_system=self._late_system)
            laid_out = self._keeping.render(plain, tools=list(tools) or None, add_generation_prompt=True)
        except UNRENDERABLE as error:
            raise RequestError(f"the {self.family} template cannot render these messages: {error}") from error
        owners = np.asarray(laid_out.message_indices)
        first = lead - (len(messages) - len(plain))
        behind = np.flatnonzero(owners >= first)
        cut = int(behind[0]) if len(behind) else 0
        if not len(behind) or np.any((owners[cut:] >= 0) & (owners[cut:] < first)):
            return None
        parts = [laid_out.token_ids[:cut], laid_out.token_ids[cut:]]
        filled = [list(part) for part in parts] if self._layout is None else self._layout.fill_parts(parts)
        return Halves(*filled)

    def _filled(self, laid_out: Sequence[int]) -> list[int]:
        return list(laid_out) if self._layout is None else self._layout.fill(laid_out)

    def bridge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        if not new or any(message.role is Role.ASSISTANT for message in new):
            return None
        family = self._keeping if history == "recorded" else self._following
        before = [*prompt, *output]
        try:
            bridged = family.bridge_to_next_turn(
                list(prompt), list(output), plain_new(new, late_system=self._late_system), tools=list(tools) or None
            )
            if bridged is None or list(bridged.token_ids[: len(before)]) != before:
                return None
            return self._filled(bridged.token_ids[len(before) :])
        except UNRENDERABLE as error:
            raise RequestError(f"the {self.family} template cannot render these messages: {error}") from error

    def rejoin(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        new = messages[covered:]
        first = next((at for at, message in enumerate(new) if message.role is Role.ASSISTANT), len(new))
        asks = any(message.role in (Role.USER, Role.SYSTEM) for message in new)
        if self._template is not None or (history == "template" and asks):
            return None
        bridged = self.bridge(prompt, output, new[:first], tools, history)
        if bridged is None:
            return None
        try:
            shown = self._shown_from(messages, covered, covered + first, tools)
        except UNRENDERABLE as error:
            raise RequestError(f"the {self.family} template cannot render these messages: {error}") from error
        if shown is None or not _ends_with(bridged, [*shown.before, *shown.opener]):
            return None
        return [*bridged[: len(bridged) - len(shown.opener)], *shown.after]

    def _shown_from(
        self, messages: Sequence[Message], start: int, middle: int, tools: Sequence[ToolSpec]
    ) -> _ShownEnd | None:
        """The end of the whole rendering, from `messages[start]` on; None when the family mixes the messages."""
        plain = plain_conversation(messages, late_system=self._late_system)
        merged = len(messages) - len(plain)
        laid_out = self._keeping.render(plain, tools=list(tools) or None, add_generation_prompt=True)
        owners = np.asarray(laid_out.message_indices)
        own = np.flatnonzero(owners >= 0)
        if np.any(np.diff(owners[own]) < 0) or owners[own[-1]] < middle - merged:
            return None
        end = int(own[-1]) + 1
        cuts = [int(own[np.searchsorted(owners[own], at - merged)]) for at in (start, middle)]
        parts = [laid_out.token_ids[a:b] for a, b in ((cuts[0], cuts[1]), (cuts[1], len(owners)), (end, len(owners)))]
        filled = [list(part) for part in parts] if self._layout is None else self._layout.fill_parts(parts)
        return _ShownEnd(*filled)

    def tail_start(self, prompt: Sequence[int]) -> int:
        if self.family not in WINDOW_FAMILIES:
            return 0
        for index in range(len(prompt) - 1, -1, -1):
            if prompt[index] in self._stops:
                return index
        return 0

    def thinking(self, prompt: Sequence[int]) -> bool:
        if self.markup is None:
            return False
        return self.tokenizer.decode(prompt[-self._opener_length :]).rstrip().endswith(self.markup.think_open)

    @property
    def switches_thinking(self) -> bool:
        return bool(self._openings)

    def opening(self, thinking: bool | None) -> Opening | None:
        found = self._openings.get(thinking) if thinking is not None else None
        return found if found is not None and found.after != found.before else None

    @cached_property
    def _openings(self) -> dict[bool | None, Opening]:
        """Of families whose templates switch thinking by nothing but the end of the prompt, which is checked for the
        WINDOW_FAMILIES (tests/tokens). A template of the model's own may do otherwise."""
        if self._layout is None or self._template is not None:
            return {}
        usual = _opener(self._parsing)
        return {
            on: Opening(on, usual, _opener(_create(self.tokenizer, self.family, retention="all", enable_thinking=on)))
            for on in (False, True)
        }

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedCalls:
        try:
            parsed = self._parsing.parse_response(list(output), tools=list(tools) or None, prompt_ids=list(prompt))
        except (ValueError, TypeError, KeyError, RecursionError):  # such as a number of 5,000 digits, or 2,000 "["
            whole = self.tokenizer.decode([token for token in output if token not in self._stops])
            return ParsedCalls((), (), (whole,), "", None)
        calls: list[ToolCall] = []
        spans: list[tuple[int, int]] = []
        malformed: list[str] = []
        for found in parsed.tool_calls:
            start, end = found.token_span or (len(output), len(output))
            if _is_call(found):
                calls.append(ToolCall(found.id or "", found.name, _arguments(found.arguments)))
                spans.append((start, end))
            else:
                malformed.append(self.tokenizer.decode(output[start:end]) or found.raw)
        return ParsedCalls(tuple(calls), tuple(spans), tuple(malformed), parsed.content or "", parsed.reasoning_content)

    @cached_property
    def _opener_length(self) -> int:
        """Ids at the end of a prompt that can hold a reasoning opener and what a template puts behind it."""
        return 8 + (len(self.tokenizer.encode(self.markup.think_open)) if self.markup else 0)


class _ShownEnd(msgspec.Struct, frozen=True):
    """Ids of a rendering's end: of the messages before the middle, of what comes from there on, and of the opening of
    the model's turn alone, with which `after` ends."""

    before: list[int]
    after: list[int]
    opener: list[int]


def _opener(family: Any) -> list[int]:
    """The ids behind a conversation with which the model's turn begins."""
    laid_out = family.render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    own = np.flatnonzero(np.asarray(laid_out.message_indices) >= 0)
    return list(laid_out.token_ids[int(own[-1]) + 1 :])


def _ends_with(ids: list[int], end: list[int]) -> bool:
    return ids[len(ids) - len(end) :] == end


def make_renderer(tokenizer: Tokenizer, name: str | None) -> FamilyRenderer:
    """The renderer called `name`: a family, or `template:FAMILY` (first prompt by the folder's own
    chat_template.jinja, everything after it by the family). None asks the `renderers` package's table of
    model names. Raises InvalidField when there is none, or the tokenizer is not of that family.
    """
    folder = Path(tokenizer.name_or_path)
    if name is None:
        name = renderers.base.MODEL_RENDERER_MAP.get(tokenizer.name_or_path) or (
            renderers.base.MODEL_RENDERER_MAP.get("/".join(folder.parts[-2:]))
        )
        if name is None:
            raise InvalidField(
                f"cannot tell the model family of {tokenizer.name_or_path!r} from its name",
                field="model.renderer",
                hint=f"name it: --renderer with one of {', '.join(sorted(MARKUP))}, or template:FAMILY",
            )
    template = None
    if name.startswith("template:"):
        name = name.removeprefix("template:")
        template = ChatTemplate.load(folder)
    return FamilyRenderer(tokenizer, name, template=template)


def _create(
    tokenizer: Tokenizer, family: str, *, retention: str | None, layout: Skeleton | None = None, **settings: Any
) -> Any:
    try:
        config = TypeAdapter[Any](renderers.RendererConfig).validate_python(
            {"name": family, "thinking_retention": retention, **settings}
        )
        return renderers.create_renderer(layout or tokenizer, config)
    except ValidationError as error:
        raise InvalidField(
            f"unknown renderer family {family!r}",
            field="model.renderer",
            hint=f"families with streaming: {', '.join(sorted(MARKUP))}",
        ) from error
    except (AssertionError, ValueError, AttributeError) as error:
        raise InvalidField(
            f"the tokenizer in {tokenizer.name_or_path} is not of family {family!r}: {error}",
            field="model.renderer",
            hint="name the model's own family, or the folder of the right tokenizer",
        ) from error


def _is_call(found: Any) -> bool:
    """Whether the harness can answer it: it has a name and arguments, if not of the declared types (values of
    XML formats carry no type of their own)."""
    mistyped = found.status is ToolCallParseStatus.INVALID_JSON and isinstance(found.arguments, dict)
    return isinstance(found.name, str) and bool(found.name) and (mistyped or found.status in CALL_STATUSES)


def _arguments(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value or {}, ensure_ascii=False)
    return text if text.isascii() or _encodable(text) else json.dumps(value)


def _encodable(text: str) -> bool:
    """Whether it is free of lone surrogates, which JSON escapes can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
