"""Pulls images from a registry with skopeo, which supports registries' protocols, credentials and mirrors better than
code of our own could.

The image store unpacks the image. Invariants: the folder into which skopeo writes the image is removed after the
import, or after a failure; at most one pull of a reference runs at a time.
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
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from outrider.concurrency.cancellation import shielded
from outrider.environment import host_id
from outrider.errors import InvalidField, NotFound, RuntimeUnavailable, described
from outrider.sandbox.rootfs.store import ImageStore, RootImage, checked_name
from outrider.sandbox.rootfs.unpack import BadImage

PULL_SECONDS = 3600
LOOK_SECONDS = 0.2
"""Seconds between two attempts to lock the file that all pulls of a reference share."""


async def pull(reference: str, name: str, store: ImageStore) -> RootImage:
    """Import the image of a reference such as `docker.io/library/python:3.12`. A cancellation kills skopeo.

    If another process or task of this user is already pulling the same reference, this function waits for the end of
    that pull, and then uses its image or raises its error. Errors of pulls on other machines are ignored, because
    another machine may have another network and other credentials.

    Raises InvalidField, and RuntimeUnavailable without skopeo. Raises BadImage if skopeo fails (with its messages) or
    needs more than PULL_SECONDS, or if the image cannot be imported. Raises OSError if the disk is full or this process
    lacks a resource, such as descriptors.
    """
    checked_name(name)
    tool = shutil.which("skopeo")
    if tool is None:
        raise RuntimeUnavailable(
            "skopeo is not installed",
            hint="it is in the package skopeo; or make an archive elsewhere (`docker save`) and import the archive",
        )
    # A reference that begins with "-" would be read as an option.
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
    # The process that pulls the image locks this file, empties it, and at the end writes the outcome.
    with store.pull_file(reference).open("a+b") as record:
        before = os.fstat(record.fileno()).st_mtime_ns
        await _lock(record)
        record.seek(0)
        if (outcome := record.read()) and os.fstat(record.fileno()).st_mtime_ns != before:
            # Another pull held the lock when this pull began, and has now ended.
            ended = msgspec.json.decode(outcome, type=PullOutcome)
            if ended.failure and ended.host == host_id():
                raise BadImage(ended.failure, hint=ended.hint)
            if ended.digest:
                with suppress(NotFound):  # the image has been removed since
                    return await asyncio.to_thread(store.give, name, ended.digest)
        record.truncate(0)
        try:
            with tempfile.TemporaryDirectory(prefix="outrider-pull-") as folder:
                layout = Path(folder, "layout")
                await _download(tool, reference, layout)
                # The import is shielded, because its thread cannot be cancelled, and needs the folder and the lock.
                image = await shielded(lambda: asyncio.to_thread(store.import_, layout, name, pulled=True))
        except (BadImage, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                # The error is not recorded, because it concerns only this process: a lack of descriptors, for example.
                raise
            hint = error.hint if isinstance(error, BadImage) else None
            record.write(msgspec.json.encode(PullOutcome(failure=described(error), hint=hint, host=host_id())))
            raise
        record.write(msgspec.json.encode(PullOutcome(digest=image.digest)))
        return image


class PullOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a pull, for pulls of the same reference that have waited for it: the digest of the image, or the
    message and the hint of the failure. `host` is the machine on which the pull has failed (`host_id`)."""

    digest: str = ""
    failure: str = ""
    hint: str | None = None
    host: str = ""


async def _lock(record: BinaryIO) -> None:
    """Lock the file. Waits by polling, because a thread that waits in `flock` cannot be cancelled."""
    while True:
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(LOOK_SECONDS)
        else:
            return


async def _download(tool: str, reference: str, layout: Path) -> None:
    """Run skopeo, which writes the image into the new folder `layout`. Raises BadImage."""
    process = await asyncio.create_subprocess_exec(
        tool,
        *("copy", "--quiet", f"docker://{reference}", f"oci:{layout}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PULL_SECONDS):
            _, said = await process.communicate()
    except TimeoutError as error:
        raise BadImage(f"skopeo did not get {reference} within {PULL_SECONDS} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):  # the process has just exited
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        raise BadImage(f"skopeo cannot get {reference}: {said.decode(errors='replace').strip()[-500:]}")
