"""The replies of the fuzzer's model: text, reasoning and tool calls, whole, cut and broken.

Independent of the dialect. The replies are the script of a `ScriptedEngine`. Invariant: the same dice give the same
replies.
"""

from __future__ import annotations

import json
import random

from outrider.lab.fakes.scripted_engine import ScriptedReply
from support.fuzz.grammar import NAMES, arguments, json_object, json_value, text

END = "<|im_end|>"
VOCABULARY = 452
"""Size of the vocabulary of the tests' tokenizer. An engine's ids outside of the vocabulary are refused."""


def replies(dice: random.Random, count: int) -> list[ScriptedReply]:
    return [_reply(dice) for _ in range(count)]


def _reply(dice: random.Random) -> ScriptedReply:
    share = dice.random()
    if share < 0.03:
        return ScriptedReply(ids=tuple(dice.randrange(VOCABULARY) for _ in range(dice.randrange(1, 30))))
    if share < 0.05:
        return ScriptedReply(reply=_said(dice), fail="rejected", after=dice.randrange(6))
    return ScriptedReply(reply=_said(dice))


def _said(dice: random.Random) -> str:
    said = _thought(dice) + dice.choice((_words, _words, _words, _calls, _calls, _calls, _broken, _nothing))(dice)
    said += dice.choice((END, END, END, END, END, END, "", "\n" + END, "<|endoftext|>", END + "beyond"))
    return said or END


def _thought(dice: random.Random) -> str:
    if dice.random() < 0.6:
        return ""
    thought = dice.choice(("plan", "a </tool_call> b", "1\n\n2 ", "é👩‍👧", "", " "))
    return dice.choice(
        (
            f"<think>\n{thought}\n</think>\n\n",
            f"<think>\n{thought}\n</think>\n\n",
            f"<think>\n{thought}\n</think>\n\n",
            f"<think>{thought}</think>",
            f"{thought}\n</think>\n\n",
            f"<think>\n{thought}",
            f"<think>\n{thought}</think><think>{thought}</think>",
        )
    )


def _nothing(dice: random.Random) -> str:
    return dice.choice(("", "", "\n", " "))


def _words(dice: random.Random) -> str:
    return "".join(text(dice) for _ in range(dice.choice((1, 1, 2, 4))))


def _calls(dice: random.Random) -> str:
    before = _words(dice) if dice.random() < 0.4 else ""
    calls = [_call(dice) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
    after = _words(dice) if dice.random() < 0.05 else ""
    return before + "\n".join(calls) + after


def _call(dice: random.Random) -> str:
    shape = dice.random()
    told = json.dumps(json_object(dice) if shape < 0.9 else json_value(dice), ensure_ascii=dice.random() < 0.5)
    if shape < 0.1:
        told = arguments(dice)
    spaced = dice.choice(
        ('{"name": "%s", "arguments": %s}', '{"name":"%s","arguments":%s}', ' {"name" : "%s",\n "arguments" : %s } ')
    )
    return f"<tool_call>\n{spaced % (dice.choice(NAMES), told)}\n</tool_call>"


def _broken(dice: random.Random) -> str:
    """Return a tool call that is broken or nearly valid."""
    whole = _call(dice)
    return dice.choice(
        (
            whole[: dice.randrange(len(whole))],
            whole + "</tool_call>",
            whole.replace("name", "nome", 1),
            whole.replace('"arguments"', '"parameters"', 1),
            "<tool_call>\nnot json\n</tool_call>",
            "<tool_call></tool_call>",
            '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "bash", "arguments": {"a":"\\ud800"}}\n</tool_call>',
            '<tool_call>\n{"name": "bash", "arguments": {"a": 1e999, "b": NaN}}\n</tool_call>',
            '<tool_call>\n{"name": "bash", "arguments": {"a": 1, "a": 2}}\n</tool_call>',
            '<tool_call>\n{"name": "bash", "arguments": ' + "[" * 60 + "]" * 60 + "}\n</tool_call>",
            '<tool_call>\n{"name": "bash", "arguments": {"a": ' + "9" * 400 + "}}\n</tool_call>",
            "<tool_call>\n<tool_call>\n" + whole,
        )
    )
