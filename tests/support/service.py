"""A running service with the scripted engine, which listens on a free port, for tests of the layers above."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from outrider.api.server import serving
from outrider.config import Config, ModelConfig, PluginsConfig
from outrider.engines.base import EngineOptions
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.service.assembly import Opened, open_service
from outrider.service.service import Service
from outrider.spec import EngineSpec
from support.tokenizer import write_tokenizer

END = "<|im_end|>"
RENDERER = "qwen3"


def call(command: str, *, tool: str = "bash", argument: str = "command") -> str:
    """Return a reply that calls a tool, in the model's syntax."""
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{"{argument}": "{command}"}}}}\n</tool_call>{END}'


def say(text: str) -> str:
    """Return a reply in plain text, as the model generates it."""
    return f"{text}{END}"


def scripted_engine(tmp_path: Path, replies: Sequence[str | dict[str, Any]], **options: Any) -> ScriptedEngine:
    """Return an engine for `running_service`, for tests that stall, kill or inspect the engine."""
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    return ScriptedEngine(
        EngineOptions(name="scripted", tokenizer=tokenizer, options={"replies": list(replies)} | options)
    )


@asynccontextmanager
async def running_service(
    *,
    tmp_path: Path,
    replies: Sequence[str | dict[str, Any]] = (say("hello"),),
    engine: ScriptedEngine | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Service, str]]:
    """Yield a service and its URL. The arguments are those of `running_node`."""
    async with running_node(tmp_path=tmp_path, replies=replies, engine=engine, **settings) as (opened, url):
        yield opened.service, url


@asynccontextmanager
async def running_node(
    *,
    tmp_path: Path,
    replies: Sequence[str | dict[str, Any]] = (say("hello"),),
    engine: ScriptedEngine | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Opened, str]]:
    """Yield a service with its node, and its URL. `replies` are the script of the engine, unless an `engine` is given.
    `settings` are fields of `Config`. The folders of data, files and tokenizer are below `tmp_path`."""
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    files = tmp_path / "files"
    files.mkdir(exist_ok=True)
    own = () if engine else (EngineSpec(kind="scripted", name="scripted", options={"replies": list(replies)}),)
    defaults: dict[str, Any] = {
        "port": 0,
        "plugins": PluginsConfig(allow=("*",)),
        "data": tmp_path / "data",
        "files": files,
        "model": ModelConfig(tokenizer=tokenizer, renderer=RENDERER),
        "engines": own,
    }
    async with open_service(Config(**defaults | settings)) as opened, serving(*opened) as url:
        if engine is not None:
            await opened.service.pool.add_engine(engine)
        yield opened, url
