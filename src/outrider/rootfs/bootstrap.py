"""A Debian root file system from a mirror, by mmdebstrap: it knows packages, suites and signatures.

It unpacks nothing itself. Invariant: what mmdebstrap made is kept only for as long as it is imported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outrider.errors import InvalidField, RuntimeUnavailable
from outrider.rootfs.definition import PACKAGE
from outrider.rootfs.store import Image, ImageStore
from outrider.rootfs.unpack import BadImage

BOOTSTRAP_SECONDS = 3600
SUITE = re.compile(r"[a-z][a-z0-9-]*")
LOG_TAIL = 4000


def bootstrap(
    name: str, store: ImageStore, *, suite: str, packages: Sequence[str] = (), mirror: str | None = None
) -> Image:
    """Import the packages that are essential in a suite, and `packages`, as an image. As root, or as an ordinary user
    who may have user namespaces. Blocks. Raises InvalidField, RuntimeUnavailable without mmdebstrap, and BadImage with
    its words when it fails."""
    if not SUITE.fullmatch(suite):
        raise InvalidField(f"{suite!r} is no Debian suite", field="suite", hint="such as stable, or bookworm")
    for package in packages:
        if not PACKAGE.fullmatch(package):
            raise InvalidField(f"{package!r} is no Debian package", field="include", hint="such as git,python3")
    tool = shutil.which("mmdebstrap")
    if tool is None:
        raise RuntimeUnavailable(
            "mmdebstrap is not installed",
            hint="it is in the package mmdebstrap (an ordinary user also needs uidmap); or make an archive elsewhere "
            "and `outrider image import` that",
        )
    included = [f"--include={','.join(packages)}"] if packages else []
    with tempfile.TemporaryDirectory(prefix="outrider-bootstrap-") as folder:
        archive = Path(folder, "root.tar")
        done = subprocess.run(
            [tool, "--variant=minbase", *included, suite, str(archive), *([mirror] if mirror else [])],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=BOOTSTRAP_SECONDS,
        )
        if done.returncode != 0:
            raise BadImage(
                f"mmdebstrap cannot make {suite}",
                hint="an ordinary user needs the package uidmap and an entry in /etc/subuid and /etc/subgid",
                log_tail=done.stderr.decode(errors="replace")[-LOG_TAIL:],
            )
        return store.import_(archive, name)
