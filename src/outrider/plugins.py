"""Finds the class or function that a name in a spec refers to. A name is a built-in, an entry point of an installed
package, or a dotted path `package.module:attribute`.

Invariant: importing this module imports no plugin.
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
        "prorl": "outrider.engines.adapters.prorl:ProrlEngine",
        "relay": "outrider.engines.relay.engine:RelayEngine",
        "scripted": "outrider.lab.fakes.scripted_engine:ScriptedEngine",
        "sglang": "outrider.engines.adapters.sglang:SGLangEngine",
        "sglang-router": "outrider.engines.adapters.router:SGLANG_ROUTER",
        "verl-workers": "outrider.engines.adapters.verl_workers:VerlWorkersEngine",
        "vllm": "outrider.engines.adapters.vllm:VLLMEngine",
        "vllm-router": "outrider.engines.adapters.router:VLLM_ROUTER",
    },
    "runtime": {
        "apptainer": "outrider.sandbox.runtimes.apptainer.runtime:ApptainerRuntime",
        "docker": "outrider.sandbox.runtimes.containers.runtime:DOCKER",
        "e2b": "outrider.sandbox.runtimes.e2b.runtime:E2BRuntime",
        "gvisor": "outrider.sandbox.runtimes.containers.runtime:GVISOR",
        "kubernetes": "outrider.sandbox.runtimes.kubernetes.runtime:KubernetesRuntime",
        "memory": "outrider.lab.fakes.memory_runtime.runtime:MemoryRuntime",
        "namespace": "outrider.sandbox.runtimes.namespace.runtime:NamespaceRuntime",
        "podman": "outrider.sandbox.runtimes.containers.runtime:PODMAN",
        "process": "outrider.sandbox.runtimes.host_process.process:ProcessRuntime",
        "process-landlock": "outrider.sandbox.runtimes.host_process.landlock:LandlockRuntime",
    },
    "agent": {
        "tools": "outrider.harnesses.tool_agent:ToolAgent",
    },
    "evaluator": {
        "all": "outrider.evaluators.combined:CombiningEvaluator",
        "callable": "outrider.evaluators.function:CallableEvaluator",
        "code": "outrider.evaluators.code.evaluator:CodeEvaluator",
        "command": "outrider.evaluators.command:CommandEvaluator",
        "completed": "outrider.evaluators.completed:CompletedEvaluator",
        "harbor": "outrider.evaluators.harbor:HarborEvaluator",
        "http": "outrider.evaluators.http:HttpEvaluator",
        "judge": "outrider.evaluators.judge.evaluator:JudgeEvaluator",
        "math": "outrider.evaluators.maths:MathEvaluator",
        "reported": "outrider.evaluators.reported:ReportedEvaluator",
        "reasoning-gym": "outrider.evaluators.reasoning:ReasoningGymEvaluator",
        "swebench": "outrider.evaluators.swebench.evaluator:SwebenchEvaluator",
        "weighted": "outrider.evaluators.combined:CombiningEvaluator",
    },
}


class PluginFailure(Exception):
    """Replaces a plugin's exception, such as SystemExit, if the exception must not reach the event loop."""


@contextlib.contextmanager
def plugin_code() -> Iterator[None]:
    """Within the block, turn two exceptions of a plugin into PluginFailure: SystemExit, and CancelledError if nobody
    has cancelled the task.

    Otherwise a plugin that calls sys.exit() would end the service, and a plugin that raises CancelledError would end
    its session without a result.
    """
    try:
        yield
    except SystemExit as error:
        raise PluginFailure(f"it tried to exit the process: {error!r}") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PluginFailure("it raised CancelledError, but nobody had cancelled it") from error


def names(kind: str) -> list[str]:
    """Return the sorted names of all plugins of a kind, such as "engine": built-ins and entry points."""
    return sorted({**_entry_points(kind), **BUILTINS.get(kind, {})})


def resolve(kind: str, name: str, *, field: str | None = None) -> Any:
    """Return the object that `name` refers to. If there is none, raises InvalidField, which lists the available
    names."""
    if ":" in name:
        return load(name, field=field)
    if path := BUILTINS.get(kind, {}).get(name) or _entry_points(kind).get(name):
        return load(path, field=field)
    raise InvalidField(
        f"unknown {kind} {name!r}",
        field=field,
        hint=f"known: {', '.join(names(kind))}, or a dotted path 'package.module:attribute'",
    )


def load(path: str, *, field: str | None = None) -> Any:
    """Import `package.module:attribute`. Raises InvalidField if it cannot be imported."""
    module_name, _, attribute = path.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # an imported module may raise anything, or call sys.exit()
        missing = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        raise InvalidField(
            f"cannot import {path!r}: {type(error).__name__}: {error}",
            field=field,
            hint="install its package, or name its folder in PYTHONPATH, where the service starts" if missing else None,
        ) from error
    return target


@functools.cache  # reading the metadata of all installed packages takes milliseconds
def _entry_points(kind: str) -> dict[str, str]:
    """Return the entry points of a kind of plugin, as dotted paths by name."""
    return {point.name: f"{point.module}:{point.attr}" for point in entry_points(group=f"outrider.{kind}")}
