"""Finds, by Harbor's rules, the sandbox in which the verifier of a Harbor task or step runs the tests.

The module checks whether files exist, but reads none. For a separate verifier's sandbox, Harbor chooses the settings
and the image independently: if the verifier of a step sets only `cpus`, the image is still that of the task's verifier.
A verifier's own image contains the tests and everything that the tests need.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from outrider.sandbox.rootfs.dockerfile import DOCKERFILE
from outrider.tasks.harbor.schema import Environment, HarborStep, TaskToml

COMPOSE = "docker-compose.yaml"


class SeparateVerifier(msgspec.Struct, frozen=True, kw_only=True):
    """The sandbox of a separate verifier.

    environment: all settings except the image.
    field: the path of the table with these settings.
    context: None if the sandbox has the same image as the agent's. Otherwise, the folder with the tests.
    image: the name of the image with the tests. If `image` is None and `context` is given, the image with the tests is
        built from `context`."""

    environment: Environment
    field: str
    context: Path | None = None
    image: str | None = None


def mode(config: TaskToml, step: HarborStep | None) -> Literal["shared", "separate"]:
    """Return whether the verifier shares the agent's sandbox. The step's own mode takes precedence over the task's."""
    return (None if step is None else step.verifier.mode) or config.verifier.mode or "shared"


def separate_verifier(config: TaskToml, folder: Path, step: HarborStep | None) -> SeparateVerifier | None:
    """Return the sandbox of a separate verifier, or None if the verifier runs in the agent's sandbox."""
    if mode(config, step) == "shared":
        return None
    levels = [(config.verifier.environment, folder / "tests", "verifier.environment")]
    if step is not None:
        own = folder / "steps" / step.name / "tests"
        levels.insert(0, (step.verifier.environment, own, f"steps.{step.name}.verifier.environment"))
    named = ((environment, field) for environment, _, field in levels if environment is not None)
    environment, field = next(named, (config.environment, "environment"))
    for level, tests, _ in levels:
        image = None if level is None else level.docker_image
        if image or any((tests / name).is_file() for name in (DOCKERFILE, COMPOSE)):
            return SeparateVerifier(environment=environment, field=field, context=tests, image=image or None)
    return SeparateVerifier(environment=environment, field=field)
