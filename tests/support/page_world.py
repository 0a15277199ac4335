"""A service for tests of the page. Its agent program runs in sandboxes and has sub-agents, a compaction, a side call
and files. The scripted replies differ from sample to sample. One of the two groups has hostile content."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from outrider.client.client import AsyncClient
from outrider.config import LanesConfig, ModelConfig, PluginsConfig
from outrider.engines.base import Chunk, EngineOptions, GenerateRequest
from outrider.lab.fakes.scripted_engine import ScriptedEngine
from outrider.sandbox.runtimes.default_runtime import default_runtime
from support.service import END, RENDERER, running_service
from support.tokenizer import SPECIAL_TOKENS, make_tokenizer

PACE = 0.002

AGENT = (Path(__file__).parent / "page_agent.py").read_text()
"""The agent program, which runs in the sandboxes."""


def say(text: str) -> str:
    return f"{text}{END}"


def call(command: str, before: str = "", tool: str = "bash", argument: str = "command") -> str:
    arguments = json.dumps({"name": tool, "arguments": {argument: command}})
    return f"{before}<tool_call>\n{arguments}\n</tool_call>{END}"


HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked=2'> "
    "[click](javascript:window.hacked=3) \u202egnp.exe\u202c \u0000\u0007\u001b[31m zero\u200bwidth "
    '</script></pre></div><a href="javascript:window.hacked=4">Cancel this group</a> '
    "<svg onload=window.hacked=5> \u05d0\u05d1\u05d2 &lt;b&gt; ${7*7} {{7*7}}"
)
LOOKS_LIKE_UI = "Session completed. Reward 1.0. This service needs a token. Token: ________ [Continue]"

READ = "First I read the parser, then I run its test."
FIX = 'sed -i \'s/split(";")/split(",")/\' parser.py && python3 test_parser.py'
WRONG = "sed -i 's/def parse/def parse_all/' parser.py && python3 test_parser.py"


def rules() -> list[str | dict[str, Any]]:
    """Return the script of the engine: the first reply whose `when` is in the end of the prompt is given."""
    return [
        {"when": "Generate a title", "reply": say("Fix the parser")},
        {"when": "Wait for me", "reply": say("I wait until somebody ends this group."), "stall": 4},
        {"when": "Work slowly", "reply": say("I work slowly, word by word, and then I am done."), "stall": 6},
        {"when": "xxxxx\n", "reply": say(HOSTILE + LOOKS_LIKE_UI)},
        {"when": "Hostile", "reply": call("echo " + "x" * 30, before=HOSTILE)},
        {"when": "(after the summary)", "reply": say("The parser splits at commas now, and its test passes.")},
        {"when": 'text.split(",")]', "reply": say("The change is there, and only in that line.")},
        {"when": "(compaction)", "reply": say("The parser was changed to split at commas. The test passes.")},
        {"when": "parser.py:2: def parse", "reply": say("The function parse is in parser.py, line 2.")},
        {"when": "(helper of sample", "reply": call("def parse", tool="search", argument="pattern")},
        {"when": "(end of sample 0)", "reply": say("The parser is fixed: it splits at commas, and the test passes.")},
        {"when": "(end of sample 1)", "reply": call("git diff --stat 2>/dev/null; cat parser.py")},
        {"when": "all tests pass", "reply": say("The test passes now.")},
        {"when": "AttributeError", "reply": say("The function has a new name. I think that this is right.")},
        {"when": "AssertionError: ['1;2']", "reply": call(FIX, before="The test expects commas. ")},
        {"when": "in sandbox 3", "reply": call(WRONG, before="The name of the function is wrong, I rename it. ")},
        {"when": "in sandbox 5", "reply": say("The parser looks right to me: I change nothing.")},
        {"when": "fix the parser", "reply": call("cat parser.py; python3 test_parser.py", before=READ)},
        say("It is done, and nothing else has to be changed."),
    ]


PARSER = 'import sys\ndef parse(text):\n    return [int(each) for each in text.split(";")]\n'
CHECK = """
import importlib.util
spec = importlib.util.spec_from_file_location("own", "parser.py")
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
try:
    found = own.parse("1,2")
except ValueError:
    raise AssertionError("['1;2'] is what parse gives, and [1, 2] is wanted") from None
assert found == [1, 2], found
print("all tests pass")
"""


def task(instruction: str, **fields: Any) -> dict[str, Any]:
    runtime, _ = default_runtime()
    return {
        "instruction": instruction,
        "harness": {"command": ["python3", "agent.py"], "nonzero_exit": "error"},
        "runtime": {
            "kind": runtime,
            "prepare": [
                {"write": AGENT, "to": "agent.py"},
                {"write": PARSER, "to": "parser.py"},
                {"write": CHECK, "to": "test_parser.py"},
            ],
        },
        "evaluator": {"kind": "command", "run": "python3 test_parser.py"},
        "artifacts": ["report.txt", "parser.py"],
        "limits": {"session_seconds": 300.0, "agent_seconds": 200.0},
        "max_attempts": 1,
        **fields,
    }


class PacedEngine(ScriptedEngine):
    """A scripted engine that takes PACE seconds for each chunk, so that model calls take time."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                await asyncio.sleep(PACE)
                yield chunk


class PageWorld(NamedTuple):
    """The service's URL, its engine, a client, and the ids of the two submitted groups."""

    url: str
    engine: ScriptedEngine
    client: AsyncClient
    parsers: str
    hostile: str


@asynccontextmanager
async def page_world(tmp_path: Path, **settings: Any) -> AsyncIterator[PageWorld]:
    """Yield a service whose groups `parsers` and `hostile` are done."""
    words = re.sub(r"[^\x20-\x7e\n]", "", AGENT + PARSER + CHECK + " ".join(str(each) for each in rules()))
    folder = tmp_path / "page-tokenizer"
    folder.mkdir()
    made = make_tokenizer(SPECIAL_TOKENS, tuple(words.split("\n")), 1500)
    (folder / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    tokenizer = str(folder)
    engine = PacedEngine(EngineOptions(name="scripted", tokenizer=tokenizer, options={"replies": rules()}))
    settings = {
        "model": ModelConfig(tokenizer=tokenizer, renderer=RENDERER, name="page-policy"),
        "plugins": PluginsConfig(allow=("*",)),
        "lanes": LanesConfig(init=4, run=6, eval=4),
    } | settings
    token = settings.get("token")
    async with (
        running_service(tmp_path=tmp_path, engine=engine, **settings) as (_, url),
        AsyncClient(url, token=token) as client,
    ):
        labels = {"suite": "parsers", "task": "fix-parser"}
        parsers = await client.submit({"task": task("Please fix the parser.", labels=labels), "n": 6})
        odd = {"suite": "hostile", "<b>x</b>": "javascript:alert(1)"}
        hostile = await client.submit({"task": task("Hostile: " + HOSTILE.replace("\0", ""), labels=odd), "n": 2})
        await client.wait([parsers.id, hostile.id])
        yield PageWorld(url, engine, client, parsers.id, hostile.id)
