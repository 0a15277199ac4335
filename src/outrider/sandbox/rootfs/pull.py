"""Pulls images from a registry with skopeo, which supports the registries' protocols, credentials and mirrors.

skopeo writes the image into a temporary folder, and the image store imports it from there. Invariants: the temporary
folder is always removed, and skopeo always ends, even if the node that pulls is killed (see node_folder.py); at most
one pull of an image reference runs at a time.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import msgspec

from outrider.concurrency.cancellation import opened_in_thread, shielded
from outrider.environment import host_id, variables
from outrider.errors import InvalidField, NotFound, RuntimeUnavailable, described
from outrider.sandbox.rootfs.store import ImageStore, RootImage, checked_name
from outrider.sandbox.rootfs.unpack import BadImage
from outrider.sandbox.runtimes.kernel.process_marks import VARIABLE, mark_of

PULL_SECONDS = 3600
LOOK_SECONDS = 0.2
"""Seconds between two attempts to lock the file of a reference."""


async def pull(reference: str, name: str, store: ImageStore, *, node: Path | None = None) -> RootImage:
    """Pull an image by its reference, such as `docker.io/library/python:3.12`, and give it a name in the store. A
    cancellation kills skopeo. `node` is the folder of the node that pulls, or None if a command pulls. The temporary
    folder is in the node's folder, and skopeo has the node's mark.

    If another process or task of this user is pulling the same reference, wait for that pull, and then use its image or
    raise its error. But if the other pull fails on another machine that shares the store, pull the image here: this
    machine's network and credentials may be different.

    Raises InvalidField for an invalid name or reference, and RuntimeUnavailable without skopeo. Raises BadImage if
    skopeo fails or takes longer than PULL_SECONDS, or if the import fails. Raises OSError if the disk is full or this
    process lacks a resource, such as file descriptors.
    """
    checked_name(name)
    tool = shutil.which("skopeo")
    if tool is None:
        raise RuntimeUnavailable(
            "skopeo is not installed",
            hint="it is in the package skopeo; or make an archive elsewhere (`docker save`) and import the archive",
        )
    # skopeo would interpret a reference that starts with "-" as an option.
    if not reference or reference.startswith("-") or any(char.isspace() for char in reference):
        raise InvalidField(
            f"{reference!r} is not an image reference", field="reference", hint="such as docker.io/library/debian"
        )
    if "@" in name and name.partition("@")[2] != reference.partition("@")[2]:
        raise InvalidField(
            f"the name {name!r} has a digest that {reference} does not ask for",
            field="name",
            hint=f"pull {reference.partition('@')[0]}@{name.partition('@')[2]}",
        )
    # During a pull, this process holds a lock on the file. At the end, it writes the outcome into the file.
    with store.pull_file(reference).open("a+b") as record:
        before = os.fstat(record.fileno()).st_mtime_ns
        await _lock(record)
        record.seek(0)
        if (outcome := record.read()) and os.fstat(record.fileno()).st_mtime_ns != before:
            # The file has changed: another pull of this reference has ended since this one began.
            ended = msgspec.json.decode(outcome, type=PullOutcome)
            if ended.failure and ended.host == host_id():
                raise BadImage(ended.failure, hint=ended.hint)
            if ended.digest:
                with suppress(NotFound):  # the image has been removed in the meantime
                    return await asyncio.to_thread(store.give, name, ended.digest)
        record.truncate(0)
        try:
            # Threads make and remove the folder, because the removal of large files takes long.
            make = partial(tempfile.TemporaryDirectory, prefix="outrider-pull-", dir=node)
            async with opened_in_thread(make, tempfile.TemporaryDirectory.cleanup) as folder:
                layout = Path(folder.name, "layout")
                mark = {} if node is None else {VARIABLE: f"{mark_of(layout.parent)}:0"}
                await _download(tool, reference, layout, mark)
                # The import is shielded from cancellation: its thread cannot be stopped, and needs the folder and the
                # lock until it ends.
                image = await shielded(lambda: asyncio.to_thread(store.import_, layout, name, pulled=True))
        except (BadImage, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                # Not recorded, because the cause is in this process only, for example too few file descriptors.
                raise
            hint = error.hint if isinstance(error, BadImage) else None
            record.write(msgspec.json.encode(PullOutcome(failure=described(error), hint=hint, host=host_id())))
            raise
        record.write(msgspec.json.encode(PullOutcome(digest=image.digest)))
        return image


class PullOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a pull, for other pulls that wait for the same reference. It has either the digest of the image,
    or the message and hint of the error. `host` identifies the machine on which the pull failed."""

    digest: str = ""
    failure: str = ""
    hint: str | None = None
    host: str = ""


async def _lock(record: BinaryIO) -> None:
    """Lock a file. This is done by polling, because a thread that is blocked in `flock` cannot be cancelled."""
    while True:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(LOOK_SECONDS)
        else:
            return


def _without_tag(reference: str) -> str:
    """Return the reference without its tag if it has a digest, because skopeo refuses references with both."""
    name, at, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")  # the host before it may have a port
    return f"{folder}{slash}{last.partition(':')[0]}@{digest}" if at else reference


async def _download(tool: str, reference: str, layout: Path, mark: Mapping[str, str]) -> None:
    """Run skopeo, which downloads the image into the new folder `layout`. `mark` are further variables of skopeo.
    Raises BadImage if skopeo fails."""
    process = await asyncio.create_subprocess_exec(
        tool,
        *("copy", "--quiet", f"docker://{_without_tag(reference)}", f"oci:{layout}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**variables(), **mark},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PULL_SECONDS):
            _, errors = await process.communicate()
    except TimeoutError as error:
        raise BadImage(f"skopeo did not get {reference} within {PULL_SECONDS} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):  # skopeo may have just exited
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        raise BadImage(f"skopeo cannot get {reference}: {errors.decode(errors='replace').strip()[-500:]}")
