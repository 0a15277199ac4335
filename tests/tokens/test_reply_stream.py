"""What a reply stream shows, and when. The split of the ids into chunks does not change the reply."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider.messages import Message, Role, ToolSpec
from outrider.tokens.rendering.parse_steps import MAX_PARSE_STEPS, PARSE_STEPS
from outrider.tokens.rendering.reply_stream import FinishedReply, ReplyPart, ReplyStream

from .renderers import FAMILIES, family_renderer, small_tokenizer
from .strategies import TOOLS, bad_calls, byte_id, hermes_call, plain, replies, solid, spellings, xml_call

TOKENIZER = small_tokenizer()
IM_END = 2


def prompt(family: str) -> list[int]:
    return family_renderer(family).render([Message(role=Role.USER, content="Where <think>")], TOOLS)


def stream(family: str = "qwen3", tools: tuple[ToolSpec, ...] = TOOLS, stop: tuple[str, ...] = ()) -> ReplyStream:
    return ReplyStream(family_renderer(family), prompt_tail=prompt(family), tools=tools, stop=stop, call_id="c1")


def read(
    chunks: list[list[int]],
    family: str = "qwen3",
    tools: tuple[ToolSpec, ...] = TOOLS,
    stop: tuple[str, ...] = (),
) -> FinishedReply:
    """Return the reply made of `chunks`. Checks that the streamed parts add up to the reply."""
    reading = stream(family, tools, stop)
    parts = [reading.push(chunk) for chunk in chunks]
    reply = reading.finish()
    parts.append(reply.rest)
    assert "".join(part.text for part in parts) == reply.message.content
    assert "".join(part.reasoning for part in parts) == (reply.message.reasoning or "")
    return reply


def said(
    text: str, family: str = "qwen3", tools: tuple[ToolSpec, ...] = TOOLS, stop: tuple[str, ...] = ()
) -> FinishedReply:
    return read([[token] for token in TOKENIZER.encode(text)], family, tools, stop)


def chop(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


def dense(text: str) -> str:
    return "".join(text.split())


@given(st.data())
def test_neither_spelling_nor_chunks_change_a_reply(data: st.DataObject) -> None:
    text = data.draw(replies())
    family = data.draw(st.sampled_from(FAMILIES))
    tools = data.draw(st.sampled_from([TOOLS, ()]))
    stop = data.draw(st.sampled_from([(), ("STOP",), ("STOP", "Obs:"), ("\n\n",)]))
    ids = data.draw(spellings(TOKENIZER, text))
    chunks = chop(ids, data.draw(st.lists(st.integers(0, 200), max_size=6)))

    one_by_one = read([[token] for token in ids], family, tools, stop)
    assert read(chunks, family, tools, stop).message == one_by_one.message
    assert read([ids], family, tools, stop).message == one_by_one.message
    assert said(text, family, tools, stop).message == one_by_one.message


@given(st.data())
def test_nothing_visible_is_lost(data: st.DataObject) -> None:
    """Text and reasoning together hold every character of the reply except thinking markers and white space. Malformed
    calls are text."""
    parts = data.draw(st.lists(plain | bad_calls, max_size=5))
    thought = data.draw(st.none() | solid.filter(lambda text: "<" not in text))
    opening = "" if thought is None else f"<think>\n{thought}\n</think>\n\n"
    text = "".join(parts)
    assume(thought is not None or not text.lstrip().startswith("<think>"))
    reply = said(opening + text).message
    assert dense(reply.content) == dense(text)
    assert dense(reply.reasoning or "") == dense(thought or "")
    assert reply.tool_calls == ()


@given(st.data())
def test_well_formed_calls_are_read_as_the_family_reads_them(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    write = hermes_call if family == "qwen3" else xml_call
    values = st.integers() | solid.map(str.strip).filter(lambda text: "<" not in text)
    filled = st.dictionaries(st.sampled_from(["path", "limit", "n"]), values, max_size=2)
    given_ = data.draw(st.lists(filled, min_size=1, max_size=3))
    before = data.draw(plain.filter(lambda text: "<" not in text))
    thought = data.draw(st.none() | solid.filter(lambda text: "<" not in text))
    opening = "" if thought is None else ("" if family != "qwen3" else "<think>\n") + thought + "\n</think>\n\n"
    if thought is None and family != "qwen3":
        opening = "</think>\n\n"
    text = opening + before + "\n".join(write("read_file", each) for each in given_)
    ids = [*data.draw(spellings(TOKENIZER, text)), IM_END]
    reply = read([[token] for token in ids], family).message

    parsed = family_renderer(family).parse(prompt(family), ids, TOOLS)
    assert len(parsed.calls) == len(given_)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [
        (call.name, call.arguments) for call in parsed.calls
    ]
    assert [call.id for call in reply.tool_calls] == [f"call_c1_{index}" for index in range(len(given_))]
    assert reply.content.strip() == parsed.content.strip() == before.strip()
    assert (reply.reasoning or "").strip() == (parsed.reasoning or "").strip() == (thought or "").strip()


@given(st.lists(st.integers(0, len(TOKENIZER) + 40), max_size=40), st.sampled_from(FAMILIES), st.booleans())
def test_any_ids_at_all_make_a_reply(ids: list[int], family: str, offered: bool) -> None:
    tools = TOOLS if offered else ()
    reply = read([[token] for token in ids], family, tools)
    assert reply.message == read([ids], family, tools).message
    reply.message.content.encode()


@given(st.lists(st.integers(0, len(TOKENIZER) + 40), max_size=30))
def test_streamed_text_is_the_decoded_text(ids: list[int]) -> None:
    text = TOKENIZER.stream()
    assert "".join(text.push([token]) for token in ids) + text.finish() == TOKENIZER.decode(ids)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode(errors="replace") == TOKENIZER.decode(ids)


@given(st.data())
def test_a_stop_string_ends_the_text_wherever_it_is_split(data: st.DataObject) -> None:
    before = data.draw(plain.filter(lambda text: "S" not in text and "<" not in text))
    after = data.draw(plain)
    ids = data.draw(spellings(TOKENIZER, f"{before}STOP{after}"))
    assert read([[token] for token in ids], stop=("STOP",)).message.content == before.strip()
    thinking = read([[token] for token in ids], "qwen3.5", stop=("STOP",)).message
    assert ((thinking.reasoning or ""), thinking.content) == (before.strip(), "")


def shown(pieces: list[str], **options: tuple[ToolSpec, ...]) -> list[ReplyPart]:
    reading = stream(**options)  # type: ignore[arg-type]  # options of any type
    return [reading.push(TOKENIZER.encode(piece)) for piece in pieces]


def test_text_is_out_as_soon_as_it_can_be_no_markup() -> None:
    assert [part.text for part in shown(["Hello", " wor", "ld <", "b> ", "x"])] == ["Hello", " wor", "ld", " <b>", " x"]
    assert [part.text for part in shown(["ab ", "<tool", "box>", "!"])] == ["ab", "", " <toolbox>", "!"]
    assert [part.text for part in shown(["a<tool"], tools=())] == ["a<tool"]
    assert [part.text for part in shown(["<think", "er>"])] == ["", "<thinker>"]


def test_reasoning_is_streamed_too() -> None:
    parts = shown(["<think>", "\nLet me", " see.</", "b>", "\n</think>", "\n\nYes"])
    assert [part.reasoning for part in parts] == ["", "Let me", " see.", "</b>", "", ""]
    assert [part.text for part in parts] == ["", "", "", "", "", "Yes"]


def test_a_long_call_holds_nothing_that_came_before_it() -> None:
    parts = shown(["I will read it.\n", "<tool_call>", '\n{"name"'])
    assert [part.text for part in parts] == ["I will read it.", "", ""]


def test_a_prefilled_opener_begins_in_reasoning() -> None:
    reply = said("Well.\n</think>\n\nYes.", "qwen3.5").message
    assert (reply.reasoning, reply.content) == ("Well.", "Yes.")
    repeated = said("<think>\nWell.</think>Yes.", "qwen3.5").message
    assert (repeated.reasoning, repeated.content) == ("Well.", "Yes.")


def test_a_question_that_ends_in_an_opener_opens_no_reasoning() -> None:
    renderer = family_renderer("qwen3")
    assert not renderer.opens_reasoning(renderer.render([Message(role=Role.USER, content="What is <think>")], ()))
    assert not renderer.opens_reasoning(renderer.render([Message(role=Role.USER, content="<think>\n")], ()))


def test_text_around_and_after_calls_is_kept() -> None:
    call = hermes_call("read_file", {"path": "a"})
    reply = said(f"One {call}\nTwo {call} Three ").message
    assert len(reply.tool_calls) == 2
    assert dense(reply.content) == "OneTwoThree"


def test_a_malformed_call_comes_back_as_text_and_is_counted() -> None:
    call, bad = hermes_call("read_file", {"path": "a"}), "<tool_call>\nnot json\n</tool_call>"
    reply = said(f"See:\n{bad}\n{call}")
    assert reply.malformed == 1
    assert reply.message.content == f"See:\n{bad}"
    assert [json.loads(made.arguments) for made in reply.message.tool_calls] == [{"path": "a"}]


def test_markup_spelled_in_ordinary_tokens_is_text() -> None:
    spelled = [token for letter in "<tool_call>" for token in TOKENIZER.encode(letter)]
    call = hermes_call("read_file", {"path": "a"})
    alone = read([TOKENIZER.encode("Write \n"), spelled, TOKENIZER.encode(" like so")])
    assert alone.message.content == "Write \n<tool_call> like so"
    assert alone.malformed == 0
    both = read([TOKENIZER.encode("Write "), spelled, TOKENIZER.encode(f": {call}")])
    assert both.message.content == "Write <tool_call>:"
    assert len(both.message.tool_calls) == 1


def test_a_call_inside_closed_reasoning_is_reasoning() -> None:
    draft = hermes_call("read_file", {"path": "a"})
    reply = said(f"<think>\nmaybe {draft}?\n</think>\n\nNo.")
    assert (reply.message.content, reply.message.tool_calls, reply.malformed) == ("No.", (), 0)
    assert dense(reply.message.reasoning or "") == dense(f"maybe {draft}?")


def test_a_call_closes_reasoning_that_is_never_closed() -> None:
    reply = said(f"<think>\nI must read. {hermes_call('read_file', {'path': 'a'})}").message
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("I must read.", "", 1)
    after = said(f"<think>\nI must read. {hermes_call('read_file', {'path': 'a'})} Wait.").message
    assert (after.reasoning, after.content, len(after.tool_calls)) == ("I must read.", "Wait.", 1)


def test_a_reply_that_ends_inside_a_character_shows_that_it_does() -> None:
    cut = byte_id(TOKENIZER, "é".encode()[0])
    assert read([TOKENIZER.encode("caf"), [cut]]).message.content == "caf\ufffd"
    assert read([TOKENIZER.encode("caf"), [cut, IM_END]]).message.content == "caf\ufffd"


def test_without_tools_markup_is_text() -> None:
    call = hermes_call("read_file", {"path": "a"})
    reply = said(f"So: {call}", tools=()).message
    assert (reply.content, reply.tool_calls) == (f"So: {call}", ())


def test_what_follows_the_stop_token_is_not_part_of_the_reply() -> None:
    call = TOKENIZER.encode(hermes_call("read_file", {"path": "a"}))
    hello = TOKENIZER.encode("Hello")
    assert read([hello, [IM_END], call]).message == Message(role=Role.ASSISTANT, content="Hello")
    assert read([[*hello, IM_END, *hello]]).message.content == "Hello"


@pytest.mark.deep
@pytest.mark.parametrize(
    "inside",
    ['{"name": "read_file", "arguments": ' + "1" * 6000 + "}", "[" * 30_000, '{"name": ' + '{"a":' * 30_000],
    ids=["digits", "lists", "objects"],
)
def test_a_degenerate_call_is_malformed_text(inside: str) -> None:
    text = f"<tool_call>\n{inside}\n</tool_call>"
    reply = said(text)
    assert (reply.message.content, reply.message.tool_calls, reply.malformed) == (text, (), 1)


def test_arguments_that_utf8_cannot_spell_stay_escaped() -> None:
    reply = said('<tool_call>\n{"name": "read_file", "arguments": {"path": "\\ud800"}}\n</tool_call>').message
    assert reply.tool_calls[0].arguments.encode()
    assert json.loads(reply.tool_calls[0].arguments) == {"path": "\ud800"}


INVOKE = '<invoke name="bash">\n<parameter name="command">ls</parameter>\n</invoke>\n'
PAIR = "<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
SEP = "<｜tool▁sep｜>bash\n"  # noqa: RUF001
REPEATED = {
    "parameters": ("qwen3.5", "<tool_call>\n<function=bash>\n" + "<parameter=command>\n" * 6000 + "</tool_call>"),
    "other ends": (
        "qwen3.5",
        "<tool_call>\n<function=bash>\n" + "<parameter=command></invoke>" * 6000 + "</tool_call>",
    ),
    "no names": ("qwen3.6", "<tool_call>\n<function=bash>\n" + "<parameter=" * 6000 + "</parameter></tool_call>"),
    "keys": ("laguna-xs.2", "<tool_call>bash\n" + "<arg_key>a</arg_key>\n<arg_value>ls\n" * 800 + "</tool_call>"),
    "ends first": (
        "laguna-xs.2",
        "<tool_call>" + "<arg_key></arg_value>" * 800 + "</arg_key><arg_value>" * 800 + "</tool_call>",
    ),
    "invokes": ("minimax-m2", "<minimax:tool_call>" + '<invoke name="bash">' * 6000 + "</minimax:tool_call>"),
    "parameters first": (
        "minimax-m2",
        '<minimax:tool_call><invoke name="a">'
        + '<parameter name="x">' * 6000
        + f"</invoke>{INVOKE}</minimax:tool_call>",
    ),
    "spaces": ("deepseek-v3", SEP + '```json\n{"a": "' + " " * 30_000 + '"}'),
    "lines": ("deepseek-v3", SEP + "```json\n" + "\n" * 3000 + '{"a": 1}'),
}


@pytest.mark.parametrize(("family", "text"), REPEATED.values(), ids=REPEATED.keys())
def test_an_output_that_takes_long_to_read_is_recognised(family: str, text: str) -> None:
    """A policy may repeat itself. Python runs nothing else while it searches for a regular expression."""
    assert PARSE_STEPS[family](text) > MAX_PARSE_STEPS


MARKERS = '<parameter name="a"/> <parameter=b> <invoke name="c"> <function=d> <arg_key> <arg_value> '
FILE = f"{MARKERS}\n" * 2000
LONG = {
    "qwen3.5": (
        "".join(xml_call("bash", {"command": f"ls {number}"}) for number in range(2000)),
        xml_call("bash", {f"argument {number}": "x" * 1000 for number in range(200)}),
        xml_call("write", {"content": FILE}),
        f"{FILE}{xml_call('bash', {'command': 'ls'})}<tool_call><function=write><parameter=content>{FILE}",
    ),
    "laguna-xs.2": (
        f"<tool_call>bash\n{PAIR * 2000}</tool_call>",
        f"<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>{FILE}</arg_value></tool_call>",
    ),
    "minimax-m2": (
        f"<minimax:tool_call>\n{INVOKE * 2000}</minimax:tool_call>",
        f'<minimax:tool_call>\n<invoke name="a"><parameter name="x">{FILE}</parameter></invoke></minimax:tool_call>',
    ),
    "deepseek-v3": (
        SEP + "```json\n" + json.dumps({"content": FILE}) + "\n```",
        SEP + "```json\n" + json.dumps(list(range(20_000)), indent=100) + "\n```",
    ),
}


@pytest.mark.parametrize("family", LONG)
def test_long_calls_are_read(family: str) -> None:
    """The arguments of a call may contain the markers of any family, for example in a file that the model writes."""
    for text in LONG[family]:
        assert PARSE_STEPS[family](text) < MAX_PARSE_STEPS


def test_a_file_of_markers_is_one_argument() -> None:
    [call] = read([TOKENIZER.encode(xml_call("write", {"content": FILE}))], "qwen3.5").message.tool_calls
    assert json.loads(call.arguments) == {"content": FILE.strip()}


def test_a_policy_that_repeats_itself_does_not_stop_the_process() -> None:
    text = REPEATED["parameters"][1]
    ids = TOKENIZER.encode(text)
    reading = stream("qwen3.5")
    reading.push(ids)
    begun = time.thread_time()
    reply = reading.finish()
    assert time.thread_time() - begun < 1.5
    assert (reply.message.tool_calls, reply.malformed) == ((), 1)
    assert reply.message.content == text
