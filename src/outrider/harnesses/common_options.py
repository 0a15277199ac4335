"""Options that have the same name, type and meaning in all presets. A preset only defines how its program gets the
option.

The module is pure data. Invariant: a preset cannot give such an option another type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ALLOWED_TOOLS = "allowed_tools"
"""Name of the option that lists the built-in tools to offer to the model. Tools of MCP servers are always offered."""

OptionType = Literal["string", "template", "integer", "number", "boolean", "names"]


class CommonOption(msgspec.Struct, frozen=True, kw_only=True):
    """An option that many presets have.

    choices: every value that at least one program accepts. If empty, all values are allowed.
    minimum: the smallest number.
    instead: a hint for users of a program without the option."""

    type: OptionType
    help: str
    instead: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None


COMMON: dict[str, CommonOption] = {
    "effort": CommonOption(
        type="string",
        choices=("minimal", "low", "medium", "high", "xhigh", "max"),
        help="How much the model thinks, in the program's own levels.",
        instead="task.sampling.thinking switches the model's thinking for every program",
    ),
    "thinking": CommonOption(
        type="boolean",
        help="Whether the program asks for thinking.",
        instead="task.sampling.thinking switches the model's thinking for every program",
    ),
    "system_prompt": CommonOption(
        type="string",
        help="The text that replaces the program's own system prompt.",
        instead="put the text into the task's instruction",
    ),
    "append_system_prompt": CommonOption(
        type="string",
        help="A text that is added to the program's own system prompt.",
        instead="put the text into the task's instruction",
    ),
    ALLOWED_TOOLS: CommonOption(
        type="names",
        help="The only built-in tools that the model is offered: a list, or names separated by commas. The tools "
        "of the task's MCP servers are offered besides.",
        instead="take away what the tools need: programs, files or the network of the sandbox",
    ),
    "max_turns": CommonOption(
        type="integer",
        minimum=1,
        help="Maximum number of model calls after which the program itself ends its run.",
        instead="task.limits.turns bounds the model calls of every program",
    ),
    "context_tokens": CommonOption(
        type="integer",
        minimum=1,
        help="The model's context length in tokens.",
        instead="the engine's context length bounds every prompt",
    ),
    "budget": CommonOption(
        type="number",
        minimum=0,
        help="Maximum cost in US dollars, by the program's own list of prices, after which it ends its run.",
        instead="task.limits.response_tokens bounds the sampled tokens of every program",
    ),
}
