"""Allows sandboxes to use the host paths that tasks name, in a service that a user starts only for these tasks.

The tasks may come from somebody else. So a sandbox gets only the paths that the tasks name or that their virtual
environments need. It never gets a path that no service may allow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from outrider.config import Config, SandboxesConfig
from outrider.errors import InvalidField
from outrider.harnesses.venv import read_venv
from outrider.sandbox.host_paths import HostPaths
from outrider.spec import TaskSpec, Upload, runtimes_of


def allowing(config: Config, tasks: Iterable[TaskSpec]) -> Config:
    """Return the settings with the tasks' paths allowed, except paths that no service may allow. The data folder must
    exist. The call blocks."""

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
    """Return True if a task has `upload` steps. Such a task needs the setting `files`."""
    prepared = [runtime.prepare for runtime, _ in runtimes_of(task)] + [step.prepare for step in task.then]
    return any(isinstance(step, Upload) for steps in prepared for step in steps)


def _named(task: TaskSpec) -> Iterator[Path]:
    """Yield the host paths that a task names, and the paths that its virtual environment needs."""
    for runtime, _ in runtimes_of(task):
        yield from (Path(mount.source) for mount in runtime.mounts)
        for root in (runtime.rootfs, runtime.image):
            if root is not None and os.path.isabs(root):
                yield Path(root)
    if (venv := task.harness.venv) is not None:
        yield Path(venv)
        try:
            yield from read_venv(venv).shown
        except InvalidField:  # an invalid environment is refused when the task is submitted
            return
