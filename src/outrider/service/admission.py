"""What only this machine can know about a task, checked before anything of it is stored.

It resolves every name and starts nothing. Invariant: a task that passes can fail only by what happens later.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from outrider.errors import HarnessUnavailable, InvalidField, RequestError, RuntimeUnavailable
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.command import check_instruction
from outrider.harnesses.factory import make_harness
from outrider.plugins import resolve
from outrider.runtimes.base import Runtime
from outrider.sessions.room import asked, whole_of
from outrider.spec import EngineSpec, GroupSpec, Resources, RuntimeSpec, Spec, TaskSpec, Upload
from outrider.wire import NodeStats

S = TypeVar("S", bound=Spec)
Location = tuple[int | str, ...]

RUNTIME_METHODS = ("create", "available", "check_spec", "start", "exec", "stop")
MAX_DEPTH = 64
"""Levels of objects and lists in a request."""

STEP_KINDS = frozenset({"Run", "Upload", "function-after[_decodable(), Write]"})
"""What pydantic puts into a location to say which kind of prepare step it tried."""
NO_FIELDS = STEP_KINDS | {"[key]"}
LIST_OF = "list["
"""What it begins a part with where a list is one of the things that a field may be."""


def parse_group(body: bytes) -> GroupSpec:
    """Strict JSON (no NaN, no invalid UTF-8) to a spec. Raises RequestError or InvalidField naming the field."""
    return check_shape(_object(body))


def parse_engine(body: bytes) -> EngineSpec:
    """As `parse_group`."""
    return _checked(EngineSpec, _object(body))


def check_shape(value: Mapping[str, Any]) -> GroupSpec:
    """The spec that plain values stand for. Raises InvalidField naming the field."""
    return _checked(GroupSpec, value)


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RequestError("the body must be a JSON object")
    return value


def _checked(kind: type[S], value: Mapping[str, Any]) -> S:
    _check_depth(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _invalid(error) from error


def check_group(spec: GroupSpec, *, files: Path, allow: Sequence[Path] = ()) -> None:
    """`allow` are the host's files and folders that a task may name. Raises InvalidField, RuntimeUnavailable or
    HarnessUnavailable."""
    task = spec.task
    runtime = _runtime(task.runtime)
    harness = make_harness(task.harness)
    if task.harness.agent is None:
        check_instruction(task.instruction)
    make_evaluator(task.evaluator)
    _check_carry(task, runtime)
    _check_uploads(task.runtime, files)
    _check_paths(task.runtime, [Path(os.path.realpath(root)) for root in allow])
    runtime.check_spec(task.runtime)
    if not (can := runtime.available()).ok:
        raise RuntimeUnavailable(
            f"this machine cannot run {task.runtime.kind!r} sandboxes: {can.detail}",
            field="task.runtime.kind",
            hint=can.hint,
        )
    if not (can := harness.available()).ok:
        raise HarnessUnavailable(can.detail, field="task.harness", hint=can.hint)


def check_room(resources: Resources, nodes: Sequence[NodeStats]) -> None:
    """Raises InvalidField for what no node has, even with nothing else on it."""
    needs = asked(resources)
    if any(needs.within(whole_of(node.room)) for node in nodes):
        return
    most_cpus = max(node.room.cpus for node in nodes)
    name, wanted = ("cpus", needs.cpus) if needs.cpus > most_cpus else ("memory_mb", needs.memory_mb)
    have = " or ".join(f"{node.room.cpus:g} cpus and {node.room.memory_mb} MiB of memory" for node in nodes)
    raise InvalidField(
        f"{wanted:g} is more than a node has: {have}",
        field=f"task.runtime.resources.{name}",
        hint=f"ask for less, or serve with more: the setting sandboxes.{name}",
    )


def _runtime(spec: RuntimeSpec) -> type[Runtime]:
    made = resolve("runtime", spec.kind, field="task.runtime.kind")
    if not all(callable(getattr(made, name, None)) for name in RUNTIME_METHODS):
        raise InvalidField(f"{spec.kind!r} is not a runtime class", field="task.runtime.kind")
    runtime: type[Runtime] = made
    return runtime


def _check_carry(task: TaskSpec, runtime: type[Runtime]) -> None:
    if task.evaluator.carry == "all" and not callable(getattr(runtime, "save_layer", None)):
        raise InvalidField(
            f"{task.runtime.kind!r} sandboxes cannot carry all that was written",
            field="task.evaluator.carry",
            hint="name the paths that are graded, or use runtime kind 'namespace'",
        )


def _check_uploads(spec: RuntimeSpec, files: Path) -> None:
    root = files.resolve()
    for number, step in enumerate(spec.prepare):
        if not isinstance(step, Upload):
            continue
        field = f"task.runtime.prepare.{number}.upload"
        path = Path(os.path.realpath(root / step.upload))
        if not path.is_relative_to(root):
            raise InvalidField(f"{step.upload!r} leads out of the files folder", field=field)
        if not os.path.exists(path):
            raise InvalidField(f"{step.upload!r} is not in the service's files folder", field=field)


def _check_paths(spec: RuntimeSpec, allow: Sequence[Path]) -> None:
    """What the task names of the host. An image by name is the operator's own import."""
    if spec.rootfs is not None:
        _check_allowed(spec.rootfs, allow, field="task.runtime.rootfs")
        if not os.path.isdir(spec.rootfs):
            raise InvalidField(f"{spec.rootfs!r} is not a folder on this node", field="task.runtime.rootfs")
    for number, mount in enumerate(spec.mounts):
        field = f"task.runtime.mounts.{number}.source"
        _check_allowed(mount.source, allow, field=field)
        if not os.path.exists(mount.source):
            raise InvalidField(f"{mount.source!r} is not on this node", field=field)
    if spec.image is not None and os.path.isabs(spec.image):
        _check_allowed(spec.image, allow, field="task.runtime.image")
        if not os.path.exists(spec.image):
            raise InvalidField(f"{spec.image!r} is not on this node", field="task.runtime.image")


