"""What the tasks of a user may name of the host, in a service that the user starts for them alone.

A user may read whatever such a task names; but it is run, and perhaps comes from elsewhere, so it is shown no more than
that, and nothing that no service lets tasks read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from outrider.config import Config, SandboxesConfig
from outrider.errors import InvalidField
from outrider.harnesses.venv import read_venv
from outrider.sandboxes.host_paths import HostPaths
from outrider.spec import TaskSpec, Upload, runtimes_of


def allowing(config: Config, tasks: Iterable[TaskSpec]) -> Config:
    """The settings with the paths allowed that the tasks name, but for those that no service may allow. The data folder
    exists. Blocks."""

    def with_allowed(*paths: Path) -> Config:
        return config.model_copy(update={"sandboxes": SandboxesConfig(allow=paths)})

    def may_be_allowed(path: Path) -> bool:
        try:
            HostPaths.checked(with_allowed(path))
        except InvalidField:
            return False
        return True

    named = {path for task in tasks for path in _named(task)}
    return with_allowed(*filter(may_be_allowed, sorted(named)))


def uploads(task: TaskSpec) -> bool:
    """Whether a task copies something of a service's files."""
    prepared = [runtime.prepare for runtime, _ in runtimes_of(task)] + [step.prepare for step in task.then]
    return any(isinstance(step, Upload) for steps in prepared for step in steps)


def _named(task: TaskSpec) -> Iterator[Path]:
    """The host's paths that a task names, with what its virtual environment needs."""
    for runtime, _ in runtimes_of(task):
        yield from (Path(mount.source) for mount in runtime.mounts)
        for root in (runtime.rootfs, runtime.image):
            if root is not None and os.path.isabs(root):
                yield Path(root)
    if (venv := task.harness.venv) is not None:
        yield Path(venv)
        try:
            yield from read_venv(venv).shown
        except InvalidField:  # it is broken, and refused for that when the task is submitted
            return
