"""Estimates in how many steps the `renderers` package reads the calls in a model's output.

The package (pinned, 0.1.12) reads the calls of some families with regular expressions, whose work grows with the square
or the cube of what a model repeats. Python runs nothing else while it searches for an expression. The families that
are not in PARSE_STEPS are read in linear time. Invariants: the estimate itself takes linear time, and well-formed calls
cost a few steps for each character, even if their arguments contain markers of calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PARSE_STEPS = 2 * 10**7
"""Maximum number of steps for one output, up to about half a second of work. An output with more is malformed. A model
that repeats an unfinished argument a thousand times would otherwise stop the whole process for up to a minute."""
_LONG_SPACE = re.compile(r"\s{256,}")
_FENCE = re.compile(r"```(?:json)?(\s*)")


def _in_vain(call: str, begin: str, middle: str, end: str, *, each_middle: bool = False) -> int:
    """Return the steps of an expression for `begin`, text, `middle`, text and `end`. From each `begin` without a later
    `middle` and `end`, the expression reads the rest of the call in vain. If `each_middle` is True, it does so again
    for each later `middle`."""
    first = call.rfind(middle, 0, max(call.rfind(end), 0)) + 1
    repeats = call.count(middle, first) if each_middle else 0
    return call.count(begin, first) * (1 + repeats) * len(call)


def _spaces(text: str) -> int:
    """Return the steps of an expression that looks for an end from each character of white space."""
    return sum(len(space) ** 2 // 20 for space in _LONG_SPACE.findall(text))


# The package reads only closed calls of these families, so the text behind the last end of a call does not count.
def _qwen(text: str) -> int:
    steps = 0
    for call in text.split("</tool_call>")[:-1]:
        steps += _in_vain(call, "<parameter=", ">", "</parameter>") + _in_vain(call, "<function=", "<function=", ">")
    return steps


def _minimax(text: str) -> int:
    steps = 0
    for block in text.split("</minimax:tool_call>")[:-1]:
        steps += _in_vain(block, '<invoke name="', '">', "</invoke>")
        for call in block.split("</invoke>")[:-1]:
            steps += _in_vain(call, '<parameter name="', '">', "</parameter>")
    return steps


def _laguna(text: str) -> int:
    calls = text.split("</tool_call>")[:-1]
    return sum(_in_vain(call, "<arg_key>", "<arg_value>", "</arg_value>", each_middle=True) for call in calls)


# The special characters in the next two functions are the models' own.
def _deepseek(text: str) -> int:
    steps = 0
    for call in text.split("<｜tool▁sep｜>")[1:]:  # noqa: RUF001
        # the expression begins again at each character of white space after the fence
        fence = _FENCE.search(call)
        steps += (1 + len(fence[1]) if fence else 1) * (len(call) + _spaces(call))
    return steps


def _deepseek_v4(text: str) -> int:
    begin, end = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"  # noqa: RUF001
    calls = text.split("</｜DSML｜invoke>")  # noqa: RUF001
    return sum(_in_vain(call, begin, '" string="', end, each_middle=True) for call in calls)


def _kimi(text: str) -> int:
    # the package uses the expression only for this marker, which the model must write as text
    return _spaces(text) if "<|tool_call_section_begin|>" in text else 0


PARSE_STEPS: dict[str, Callable[[str], int]] = {
    "qwen3.5": _qwen,
    "qwen3.6": _qwen,
    "qwen3.8": _qwen,
    "prime-qwen3": _qwen,
    "nemotron-3": _qwen,
    "nemotron-3-ultra": _qwen,
    "nemotron-3.5": _qwen,
    "minimax-m2": _minimax,
    "laguna-m.1": _laguna,
    "laguna-s-2.1": _laguna,
    "laguna-xs-2.1": _laguna,
    "laguna-xs.2": _laguna,
    "deepseek-v3": _deepseek,
    "deepseek-r1": _deepseek,
    "deepseek-v4": _deepseek_v4,
    "kimi-k2.5": _kimi,
}
"""For each family whose calls the package reads with such expressions: the function that estimates the steps."""
