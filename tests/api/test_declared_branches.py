"""A client's declaration of a call's branch is recorded, in every dialect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from outrider.trajectory import BranchKind, Turn

from .test_frozen_gateway import a_pair
from .test_gateway import KEY, a_gateway

ASKED = [{"role": "user", "content": "hello"}]


def request_of(dialect: str, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path below the session's key, and the body, of a call of `model`."""
    match dialect:
        case "chat":
            return "/v1/chat/completions", {"model": model, "messages": ASKED}
        case "messages":
            return "/v1/messages", {"model": model, "max_tokens": 9, "messages": ASKED}
        case "responses":
            return "/v1/responses", {"model": model, "input": "hello"}
        case _:
            return f"/v1beta/models/{model}:generateContent", {"contents": [{"parts": [{"text": "hello"}]}]}


async def declared(folder: Path, dialect: str, model: str, header: str | None = None) -> Turn:
    path, body = request_of(dialect, model)
    async with a_gateway(folder, "hi<|im_end|>") as (world, http):
        headers = {} if header is None else {"x-outrider-branch": header}
        async with http.post(f"/s/{KEY}{path}", json=body, headers=headers) as reply:
            assert reply.status == 200, await reply.text()
        return world.turns[0]


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
async def test_by_a_suffix_of_the_models_name(tmp_path: Path, dialect: str) -> None:
    turn = await declared(tmp_path, dialect, "org/model@subagent/code.reviewer-2")
    assert (turn.declared, turn.declared_label) == (BranchKind.SUBAGENT, "code.reviewer-2")


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses", "gemini"])
async def test_by_a_header_which_counts_more(tmp_path: Path, dialect: str) -> None:
    turn = await declared(tmp_path, dialect, "model@subagent", "compaction")
    assert (turn.declared, turn.declared_label) == (BranchKind.COMPACTION, "")


@pytest.mark.parametrize("model", ["claude@20250101", "m@retry", "m@unsure", "m@main/", "m@main/a b", "subagent"])
async def test_another_suffix_is_a_part_of_the_name(tmp_path: Path, model: str) -> None:
    assert (await declared(tmp_path, "chat", model)).declared is None


@pytest.mark.parametrize("header", ["", "helper", "retry", "main/", "main/a b", f"main/{'a' * 65}"])
async def test_a_header_of_another_form_is_refused_with_the_forms_there_are(tmp_path: Path, header: str) -> None:
    async with a_gateway(tmp_path, "hi<|im_end|>") as (world, http):
        path, body = request_of("chat", "model")
        async with http.post(f"/s/{KEY}{path}", json=body, headers={"x-outrider-branch": header}) as reply:
            error = (await reply.json())["error"]
        assert (reply.status, error["param"]) == (400, "x-outrider-branch")
        assert "main, subagent, compaction, auxiliary" in error["message"]
        assert world.turns == []


async def test_a_frozen_model_keeps_its_name(tmp_path: Path) -> None:
    path, body = request_of("chat", "judge@auxiliary/score")
    async with a_pair(tmp_path) as pair, aiohttp.ClientSession() as http:
        async with http.post(f"{pair.url}{path}", json=body) as reply:
            assert reply.status == 200, await reply.text()
        assert pair.names() == {"policy": 0, "judge": 1}
