"""What only this machine can know about a task, checked before anything of it is stored.

It resolves every name and starts nothing. Invariant: a task that passes can fail only by what happens later.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from outrider.errors import HarnessUnavailable, InvalidField, RequestError, RuntimeUnavailable
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.factory import make_harness
from outrider.plugins import resolve
from outrider.runtimes.base import Runtime
from outrider.spec import GroupSpec, RuntimeSpec, Upload

Location = tuple[int | str, ...]

KIND_WORDS = frozenset({"Run", "Upload", "Write"})
"""Names that pydantic puts into a location to say which prepare step it tried; they are no fields."""


def parse_group(body: bytes) -> GroupSpec:
    """Strict JSON (no NaN, no invalid UTF-8) to a spec. Raises RequestError or InvalidField naming the field."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RequestError("the body must be a JSON object")
    return check_shape(value)


def check_shape(value: Mapping[str, Any]) -> GroupSpec:
    """The spec that plain values stand for. Raises InvalidField naming the field."""
    try:
        return GroupSpec.model_validate(value)
    except ValidationError as error:
        raise _invalid(error) from error


def check_group(spec: GroupSpec, *, files: Path) -> None:
    """Raises InvalidField, RuntimeUnavailable or HarnessUnavailable."""
    task = spec.task
    runtime: type[Runtime] = resolve("runtime", task.runtime.kind, field="task.runtime.kind")
    harness = make_harness(task.harness)
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


def _check_files(spec: RuntimeSpec, files: Path) -> None:
    root = files.resolve()
    for number, step in enumerate(spec.prepare):
        if not isinstance(step, Upload):
            continue
        field = f"task.runtime.prepare.{number}.upload"
        path = (root / step.upload).resolve()
        if not path.is_relative_to(root):
            raise InvalidField(f"{step.upload!r} leads out of the files folder", field=field)
        if not path.exists():
            raise InvalidField(f"{step.upload!r} is not in the service's files folder", field=field)
    if spec.rootfs is not None and not Path(spec.rootfs).is_dir():
        raise InvalidField(f"{spec.rootfs!r} is not a folder on this node", field="task.runtime.rootfs")


def _invalid(error: ValidationError) -> InvalidField:
    """The first complaint. Of a prepare step, only those about the kind whose own key it has: that was meant."""
    found = error.errors(include_url=False)
    not_meant = {
        detail["loc"][:-1] for detail in found if detail["type"] == "missing" and _is_own_key(detail["loc"][-2:])
    }
    details = next((detail for detail in found if _kind(detail["loc"]) not in not_meant), found[0])
    path = ".".join(str(part) for part in details["loc"] if part not in KIND_WORDS)
    return InvalidField(_sentence(details), field=path)


def _kind(location: Location) -> Location:
    """The part of a location that says which kind of step was tried; empty elsewhere."""
    ends = [index for index, part in enumerate(location) if part in KIND_WORDS]
    return location[: ends[-1] + 1] if ends else ()


def _is_own_key(end: Location) -> bool:
    return len(end) == 2 and end[0] in KIND_WORDS and str(end[0]).lower() == end[1]


def _sentence(details: Any) -> str:
    message: str = details["msg"].removeprefix("Value error, ")
    if details["type"] == "extra_forbidden":
        return "unknown field"
    return message[:1].lower() + message[1:]
