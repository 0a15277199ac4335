"""Parses request bodies into specs, and checks whether this machine can run a task.

The checks look up everything that a task names, such as its runtime, but start nothing. Invariant: a group is stored
only after it has passed the checks.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import orjson
from pydantic import ValidationError

from outrider.destinations import Phase
from outrider.errors import (
    EvaluatorError,
    HarnessUnavailable,
    InvalidField,
    OutriderError,
    RequestError,
    RuntimeUnavailable,
    UnreadableTask,
    renamed_field,
)
from outrider.evaluators.base import ChecksSpec, Evaluator
from outrider.evaluators.endpoints import Endpoints
from outrider.evaluators.factory import make_evaluator
from outrider.harnesses.command import check_instruction
from outrider.harnesses.factory import check_written, make_harness
from outrider.harnesses.mcp_servers import check_reachable
from outrider.harnesses.placeholders import filled_size
from outrider.harnesses.venv import FIELD as VENV
from outrider.harnesses.venv import read_venv, stray_links
from outrider.plugins import plugin_code, resolve
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.rootfs.store import checked_name, has_image
from outrider.sandbox.rootfs.wanted import may_pull
from outrider.sandbox.runtimes.base import RuntimeKind
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import check_carry, check_kind
from outrider.schemas import NodeStats
from outrider.sessions.resources import ResourceAmount, required, session_needs, total_of
from outrider.spec import (
    MAX_INLINE_FILE,
    REPORTED,
    RUNTIME,
    GroupSpec,
    PrepareStep,
    ReportSpec,
    Spec,
    StoredGroupSpec,
    TaskSpec,
    Upload,
    complaints,
    fault_text,
    fields_of_step,
    runtimes_of,
    steps_of,
)
from outrider.store.store import Store

log = logging.getLogger("outrider.service")

S = TypeVar("S", bound=Spec)
Location = tuple[int | str, ...]

RUNTIME_METHODS = ("create", "available", "check_spec")
"""A plugin is accepted as a runtime only if it has these methods."""

MAX_DEPTH = 64
"""Maximum nesting of objects and lists in a request. Without this limit, JSON decoders would accept deeper nesting than
JSON encoders can write."""
MAX_NAMES = 1024
"""Maximum number of fields of a JSON object in a request, such as `env`. Only `options`, and the rewards in a report,
may have more fields."""

WRITABLE = ("/root", "/tmp", "/var/tmp", "/dev", "/proc", "/run")
"""Folders of a sandbox to which programs write. No virtual environment may be mounted over such a folder, because the
mount is read-only."""

STEP_KINDS = frozenset({"PrepareCommand", "Upload", "function-after[_decodable(), Write]"})
"""The kinds of prepare steps, as pydantic names them in an error's location. Pydantic tries to read a step as each
kind, and reports all errors."""
NO_FIELDS = STEP_KINDS | {"[key]", "DiffSpec"}
"""Parts of a pydantic error's location that are not field names."""
LIST_OF = "list["
"""Prefix of parts such as `list[str]` in an error's location. Pydantic adds such a part if a field may be a list or
another type."""
RESOURCES = ("cpus", "memory_mb", "gpus")
"""The resources of a node that are set aside for sessions."""
CHECK_SECONDS = 120.0
"""Maximum total seconds for checking the evaluators of one submitted group."""


def parse_body(kind: type[S], body: bytes) -> S:
    """Parse a request body into a spec. The body must be strict JSON (no NaN, no invalid UTF-8). An empty body means
    `{}` if the spec has no required field.

    Raises RequestError if the body is not a JSON object, and InvalidField for an invalid value."""
    if not body and not any(field.is_required() for field in kind.model_fields.values()):
        body = b"{}"
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RequestError("the body must be a JSON object")
    return _validated(kind, value)


def validate_group(value: Mapping[str, Any]) -> GroupSpec:
    """Convert a decoded JSON object to a group spec. Raises InvalidField with the field's name for an invalid value."""
    return _validated(GroupSpec, value)


