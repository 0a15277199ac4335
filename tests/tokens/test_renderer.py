"""The adapter of the `renderers` package: how much of a prompt it needs, what it refuses, how it is made."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidField, RequestError
from outrider.messages import Message, Role, ToolCall, image_from_bytes
from outrider.tokens.rendering.chat_template import ChatTemplate
from outrider.tokens.rendering.renderer import WINDOW_FAMILIES, History, Renderer, make_renderer
from outrider.tokens.rendering.tokenizer import Tokenizer
from support.tokenizer import write_tokenizer

from .clients import news, sampled
from .renderers import FAMILIES, family_renderer, small_tokenizer
from .strategies import TOOLS, plain

IM_END = 2
TRICKS = ("<think>", "</think>", "<|im_end|>", "<|im_start|>assistant\n<think>\n", "<|endoftext|>", "<tool_call>")

texts = st.tuples(plain, st.sampled_from(("", *TRICKS)), plain).map("".join)
asked = st.one_of(
    st.builds(Message, role=st.just(Role.USER), content=texts),
    st.builds(Message, role=st.just(Role.TOOL), content=texts, tool_call_id=st.just("c1")),
    st.builds(Message, role=st.just(Role.ASSISTANT), content=texts, reasoning=st.none() | texts),
)


def test_every_windowed_family_is_checked_here() -> None:
    assert set(FAMILIES) == WINDOW_FAMILIES


@given(
    st.lists(asked, max_size=4), asked.filter(lambda m: m.role is not Role.ASSISTANT), st.integers(0, 2**32), st.data()
)
def test_the_end_of_a_prompt_tells_as_much_as_all_of_it(
    history: list[Message], last: Message, seed: int, data: st.DataObject
) -> None:
    renderer = family_renderer(data.draw(st.sampled_from(FAMILIES)))
    keep: History = data.draw(st.sampled_from(("recorded", "template")))
    tools = data.draw(st.sampled_from([TOOLS, ()]))
    rng = Random(seed)
    prompt = renderer.render([*history, last], tools)
    output = sampled(rng)
    added = news(rng, Message(role=Role.ASSISTANT, tool_calls=(ToolCall("c1", "read_file", "{}"),)))

    tail = prompt[renderer.tail_start(prompt) :]
    assert renderer.opens_reasoning(tail) == renderer.opens_reasoning(prompt)
    assert renderer.parse(tail, output, tools) == renderer.parse(prompt, output, tools)
    longer = renderer.bridge(prompt, output, added, tools, keep)
    assert renderer.bridge(tail, output, added, tools, keep) == longer
    if longer is not None:
        again = [*prompt, *output, *longer]
        assert renderer.tail_start(again) > len(prompt) + len(output)
        assert renderer.bridge(again, output, added, tools, keep) == longer


@pytest.mark.parametrize("family", FAMILIES)
def test_an_appended_message_reads_as_if_rendered_whole(family: str) -> None:
    """The ids equal the family's own rendering of the whole conversation, which drops nothing here."""
    renderer = family_renderer(family)
    question = Message(role=Role.USER, content="Read the file.")
    call = ToolCall("c1", "read_file", '{"path": "a"}')
    results = [Message(role=Role.TOOL, content=text, tool_call_id="c1") for text in ("one", "two")]
    said = Message(role=Role.ASSISTANT, content="Yes.", reasoning="Hm.", tool_calls=(call,))
    whole = renderer.render([question, said, *results], TOOLS)
    prompt = renderer.render([question], TOOLS)
    reply = whole[len(prompt) : whole.index(IM_END, len(prompt)) + 1]
    added = renderer.bridge(prompt, reply, results, TOOLS, "recorded")
    assert whole[: len(prompt)] == prompt
    assert added is not None
    assert [*prompt, *reply, *added] == whole


def test_assistant_messages_and_silence_are_not_bridged() -> None:
    renderer = family_renderer("qwen3")
    prompt = renderer.render([Message(role=Role.USER, content="x")], ())
    assistant = Message(role=Role.ASSISTANT, content="y")
    assert renderer.bridge(prompt, [IM_END], [assistant], (), "recorded") is None
    assert renderer.bridge(prompt, [IM_END], [], (), "recorded") is None


def test_a_conversation_that_cannot_be_expressed_is_the_clients_error() -> None:
    renderer = family_renderer("qwen3.5")
    with pytest.raises(RequestError, match="template cannot render"):
        renderer.render([], ())
    image = Message(role=Role.USER, content="x", parts=(image_from_bytes("image/png", b"1"),))
    for messages in ([image], [Message(role=Role.SYSTEM, content="x"), image]):
        with pytest.raises(RequestError, match="text only"):
            renderer.render(messages, ())


