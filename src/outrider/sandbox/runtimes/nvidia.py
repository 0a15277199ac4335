"""The NVIDIA GPUs of this machine, and the files that a sandbox needs to use them. The module is used for sandboxes
that are made without a container engine.

The driver's state is read only from files. No library of the driver is loaded, and no GPU is opened. The formats of
these files are known only from other programs that parse them: this code was not tried on a machine with a GPU.
Invariant: a sandbox sees only the GPUs that it was given.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outrider.environment import environment
from outrider.errors import RuntimeUnavailable

CDI_KIND = "nvidia.com/gpu="
"""Beginning of an NVIDIA GPU's name in the Container Device Interface (CDI) of container engines."""
CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
"""Device files that are shown together with any GPU. Every CUDA program opens the first two. Profilers also open the
last."""
LIBRARIES_AT = "/run/outrider-nvidia"
"""Folder with the driver's libraries in a sandbox. They cannot be part of an image, because their version must match
the kernel module."""
LIBRARY = re.compile(r"(?:libcuda|libcudadebugger|libnvcuvid|libnvoptix|libnvidia-[\w-]+)\.so\.[\w.]+")
LISTED = re.compile(r"\s*(\S+) \(([^)]*)\) => (/\S+)")
MACHINES = {"x86_64": "x86-64", "aarch64": "AArch64"}
"""Names of processor architectures in the output of `ldconfig -p`, by the names that `uname -m` prints."""


class Gpu(msgspec.Struct, frozen=True):
    """One GPU. `index` is its position in PCI bus order, which nvidia-smi also shows. `minor` is the minor number of
    its device file."""

    index: int
    minor: int
    uuid: str = ""
    model: str = "NVIDIA GPU"

    @property
    def name(self) -> str:
        return str(self.index)

    def known_as(self, name: str) -> bool:
        name = name.removeprefix(CDI_KIND)
        return name == self.name or (name.startswith("GPU-") and self.uuid.startswith(name))


class GpuFiles(msgspec.Struct, frozen=True):
    """The device files and libraries that a sandbox needs for GPUs, as pairs (path on this machine, path in the
    sandbox)."""

    devices: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()

    @property
    def libraries_at(self) -> str:
        return LIBRARIES_AT if self.libraries else ""


@dataclass(frozen=True)
class NvidiaDriver:
    """The NVIDIA driver's state, read from the folders `proc` and `dev`. The program `ldconfig` lists the driver's
    libraries."""

    proc: Path = Path("/proc/driver/nvidia")
    dev: Path = Path("/dev")
    ldconfig: str = "/sbin/ldconfig"

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that this process may open. A batch job may have only some of the machine's GPUs, because a
        control group denies the job the others. `access` detects this without opening a GPU."""
        known = [_gpu(at, _text(file)) for at, file in enumerate(sorted(self.proc.glob("gpus/*/information")))]
        if not known:  # in a container, /proc may lack these files
            minors = sorted(int(path.name[6:]) for path in self.dev.glob("nvidia[0-9]*") if path.name[6:].isdigit())
            known = [Gpu(index, minor) for index, minor in enumerate(minors)]
        return tuple(gpu for gpu in known if os.access(self.dev / f"nvidia{gpu.minor}", os.R_OK | os.W_OK))

    def visible(self) -> tuple[Gpu, ...]:
        """Return the GPUs that a CUDA program would use if this process started it. If CUDA_VISIBLE_DEVICES is set, it
        lists these GPUs. The list ends before the first name in CUDA_VISIBLE_DEVICES that is repeated or does not match
        exactly one GPU. Numbers are in PCI bus order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        here = self.gpus()
        if (wanted := environment("CUDA_VISIBLE_DEVICES")) is None:
            return here
        chosen: list[Gpu] = []
        for name in map(str.strip, wanted.split(",")):
            if name.isdigit():
                found = here[int(name) : int(name) + 1]
            else:
                found = tuple(gpu for gpu in here if gpu.known_as(name))
            if len(found) != 1 or found[0] in chosen:
                break
            chosen += found
        return tuple(chosen)

    def shown(self, names: Sequence[str]) -> GpuFiles:
        """Return the files that a sandbox needs for the GPUs with these names. The call blocks. Raises
        RuntimeUnavailable."""
        return GpuFiles(self._devices(names), self._libraries()) if names else GpuFiles()

    def _devices(self, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return the device files of these GPUs, and the device files in CONTROL."""
        here = self.gpus()
        files = []
        for name in names:
            found = [gpu for gpu in here if gpu.known_as(name)]
            if len(found) != 1:
                have = ", ".join(gpu.name for gpu in here) or "none"
                raise RuntimeUnavailable(
                    f"this machine has no NVIDIA GPU {name!r} that can be shown in a sandbox (there are: {have})",
                    hint="see the setting sandboxes.gpus; GPUs of other makers can be given in docker and podman",
                )
            files.append(f"nvidia{found[0].minor}")
        files += [name for name in CONTROL if (self.dev / name).exists()]
        return tuple((str(self.dev / name), f"/dev/{name}") for name in files)

    def _libraries(self) -> tuple[tuple[str, str], ...]:
        try:
            done = subprocess.run([self.ldconfig, "-p"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeUnavailable(f"cannot list the driver's libraries: {error}") from error
        found = driver_libraries(done.stdout, MACHINES.get(platform.machine(), ""))
        if "libcuda.so.1" not in found:
            raise RuntimeUnavailable(
                f"there is no libcuda.so.1 in the list of {self.ldconfig} -p",
                hint="install the NVIDIA driver's libraries for CUDA, and run ldconfig",
            )
        return tuple((os.path.realpath(path), f"{LIBRARIES_AT}/{name}") for name, path in found.items())


NVIDIA = NvidiaDriver()


def driver_libraries(listing: str, machine: str) -> dict[str, str]:
    """Return the paths of the driver's libraries, by name. `listing` is the output of `ldconfig -p`. If it lists a
    library several times, the first path is returned, because programs load that file."""
    found: dict[str, str] = {}
    for line in listing.splitlines():
        if (match := LISTED.match(line)) and LIBRARY.fullmatch(match[1]) and machine in match[2].split(","):
            found.setdefault(match[1], match[3])
    return found


def variables(names: Sequence[str]) -> Mapping[str, str]:
    """Return environment variables that tell programs in a sandbox which GPUs they have. Returns no variables unless
    all GPUs are from NVIDIA. In CUDA_VISIBLE_DEVICES, the sandbox's GPUs are numbered from 0, because CUDA sees no
    others."""
    if not names or not all(is_nvidia(name) for name in names):
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(names)))),
        "NVIDIA_VISIBLE_DEVICES": ",".join(name.removeprefix(CDI_KIND) for name in names),
    }


def is_nvidia(name: str) -> bool:
    """Return whether a name in the setting sandboxes.gpus is an NVIDIA GPU's. Such a name contains no slash (`0`), or
    begins with CDI_KIND."""
    return "/" not in name or name.startswith(CDI_KIND)


def _gpu(index: int, information: str) -> Gpu:
    fields = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
    minor = fields.get("Device Minor", "").strip()
    return Gpu(
        index=index,
        minor=int(minor) if minor.isdigit() else index,
        uuid=fields.get("GPU UUID", "").strip(),
        model=fields.get("Model", "").strip() or "NVIDIA GPU",
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
