"""What only this machine can know about a task, checked before anything of it is stored.

It resolves every name and starts nothing. Invariant: a task that passes can fail only by what happens later.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from outrider.errors import HarnessUnavailable, InvalidField, RequestError, RuntimeUnavailable
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.command import check_instruction
from outrider.harnesses.factory import make_harness
from outrider.harnesses.placeholders import filled_size
from outrider.harnesses.venv import FIELD as VENV
from outrider.harnesses.venv import Venv, read_venv, stray_links
from outrider.plugins import resolve
from outrider.runtimes.base import Runtime
from outrider.schemas import NodeStats
from outrider.sessions.resources import asked, whole_of
from outrider.spec import MAX_INLINE_FILE, EngineSpec, GroupSpec, Resources, RuntimeSpec, Spec, TaskSpec, Upload

S = TypeVar("S", bound=Spec)
Location = tuple[int | str, ...]

RUNTIME_METHODS = ("create", "available", "check_spec", "start", "exec", "stop")
MAX_DEPTH = 64
"""Levels of objects and lists in a request."""

WRITABLE = ("/root", "/tmp", "/var/tmp", "/dev", "/proc", "/run")
"""Folders that every sandbox with a root of its own has."""

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
    allowed = [Path(os.path.realpath(root)) for root in allow]
    _check_paths(task.runtime, allowed)
    _check_files(task)
    _check_venv(task, runtime, allowed)
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


def _check_files(task: TaskSpec) -> None:
    """That no text becomes huge when its words are filled in."""
    if not task.harness.files:
        return
    options = {f"option.{name}": str(value) for name, value in task.harness.options.items()}
    words = {"instruction": task.instruction, **options}
    for path, text in task.harness.files.items():
        if (size := filled_size(path, text, words)) > MAX_INLINE_FILE:
            field = f"task.harness.files.{path}"
            raise InvalidField(
                f"is {size} characters with its words filled in, and may be {MAX_INLINE_FILE}", field=field
            )


def _check_venv(task: TaskSpec, runtime: type[Runtime], allow: Sequence[Path]) -> None:
    """Of a virtual environment all that is shown with it must be allowed: that it leads there proves nothing. Any
    sandbox of a preset is shown the service's own interpreter."""
    path, spec = task.harness.venv, task.runtime
    if path is None:
        return
    if not getattr(runtime, "shows_mounts", True):
        raise InvalidField(
            f"{spec.kind!r} sandboxes run no programs of the host", field=VENV, hint="use runtime kind 'namespace'"
        )
    _check_allowed(path, allow, field=VENV)
    venv = read_venv(path)
    own = Path(sys.base_prefix).resolve()
    refused = [place for place in venv.shown if not any(place.resolve().is_relative_to(root) for root in (*allow, own))]
    if refused:
        raise InvalidField(
            f"{path!r} does not work without {' and '.join(map(str, refused))}, which tasks may not name",
            field=VENV,
            hint=f"its operator allows it with `outrider serve {' '.join(f'--allow-path {one}' for one in refused)}`",
        )
    if venv.of_system and (spec.image or spec.rootfs):
        raise InvalidField(
            f"the interpreter of {path!r} is in the host's /usr, which is not in a sandbox with a root of its own",
            field=VENV,
            hint="make the environment inside the image; or make it here with an interpreter that is not in /usr, such "
            "as `uv venv --managed-python` takes",
        )
    for folder in (spec.workdir, *WRITABLE):
        if over := [place for place in venv.shown if PurePosixPath(folder).is_relative_to(place)]:
            raise InvalidField(
                f"{over[0]}, which {path!r} needs, would lie read-only over the sandbox's own {folder}",
                field=VENV,
                hint="move it to a folder of its own; or, if that is the working directory, give another "
                "task.runtime.workdir",
            )
    _check_links(venv, spec)


def _check_links(venv: Venv, spec: RuntimeSpec) -> None:
    system = () if spec.image or spec.rootfs else (Path("/usr"),)
    stray = stray_links(venv, [*system, *(Path(mount.source) for mount in spec.mounts)])
    if stray:
        goal = os.path.realpath(stray[0])
        raise InvalidField(
            f"{stray[0]} is a link to {goal}, which the sandbox does not have"
            + (f"; nor have {len(stray) - 1} other links what they lead to" if stray[1:] else ""),
            field=VENV,
            hint="install the packages as copies (UV_LINK_MODE=copy), or show what the links lead to with "
            "task.runtime.mounts",
        )


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