async def stored_group(store: Store, group_id: str) -> StoredGroupSpec:
    """Return the spec of a stored group. Raises UnreadableTask if another version of Outrider stored a spec that this
    version cannot read, or if the key that encrypted it is missing."""
    stored = await store.spec(group_id)
    try:
        # In a thread, because the validation decodes the base64 of every file in the task.
        return await asyncio.to_thread(StoredGroupSpec.model_validate_json, stored)
    except ValidationError as error:
        # The text of a ValidationError quotes parts of the task, which may contain secrets. So the log names only the
        # fields, and the error is not chained.
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        fields = ", ".join(f"{'.'.join(map(str, fault['loc']))} ({fault['type']})" for fault in faults)
        log.error("the task of group %s cannot be read: %s", group_id, fields)
        raise UnreadableTask(
            f"the stored task of group {group_id} cannot be read by this version of Outrider",
            hint="the service's log says which field; submit the task again",
        ) from None


def is_same_request(stored: bytes, spec: GroupSpec, body: bytes) -> bool:
    """Return True if the JSON of a stored group, as this version reads it, equals `body`, the JSON of `spec`."""
    try:
        return type(spec).model_validate_json(stored).model_dump_json().encode() == body
    except ValidationError:
        return False


def _validated(kind: type[S], value: Mapping[str, Any]) -> S:
    # The nesting is checked first, level by level, because recursion into deep nesting could overflow the stack.
    level: list[tuple[Location, Any]] = [((), value)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[Location, Any]] = []
        for path, outer in level:
            if isinstance(outer, Mapping):
                # `turns` and `rows` of a report may be large: they have an entry for each turn or row.
                rewards = kind is ReportSpec and path in (("turns",), ("rows",))
                if len(outer) > MAX_NAMES and "options" not in path and not rewards:
                    raise InvalidField(
                        f"has {len(outer)} fields; no object has more than {MAX_NAMES}", field=_shown(path)
                    )
                below += [((*path, name), inner) for name, inner in outer.items()]
            elif isinstance(outer, list):
                below += [((*path, index), inner) for index, inner in enumerate(outer)]
        level = below
    if level:
        raise InvalidField(f"is nested deeper than {MAX_DEPTH} levels", field=_shown(level[0][0]))
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        errors = complaints(error)
        # For an invalid prepare step, pydantic reports errors for every kind of step. The kind with the fewest errors
        # is probably the one that the caller meant.
        counts = Counter(_step_kind_tried(details["loc"]) for details in errors)
        # An unknown field is reported rather than a missing one, because the unknown field may be a misspelling of the
        # missing one.
        rank = {"extra_forbidden": 0, "missing": 2}
        chosen = min(
            errors, key=lambda details: (counts[_step_kind_tried(details["loc"])], rank.get(details["type"], 1))
        )
        parts = [str(part) for part in chosen["loc"] if part not in NO_FIELDS]
        field = ".".join(part for part in parts if not part.startswith(LIST_OF))
        message = fault_text(chosen, kind)
        raise InvalidField(message[:1].lower() + message[1:], field=field) from error


def _shown(location: Location) -> str:
    return ".".join(map(str, location[:4]))


def _step_kind_tried(location: Location) -> Location:
    """Return the beginning of a pydantic error's location, up to the kind of prepare step. Returns () if the location
    names no kind."""
    end = next((place for place, part in enumerate(location, start=1) if part in STEP_KINDS), 0)
    return location[:end]


def check_resources(task: TaskSpec, nodes: Sequence[NodeStats]) -> None:
    """Raise InvalidField if the task's sandboxes need more resources than any node has. Does nothing if there are no
    nodes."""

    def fits(needs: ResourceAmount) -> bool:
        return any(needs.within(total_of(node.resources)) for node in nodes)

    agent, needs = required(task.runtime), session_needs(task)
    if not nodes or fits(needs):
        return
    graded = "" if not fits(agent) else ", with the sandboxes for grading,"
    short = [name for name in RESOURCES if getattr(needs, name) > max(getattr(node.resources, name) for node in nodes)]
    # If each resource alone fits on some node, but no node has enough of all resources, the error names the memory.
    name = short[0] if short else "memory_mb"
    have = " or ".join(dict.fromkeys(total_of(node.resources).in_words() for node in nodes))
    raise InvalidField(
        f"{getattr(needs, name):g}{graded} is more than a node has: {have}",
        field=f"task.runtime.resources.{name}",
        hint=f"ask for less, or serve with more: the setting sandboxes.{name}",
    )


class Bound(NamedTuple):
    """A limit on a number in a task. `field` names the number, `asked` returns it, and `most` is its maximum."""

    field: str
    most: float
    asked: Callable[[TaskSpec], float]


