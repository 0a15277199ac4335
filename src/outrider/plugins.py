"""How a name in a spec becomes code: a built-in, an entry point, or a dotted path `package.module:attribute`.

Nothing is scanned and nothing is patched; a built-in is named by its dotted path too, so that importing this
module imports none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from outrider.errors import InvalidField

BUILTINS: dict[str, dict[str, str]] = {
    "engine": {
        "embedded": "outrider.engines.embedded:EmbeddedEngine",
        "openai": "outrider.engines.adapters.openai:OpenAIEngine",
        "scripted": "outrider.testing.scripted_engine:ScriptedEngine",
        "sglang": "outrider.engines.adapters.sglang:SGLangEngine",
        "vllm": "outrider.engines.adapters.vllm:VLLMEngine",
    },
    "runtime": {
        "apptainer": "outrider.runtimes.apptainer.runtime:ApptainerRuntime",
        "docker": "outrider.runtimes.containers.runtime:DOCKER",
        "gvisor": "outrider.runtimes.containers.runtime:GVISOR",
        "memory": "outrider.testing.memory_runtime.runtime:MemoryRuntime",
        "namespace": "outrider.runtimes.namespace.runtime:NamespaceRuntime",
        "podman": "outrider.runtimes.containers.runtime:PODMAN",
        "process": "outrider.runtimes.host_process.process:ProcessRuntime",
        "process-landlock": "outrider.runtimes.host_process.landlock:LandlockRuntime",
    },
    "agent": {
        "tools": "outrider.harnesses.tool_agent:ToolAgent",
    },
    "evaluator": {
        "callable": "outrider.evaluators.function:CallableEvaluator",
        "command": "outrider.evaluators.command:CommandEvaluator",
    },
}


class PluginFailure(Exception):
    """A plugin did what no caller can let pass."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Around the code of a plugin: whatever it raises comes out as an Exception. To end the program, or to be cancelled
    by nobody, would otherwise end the service, or a session without an outcome."""
    try:
        yield
    except SystemExit as error:
        raise PluginFailure(f"it tried to end the program: {error!r}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PluginFailure("it was cancelled by itself") from error


def names(kind: str) -> list[str]:
    """Every name that `resolve` knows for a kind, sorted."""
    return sorted({**_published(kind), **BUILTINS.get(kind, {})})


def resolve(kind: str, name: str, *, field: str | None = None) -> Any:
    """The object `name` stands for. Raises InvalidField when there is none, naming what there is."""
    if ":" in name:
        return load(name, field=field)
    if path := BUILTINS.get(kind, {}).get(name) or _published(kind).get(name):
        return load(path, field=field)
    raise InvalidField(
        f"unknown {kind} {name!r}",
        field=field,
        hint=f"known: {', '.join(names(kind))}, or a dotted path 'package.module:attribute'",
    )


def load(path: str, *, field: str | None = None) -> Any:
    """Import `package.module:attribute`. Raises InvalidField when it is not there."""
    module_name, _, attribute = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported, or try to leave
        raise InvalidField(f"cannot import {path!r}: {type(error).__name__}: {error}", field=field) from error
    return target


@functools.cache  # to read what every installed package publishes takes milliseconds
def _published(kind: str) -> dict[str, str]:
    """The entry points of a kind: names and dotted paths."""
    return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=f"outrider.{kind}")}
