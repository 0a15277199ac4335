"""Converts conversations to the dictionaries that chat templates take, and renders a model's own template (Jinja).

The module does not depend on the model family, except that the caller says whether the family accepts a system message
after other messages (`late_system`). Invariant: a message that is not at the beginning becomes the same dictionary,
whether the whole conversation is converted or only its new messages. If the dictionaries differed, appending messages
to a prompt would give other ids than rendering the whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidField, RequestError
from outrider.messages import Image, Message, Role
from outrider.tokens.rendering.tokenizer import read_settings
from outrider.tokens.tree.canonical import is_parsed_as_json

MessageDict = dict[str, Any]


def conversation_dicts(messages: Sequence[Message], *, late_system: bool) -> list[MessageDict]:
    """Convert a whole conversation to dictionaries. If `late_system` is False, the system messages at the beginning are
    joined into one, and later system messages become user messages. Raises RequestError for an image without a known
    size in patches (`grid`)."""
    if late_system:
        return [message_dict(message) for message in messages]
    leading = next((at for at, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))
    later = new_message_dicts(messages[leading:], late_system=False)
    if leading == 0:
        return later
    first, *others = [message_dict(message) for message in messages[:leading]]
    first["content"] = "\n\n".join(system["content"] for system in (first, *others) if system["content"])
    return [first, *later]


def new_message_dicts(messages: Sequence[Message], *, late_system: bool) -> list[MessageDict]:
    """Convert messages that follow other messages to dictionaries. If `late_system` is False, system messages become
    user messages. Raises RequestError for an image without a known size in patches (`grid`)."""
    dicts = [message_dict(message) for message in messages]
    for message in dicts if not late_system else ():
        if message["role"] == Role.SYSTEM.value:
            message["role"] = Role.USER.value
    return dicts


def message_dict(message: Message) -> MessageDict:
    """Convert one message to a dictionary. The arguments of a tool call become an object if they are a JSON object that
    is not too large to parse (`is_parsed_as_json`). Otherwise they stay text. Raises RequestError if a system
    message has images, or if the size of an image in patches (`grid`) is not known."""
    found: MessageDict = {"role": message.role.value, "content": message.content}
    if message.parts:
        if message.role is Role.SYSTEM or any(isinstance(part, Image) and part.grid is None for part in message.parts):
            raise RequestError(
                "this model is given text only: its engine takes token ids, and images have none"
                if message.role is not Role.SYSTEM
                else "a system message has no images",
                field="messages",
                hint="leave the image out, or serve the model through an engine of kind 'openai'",
            )
        found["content"] = [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part.text}
            for part in message.parts
        ]
    if message.reasoning is not None:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object_or_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


def _object_or_text(arguments: str) -> Any:
    if not is_parsed_as_json(arguments):
        return arguments
    try:
        value = json.loads(arguments)
        if isinstance(value, dict):
            # Some JSON escapes are unpaired surrogates, which no template can print. For such an escape, the next line
            # raises UnicodeEncodeError, which is a ValueError, and the arguments stay text.
            json.dumps(value, ensure_ascii=False).encode()
            return value
    except (ValueError, RecursionError):
        pass
    return arguments


class ChatTemplate:
    """A model's own chat template. It is rendered in the same way as for the model's training. The template renders
    only whole conversations. Messages that follow a rendered conversation are appended by the rules of the model
    family. `render` raises jinja2.TemplateError if the template rejects the conversation."""

    def __init__(self, source: str, *, special: dict[str, str]) -> None:
        # Published templates are written for `transformers`, so these settings, `tojson` and `raise_exception` are the
        # same as in `transformers`.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(source)
        self._special = special

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Load the template from chat_template.jinja, or from tokenizer_config.json if that file does not exist. Raises
        InvalidField if there is no template, or if it cannot be parsed."""
        settings = read_settings(folder)
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else settings.get("chat_template")
        if not isinstance(source, str):
            raise InvalidField(f"{folder} holds no chat template", field="model.renderer")
        special = {
            name: str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
            for name, value in settings.items()
            if name.endswith("_token")
        }
        try:
            return cls(source, special=special)
        except jinja2.TemplateError as error:
            raise InvalidField(f"cannot read the chat template of {folder}: {error}", field="model.renderer") from error

    def render(self, messages: list[MessageDict], tools: list[dict[str, Any]]) -> str:
        return self._template.render(
            messages=messages, tools=tools or None, add_generation_prompt=True, **self._special
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The template filter `tojson`, with the same arguments and defaults as in `transformers`. Published templates use
    some of these arguments."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