BOUNDS = (
    Bound("task.limits.prepare_seconds", 3600, lambda task: task.limits.prepare_seconds),
    Bound("task.limits.session_seconds", 86_400, lambda task: task.limits.session_seconds),
    Bound("task.evaluator.seconds", 86_400, lambda task: sum(step.evaluator.seconds for step in steps_of(task))),
)
"""Limits in seconds on how long a session may hold a slot of the lanes `init`, `run` and `eval`. No session is
interrupted for another tenant, so these limits also bound a tenant's wait for its first slot."""


def check_bounds(task: TaskSpec) -> None:
    """Raise InvalidField if a task exceeds one of the BOUNDS. Not called for the tasks of admins."""
    for bound in BOUNDS:
        if (asked := bound.asked(task)) > bound.most:
            raise InvalidField(
                f"{asked:g} seconds are more than the {bound.most:g} for which a session may hold a slot",
                field=bound.field,
                hint="ask for less, or have an admin submit the group",
            )


def check_group(
    spec: GroupSpec,
    *,
    paths: HostPaths,
    endpoints: Endpoints | None = None,
    here: bool = True,
    pull: Sequence[str] = (),
) -> list[Evaluator]:
    """Check everything about a group that depends on this machine. Returns the evaluators of the task's steps, for
    `SubmissionChecks`. Blocks on the file system. Raises InvalidField, RuntimeUnavailable or HarnessUnavailable.

    paths: the files of this machine that a task may name.
    endpoints: the external graders.
    here: True if sessions run on this machine. If so, this machine's runtimes and harnesses are also checked. Any other
        machine checks its own runtimes and harnesses when a session starts there.
    pull: prefixes of image references. An image with such a prefix is pulled when a session needs it, so the image need
        not be on this machine.
    """
    task = spec.task
    runtimes = runtimes_of(task)
    runtime, *_ = kinds = [_runtime_kind(one.sandbox_kind, field=f"{field}.kind") for one, field in runtimes]
    for kind, (one, field) in zip(kinds, runtimes, strict=True):
        with renamed_field(RUNTIME, field):
            check_kind(one, kind)
    harness = make_harness(task.harness)
    network = task.runtime.network
    check_reachable(task.harness.mcp_servers, [] if network is None else network.of(Phase.AGENT))
    check_written(task)
    steps = steps_of(task)
    evaluators = []
    for number, step in enumerate(steps):
        with fields_of_step(number):
            if task.harness.agent is None and task.harness.elsewhere is None:
                check_instruction(step.instruction)
            evaluators.append(make_evaluator(step.evaluator, endpoints))
            check_carry(step, runtime)
    for one, field in runtimes:
        with renamed_field(RUNTIME, field):
            paths.check(one)
        if one.network is not None and one.network.replay is not None:
            paths.upload(one.network.replay, field=f"{field}.network.replay")
        _check_uploads(one.prepare, paths, field=f"{field}.prepare")
    for number, later in enumerate(task.then):
        _check_uploads(later.prepare, paths, field=f"task.then.{number}.prepare")
    # Replacing placeholders may make a file huge, because a short text can contain the placeholder of a long
    # instruction many times.
    words = {f"option.{name}": str(value) for name, value in task.harness.options.items()}
    words["instruction"] = max((step.instruction for step in steps), key=len)
    for path, text in task.harness.files.items():
        if (size := filled_size(path, text, words)) > MAX_INLINE_FILE:
            raise InvalidField(
                f"has {size} characters once its placeholders are filled in; the maximum is {MAX_INLINE_FILE}",
                field=f"task.harness.files.{path}",
            )
    _check_venv(task, runtime, paths)
    if not here or (task.harness.elsewhere is not None and task.evaluator.kind == REPORTED):
        return evaluators  # the task needs no sandbox on this machine
    for kind, (one, field) in zip(kinds, runtimes, strict=True):
        with renamed_field(RUNTIME, field):
            if may_pull(one, kind, pull) and not has_image(one.image):
                checked_name(one.image or "", field=f"{RUNTIME}.image")
            else:
                kind.check_spec(one)
        if not (can := kind.available()).ok:
            raise RuntimeUnavailable(
                f"this machine cannot run {one.kind!r} sandboxes: {can.detail}",
                field=f"{field}.kind",
                hint=can.hint,
            )
    if not (can := harness.available()).ok:
        raise HarnessUnavailable(can.detail, field="task.harness", hint=can.hint)
    return evaluators