@pytest.mark.parametrize("family", FAMILIES)
@given(st.lists(asked, min_size=1, max_size=3), st.lists(texts, min_size=1, max_size=2), st.data())
def test_late_system_messages_read_the_same_whether_new_or_rendered_whole(
    family: str, history: list[Message], late: list[str], data: st.DataObject
) -> None:
    renderer = family_renderer(family)
    question = Message(role=Role.USER, content="Read the file.")
    said = Message(role=Role.ASSISTANT, content="Yes.", reasoning="Hm.")
    systems = [Message(role=Role.SYSTEM, content=text) for text in late]
    new = data.draw(st.permutations([*systems, *(m for m in history if m.role is not Role.ASSISTANT)]))
    prompt, whole = renderer.render([question], ()), renderer.render([question, said, *new], ())
    added = renderer.bridge(prompt, [*small_tokenizer().encode("</think>Yes."), IM_END], new, (), "recorded")
    assert added is not None
    assert whole[len(whole) - len(added) :] == added
    role = Role.SYSTEM if family == "qwen3" else Role.USER
    shown = [
        message if message.role is not Role.SYSTEM else Message(role=role, content=message.content) for message in new
    ]
    assert renderer.render([question, said, *shown], ()) == whole


def test_system_messages_at_the_beginning_are_one_where_the_family_takes_one() -> None:
    one, two = (Message(role=Role.SYSTEM, content=text) for text in ("Be kind.", "Be brief."))
    user = Message(role=Role.USER, content="x")
    renderer = family_renderer("qwen3.5")
    both = Message(role=Role.SYSTEM, content="Be kind.\n\nBe brief.")
    assert renderer.render([one, two, user], ()) == renderer.render([both, user], ())
    assert renderer.render([one, Message(role=Role.SYSTEM, content=""), user], ()) == renderer.render([one, user], ())


def test_a_template_that_refuses_late_system_messages_is_given_a_users() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    renderer = Renderer(small_tokenizer(), "qwen3", template=ChatTemplate(source, special={}))
    late = Message(role=Role.SYSTEM, content="y")
    prompt = renderer.render([Message(role=Role.USER, content="x"), late], ())
    assert small_tokenizer().decode(prompt) == "[user]x[user]y"
    added = renderer.bridge(prompt, [IM_END], [late], (), "recorded")
    assert added is not None
    assert "user\ny" in small_tokenizer().decode(added)


def test_a_name_that_is_no_family(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    assert make_renderer(tokenizer, "qwen3").family == "qwen3"
    for name in ("nonsense", "template:nonsense", None, "qwen3.5", "template:qwen3"):
        with pytest.raises(InvalidField):
            make_renderer(tokenizer, name)


TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_a_model_with_a_template_of_its_own(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    tokenizer = Tokenizer.load(folder)
    renderer = make_renderer(tokenizer, "template:qwen3")
    prompt = renderer.render([Message(role=Role.USER, content="é?")], ({"name": "é"},))
    assert tokenizer.decode(prompt) == (
        '<|endoftext|>{"name": "é"}\n<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n<think>\n'
    )
    assert renderer.opens_reasoning(prompt)
    assert renderer.bridge(
        prompt, tokenizer.encode("a</think>b"), [Message(role=Role.USER, content="c")], (), "recorded"
    )
    with pytest.raises(RequestError, match="no system"):
        renderer.render([Message(role=Role.SYSTEM, content="x")], ())


def test_tojson_takes_what_published_templates_pass() -> None:
    tools = [{"name": "é", "a": 1}]
    for arguments, expected in (
        ("", '{"name": "é", "a": 1}'),
        ("(ensure_ascii=False)", '{"name": "é", "a": 1}'),  # GLM
        ("(ensure_ascii=True, sort_keys=True, separators=(',', ':'))", '{"a":1,"name":"\\u00e9"}'),
        ("(indent=1)", '{\n "name": "é",\n "a": 1\n}'),
    ):
        template = ChatTemplate("{{ tools[0] | tojson" + arguments + " }}", special={})
        assert template.render([], tools) == expected


def test_templates_cannot_reach_out() -> None:
    unsafe = ChatTemplate("{{ messages.__class__.__mro__ }}", special={})
    with pytest.raises(jinja2.TemplateError, match="unsafe"):
        unsafe.render([], [])


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidField) as missing:
        Tokenizer.load(tmp_path)
    assert "tokenizer.json" in (missing.value.hint or "")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidField):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("settings", ["{", "[]", '{"chat_template": "{% if %}"}', "{}"])
def test_a_folder_whose_settings_cannot_be_used(tmp_path: Path, settings: str) -> None:
    (write_tokenizer(tmp_path) / "tokenizer_config.json").write_text(settings)
    with pytest.raises(InvalidField):
        make_renderer(Tokenizer.load(tmp_path), "template:qwen3")


def test_remembered_ids_are_not_shared() -> None:
    tokenizer = small_tokenizer()
    tokenizer.encode("user\n").append(7)
    assert tokenizer.encode("user\n") == tokenizer.backend.encode("user\n", add_special_tokens=False).ids


@given(texts)
def test_text_survives_its_ids(text: str) -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
