"""Renders messages to token ids, and parses sampled ids back to a message, by the rules of one model family.

Only this module calls the `renderers` package (pinned, 0.1.x). Invariant: existing ids never change. `bridge` and
`bridge_rewritten` return ids that can be appended to the existing ids. If a method cannot prove that its result
represents the new messages, it returns None, and the caller must render the whole conversation (a fork).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import jinja2
import msgspec
import numpy as np
import renderers
from pydantic import TypeAdapter, ValidationError
from renderers.base import ToolCallParseStatus

from outrider.errors import InvalidField, RequestError
from outrider.messages import Image, Message, Role, ToolCall, ToolSpec, images_in
from outrider.tokens.rendering.chat_template import ChatTemplate, conversation_dicts, new_message_dicts
from outrider.tokens.rendering.image_grids import PLACEHOLDER, ImageSettings, read_image_settings
from outrider.tokens.rendering.parse_steps import MAX_PARSE_STEPS, PARSE_STEPS
from outrider.tokens.rendering.tokenizer import SHORT_TEXT, Tokenizer
from outrider.tokens.tree.canonical import ALL_PRINTED, PRINTED_FIELDS
from outrider.trajectory import Ids, ImageSpan

History = Literal["recorded", "template"]
"""How earlier turns appear in a prompt. With "recorded", earlier turns keep their recorded ids. With "template", the
reasoning of earlier turns is left out if the chat template drops it."""


class Markup(msgspec.Struct, frozen=True):
    """The markers that enclose reasoning and tool calls in a family's text. Text from `call_open` on is not streamed,
    but held back until the whole turn is parsed. Some families enclose all calls of a turn in one pair of markers,
    `call_open` and `calls_close`. For other families, `call_open` begins a single call and `calls_close` is ""."""

    think_open: str
    think_close: str
    call_open: str
    calls_close: str = ""


_HERMES = Markup("<think>", "</think>", "<tool_call>")
_KIMI = Markup("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
# The special characters in these two texts are the model's own.
_DEEPSEEK = Markup("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # noqa: RUF001

MARKUP: dict[str, Markup] = {
    "qwen3": _HERMES,
    "prime-qwen3": _HERMES,
    "qwen3-vl": _HERMES,
    "qwen3.5": _HERMES,
    "qwen3.6": _HERMES,
    "qwen3.8": _HERMES,
    "glm-4.5": _HERMES,
    "glm-5": _HERMES,
    "glm-5.1": _HERMES,
    "glm-5.3": _HERMES,
    "nemotron-3": _HERMES,
    "minimax-m2": Markup("<think>", "</think>", "<minimax:tool_call>"),
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
}
"""The markers of each family whose text can be streamed. For other families, the client receives the text only when
the turn is complete."""

WINDOW_FAMILIES = frozenset({"qwen3", "qwen3.5", "qwen3.6"})
"""Families that are known to have these three properties (tested in tests/tokens):

- `bridge` and `parse` need only the end of a prompt, from its last stop id on.
- Rendering only concatenates the tokenizer's ids, so a placeholder can stand for the ids of a text.
- Only the end of a prompt determines whether the model thinks."""

UNRENDERABLE = (ValueError, TypeError, KeyError, AssertionError, RecursionError, jinja2.TemplateError)
"""The errors that `renderers` and chat templates raise for a conversation that they reject."""

CALL_STATUSES = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL})
"""The parser's statuses for well-formed calls. A call of an unknown tool is well-formed: it is passed to the harness,
which replies with an error."""


class ThinkingSwitch(msgspec.Struct, frozen=True):
    """A change to the end of a prompt. If `thinking` is True, the change turns thinking on, otherwise off. The ids
    `usual_end`, the family's default end of a prompt, are replaced by the ids `switched_end`."""

    thinking: bool
    usual_end: list[int]
    switched_end: list[int]


class ParsedCalls(msgspec.Struct, frozen=True):
    """The parser's result for a turn.

    calls: the well-formed calls.
    spans: for each call, its half-open range in the output ids.
    malformed: the texts of malformed calls.
    content, reasoning: used only for model families without known markers, whose replies are not streamed."""

    calls: tuple[ToolCall, ...]
    spans: tuple[tuple[int, int], ...]
    malformed: tuple[str, ...]
    content: str
    reasoning: str | None


