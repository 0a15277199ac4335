"""Builds images from recipes with Apptainer, and reuses earlier builds.

    builds/KEY.sif    the result of a build; the key covers everything that goes into the build

recipe.py converts a recipe into an Apptainer definition. Invariants: every file `KEY.sif` is complete; if several
processes need the same file, only one builds it (see concurrency/build_once.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from outrider.concurrency.build_once import build_once
from outrider.environment import cache_home, installed_version
from outrider.errors import LOG_TAIL, RuntimeUnavailable
from outrider.sandbox.rootfs.recipe import Definition, Recipe, definition_of, local_base
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.rootfs.unpack import BadImage

BUILD_SECONDS = 6 * 3600.0
SIF = "image.sif"
PROGRAMS = ("apptainer", "singularity")
"""Names of Apptainer's program. Apptainer was formerly called Singularity."""


class Reuse(StrEnum):
    """Which earlier build may be used instead of a new one.

    scratch: none, unless another process has finished the same build since this one was requested.
    versioned: a build of the same recipe, with the same base, files and version of Outrider.
    lock: a build with the same base, packages and requirements. A second, short build then adds files, variables and
        commands.
    """

    SCRATCH = "scratch"
    VERSIONED = "versioned"
    LOCK = "lock"


def apptainer_program() -> str:
    """Return the path of the Apptainer program, without running it. If it is not installed, raises RuntimeUnavailable
    with a hint on how to install it."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        raise RuntimeUnavailable(
            "apptainer is not installed",
            hint="on a cluster: `module load apptainer`; else your distribution's package, or apptainer.org",
        )
    return program


class Builder:
    """Builds images with Apptainer in the folder `folder`. The methods block until their work is done. `program` is the
    path of Apptainer, which by default is looked up on the PATH. `note` is called with progress messages. A build that
    takes longer than `seconds` is killed."""

    def __init__(
        self,
        store: ImageStore,
        *,
        folder: Path | None = None,
        program: str | None = None,
        note: Callable[[str], None] = lambda text: None,
        seconds: float = BUILD_SECONDS,
    ) -> None:
        self._store = store
        self._folder = folder or cache_home() / "builds"
        self._program = program
        self._note = note
        self._seconds = seconds

    def build(self, recipe: Recipe, reuse: Reuse) -> Path:
        """Return the SIF file for a recipe, from a new or an earlier build. Raises InvalidField or NotFound for a bad
        recipe, BadImage with Apptainer's output if the build fails, and RuntimeUnavailable without Apptainer."""
        since = time.time() if reuse is Reuse.SCRATCH else 0.0
        whole = definition_of(recipe, self._store)
        if reuse is not Reuse.LOCK:
            return self._built(whole.key("versioned", installed_version("outrider")), whole, since=since)
        installed = msgspec.structs.replace(whole, files=(), env={}, commands=())
        key = installed.key("lock")
        base = self._built(key, installed)
        rest = msgspec.structs.replace(whole, header=local_base(base), identity=key, packages=(), pip="")
        return self._built(rest.key("rest"), rest)

    def _built(self, key: str, definition: Definition, *, since: float = 0.0) -> Path:
        """Return the SIF file with this key. Build it if it is missing or older than `since`."""
        ran = False

        def run(draft: Path) -> None:
            nonlocal ran
            ran = True
            self._run(definition, draft)

        place = build_once(
            self._folder / f"{key}.sif",
            run,
            part=SIF,
            is_built=lambda path: path.exists() and path.stat().st_mtime >= since,
            on_wait=lambda: self._note("waiting for another process that builds the same"),
        )
        if not ran:
            self._note(f"using {place}, which was built before")
        return place

    def _run(self, definition: Definition, draft: Path) -> None:
        program = self._program or apptainer_program()
        recipe, requirements, sif, log = (draft / name for name in ("image.def", "requirements.txt", SIF, "log"))
        requirements.write_text(definition.pip, encoding="utf-8")
        recipe.write_text(definition.render(requirements), encoding="utf-8")
        self._note(f"building with {program}; this takes minutes if many packages are installed")
        as_user = ["--fakeroot"] if os.geteuid() else []  # makes the user root in the build, for apt and pip
        with log.open("wb") as out:
            try:
                done = subprocess.run(
                    [program, "build", *as_user, str(sif), str(recipe)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=self._seconds,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise BadImage(
                    f"{program} took over {self._seconds:g} s to build",
                    hint="build the slow steps into an image of their own, and name it as the base",
                    log_tail=log_tail(log),
                ) from error
        if done.returncode != 0 or not sif.exists():
            raise BadImage(
                f"{program} cannot build the image",
                hint="an ordinary user needs an entry in /etc/subuid and /etc/subgid; root needs all capabilities",
                log_tail=log_tail(log),
            )
        sif.chmod(0o644)


def log_tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL:].decode(errors="replace")
