"""Builds the image of a Dockerfile. The steps of each stage run in a sandbox, and the files that they write become the
image.

sandbox/rootfs/dockerfile.py creates the plan with these steps. Invariants: the store gets the complete image or
nothing; if several processes request the same image, only one builds it; after a build, none of the build's processes
is alive.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
import shlex
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import cast

from outrider.errors import InvalidField, RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.build_proxy import BuildProxy, checked_hosts, index_variables
from outrider.sandbox.network.variables import APT_CONFIG, APT_SETTINGS, proxy_variables
from outrider.sandbox.pythons.portable import PORTABLE_AT
from outrider.sandbox.rootfs.dockerfile import (
    BuildPlan,
    BuildStep,
    Copy,
    CopyFrom,
    MakeFolder,
    RunInstruction,
    WriteFile,
    engine_hint,
    read_dockerfile,
)
from outrider.sandbox.rootfs.owners import MOST_USERS, unpacked
from outrider.sandbox.rootfs.store import ImageStore, RootImage
from outrider.sandbox.rootfs.unpack import OPAQUE, WHITEOUT, BadImage, Contents, contents_of, unpack
from outrider.sandbox.runtimes.base import Runtime, SavesLayers
from outrider.sandbox.runtimes.guest.filesystem.layers import OPAQUE_HEADER
from outrider.sandbox.runtimes.namespace.user_ids import user_ids
from outrider.sandbox.standalone import open_sandbox
from outrider.spec import RuntimeSpec

RUN_SECONDS = 600.0
"""Time limit of one RUN in seconds. Harbor has the same limit for a whole build."""
QUICK_SECONDS = 60.0
NO_USER = re.compile(r"(?:owner|chown|chgrp|[ug]id|groups)[^\n]*(?:Invalid argument|Operation not permitted)")
"""Matches the error message of a program that fails because the sandbox has only one user."""
PATHS_AT_ONCE = 500
"""Maximum number of paths in one command."""
MAX_LINKS = 255
ROOT_LAYER = "0"
"""The folder of a `save_layer` archive that contains the changes to the root file system."""
NOT_KEPT = ("proc/", "sys/", "dev/", PORTABLE_AT.strip("/"), APT_CONFIG.strip("/"))
"""Prefixes of the paths that belong to the running sandbox and must not become part of the image."""


def build_image(
    context: Path,
    store: ImageStore,
    *,
    name: str | None = None,
    hosts: Sequence[str] = (),
    seconds: float = RUN_SECONDS,
    note: Callable[[str], None] = lambda text: None,
) -> RootImage:
    """Build the image of a folder's Dockerfile in sandboxes of kind `namespace`, unless the image exists. The image
    gets the name that Harbor tasks use, and also `name` if given.

    `hosts`: the hosts that RUN may reach (see build_proxy.py).
    `seconds`: the time limit of each RUN.
    `note`: is called with a progress message before each step.

    Blocks, and must not be called in an event loop. Raises InvalidField for the Dockerfile, BadImage with the failed
    line, and RuntimeUnavailable.
    """
    if name is not None and "@" in name:
        raise InvalidField(
            f"{name!r} has a digest, which only images of a registry have", field="name", hint="give a name without @"
        )
    plan = read_dockerfile(context, store)
    image = Build(store, hosts=checked_hosts(hosts), seconds=seconds, note=note).image(plan)
    if name is not None:
        store.give(name, image.digest)
    return image


class Build:
    """Builds images from plans. For a plan with several stages, the images of earlier stages are built first."""

    def __init__(
        self, store: ImageStore, *, hosts: frozenset[str], seconds: float, note: Callable[[str], None]
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._seconds = seconds
        self._note = note

    def image(self, plan: BuildPlan) -> RootImage:
        """Return the image of a plan. Build it if it does not exist."""
        store = self._store

        def fill(root: Path) -> Contents:
            for needed in plan.needed:
                if needed.plan is not None:
                    self.image(needed.plan)
            with tempfile.TemporaryDirectory(prefix="outrider-build-", dir=root.parent) as drafts:
                saved, layer = Path(drafts, "saved"), Path(drafts, "layer")
                asyncio.run(self._save(plan, saved))
                for needed in plan.needed:
                    if store.image(needed.name).digest != needed.digest:
                        raise BadImage(f"the image {needed.name!r} was replaced during the build", hint="build again")
                as_image_layer(saved, layer)
                link_tree(store.root(store.image(plan.base.name)), root)
                owners = store.owners_file(store.image(plan.base.name))
                known = unpacked(owners.read_bytes()) if owners else {}
                owned = unpack([layer.open("rb")], root, owners=known).owners
            contents = contents_of(root)
            contents.owners, contents.base_owners = owned, known
            return contents

        return store.make(plan.digest, plan.name, fill, source=plan.file, env=plan.env, workdir=plan.workdir)

    async def _save(self, plan: BuildPlan, target: Path) -> None:
        """Run the steps in a sandbox of the base image, and write the changed files into the archive `target`. Raises
        BadImage."""
        proxy, (users, lacking) = BuildProxy(self._hosts), users_of_build()
        # If only one user is possible, pass None instead of 1. With None, the runtime refuses a base image that has
        # files of other users. With 1, the runtime would accept the image, and root would own all new files.
        spec = RuntimeSpec(image=plan.base.name, workdir="/", users=users if users > 1 else None)
        async with open_sandbox(spec, gateway=proxy.serving) as runtime:
            await runtime.write(APT_CONFIG, APT_SETTINGS)
            env = {**proxy_variables(runtime.endpoint), **index_variables(self._hosts)}
            for number, step in enumerate(plan.steps, 1):
                self._note(f"{plan.file}, line {step.line}: step {number} of {len(plan.steps)}")
                try:
                    if isinstance(step, CopyFrom):
                        origin = self._store.root(self._store.image(step.origin.name))
                        await copy_from(runtime, step, origin, target.parent)
                    else:
                        await carry_out(runtime, step, env=env, drafts=target.parent, seconds=self._seconds)
                except RuntimeFailure as error:
                    message = f"{plan.file}, line {step.line}: {error.message}"
                    hint = error.hint
                    if isinstance(step, RunInstruction):
                        hint = hint or run_hint(plan.file.parent, proxy.refused, self._hosts)
                    if lacking is not None and NO_USER.search(error.log_tail or ""):
                        hint = f"the build has one user, because {lacking.message}; {lacking.hint}"
                    raise BadImage(message, hint=hint, log_tail=error.log_tail) from error
            await cast(SavesLayers, runtime).save_layer(target)


def users_of_build() -> tuple[int, RuntimeUnavailable | None]:
    """Return how many users the sandbox of a build has: MOST_USERS, or 1 and the reason why only one is possible. Some
    packages, such as tmux, need several users because they change the owners of files."""
    try:
        user_ids(MOST_USERS)
    except RuntimeUnavailable as error:
        return 1, error
    return MOST_USERS, None


def run_hint(context: Path, refused: frozenset[str], hosts: frozenset[str]) -> str | None:
    """Return a hint for a failed RUN, with the options that allow the refused hosts. Returns None if the proxy has
    refused no host."""
    if not refused:
        return None
    flags = " ".join(f"--allow-host {host}" for host in sorted(refused | hosts))
    return f"RUN has no network; to allow it: outrider image build {context} {flags}; or {engine_hint(context)}"


async def carry_out(runtime: Runtime, step: BuildStep, *, env: Mapping[str, str], drafts: Path, seconds: float) -> None:
    """Run one build step. A RUN gets the variables in `env`, but the instruction's own variables take precedence. A RUN
    is killed after `seconds`. Raises RuntimeFailure if the step fails."""
    match step:
        case RunInstruction():
            variables = {**env, **step.env}
            done = await runtime.exec(step.argv, env=variables, cwd=step.workdir, merged=True, seconds=seconds)
            if done.exit_code != 0:
                ended = f"exited with {done.exit_code}" if done.exit_code is not None else f"took over {seconds:g} s"
                raise RuntimeFailure(f"RUN {' '.join(step.argv)[:200]!r} {ended}", log_tail=done.log_tail())
        case MakeFolder():
            await checked(runtime, ["mkdir", "-p", step.path])
        case WriteFile():
            target = posixpath.join(step.target, step.name) if await goes_into(runtime, step) else step.target
            await runtime.write(target, step.text.encode())
            await checked(runtime, ["chmod", step.mode or "644", target])
            await chown(runtime, step.owner, [target])
        case Copy():
            into = step.into or (step.sources[0].is_file() and await goes_into(runtime, step))
            new = step.owner and not await exists(runtime, step.target)
            for source in step.sources:
                target = posixpath.join(step.target, source.name) if into and source.is_file() else step.target
                kept = await asyncio.to_thread(kept_part, source, step.without, drafts)
                await runtime.upload(kept, target)
                if step.mode is not None:
                    await checked(runtime, ["chmod", step.mode, target])
                await chown(runtime, step.owner, copies(kept, target))
            await chown(runtime, step.owner, [step.target] if new else [])


async def goes_into(runtime: Runtime, step: Copy | CopyFrom | WriteFile) -> bool:
    """Return whether the target is a folder. A copied file then keeps its name in that folder."""
    if step.into:
        return True
    return (await runtime.exec(f"test -d {shlex.quote(step.target)}", seconds=QUICK_SECONDS)).exit_code == 0


def kept_part(source: Path, without: Sequence[Path], drafts: Path) -> Path:
    """Return `source` without the paths in `without`. The result is a copy, or `source` itself if nothing is left
    out."""
    if not any(path.is_relative_to(source) for path in without):
        return source
    left_out = frozenset(map(str, without))
    copy = Path(tempfile.mkdtemp(dir=drafts)) / "kept"
    shutil.copytree(
        source,
        copy,
        symlinks=True,
        ignore=lambda folder, names: [name for name in names if os.path.join(folder, name) in left_out],
    )
    return copy


async def copy_from(runtime: Runtime, step: CopyFrom, origin: Path, drafts: Path) -> None:
    """Copy files from another image, whose root folder is `origin`, into the sandbox. If a source is a symbolic link,
    its target within `origin` is copied under the link's name. Symbolic links in a copied folder stay links. `drafts`
    is for temporary files. Raises RuntimeFailure."""
    found = [match for source in step.sources for match in await asyncio.to_thread(matches, origin, source)]
    into = step.into or len(found) > 1 or (found[0][1].is_file() and await goes_into(runtime, step))
    new = step.owner and not await exists(runtime, step.target)
    for name, path in found:
        if path.is_file():
            target = posixpath.join(step.target, name) if into else step.target
            await runtime.upload(path, target)
            if step.mode is not None:
                await checked(runtime, ["chmod", step.mode, target])
            await chown(runtime, step.owner, [target])
            continue
        if step.mode is not None:
            raise RuntimeFailure("COPY --chmod is supported for files only")
        copy, links = await asyncio.to_thread(without_links, path, drafts)
        await runtime.upload(copy, step.target)
        for begin in range(0, len(links), PATHS_AT_ONCE):
            script = "\n".join(
                f"ln -sfn -- {shlex.quote(goal)} {shlex.quote(posixpath.join(step.target, name))}"
                for name, goal in links[begin : begin + PATHS_AT_ONCE]
            )
            done = await runtime.exec(["/bin/sh", "-e"], stdin=script.encode(), seconds=QUICK_SECONDS)
            if done.exit_code != 0:
                raise RuntimeFailure("the links of the copied folder cannot be made", log_tail=done.log_tail())
        await chown(runtime, step.owner, copies(path, step.target))
    await chown(runtime, step.owner, [step.target] if new else [])


async def exists(runtime: Runtime, path: str) -> bool:
    return (await runtime.exec(f"test -e {shlex.quote(path)}", seconds=QUICK_SECONDS)).exit_code == 0


def copies(source: Path, target: str) -> list[str]:
    """Return the paths that the copies have in the sandbox, after `source` was copied to `target`."""
    if not source.is_dir():
        return [target]
    return [
        posixpath.join(target, os.path.relpath(os.path.join(at, name), source))
        for at, folders, files in os.walk(source)
        for name in (*folders, *files)
    ]


async def chown(runtime: Runtime, owner: str, paths: Sequence[str]) -> None:
    """Change the owner of files in the sandbox. Does nothing if `owner` is "". Raises RuntimeFailure."""
    for begin in range(0, len(paths) if owner else 0, PATHS_AT_ONCE):
        await checked(runtime, ["chown", "-h", owner, "--", *paths[begin : begin + PATHS_AT_ONCE]])


def matches(origin: Path, source: str) -> list[tuple[str, Path]]:
    """Find the files and folders of an image that match an absolute path or pattern. Returns each with its name and its
    resolved path on the host. Raises RuntimeFailure if nothing matches, or if a path has too many links."""
    relative = source.lstrip("/")
    wild = any(char in relative for char in "*?[")
    named = sorted(origin.glob(relative)) if wild else [origin / relative]
    found = []
    for path in named:
        place = inside(origin, path)
        if place.is_dir() or place.is_file():
            found.append((path.name, place))
    if not found:
        raise RuntimeFailure(f"that image has no {source}")
    return found


def inside(origin: Path, path: Path) -> Path:
    """Resolve the symbolic links in a path as if `origin` were the root folder. Raises RuntimeFailure if there are too
    many links."""
    parts = list(path.relative_to(origin).parts)[::-1]
    place = origin
    for _ in range(MAX_LINKS):
        if not parts:
            return place
        part = parts.pop()
        if part == "..":
            place = place.parent if place != origin else origin
        elif (place / part).is_symlink():
            goal = os.readlink(place / part)
            if goal.startswith("/"):
                place = origin
            parts += [name for name in goal.split("/")[::-1] if name not in ("", ".")]
        else:
            place /= part
    raise RuntimeFailure(f"{path.relative_to(origin)} of that image has too many links")


def without_links(source: Path, drafts: Path) -> tuple[Path, list[tuple[str, str]]]:
    """Copy a folder without its symbolic links. Returns the copy, and the path and target of each link."""
    copy = Path(tempfile.mkdtemp(dir=drafts)) / "copy"
    links: list[tuple[str, str]] = []

    def leave_out(folder: str, names: list[str]) -> list[str]:
        out = [name for name in names if os.path.islink(os.path.join(folder, name))]
        links.extend(
            (os.path.relpath(os.path.join(folder, name), source), os.readlink(os.path.join(folder, name)))
            for name in out
        )
        return out

    shutil.copytree(source, copy, ignore=leave_out)
    return copy, links


async def checked(runtime: Runtime, command: list[str]) -> None:
    """Run a command. Raises RuntimeFailure if the command fails."""
    done = await runtime.exec(command, seconds=QUICK_SECONDS)
    if done.exit_code != 0:
        raise RuntimeFailure(f"{' '.join(command)[:200]} exited with {done.exit_code}", log_tail=done.log_tail())


def as_image_layer(saved: Path, target: Path) -> None:
    """Convert an archive of a sandbox's changes into an image layer. Only changes to the root file system are kept. The
    archive marks removed files as overlayfs does, with devices and attributes. The layer marks them with special file
    names (see WHITEOUT)."""
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
    """Recreate the folder tree of `source` in the empty folder `target`, with hard links to its files. This is safe:
    images never change, and unpacking a layer replaces files instead of writing to them."""
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