class SplitPrompt(msgspec.Struct, frozen=True):
    """The ids of a prompt, divided into two parts. `head` contains the tools and the system messages at the beginning.
    `history` contains everything after them."""

    head: list[int]
    history: list[int]


class Renderer:
    """The rules of one model family, from the `renderers` package. If the model was fine-tuned on a different chat
    template, that `template` renders whole prompts instead.

    `bridge`, `bridge_rewritten`, `parse` and `opens_reasoning` need only the tail of a prompt, from `tail_start` on.
    `render`, `render_split`, `bridge` and `bridge_rewritten` raise RequestError for a conversation that the family
    cannot render. All methods are pure and can be called from any thread.

    Some families and templates reject a system message after other messages. For such a family or template, both
    rendering and bridging turn a later system message into a user message. Rendering also joins several system messages
    at the beginning into one.

    If `images` is set, messages may contain images whose size in patches (`grid`) is known. Each image becomes as many
    placeholder tokens as the model reads for the image. If `images` is None, an image raises RequestError.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: str,
        *,
        template: ChatTemplate | None = None,
        images: ImageSettings | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.images = images
        self._image_id: int | None = None
        if images is not None:
            self._image_id = tokenizer.backend.token_to_id(PLACEHOLDER)
        self.markup = MARKUP.get(family)
        self.printed = PRINTED_FIELDS.get(family, ALL_PRINTED) if template is None else ALL_PRINTED
        self._template = template
        self._placeholders = PlaceholderTokenizer(tokenizer) if family in WINDOW_FAMILIES else None
        self._recorded_family = _create(tokenizer, family, retention="all", layout=self._placeholders)
        self._template_family = _create(tokenizer, family, retention=None, layout=self._placeholders)
        self._parser = _create(tokenizer, family, retention="all")
        self.stop_ids = tuple(self._recorded_family.get_stop_token_ids())
        self._stops = frozenset(self.stop_ids)
        # The library does not say whether the family and the template accept a system message after other messages. So
        # find out by rendering a short conversation with such a message.
        self._late_system = True
        roles = (Role.USER, Role.ASSISTANT, Role.SYSTEM, Role.USER)
        dicts = conversation_dicts([Message(role=role, content="x") for role in roles], late_system=True)
        try:
            self._parser.render_ids(dicts, add_generation_prompt=True)
            if template is not None:
                template.render(dicts, [])
        except UNRENDERABLE:
            self._late_system = False

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Turn the errors that the library and templates raise for a conversation (UNRENDERABLE) into RequestError."""
        try:
            yield
        except UNRENDERABLE as error:
            raise RequestError(f"the {self.family} template cannot render these messages: {error}") from error

    def _fill(self, *parts: tuple[Sequence[int], Sequence[Message]]) -> list[list[int]]:
        """Replace the placeholder of each long text with the text's ids, and repeat the placeholder of each image once
        for each of the image's tokens. Each argument is a part of the prompt, together with its messages. Raises
        RequestError if a part and its messages have different numbers of image placeholders and images."""
        ids = [part for part, _ in parts]
        filled = [list(part) for part in ids] if self._placeholders is None else self._placeholders.fill(ids)
        if self._image_id is None:
            return filled
        return [self._with_images(part, messages) for part, (_, messages) in zip(filled, parts, strict=True)]

    def _with_images(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        counts = [self._count_of(image) for message in messages for image in images_in(message)]
        if not counts and self._placeholder_id not in ids:
            return ids
        places = [at for at, token_id in enumerate(ids) if token_id == self._image_id]
        if len(places) != len(counts):
            raise RequestError(
                f"the placeholder of an image, {PLACEHOLDER}, is in the text of a message",
                field="messages",
                hint="leave the text out: the model would read it as an image",
            )
        for at, count in zip(reversed(places), reversed(counts), strict=True):
            ids[at : at + 1] = [self._placeholder_id] * count
        return ids

    @property
    def _placeholder_id(self) -> int:
        assert self._image_id is not None
        placeholder: int = self._image_id
        return placeholder

    def _count_of(self, image: Image) -> int:
        assert self.images is not None
        assert image.grid is not None
        return self.images.tokens_of(image.grid)

    def image_spans(self, delta: Ids, start: int, messages: Sequence[Message]) -> tuple[ImageSpan, ...]:
        """Return the position of each image of `messages` in a prompt. `delta` contains the prompt's ids from position
        `start` on. Raises RequestError if the placeholders in `delta` do not match the images."""
        if self._image_id is None:
            return ()
        places = np.flatnonzero(delta == self._image_id)
        spans: list[ImageSpan] = []
        taken = 0
        for message in messages:
            for image in images_in(message):
                count = self._count_of(image)
                own = places[taken : taken + count]
                if len(own) < count or int(own[-1]) - int(own[0]) != count - 1:
                    break
                assert image.grid is not None
                spans.append(ImageSpan(image.digest, start + int(own[0]), count, image.grid))
                taken += count
        if taken != len(places) or len(spans) != sum(len(images_in(message)) for message in messages):
            raise RequestError(
                "a placeholder of an image that the model itself has sampled is in the prompt",
                hint="begin a new conversation",
            )
        return tuple(spans)

    def _laid_out(self, dicts: list[dict[str, Any]], tools: Sequence[ToolSpec]) -> Any:
        """Return the whole prompt as the `renderers` package returns it, with a single placeholder for each image."""
        unread = {"process_multimodal": False} if self._image_id is not None else {}
        return self._recorded_family.render(dicts, tools=list(tools) or None, add_generation_prompt=True, **unread)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the ids of the whole prompt, up to the point where the model's reply begins."""
        dicts = conversation_dicts(messages, late_system=self._late_system)
        with self._refusals():
            if self._template is not None:
                ids = self.tokenizer.encode(self._template.render(dicts, list(tools)))
                return ids if self._image_id is None else self._with_images(ids, messages)
            if self._image_id is not None:
                return self._fill((self._laid_out(dicts, tools).token_ids, messages))[0]
            ids = self._recorded_family.render_ids(dicts, tools=list(tools) or None, add_generation_prompt=True)
            return self._fill((ids, ()))[0]

    def render_split(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> SplitPrompt | None:
        """Return the same ids as `render`, divided before the first message that is not a system message. Returns None
        if the ids cannot be divided there, if there are only system messages, or if a template renders the prompt."""
        leading = next((at for at, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
        if self._template is not None or leading == len(messages):
            return None
        with self._refusals():
            dicts = conversation_dicts(messages, late_system=self._late_system)
            layout = self._laid_out(dicts, tools)
            # the index of the message that each id belongs to, or -1
            owners = np.asarray(layout.message_indices)
            first = leading - (len(messages) - len(dicts))
            behind = np.flatnonzero(owners >= first)
            if not len(behind):
                return None
            cut = int(behind[0])
            if np.any((owners[cut:] >= 0) & (owners[cut:] < first)):
                return None  # the family renders a system message, or the tools, after other messages
            return SplitPrompt(*self._fill((layout.token_ids[:cut], ()), (layout.token_ids[cut:], messages)))

    def bridge(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        """Return the ids of the messages `new`, to be appended to `prompt` + `output`. Returns None if the family
        cannot prove that the result is correct, or if `new` is empty or contains an assistant message."""
        if not new or any(message.role is Role.ASSISTANT for message in new):
            return None
        family = self._recorded_family if history == "recorded" else self._template_family
        before = [*prompt, *output]
        dicts = new_message_dicts(new, late_system=self._late_system)
        with self._refusals():
            unread = {"process_multimodal": False} if self._image_id is not None else {}
            bridged = family.bridge_to_next_turn(list(prompt), list(output), dicts, tools=list(tools) or None, **unread)
            # The library should only append ids. Check this each time, because a change to earlier ids would also
            # change ids that the model sampled.
            if bridged is None or list(bridged.token_ids[: len(before)]) != before:
                return None
            return self._fill((bridged.token_ids[len(before) :], new))[0]

    def bridge_rewritten(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        messages: Sequence[Message],
        covered: int,
        tools: Sequence[ToolSpec],
        history: History,
    ) -> list[int] | None:
        """Like `bridge`, for new messages that include assistant messages. `prompt` + `output` are the ids of
        `messages[:covered]`. The method returns the ids of `messages[covered:]`.

        The library cannot bridge assistant messages. So only the messages before the first assistant message are
        bridged. The ids of the other messages are copied from a rendering of the whole conversation. Returns None in
        these cases:

        - The messages before the first assistant message cannot be bridged, or the bridge and the whole rendering have
          different ids for these messages.
        - A template renders whole prompts.
        - `history` is "template", and there are new user or system messages.
        """
        new = messages[covered:]
        before_reply = next((at for at, message in enumerate(new) if message.role is Role.ASSISTANT), len(new))
        asks = any(message.role in (Role.USER, Role.SYSTEM) for message in new)
        if self._template is not None or (history == "template" and asks):
            return None
        bridged = self.bridge(prompt, output, new[:before_reply], tools, history)
        if bridged is None:
            return None
        with self._refusals():
            dicts = conversation_dicts(messages, late_system=self._late_system)
            layout = self._laid_out(dicts, tools)
            owners = np.asarray(layout.message_indices)
            owned = np.flatnonzero(owners >= 0)
            merged = len(messages) - len(dicts)
            first, reply = covered - merged, covered + before_reply - merged
            if np.any(np.diff(owners[owned]) < 0) or owners[owned[-1]] < reply:
                return None  # the family renders messages in another order, or leaves some out
            first_at, reply_at = (int(owned[np.searchsorted(owners[owned], at)]) for at in (first, reply))
            ids, end = layout.token_ids, int(owned[-1]) + 1
            shown, added, opener = self._fill(
                (ids[first_at:reply_at], new[:before_reply]), (ids[reply_at:], new[before_reply:]), (ids[end:], ())
            )
        # `opener` contains the ids that open the model's turn. The bridge ends with `shown` and `opener`, and the
        # rendering ends with `added` and `opener`.
        shown += opener
        if bridged[len(bridged) - len(shown) :] != shown:
            return None
        return [*bridged[: len(bridged) - len(opener)], *added]

    def tail_start(self, prompt: Sequence[int]) -> int:
        """Return the index of the last stop id in a prompt, or 0. `bridge` and `parse` need only the ids from this
        index on."""
        if self.family not in WINDOW_FAMILIES:
            return 0
        for index in range(len(prompt) - 1, -1, -1):
            if prompt[index] in self._stops:
                return index
        return 0

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return True if the prompt ends with the marker that opens reasoning. The model's output then begins with
        reasoning."""
        if self.markup is None:
            return False
        return self.tokenizer.decode(prompt[-self._opener_length :]).rstrip().endswith(self.markup.think_open)

    @cached_property
    def _opener_length(self) -> int:
        """Number of ids at the end of a prompt that are decoded by `opens_reasoning` to find the marker. It is the
        number of the marker's ids, plus 8 for white space after the marker."""
        return 8 + (len(self.tokenizer.encode(self.markup.think_open)) if self.markup else 0)

    @property
    def switches_thinking(self) -> bool:
        """True if the ids at the end of a prompt can turn thinking on and off."""
        return bool(self._switches)

    def thinking_switch(self, thinking: bool | None) -> ThinkingSwitch | None:
        """Return the change that turns thinking on or off at the end of a prompt. Returns None if `thinking` is None or
        already the default, or if the family cannot turn thinking on and off."""
        found = self._switches.get(thinking) if thinking is not None else None
        return found if found is not None and found.switched_end != found.usual_end else None

    @cached_property
    def _switches(self) -> dict[bool | None, ThinkingSwitch]:
        # A model's own template may turn thinking on or off in another part of the prompt, so there are no switches for
        # a template.
        if self.family not in WINDOW_FAMILIES or self._template is not None:
            return {}
        usual = _turn_opening(self._parser)
        return {
            on: ThinkingSwitch(
                on, usual, _turn_opening(_create(self.tokenizer, self.family, retention="all", enable_thinking=on))
            )
            for on in (False, True)
        }

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: Sequence[ToolSpec]) -> ParsedCalls:
        """Parse the output of a turn. An output that cannot be parsed, or only in far too many steps (MAX_PARSE_STEPS),
        is returned as one malformed call."""
        if (steps_of := PARSE_STEPS.get(self.family)) is not None:
            text = self.tokenizer.decode([token for token in output if token not in self._stops])
            if steps_of(text) > MAX_PARSE_STEPS:
                return ParsedCalls((), (), (text,), "", None)
        try:
            parsed = self._parser.parse_response(list(output), tools=list(tools) or None, prompt_ids=list(prompt))
        # The library raises these errors for a number of 5,000 digits or 2,000 nested "[", for example.
        except (ValueError, TypeError, KeyError, RecursionError):
            whole = self.tokenizer.decode([token for token in output if token not in self._stops])
            return ParsedCalls((), (), (whole,), "", None)
        calls: list[ToolCall] = []
        spans: list[tuple[int, int]] = []
        malformed: list[str] = []
        for found in parsed.tool_calls:
            start, end = found.token_span or (len(output), len(output))
            # A call whose arguments have types other than the declared ones is still well-formed, because values in XML
            # formats have no types.
            mistyped = found.status is ToolCallParseStatus.INVALID_JSON and isinstance(found.arguments, dict)
            if isinstance(found.name, str) and found.name and (mistyped or found.status in CALL_STATUSES):
                calls.append(ToolCall(found.id or "", found.name, _arguments_text(found.arguments)))
                spans.append((start, end))
            else:
                malformed.append(self.tokenizer.decode(output[start:end]) or found.raw)
        return ParsedCalls(tuple(calls), tuple(spans), tuple(malformed), parsed.content or "", parsed.reasoning_content)


def _turn_opening(family: Any) -> list[int]:
    """Return the ids that open the model's turn: those after the last message of a prompt."""
    layout = family.render([{"role": "user", "content": "x"}], add_generation_prompt=True)
    owned = np.flatnonzero(np.asarray(layout.message_indices) >= 0)
    return list(layout.token_ids[int(owned[-1]) + 1 :])


def _arguments_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value or {}, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an unpaired surrogate can only be sent as a JSON escape
        return json.dumps(value)
    return text


class _Texts(threading.local):
    """The long texts that placeholders stand for in the current prompt. Each thread has its own list."""

    def __init__(self) -> None:
        self.texts: list[str] = []


class PlaceholderTokenizer:
    """The tokenizer that the library uses for WINDOW_FAMILIES. It encodes a long text as one placeholder, a negative
    id. After the library has rendered the prompt, `fill` replaces the placeholders with ids.

    Placeholders save time: the library processes the ids of a prompt one by one, several times, and most ids of a
    prompt come from a few long texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.name_or_path = tokenizer.name_or_path
        self.unk_token_id = tokenizer.unk_token_id
        self.eos_token_id = tokenizer.eos_token_id
        self.decode = tokenizer.decode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self._tokenizer = tokenizer
        self._own = _Texts()

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Return the ids of a short text. For a text longer than SHORT_TEXT characters, return a placeholder."""
        if len(text) <= SHORT_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._own.texts.append(text)
        return [-len(self._own.texts)]

    def fill(self, parts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Replace each placeholder in the parts of one prompt with the ids of its text, and then forget the texts."""
        texts, self._own.texts = self._own.texts, []
        filled: list[list[int]] = []
        for part in parts:
            ids: list[int] = []
            for token_id in part:
                if token_id >= 0:
                    ids.append(token_id)
                else:
                    ids += self._tokenizer.encode(texts[-token_id - 1])
            filled.append(ids)
        return filled


def make_renderer(tokenizer: Tokenizer, name: str | None, *, image_tokens: int = 0) -> Renderer:
    """Make a renderer. `name` is a model family, or `template:FAMILY`. With `template:`, the chat template in the
    tokenizer's folder renders whole prompts, and the rules of the family append later messages. If `name` is None, the
    family is looked up by the model's name in a table of the `renderers` package.

    An image may have at most `image_tokens` tokens. If this is 0, or if the folder has no image processor, images are
    refused.

    Raises InvalidField in these cases:

    - The family is unknown, is not found by the model's name, or does not match the tokenizer.
    - The template is missing or cannot be read.
    - The image processor is not supported."""
    folder = Path(tokenizer.name_or_path)
    if name is None:
        table = renderers.base.MODEL_RENDERER_MAP
        name = table.get(tokenizer.name_or_path) or table.get("/".join(folder.parts[-2:]))
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
    return Renderer(tokenizer, name, template=template, images=read_image_settings(folder, name, image_tokens))


@cache
def _settings_of_families() -> TypeAdapter[Any]:
    """Return the validator for the families' settings. The validator is cached, because every renderer needs it, and
    because building a validator takes 5 ms."""
    return TypeAdapter(renderers.RendererConfig)


def _create(
    tokenizer: Tokenizer,
    family: str,
    *,
    retention: str | None,
    layout: PlaceholderTokenizer | None = None,
    **settings: Any,
) -> Any:
    """Make the `renderers` package's renderer for a family. If `retention` is "all", prompts include the reasoning of
    earlier turns. If `retention` is None, the family's template decides whether prompts include this reasoning. Raises
    InvalidField if the family is unknown or does not match the tokenizer."""
    try:
        config = _settings_of_families().validate_python({"name": family, "thinking_retention": retention, **settings})
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
