"""Reads back from a rendered prompt what a scripted model needs to know: its task, its tools, how far it is.

It knows the one chat format that the certifier's service renders in. Pure. Invariant: what it finds is what the
model was shown, whatever the wire said.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from outrider.certify.rows import HELPER_MARK, MARK
from outrider.messages import ToolSpec

START = "<|im_start|>"
END = "<|im_end|>"

_MARKS = re.compile(rf"({re.escape(MARK)}|{re.escape(HELPER_MARK)})([a-z-]+)")
_AGENT_ID = re.compile(r'"agent_id": ?"([^"]+)"')
_TOOLS = re.compile(r"\n<tools>\n(.*?)\n</tools>\n\nFor each function call", re.DOTALL)


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model call stands. `row` is its task's name (None when the prompt names none), `helper` whether a
    sub-agent makes it, `said` how many replies the conversation has since its task was given; `agent_id` is what the
    newest message calls a sub-agent that was started."""

    row: str | None
    helper: bool = False
    said: int = 0
    agent_id: str | None = None
    tools: tuple[ToolSpec, ...] = ()


def read_prompt(text: str) -> Scene:
    """The scene of a prompt's text."""
    messages = [part.removesuffix("\n").removesuffix(END) for part in text.split(START)[1:]]
    tools = tools_of(messages[0]) if messages else ()
    for index, message in enumerate(messages):
        if message.startswith("user\n") and (found := _MARKS.search(message)):
            # The last one is where the model is to speak now.
            said = sum(later.startswith("assistant\n") for later in messages[index + 1 : -1])
            named = _AGENT_ID.search(messages[-2])
            return Scene(
                row=found[2],
                helper=found[1] == HELPER_MARK,
                said=said,
                agent_id=named[1] if named else None,
                tools=tools,
            )
    return Scene(row=None, tools=tools)


def tools_of(system: str) -> tuple[ToolSpec, ...]:
    """The tools that a system message ends with."""
    blocks = _TOOLS.findall(system)
    return tuple(tool for line in (blocks[-1].split("\n") if blocks else []) if (tool := _tool(line)))


def _tool(line: str) -> ToolSpec | None:
    try:
        found: Any = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("function"), dict) else None
