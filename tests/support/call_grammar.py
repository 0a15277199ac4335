"""Replies with given tool calls, as a structural tag of XGrammar allows them, and a tokenizer with the marker tokens of
every model family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from outrider.messages import Message, Role, ToolCall, ToolSpec
from outrider.tokens.rendering.chat_template import conversation_dicts
from outrider.tokens.rendering.renderer import Renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.tokenizer import make_tokenizer

MARKERS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_call_argument_begin|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"),
    *("[BOS]", "[EOS]", "[PAD]", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
    *("]~b]", "]~!b[", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    *(f"<｜{text}｜>" for text in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁sep")),  # noqa: RUF001
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call") for end in ("begin", "end")),  # noqa: RUF001
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("outputs", "output") for end in ("begin", "end")),  # noqa: RUF001
)

Call = tuple[str, Mapping[str, Any]]


@cache
def marker_tokenizer() -> Tokenizer:
    backend = make_tokenizer()
    backend.add_special_tokens(list(MARKERS))
    return Tokenizer(backend, name_or_path="markers", settings={"eos_token": "<|im_end|>"})


@cache
def marked_renderer(family: str) -> Renderer:
    return Renderer(marker_tokenizer(), family)


def rendering(family: str, calls: Sequence[Call], tools: Sequence[ToolSpec]) -> str:
    """Return the text of an assistant turn with these calls, as the family renders past turns. The text begins where
    its ids differ from the prompt's, and at the latest with the prompt's last token."""
    renderer = marked_renderer(family)
    asked = [Message(role=Role.USER, content="hi")]
    made = tuple(
        ToolCall(f"functions.{name}:{number}", name, json.dumps(arguments))
        for number, (name, arguments) in enumerate(calls)
    )
    replied = [*asked, Message(role=Role.ASSISTANT, content="", tool_calls=made)]
    before = renderer.render(asked, tools)
    dicts = conversation_dicts(replied, late_system=True)
    ids = list(renderer._parser.render_ids(dicts, tools=list(tools)))
    same = next(
        at for at, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other or at + 1 == len(before)
    )
    return renderer.tokenizer.decode(ids[same:])


def written(grammar: str, calls: Sequence[Call]) -> str:
    """Return the text of a reply with these calls, as the grammar allows it. Fails if the grammar does not allow a
    call."""
    tag = json.loads(grammar)
    assert tag["type"] == "structural_tag"
    return _written(tag["format"], calls)


def _written(form: dict[str, Any], calls: Sequence[Call]) -> str:
    match form["type"]:
        case "const_string":
            return str(form["value"])
        case "regex":
            assert form["pattern"] == "[0-9]{1,3}"
            return "0"
        case "sequence":
            return "".join(_written(part, calls) for part in form["elements"])
        case "triggered_tags" if len(form["tags"]) == 1 and form["tags"][0]["content"]["type"] == "tags_with_separator":
            [tag] = form["tags"]
            return str(tag["begin"]) + _written(tag["content"], calls) + str(tag["end"])
        case "tags_with_separator" | "triggered_tags":
            assert not (form["stop_after_first"] and len(calls) > 1)
            return str(form.get("separator", "\n")).join(_call(form["tags"], call) for call in calls)
        case "json_schema" | "qwen_xml_parameter":
            [(_, arguments)] = calls
            assert form["json_schema"]["type"] == "object"
            assert arguments.keys() <= form["json_schema"]["properties"].keys()
            return _arguments(form.get("style", form["type"]), arguments)
    raise AssertionError(f"an unknown format: {form}")


def _call(tags: Sequence[dict[str, Any]], call: Call) -> str:
    """Return the text of one call. In `begin`, the tool's name stands between two characters that no name contains."""
    [tag] = [tag for tag in tags if call[0] in re.findall(r"[A-Za-z0-9_-]+", tag["begin"])]
    return str(tag["begin"]) + _written(tag["content"], [call]) + str(tag["end"])


def _arguments(style: str, arguments: Mapping[str, Any]) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    match style:
        case "json_schema":
            return json.dumps(arguments)
        case "qwen_xml_parameter":
            return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        case "glm_xml":
            return "".join(f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>" for key, text in texts.items())
        case "minimax_xml":
            return "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in texts.items())
    raise AssertionError(f"an unknown style: {style}")