def _check_allowed(path: str, allow: Sequence[Path], *, field: str) -> None:
    """Before anything else is said of it: whether it is there is nobody's business who may not have it."""
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(root) for root in allow):
        raise InvalidField(
            f"{path!r} is not among the host's paths that tasks may name",
            field=field,
            hint="its operator allows it with `outrider serve --allow-path PATH`, or the setting sandboxes.allow",
        )


def _invalid(error: ValidationError) -> InvalidField:
    """One complaint. Of the kinds that a prepare step may be, the one with the fewest complaints is what was meant."""
    errors = error.errors(include_url=False)
    complaints = Counter(_kind_tried(details["loc"]) for details in errors)
    chosen = min(errors, key=lambda details: complaints[_kind_tried(details["loc"])])
    parts = [str(part) for part in chosen["loc"] if part not in NO_FIELDS]
    path = ".".join(part for part in parts if not part.startswith(LIST_OF))
    return InvalidField(_sentence(chosen), field=path)


def _kind_tried(location: Location) -> Location:
    """The location up to the kind of prepare step it names; empty when it names none."""
    end = next((place for place, part in enumerate(location, start=1) if part in STEP_KINDS), 0)
    return location[:end]


def _check_depth(value: Any) -> None:
    """Raises InvalidField: what is nested deeper than MAX_DEPTH could be read, but not written again."""
    level: list[tuple[Location, Any]] = [((), value)]
    for _ in range(MAX_DEPTH):
        level = [((*path, name), inner) for path, outer in level for name, inner in _inside(outer)]
    if level:
        field = ".".join(map(str, level[0][0][:4]))
        raise InvalidField(f"is nested deeper than {MAX_DEPTH} levels", field=field)


def _inside(value: Any) -> Iterable[tuple[int | str, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def _sentence(details: Any) -> str:
    message: str = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        return "unknown field"
    return message[:1].lower() + message[1:]
