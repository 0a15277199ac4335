"""Builds images with podman or docker, from Dockerfiles that sandbox/image_build.py does not support.

The engine stores the image under the name that Harbor tasks use, for sandboxes of kind podman or docker. The image
store gets a copy for sandboxes of other kinds. Invariants: the build has no network unless the caller allows it; a
Dockerfile with a USER or ENTRYPOINT that no sandbox supports is refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from outrider.errors import LOG_TAIL, InvalidField, NotFound, RuntimeUnavailable
from outrider.sandbox.rootfs.archives import digest_of
from outrider.sandbox.rootfs.dockerfile import DOCKERFILE, Health, Reader, read_dockerfile
from outrider.sandbox.rootfs.dockerignore import MAX_FILE, Ignore, read_ignore
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import BadImage
from outrider.text_files import read_text_file

BUILD_SECONDS = 3600
SAVE = {"podman": ("save", "--quiet", "--format", "oci-archive"), "docker": ("save",)}
ROOTS = ("", "root", "0", "root:root", "0:0")


class BuildEngine(StrEnum):
    PODMAN = "podman"
    DOCKER = "docker"


class BuiltImage(NamedTuple):
    """The image of a task's Dockerfile. `name` is its name in the store, and `health` is its HEALTHCHECK."""

    name: str
    health: Health | None


def built_image(context: Path, store: ImageStore) -> BuiltImage:
    """Return the image of a folder's Dockerfile, which an engine or Outrider itself has built. Raises InvalidField if
    this machine does not have the image, or if the Dockerfile is not supported."""
    made_by_engine = engine_name(context)
    if made_by_engine in store.names():
        return BuiltImage(made_by_engine, checked_dockerfile(context, store))
    plan = read_dockerfile(context, store)
    try:
        store.image(plan.name)
    except NotFound as error:
        raise InvalidField(
            f"the image of {plan.file} is not built on this machine",
            field="environment.docker_image",
            hint=f"outrider image build {context}",
        ) from error
    return BuiltImage(plan.name, plan.health)


def engine_name(context: Path) -> str:
    """Return the name for the image that an engine builds from a folder. The name contains a digest of all files in the
    folder, except those that .dockerignore excludes. Raises InvalidField."""
    ignore = read_ignore(context)
    out = frozenset(left_out(context, ignore)) if ignore.patterns else frozenset()
    text = read_text_file(context / DOCKERFILE, field="dockerfile", limit=MAX_FILE)
    hashed = f"{hashlib.sha256(text.encode()).hexdigest()} {digest_of(context, out)}"
    return f"engine/{hashlib.sha256(hashed.encode()).hexdigest()[:32]}"


def left_out(context: Path, ignore: Ignore) -> list[str]:
    """Return the paths in the folder that .dockerignore excludes."""
    found = []
    for at, folders, files in os.walk(context):
        for name in (*folders, *files):
            path = Path(at, name)
            is_folder = name in folders and not path.is_symlink()
            if ignore.leaves_out(path.relative_to(context).as_posix()) and not (is_folder and ignore.takes_back):
                found.append(str(path))
    return found


def checked_dockerfile(context: Path, store: ImageStore) -> Health | None:
    """Return the HEALTHCHECK of a Dockerfile. Raises InvalidField for a USER other than root and for an ENTRYPOINT that
    starts a program, because sandboxes support neither."""
    text = read_text_file(context / DOCKERFILE, field="dockerfile", limit=MAX_FILE)
    return Reader(context / DOCKERFILE, store).health(text)


def build_by_engine(
    context: Path,
    store: ImageStore,
    engine: BuildEngine,
    *,
    name: str | None = None,
    network: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> RootImage:
    """Build the image of a folder's Dockerfile with an engine, and import it into the store. The image gets the name of
    `engine_name`, and also `name` if given. With `network`, the build uses the engine's network. `note` is called with
    progress messages.

    Blocks. Raises InvalidField for the Dockerfile, BadImage with the end of the engine's output, and RuntimeUnavailable
    if the engine is not installed.
    """
    checked_dockerfile(context, store)
    program = shutil.which(engine)
    if program is None:
        raise RuntimeUnavailable(
            f"{engine} is not installed", hint=f"install the package {engine}, or build without --engine"
        )
    own = engine_name(context)
    note(f"{program} builds {context / DOCKERFILE}")
    options = [] if network else ["--network", "none"]
    _run([program, "build", "--tag", own, *options, "--file", str(context / DOCKERFILE), str(context)], network)
    user = _run([program, "image", "inspect", "--format", "{{.Config.User}}", own], network).strip()
    if user not in ROOTS:
        raise InvalidField(
            f"the image of {context / DOCKERFILE} has the user {user!r} of its base, but sandboxes have only root",
            field="dockerfile",
            hint="end the Dockerfile with USER root, if the task can be solved as root",
        )
    with tempfile.TemporaryDirectory(prefix="outrider-engine-") as folder:
        archive = Path(folder, "image.tar")
        note(f"importing {own}")
        _run([program, *SAVE[engine], "--output", str(archive), own], network)
        image = store.import_(archive, own)
    if name is not None:
        store.give(name, image.digest)
    return image


def _run(command: Sequence[str], network: bool) -> str:
    """Run a command of the engine and return its output. Raises BadImage. Without `network`, the error's hint names the
    option that allows a network."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BadImage(f"{' '.join(command[:3])} took over {BUILD_SECONDS} s") from error
    if done.returncode != 0:
        hint = None if network else "if a step needs the network, and may have it, add --network"
        tail = (done.stdout + done.stderr)[-LOG_TAIL:].decode(errors="replace")
        raise BadImage(f"{' '.join(command[:3])} exited with {done.returncode}", hint=hint, log_tail=tail)
    return done.stdout.decode(errors="replace")
