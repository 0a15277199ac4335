"""Builds the image of a Dockerfile: runs the steps in one sandbox, and keeps the written files as an image.

sandbox/rootfs/dockerfile.py makes the plan of the steps from the Dockerfile. Invariants: the image appears whole or not
at all; if several processes request the image at once, only the first builds it; no process of a build is alive after
the build.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import cast

from outrider.errors import RuntimeFailure
from outrider.sandbox.pythons.portable import PORTABLE_AT
from outrider.sandbox.rootfs.dockerfile import BuildPlan, BuildStep, Copy, MakeFolder, RunInstruction, read_dockerfile
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import OPAQUE, WHITEOUT, BadImage, Contents, contents_of, unpack
from outrider.sandbox.runtimes.base import Runtime, SavesLayers
from outrider.sandbox.runtimes.guest.filesystem.layers import OPAQUE_HEADER
from outrider.sandbox.standalone import open_sandbox
from outrider.spec import RuntimeSpec

RUN_SECONDS = 600.0
"""Time limit of one RUN. Harbor has the same limit for a whole build."""
QUICK_SECONDS = 60.0
ROOT_LAYER = "0"
"""The folder with the changes to the sandbox's root file system, in an archive made by `save_layer`."""
NOT_KEPT = ("proc/", "sys/", "dev/", PORTABLE_AT.strip("/"))
"""Prefixes of the paths that belong to the running sandbox and not to the image."""


def build_image(
    context: Path,
    store: ImageStore,
    *,
    name: str | None = None,
    seconds: float = RUN_SECONDS,
    note: Callable[[str], None] = lambda text: None,
) -> RootImage:
    """Build the image of a folder's Dockerfile in sandboxes of kind `namespace`, unless the image exists. The image
    gets the name used by Harbor tasks, and `name`. `seconds` bounds each RUN; `note` is called with a line before each
    step. Blocks; call it outside of an event loop. Raises InvalidField for the Dockerfile, BadImage naming the line
    that failed, and RuntimeUnavailable."""
    plan = read_dockerfile(context, store)

    def fill(root: Path) -> Contents:
        with tempfile.TemporaryDirectory(prefix="outrider-build-", dir=root.parent) as drafts:
            saved, layer = Path(drafts, "saved"), Path(drafts, "layer")
            asyncio.run(save_build(plan, saved, seconds=seconds, note=note))
            if store.image(plan.base_name) != plan.base:
                raise BadImage(f"the image {plan.base_name!r} was replaced during the build", hint="build again")
            as_image_layer(saved, layer)
            link_tree(store.root(plan.base), root)
            unpack([layer.open("rb")], root)
        return contents_of(root)

    image = store.make(plan.digest, plan.name, fill, source=plan.file, env=plan.env, workdir=plan.workdir)
    if name is not None:
        store.give(name, image.digest)
    return image


async def save_build(plan: BuildPlan, target: Path, *, seconds: float, note: Callable[[str], None]) -> None:
    """Run the steps in a new sandbox of the base image, and save the written files. Raises BadImage."""
    async with open_sandbox(RuntimeSpec(image=plan.base_name, workdir="/")) as runtime:
        for number, step in enumerate(plan.steps, 1):
            note(f"{plan.file}, line {step.line}: step {number} of {len(plan.steps)}")
            try:
                await carry_out(runtime, step, seconds=seconds)
            except RuntimeFailure as error:
                message = f"{plan.file}, line {step.line}: {error.message}"
                raise BadImage(message, hint=error.hint, log_tail=error.log_tail) from error
        await cast(SavesLayers, runtime).save_layer(target)


async def carry_out(runtime: Runtime, step: BuildStep, *, seconds: float) -> None:
    """Carry out one step. Raises RuntimeFailure, also if a command fails."""
    match step:
        case RunInstruction():
            done = await runtime.exec(step.argv, env=step.env, cwd=step.workdir, merged=True, seconds=seconds)
            if done.exit_code != 0:
                ended = f"exited with {done.exit_code}" if done.exit_code is not None else f"took over {seconds:g} s"
                raise RuntimeFailure(f"RUN {' '.join(step.argv)[:200]!r} {ended}", log_tail=done.log_tail())
        case MakeFolder():
            await checked(runtime, ["mkdir", "-p", step.path])
        case Copy():
            into = step.into
            if not into and step.sources[0].is_file():
                into = (await runtime.exec(f"test -d {shlex.quote(step.target)}", seconds=QUICK_SECONDS)).exit_code == 0
            for source in step.sources:
                target = posixpath.join(step.target, source.name) if into and source.is_file() else step.target
                await runtime.upload(source, target)
                if step.mode is not None:
                    await checked(runtime, ["chmod", step.mode, target])


async def checked(runtime: Runtime, command: list[str]) -> None:
    done = await runtime.exec(command, seconds=QUICK_SECONDS)
    if done.exit_code != 0:
        raise RuntimeFailure(f"{' '.join(command)} exited with {done.exit_code}", log_tail=done.log_tail())


def as_image_layer(saved: Path, target: Path) -> None:
    """Write the root's part of a sandbox's layer archive as an image layer. The archive marks removals as overlayfs
    does, by devices and attributes. The image layer marks them by file names."""
    with tarfile.open(saved, "r:") as archive, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as layer:
        for member in archive:
            top, _, name = member.name.partition("/")
            if top != ROOT_LAYER or not name or name.startswith(NOT_KEPT):
                continue
            folder, _, last = name.rpartition("/")
            if member.ischr() and (member.devmajor, member.devminor) == (0, 0):
                layer.addfile(tarfile.TarInfo(posixpath.join(folder, f"{WHITEOUT}{last}")))
                continue
            hides = OPAQUE_HEADER in member.pax_headers
            member.name, member.pax_headers = name, {}
            if member.islnk():
                member.linkname = member.linkname.partition("/")[2]
            layer.addfile(member, archive.extractfile(member) if member.isreg() else None)
            if hides:
                layer.addfile(tarfile.TarInfo(f"{name}/{OPAQUE}"), BytesIO())


def link_tree(source: Path, target: Path) -> None:
    """Fill `target`, an empty folder, with the tree of `source`, and hard-link the files. Linking is safe because
    images never change, and a layer unpacked over the tree replaces files and writes to none."""
    for at, folders, files in os.walk(source):
        here = target / os.path.relpath(at, source)
        for name in (*folders, *files):
            path = os.path.join(at, name)
            if os.path.islink(path):
                os.symlink(os.readlink(path), here / name)
            elif name in files:
                os.link(path, here / name)
            else:
                (here / name).mkdir()
        shutil.copystat(at, here)
