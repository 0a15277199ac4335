"""A model's own chat template (Jinja), rendered the way its training did.

Only whole conversations: turns after the first are bridged by the family's renderer. The environment is
Jinja's sandboxed one with the filters and functions that published chat templates rely on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidField
from outrider.tokens.rendering.tokenizer import read_settings


class ChatTemplate:
    """`render` raises ValueError when the template refuses the conversation."""

    def __init__(self, source: str, *, special: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._special = special

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """From chat_template.jinja or tokenizer_config.json. Raises InvalidField when there is neither, or it is
        no template."""
        settings = read_settings(folder)
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else settings.get("chat_template")
        if not isinstance(source, str):
            raise InvalidField(f"{folder} holds no chat template", field="model.renderer")
        special = {name: value for name, value in settings.items() if name.endswith("_token")}
        try:
            return cls(source, special={name: _content(value) for name, value in special.items()})
        except jinja2.TemplateError as error:
            raise InvalidField(f"cannot read the chat template of {folder}: {error}", field="model.renderer") from error

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self._special
            )
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error


def _content(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