def _runtime_kind(name: str, *, field: str) -> RuntimeKind:
    kind: RuntimeKind = resolve("runtime", name, field=field)
    if not all(callable(getattr(kind, method, None)) for method in RUNTIME_METHODS):
        raise InvalidField(f"{name!r} is not a runtime", field=field)
    return kind


class SubmissionChecks:
    """Runs the slow checks of evaluator specs, such as parsing a gold answer.

    Only one group of each tenant is checked at a time, so that no tenant can occupy the whole machine. The checks of a
    group may take `seconds`, including the wait for the tenant's earlier groups.
    """

    def __init__(self, host: Host, *, seconds: float = CHECK_SECONDS) -> None:
        self._host = host
        self._seconds = seconds
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def check(self, evaluators: Sequence[Evaluator], tenant: str) -> None:
        """Check the specs of the evaluators. Raises InvalidField, and EvaluatorError if a check cannot be completed."""
        if not any(isinstance(evaluator, ChecksSpec) for evaluator in evaluators):
            return
        try:
            async with asyncio.timeout(self._seconds) as clock, self._turns[tenant]:
                for number, evaluator in enumerate(evaluators):
                    with fields_of_step(number):
                        await _check_evaluator(evaluator, self._host)
        except TimeoutError as error:
            if not clock.expired():
                raise
            message = f"the evaluators could not be checked within {self._seconds:g} s"
            hint = "submit the group again, later; groups of one tenant are checked one after another"
            raise EvaluatorError(message, field="task.evaluator", hint=hint) from error


async def _check_evaluator(evaluator: Evaluator, host: Host) -> None:
    if not isinstance(evaluator, ChecksSpec):
        return
    try:
        with plugin_code():
            await evaluator.check_spec(host)
    except OutriderError:
        raise
    except Exception as error:  # a plugin may raise any exception
        message = f"the evaluator refuses its spec: {type(error).__name__}: {error}"
        raise InvalidField(message, field="task.evaluator") from error


def _check_uploads(prepare: Sequence[PrepareStep], paths: HostPaths, *, field: str) -> None:
    """Raise InvalidField unless every file or folder to be uploaded is in the service's folder for tasks."""
    for number, step in enumerate(prepare):
        if isinstance(step, Upload):
            paths.upload(step.upload, field=f"{field}.{number}.upload")


def _check_venv(task: TaskSpec, runtime: RuntimeKind, paths: HostPaths) -> None:
    """Raise InvalidField unless the task's virtual environment, and the folders that the environment needs, are allowed
    and work in the sandbox."""
    path, spec = task.harness.venv, task.runtime
    if path is None:
        return
    if not getattr(runtime, "shows_mounts", True):
        raise InvalidField(
            f"{spec.kind!r} sandboxes run no programs of the host", field=VENV, hint="use runtime kind 'namespace'"
        )
    paths.allowed(path, field=VENV)
    venv = read_venv(path)
    paths.check_venv(path, venv.shown, field=VENV)
    own_root = bool(spec.image or spec.rootfs)
    if venv.of_system and own_root:
        raise InvalidField(
            f"the interpreter of {path!r} is in the host's /usr, which is not in a sandbox with a root of its own",
            field=VENV,
            hint="make the environment inside the image; or make it here with an interpreter outside /usr, for "
            "example with `uv venv --managed-python`",
        )
    for folder in (spec.workdir, *WRITABLE):
        if over := [place for place in venv.shown if PurePosixPath(folder).is_relative_to(place)]:
            raise InvalidField(
                f"{over[0]}, which {path!r} needs, would lie read-only over the sandbox's own {folder}",
                field=VENV,
                hint="move it to a folder of its own; or, if that is the working directory, give another "
                "task.runtime.workdir",
            )
    system = () if own_root else (Path("/usr"),)
    if stray := stray_links(venv, [*system, *(Path(mount.source) for mount in spec.mounts)]):
        others = f"; the same holds for {len(stray) - 1} other links" if stray[1:] else ""
        raise InvalidField(
            f"{stray[0]} is a link to {os.path.realpath(stray[0])}, which the sandbox does not have{others}",
            field=VENV,
            hint="install the packages as copies (UV_LINK_MODE=copy), or mount the targets of the links with "
            "task.runtime.mounts",
        )
