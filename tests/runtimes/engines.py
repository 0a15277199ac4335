"""The container engines that `.ci/sandboxes` starts, and images for them, made of this machine's own files.

Nothing is fetched. An image is made once for each engine and test run, and removed at the end of the run.
"""

from __future__ import annotations

import functools
import io
import os
import re
import socket
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.containers.daemon import DOCKER_ENGINE, PODMAN_ENGINE, limits_hold
from outrider.sandbox.runtimes.containers.runtime import ContainerRuntime

PYTHON = "/usr/bin/python3"
PROGRAMS = (
    *("bash", "cat", "chmod", "cp", "cut", "dd", "echo", "env", "false", "find", "git", "grep", "head", "hostname"),
    *("id", "kill", "ln", "ls", "mkdir", "mkfifo", "mount", "mv", "nohup", "ps", "rm", "sed", "seq", "setsid"),
    *("sleep", "sort", "stat", "tail", "touch", "true", "unshare", "wc", "yes"),
)
CACHE = "SANDBOX_CACHE"
"""The environment variable with a folder that every user of this machine may read."""


HERE = replace(DOCKER_ENGINE, variable="SANDBOX_DOCKER")
DOCKER = ContainerRuntime(HERE)
GVISOR = ContainerRuntime(HERE, oci_runtime="runsc")
PODMAN = ContainerRuntime(replace(PODMAN_ENGINE, variable="SANDBOX_PODMAN"))
ROOTLESS_PODMAN = ContainerRuntime(replace(PODMAN_ENGINE, variable="SANDBOX_PODMAN_ROOTLESS"))
RUNTIMES = {"docker": DOCKER, "gvisor": GVISOR, "podman": PODMAN, "podman-rootless": ROOTLESS_PODMAN}
MADE: set[tuple[Path, str]] = set()


def engine(kind: str) -> Path:
    """Return the engine's socket. Skips the test if there is no engine."""
    variable = RUNTIMES[kind].engine.variable
    if variable not in os.environ:
        pytest.skip(f"{kind}: {variable} is not set: .ci/sandboxes FILE starts an engine and writes it to FILE")
    if not (can := RUNTIMES[kind].available()).ok:
        pytest.skip(f"{kind}: {can.detail}")
    return RUNTIMES[kind].engine.find()


def needs_limits(kind: str) -> None:
    if not limits_hold(engine(kind)):
        pytest.skip(f"{kind}: no limits, because it is rootless and control groups are of version 1")


def image(kind: str, content: str = "python") -> str:
    """Return the name of an image with Python, bash and the usual tools (`python`), or with a static busybox only."""
    return imported(engine(kind), content)


def prepared(kind: str, environment: pytest.MonkeyPatch) -> str:
    """Return the image for most tests. If SANDBOX_CACHE is set, OUTRIDER_HOME is this folder from then on, so that each
    engine can read the interpreter for containers."""
    if CACHE in os.environ:
        environment.setenv("OUTRIDER_HOME", os.environ[CACHE])
    return image(kind)


@functools.cache
def imported(path: Path, content: str) -> str:
    name = f"outrider-test-{content}-{os.getpid()}"
    query = f"/images/create?fromSrc=-&repo={name}&tag=latest&changes=ENV%20GREETING%3Dhello"
    request(path, "POST", query, archive(content))
    MADE.add((path, name))
    return name


def remove_images() -> None:
    while MADE:
        path, name = MADE.pop()
        request(path, "DELETE", f"/images/{name}:latest?force=true", b"")


def kill(kind: str, container: str) -> None:
    """Kill a container. Podman then waits for its end, and answers 500 if the container has been removed by then."""
    status, content = exchange(engine(kind), "POST", f"/containers/{container}/kill", b"")
    assert status < 300 or (status == 500 and b"no such container" in content), content.decode()


def request(path: Path, method: str, target: str, body: bytes) -> bytes:
    status, content = exchange(path, method, target, body)
    assert status < 300, content.decode()
    return content


def exchange(path: Path, method: str, target: str, body: bytes) -> tuple[int, bytes]:
    """Send a request to an engine's socket. Returns the status and the body of the reply."""
    connection = HTTPConnection("localhost", timeout=120)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request(method, target, body, {"Content-Type": "application/x-tar"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


@functools.cache
def archive(content: str) -> bytes:
    """Return an image as an archive, cached because collecting the libraries of its programs takes seconds."""
    return tar({"python": python_root, "busybox": busybox_root}[content]())


def tar(members: Iterable[tuple[str, Path | None]]) -> bytes:
    """Return the archive of a root. Each member is a path inside, and a file of the host or None for a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, source in dict(members).items():
            if source is None:
                info = tarfile.TarInfo(name.lstrip("/"))
                info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name.endswith("tmp") else 0o755
                archive.addfile(info)
            else:
                archive.add(source.resolve(), name.lstrip("/"), filter=of_root)
    return out.getvalue()


def of_root(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return None if info.name.endswith("__pycache__") else info


FOLDERS = ("/dev", "/proc", "/sys", "/tmp", "/var/tmp", "/root", "/etc", "/run")


def busybox_root() -> Iterator[tuple[str, Path | None]]:
    """Yield a root with nothing but busybox, without a shell under its usual name."""
    if "SANDBOX_BUSYBOX" not in os.environ:
        pytest.skip("SANDBOX_BUSYBOX is not set: .ci/sandboxes installs a static busybox and writes it to its FILE")
    yield from ((name, None) for name in FOLDERS)
    yield "/bin/busybox", Path(os.environ["SANDBOX_BUSYBOX"])


def python_root() -> Iterator[tuple[str, Path | None]]:
    yield from ((name, None) for name in FOLDERS)
    programs = [Path(folder, name) for name in PROGRAMS for folder in ("/usr/bin", "/bin")]
    stdlib = Path(said(PYTHON, "-c", "import os; print(os.__file__)")).parent
    loaded = [Path(PYTHON), *(path for path in programs if path.exists())]
    for path in loaded:
        yield f"/usr/bin/{path.name}", path
    for path in stdlib.rglob("*"):
        if path.is_file() and not re.search(r"/(test|__pycache__|dist-packages|config-[^/]*)/", str(path)):
            yield str(path), path
    for path in [*loaded, *stdlib.glob("lib-dynload/*.so")]:
        for library in re.findall(r"(/\S+) \(0x", said("ldd", str(path), check=False)):
            yield library, Path(library)
    yield "/bin/sh", Path("/bin/sh")
    yield "/bin/bash", Path("/bin/bash")


def said(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout.strip()
