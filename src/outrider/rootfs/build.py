"""Images built by Apptainer from a recipe, and what is used again of earlier builds.

    builds/KEY.sif      what was built
    builds/.locks/KEY   held by whoever builds it

It knows recipes only as definitions (see definition.py). Invariant: what is at `KEY.sif` is whole, and of any number
of processes that want it at once one builds it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import msgspec

from outrider.config import cache_home
from outrider.rootfs.apptainer import apptainer_program
from outrider.rootfs.definition import Definition, Recipe, definition_of, local_base
from outrider.rootfs.store import ImageStore
from outrider.rootfs.unpack import BadImage

BUILD_SECONDS = 6 * 3600
LOG_TAIL = 4000


class Reuse(StrEnum):
    """When an earlier build is as good as a new one.

    scratch: never. versioned: when base, recipe, the contents of its files and Outrider's version are the same. lock:
    what is installed, when base, packages and requirements are the same; files and commands are put on it in a second,
    short build.
    """

    SCRATCH = "scratch"
    VERSIONED = "versioned"
    LOCK = "lock"


class Builder:
    """Its methods block. `program` is Apptainer, looked for if it is not given; `note` is told of long work."""

    def __init__(
        self,
        store: ImageStore,
        *,
        folder: Path | None = None,
        program: str | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store = store
        self._folder = folder or cache_home() / "builds"
        self._program = program
        self._note = note

    def build(self, recipe: Recipe, reuse: Reuse) -> Path:
        """The SIF file of a recipe. Raises InvalidField, NotFound, BadImage with what Apptainer said, and
        RuntimeUnavailable without it."""
        wanted = time.time()
        whole = definition_of(recipe, self._store)
        if reuse is Reuse.SCRATCH:
            return self._built(whole.key("versioned", version("outrider")), whole, since=wanted)
        if reuse is Reuse.VERSIONED:
            return self._built(whole.key("versioned", version("outrider")), whole)
        installed = msgspec.structs.replace(whole, files=(), env={}, commands=())
        key = installed.key("lock")
        base = self._built(key, installed)
        rest = msgspec.structs.replace(whole, header=local_base(base), identity=key, packages=(), pip="")
        return self._built(rest.key("rest"), rest)

    def _built(self, key: str, definition: Definition, *, since: float = 0.0) -> Path:
        """What has the key, built no longer ago than `since`."""
        target = self._folder / f"{key}.sif"
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked(key):
            if target.exists() and target.stat().st_mtime >= since:
                self._note(f"using {target}, which was built before")
                return target
            for left in self._folder.glob(f".draft-{key}-*"):  # by builders that were killed: we hold their lock
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".draft-{key}-", dir=self._folder) as draft:
                os.replace(self._run(definition, Path(draft)), target)
        return target

    def _run(self, definition: Definition, draft: Path) -> Path:
        program = self._program or apptainer_program()
        recipe, requirements, sif, log = (draft / name for name in ("image.def", "requirements.txt", "sif", "log"))
        requirements.write_text(definition.pip, encoding="utf-8")
        recipe.write_text(definition.render(requirements), encoding="utf-8")
        self._note(f"building with {program}; this takes minutes where much is installed")
        as_user = ["--fakeroot"] if os.geteuid() else []
        with log.open("wb") as out:
            done = subprocess.run(
                [program, "build", *as_user, str(sif), str(recipe)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=BUILD_SECONDS,
                check=False,
            )
        if done.returncode != 0 or not sif.exists():
            raise BadImage(
                f"{program} cannot build the image",
                hint="an ordinary user needs an entry in /etc/subuid and /etc/subgid; root needs all capabilities",
                log_tail=log.read_bytes()[-LOG_TAIL:].decode(errors="replace"),
            )
        sif.chmod(0o644)
        return sif

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """The lock goes with its process, however that ends."""
        locks = self._folder / ".locks"
        locks.mkdir(exist_ok=True)
        with (locks / key).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._note("waiting for another process that builds the same")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
