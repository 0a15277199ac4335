"""Forced tool calls on a real vLLM, in each dialect, and the grammars of all families in vLLM's own XGrammar."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.constraint import ToolChoice
from outrider.spec import EngineSpec
from outrider.tokens.rendering.call_grammar import FORMS, call_constraint
from outrider.trajectory import FinishReason, unpack_ids
from support.call_grammar import Call, rendering, written

from .dialect_clients import CLIENTS, PARAMETERS, TOOL, DialectClient, Way
from .parked import a_parked_session
from .vllm_cpu import VllmServer

pytestmark = pytest.mark.real

NARROW = {
    "type": "object",
    "properties": {"command": {"enum": ["ls", "pwd"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["command", "count"],
}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "chat": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": TOOL}}}],
    "messages": [{"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": TOOL}}],
    "responses": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "name": TOOL}}],
    "gemini": [
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
        {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [TOOL]}}},
    ],
}
NAMED = [CHOICES[name][1] for name in ("chat", "messages", "responses")]
"""The choices that allow only one call."""
WAY = Way(max_tokens=400, temperature=2.0)
"""At this temperature, the tiny policy calls no tool unless it is forced."""
CHECK = """
import json, sys, xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts
for line in sys.stdin:
    grammar, text = json.loads(line)
    print(int(accepts(xgrammar.Grammar.from_structural_tag(grammar), text)))
"""


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
async def test_a_real_engine_keeps_a_forced_call(client: DialectClient, vllm_url: VllmServer, tmp_path: Path) -> None:
    engine = EngineSpec(kind="vllm", url=vllm_url.url, model=vllm_url.model)
    async with (
        a_parked_session(tmp_path, vllm_url.model_folder, engine, renderer="qwen3") as session,
        aiohttp.ClientSession() as http,
    ):
        cut: list[int] = []
        for number, choice in enumerate(CHOICES[client.name] * 3):
            body = client.body([client.user("Where is maple?")], WAY, stream=False)
            body = json.loads(json.dumps(body).replace(json.dumps(PARAMETERS), json.dumps(NARROW))) | choice
            url = session.base_url + client.path(stream=False)
            async with http.post(url, json=body, headers=client.headers) as response:
                told = await response.json()
                assert response.status == 200, told
            reply = client.read(told).reply
            if reply.content or not reply.tool_calls:
                # The grammar allows any whitespace, and the tiny policy may write it until its tokens are used up.
                cut.append(number)
            for call in reply.tool_calls:
                arguments = json.loads(call.arguments)
                assert call.name == TOOL
                assert arguments["command"] in ("ls", "pwd")
                assert 1 <= arguments["count"] <= 9
            if choice in NAMED and number not in cut:
                assert len(reply.tool_calls) == 1
        await session.end()
        turns = await session.turns()
    assert len(turns) == 6
    assert [turns[number].finish for number in cut] == [FinishReason.LENGTH] * len(cut)
    assert len(cut) < 6
    assert all(turn.altered and unpack_ids(turn.output_ids).size for turn in turns)


def test_xgrammar_accepts_each_familys_own_calls_and_no_others(vllm_prefix: Path) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": NARROW}} for name in ("bash", "look", "no")]
    one: list[Call] = [("bash", {"command": "ls", "count": 3})]
    two: list[Call] = [*one, ("look", {"command": "pwd", "count": 1})]
    wrong: list[Call] = [("bash", {"command": "rm", "count": 3})]
    other: list[Call] = [("no", {"command": "ls", "count": 3})]
    cases: list[tuple[str, str, bool]] = []
    for family in FORMS:
        forced = grammar(family, tools, required=True)
        free = grammar(family, tools, required=False)
        everything = call_constraint(
            family, tools, ToolChoice(names=("bash", "look", "no"), required=True, single=False, field="x")
        ).text
        single = grammar(family, tools, required=True, single=True)
        cases += [(forced, written(forced, calls), True) for calls in (one, two)]
        cases += [(forced, own_text(family, calls, tools), True) for calls in (one, two)]
        cases += [(forced, written(forced, wrong), False), (forced, written(everything, other), False)]
        cases += [(forced, "", False), (forced, "Some text.", False), (free, "Some text.", True)]
        cases += [(free, "Some text.\n" + written(forced, one), True)]
        cases += [(free, "Some text.\n" + written(everything, other), False)]
        cases += [(single, written(forced, one), True), (single, written(forced, two), False)]
    lines = "\n".join(json.dumps([form, text]) for form, text, _ in cases)
    python = vllm_prefix / "bin" / "python"
    done = subprocess.run([python, "-c", CHECK], input=lines, capture_output=True, text=True, check=True)
    found = [answer == "1" for answer in done.stdout.split()]
    assert [(text, held) for (_, text, held), is_held in zip(cases, found, strict=True) if held != is_held] == []
    print(f"{len(cases)} texts of {len(FORMS)} families")


def grammar(family: str, tools: list[dict[str, Any]], *, required: bool, single: bool = False) -> str:
    choice = ToolChoice(names=("bash", "look"), required=required, single=single, field="x")
    return call_constraint(family, tools, choice).text


def own_text(family: str, calls: list[Call], tools: list[dict[str, Any]]) -> str:
    """Return the calls as the family renders them, from the first marker of a call to the last."""
    form, text = FORMS[family], rendering(family, calls, tools)
    begin = form.before or form.begin.partition("NAME")[0]
    end = form.after or form.end.lstrip("}\n")
    return text[text.index(begin) : text.rindex(end) + len(end)]
