"""The served OpenAPI description is true: Schemathesis makes requests from it and checks the replies against it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from outrider.client.client import AsyncClient
from outrider.config import CallbacksConfig, LanesConfig
from support.service import running_service, say

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SETTINGS = """\
[parameters]
"query.wait" = 0
"""
"""Random waits would take most of the time."""


FEW = ("--generation-deterministic", "--max-examples", "20", "--no-shrink")
"""The same requests in each run."""
MANY = ("--generation-database", "none", "--max-examples", "200")


@pytest.mark.parametrize(
    "examples", [pytest.param(FEW, marks=pytest.mark.deep), pytest.param(MANY, marks=pytest.mark.nightly)]
)
async def test_every_reply_is_described(tmp_path: Path, examples: tuple[str, ...]) -> None:
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    async with (
        running_service(
            tmp_path=tmp_path,
            replies=[say("hello")],
            token="root",
            lanes=LanesConfig(init=2, run=2, eval=2),
            callbacks=CallbacksConfig(allow=("127.0.0.1",)),  # no random host is called
        ) as (_, url),
        AsyncClient(url, token="root") as client,
    ):
        task = {
            "instruction": "say hello",
            "harness": {"agent": "tools"},
            "runtime": {"kind": "memory"},
            "evaluator": {"kind": "command", "run": "true"},
        }
        await client.wait([(await client.submit({"task": task})).id])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(tmp_path / "schemathesis.toml")),
            *("run", f"{url}/openapi.json", "--header", "Authorization: Bearer root", "--checks", CHECKS),
            *(*examples, "--max-time", "20", "--request-timeout", "40", "--no-color"),
            # Hypothesis parses Python while it makes requests; two threads in `ast.parse` end in a SystemError on
            # Python 3.11 ("AST constructor recursion depth mismatch").
            *("--workers", "1"),
            *("--exclude-path", "/v1/events"),  # an endless stream
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output[-20_000:]
