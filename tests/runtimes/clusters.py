"""The fake cluster of a test run, in a thread of its own, with images made of this machine's files."""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

import outrider
from outrider.concurrency.loop_thread import LoopThread
from outrider.environment import cache_home
from outrider.lab.fakes.kubernetes.api_server import FakeApiServer, fake_cluster
from outrider.lab.fakes.kubernetes.machine import FakeImage
from outrider.sandbox.runtimes.kubernetes.rights import RULES

from . import engines

IMAGE = "registry.test/python:3"
TOOLS_IMAGE = "registry.test/outrider:1"
"""The image in place of Outrider's own: this machine's interpreter, environment and sources."""
HELD = ExitStack()


@functools.cache
def machine_runs() -> bool:
    """Return whether this process may make the namespaces of the cluster's machine."""
    done = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return os.geteuid() == 0 and done.returncode == 0


def needs_machine() -> None:
    if not machine_runs():
        pytest.skip("kubernetes: the test cluster's machine needs root, and `unshare` of util-linux")


@functools.cache
def python_image() -> FakeImage:
    """Return the image of the container engines' tests, as a folder."""
    root = Path(HELD.enter_context(tempfile.TemporaryDirectory(prefix="or-image-")))
    with tarfile.open(fileobj=io.BytesIO(engines.archive("python"))) as archive:
        archive.extractall(root, filter="fully_trusted")
    root.chmod(0o755)
    return FakeImage(root, {"GREETING": "hello"})


def tools_image() -> FakeImage:
    source = Path(outrider.__file__).parent.parent
    prefix = Path(sys.prefix).resolve()
    env = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(source), "OUTRIDER_HOME": str(cache_home())}
    folders = {source, prefix, Path(sys.base_prefix), cache_home(), Path(tempfile.gettempdir())}
    if shared := os.environ.get(engines.CACHE):  # the tests of tools have IPython there
        folders.add(Path(shared))
    folders |= {path for path in map(Path, ("/usr", "/lib", "/lib64")) if path.exists()}
    return FakeImage(python_image().root, env, tuple(sorted(folders)))


@functools.cache
def cluster() -> FakeApiServer:
    loop = HELD.enter_context(LoopThread("test cluster"))
    server = HELD.enter_context(loop.open(fake_cluster({IMAGE: python_image(), TOOLS_IMAGE: tools_image()})))
    server.rules.role = RULES
    return server


def kubeconfig(folder: Path) -> Path:
    """Write a kubeconfig for the cluster into a folder of the test. Returns its path."""
    needs_machine()
    path = folder / "kubeconfig"
    path.write_text(cluster().kubeconfig())
    return path


def close() -> None:
    HELD.close()
    for cached in (cluster, python_image):
        cached.cache_clear()
