"""A task of Polar in a namespace sandbox: the agent is a shell command, and tests of a repository grade its work."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from api.compat.test_polar import ended, serving
from outrider.config import SandboxesConfig
from support.service import say

pytestmark = pytest.mark.deep

TESTS = """\
from prices import total

def test_all():
    assert total([1, 2]) == 3

def test_old():
    assert total([]) == 1
"""
PREPARE = [
    {"type": "upload_dir", "source": "shop", "target": "shop"},
    {
        "type": "exec",
        "command": "git init -q . && git add -A && git -c user.name=a -c user.email=a@b.c commit -qm base",
        "cwd": "shop",
        "max_attempts": 2,
        "retry_backoff_seconds": 0.1,
    },
]
CALL = """\
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": '{instruction}'}]}).encode()
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("prices.py", "w").write(f"def total(prices):\\n    return {reply}\\n")
open(os.environ["ARTIFACTS_DIR"] + "/reply.txt", "w").write(os.environ["TASK_ID"] + " " + reply)
"""
PREFIXES = sorted({str(Path(prefix).resolve()) for prefix in (sys.prefix, sys.base_prefix)})
EXPECTED = {"test_all": "PASSED", "test_old": "FAILED"}


def task(number: int, expected: dict[str, str]) -> dict[str, Any]:
    python = f"{Path(sys.prefix).resolve()}/bin/python"
    return {
        "task_id": f"shop-{number}",
        "instruction": "Write the expression.",
        "agent": {"harness": "shell", "custom_shell": {"command": f"python3 -c {shlex.quote(CALL)}", "cwd": "shop"}},
        "runtime": {
            "prepare": PREPARE,
            "kwargs": {"kind": "namespace", "volumes": [f"{prefix}:{prefix}:ro" for prefix in PREFIXES]},
        },
        "evaluator": {
            "strategy": "test_on_output",
            "config": {
                "repo_dir": "shop",
                "test_command": f"{python} -m pytest -rA -p no:cacheprovider test_prices.py",
                "expected_output_json": json.dumps(expected),
                "test_timeout": 60,
                "exclude_patterns": ["*.pyc"],
            },
            "env": {"PYTHONDONTWRITEBYTECODE": "1"},
            "refresh_runtime": True,
        },
        "builder": {"strategy": "prefix_merging", "config": {}},
    }


async def test_a_shell_agent_is_graded_by_the_exact_map_of_its_tests(tmp_path: Path) -> None:
    files = tmp_path / "files" / "shop"
    files.mkdir(parents=True)
    (files / "test_prices.py").write_text(TESTS)
    (files / "prices.py").write_text("def total(prices):\n    return 0\n")
    async with serving(tmp_path, replies=[say("sum(prices)")], sandboxes=SandboxesConfig(allow=tuple(PREFIXES))) as (
        service,
        client,
        _,
    ):
        await client.submit(task(1, EXPECTED))
        await client.submit(task(2, EXPECTED | {"test_old": "PASSED"}))
        [right], [wrong] = (await ended(client, "shop-1")).results, (await ended(client, "shop-2")).results
        assert (right.status, right.error) == ("COMPLETED", None)
        assert right.trajectory.traces[0].reward == 1.0, right.metadata
        assert wrong.trajectory.traces[0].reward == 0.0
        assert "test_old" in wrong.metadata["outrider"]["reason"]
        assert right.trajectory.traces[0].prompt_messages == [{"role": "user", "content": "Write the expression."}]
        kept = await asyncio.to_thread(
            service.artifacts.file, right.session_id, "/tmp/polar-session/artifacts/reply.txt"
        )
        assert kept.read_text() == "shop-1 sum(prices)"
