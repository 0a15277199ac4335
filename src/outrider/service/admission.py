"""What only this machine can know about a task, checked before anything of it is stored.

It resolves every name and starts nothing. Invariant: a task that passes can fail only by what happens later.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from outrider.errors import HarnessUnavailable, InvalidField, RequestError, RuntimeUnavailable
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.command import check_instruction
from outrider.harnesses.factory import make_harness
from outrider.plugins import resolve
from outrider.rootfs.store import ImageStore
from outrider.runtimes.base import Runtime
from outrider.spec import EngineSpec, GroupSpec, RuntimeSpec, Spec, Upload

S = TypeVar("S", bound=Spec)
Location = tuple[int | str, ...]

MAX_DEPTH = 64
"""Levels of objects and lists in a request."""

STEP_KINDS = frozenset({"Run", "Upload", "function-after[_decodable(), Write]"})
"""What pydantic puts into a location to say which kind of prepare step it tried."""
NO_FIELDS = STEP_KINDS | {"[key]"}


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


def check_group(spec: GroupSpec, *, files: Path) -> None:
    """Raises InvalidField, RuntimeUnavailable or HarnessUnavailable."""
    task = spec.task
    runtime = _runtime(task.runtime)
    harness = make_harness(task.harness)
    if task.harness.agent is None:
        check_instruction(task.instruction)
    make_evaluator(task.evaluator)
    _check_files(task.runtime, files)
    if not (can := runtime.available()).ok:
        raise RuntimeUnavailable(
            f"this machine cannot run {task.runtime.kind!r} sandboxes: {can.detail}",
            field="task.runtime.kind",
            hint=can.hint,
        )
    if not (can := harness.available()).ok:
        raise HarnessUnavailable(can.detail, field="task.harness", hint=can.hint)


def _runtime(spec: RuntimeSpec) -> type[Runtime]:
    made = resolve("runtime", spec.kind, field="task.runtime.kind")
    if not all(callable(getattr(made, name, None)) for name in ("create", "available", "start", "exec", "stop")):
        raise InvalidField(f"{spec.kind!r} is not a runtime class", field="task.runtime.kind")
    runtime: type[Runtime] = made
    return runtime


def _check_files(spec: RuntimeSpec, files: Path) -> None:
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
    if spec.rootfs is not None and not os.path.isdir(spec.rootfs):
        raise InvalidField(f"{spec.rootfs!r} is not a folder on this node", field="task.runtime.rootfs")
    if spec.image is not None:
        try:
            ImageStore().image(spec.image)
        except RequestError as error:
            raise InvalidField(error.message, field="task.runtime.image", hint=error.hint) from error


def _invalid(error: ValidationError) -> InvalidField:
    """One complaint. Of the kinds that a prepare step may be, the one with the fewest complaints is what was meant."""
    errors = error.errors(include_url=False)
    complaints = Counter(_kind_tried(details["loc"]) for details in errors)
    chosen = min(errors, key=lambda details: complaints[_kind_tried(details["loc"])])
    path = ".".join(str(part) for part in chosen["loc"] if part not in NO_FIELDS)
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
