"""The modules that Outrider's processes import at their start. Each needless library would cost every start 20 to 300
ms of processor time."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cli.test_serve import flags
from cli.world import program

PACKAGE = Path(__file__).parent.parent / "src" / "outrider"

NEVER = {"asyncpg", "prometheus_client", "httpx", "openai", "torch", "transformers", "datasets", "ray", "pytest", "mcp"}
"""Libraries that no process imports at its start. They belong to a store, an engine or a trainer that few users
have."""
SERVER = {"fastapi", "starlette", "uvicorn", "websockets", "renderers", "tokenizers", "jinja2", "cryptography"}
COMMAND_LINE = {"click", "rich"}
DATA = {"numpy", "pydantic", "msgspec", "aiohttp"}
SETTINGS = {"pydantic", "outrider.config", "outrider.spec"}
CLIENT = (
    NEVER
    | SERVER
    | SETTINGS
    | {
        *("aiohttp", "yarl", "attr", "numpy", "typer", "uvloop", "orjson", "xxhash"),
        *("outrider.service", "outrider.sandbox", "outrider.tasks.adapters", "outrider.lab", "outrider.engines"),
    }
)
"""Modules that are not imported by a command that only calls a service. Importing one of them, with the modules that it
imports, takes a tenth of a second."""
SESSION = "s-0019a4e2b6c1f3d2-0"
CLIENT_COMMANDS = {
    "status": ("status",),
    "status of a group": ("status", "g-0019a4e2b6c1f3d2", "--json"),
    "top": ("top", "--once"),
    "cancel": ("cancel", SESSION),
    "show": ("show", SESSION),
    "regrade": ("regrade", SESSION),
    "artifacts": ("artifacts", SESSION),
    "export": ("export", "--after", "3"),
    "gc": ("gc", "--days", "3", "--dry-run"),
    "consumers": ("consumers", "list"),
    "callbacks": ("callbacks", "list"),
    "engines": ("engines", "list"),
    "nodes": ("nodes", "list"),
    "policy": ("policy", "pause", "--mode", "abort"),
    "token": ("token", "create", "--role", "read", "--name", "me"),
    "run": ("run", str(PACKAGE.parent.parent / "examples" / "count_words.toml"), "-n", "2"),
}
"""Commands that call a service. No service runs at the address that the tests give them."""
MODULES = {"--version": 200, "--help": 260, "status": 330}
"""A command imports fewer modules than this, including Python's own. There is room for some more modules of Python's
libraries."""


def imported_late(file: str, function: str) -> list[str]:
    """Return the modules that a function imports by `from MODULE import ...`."""
    tree = ast.parse((PACKAGE / file).read_text())
    found = next(node for node in ast.walk(tree) if getattr(node, "name", "") == function)
    return [node.module for node in ast.walk(found) if isinstance(node, ast.ImportFrom) and node.module]


def modules_after(code: str) -> set[str]:
    """Return every module that a new Python process has imported after it ran the code, and the packages of these
    modules."""
    code = f"import sys\n{code}\nprint(*sys.modules, sep='\\n')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    names = ran.stdout.split()
    return {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}


def loading(command: str | None) -> str:
    """Return code that imports all modules of a command or a group of commands; of all commands if `command` is
    None."""
    return f"""
from outrider.cli.commands import commands
groups = [commands()]
for group in groups:
    for name in group.names if group is not groups[0] or {command!r} is None else [{command!r}]:
        member = group.member(name)
        groups += [member] if hasattr(member, "names") else []
"""


def running(*words: str) -> str:
    return (
        "import io, sys\nshown, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO())\n"
        f"from outrider.cli import main\nmain({words!r})\nsys.stdout = shown"
    )


def importing(*modules: str) -> str:
    return "\n".join(f"import {module}" for module in modules)


STARTS = {
    "a node": (
        importing("outrider.cli.node_process", *imported_late("cli/node_process.py", "_run")),
        NEVER
        | COMMAND_LINE - {"click"}  # imported by uvicorn
        | {"fastapi", "starlette", "aiohttp", "outrider.api.server", "outrider.client", "outrider.service.service"},
    ),
    "the version": (running("--version"), NEVER | SERVER | SETTINGS | COMMAND_LINE | DATA | {"asyncio"}),
    "the help": (running("--help"), CLIENT | {"asyncio", "outrider.client", "outrider.schemas"}),
    "a group's commands": (running("policy", "--help"), CLIENT),
    "a command that looks at tasks": (loading("task"), NEVER | SERVER - {"cryptography"} | {"outrider.lab"}),
    "all commands": (loading(None), NEVER | SERVER - {"cryptography"}),
    "a trainer's client": (
        "import outrider; outrider.Client",
        CLIENT | COMMAND_LINE | {"outrider.cli"},
    ),
    "the zygote of checks": ("import outrider.evaluators.checks.zygote", NEVER | SERVER | COMMAND_LINE | DATA),
    "a check of SWE-bench": ("import outrider.evaluators.checks.swebench_check", NEVER | SERVER | COMMAND_LINE | DATA),
}


FAST = {"a node", "the help", "a trainer's client", "status", "run"}
"""Processes whose tests are among the fast ones. The other tests are deep, because each test starts a Python."""


def each(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.deep) for name in names]


@pytest.mark.parametrize("process", each(STARTS))
def test_a_start_imports_nothing_that_the_process_does_not_need(process: str) -> None:
    code, unneeded = STARTS[process]
    assert not unneeded & modules_after(code)


@pytest.mark.parametrize("command", each(CLIENT_COMMANDS))
def test_a_command_that_calls_a_service_imports_little(command: str) -> None:
    words = (*CLIENT_COMMANDS[command], "--url", "http://127.0.0.1:9")
    imported = modules_after(running(*words))
    assert "outrider.client.client" in imported
    assert not CLIENT & imported


@pytest.mark.deep
@pytest.mark.parametrize("words", MODULES)
def test_a_command_of_the_first_hour_starts_at_once(words: str) -> None:
    assert len(modules_after(running(words))) < MODULES[words]


@pytest.mark.deep
async def test_a_service_and_its_nodes_import_nothing_that_they_do_not_need(tmp_path: Path) -> None:
    """All processes are real. They have threads, and with threads `outrider.tokens.rendering` imports more."""
    process = await program(
        "serve", *flags(tmp_path), "--processes", "2", env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    )
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"outrider is ready at ")
    process.send_signal(signal.SIGTERM)
    _, times = await process.communicate()
    imported = {
        line.split(b"|")[-1].strip().decode() for line in times.splitlines() if line.startswith(b"import time:")
    }
    assert imported >= {"fastapi", "renderers", "outrider.nodes.service_proxy"}
    assert not imported & NEVER
    assert b"Started server process" not in times
    assert not imported & {
        *("aiohttp", "outrider.client.client", "outrider.tasks", "outrider.trainers"),
        *("outrider.lab.demo", "outrider.lab.certify"),
    }
