"""Finds Apptainer, checks that it works for this user, and builds the command that runs one sandbox.

Only `find_apptainer` starts programs. Invariant: a container sees only the host paths that the caller names, and gets
no environment variable of the service.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from outrider.environment import environment
from outrider.errors import RuntimeUnavailable
from outrider.sandbox.pythons.portable import PORTABLE_AT, portable_command, portable_python
from outrider.sandbox.rootfs.build import apptainer_program
from outrider.sandbox.runtimes.namespace.plan import EMPTY_FOLDERS
from outrider.sandbox.runtimes.probe_cache import ProbeCache
from outrider.sandbox.runtimes.tool_server.bundle import BOOT, FLAGS

PROBE_SECONDS = 60.0
ISOLATION = (
    "--containall",
    "--no-home",
    "--no-init",
    *("--no-mount", "sys,hostfs,bind-paths"),
    *("--net", "--network", "none"),
    *("--dns", "127.0.0.1"),
    *("--hostname", "sandbox"),
    *("--pwd", "/"),
    "--writable-tmpfs",
    "--no-eval",
    "--no-umask",
)
ROOT_OF_OWN = ("--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command")
"""Options for an ordinary user, who becomes uid 0 in a new user namespace with no other user."""
ROOT_AS_ROOT = ("--userns",)
"""Options if the service runs as root. Root also becomes uid 0 of a new user namespace. `--fakeroot` is left out,
because it fails for root without an entry in /etc/subuid."""
ENTER_GROUPS = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit 1; shift; done; shift; exec "$@"'
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONFINEMENT = (
    *("isolation.syscalls", "isolation.seccomp", "filesystem.paths", "isolation.isolate"),
    "isolation.container_entry",
)
"""Modules of runtimes/guest that confine the tool server, in import order."""


class Apptainer(msgspec.Struct, frozen=True):
    path: str
    version: str


class Bind(msgspec.Struct, frozen=True):
    """A file, folder or socket of the host, and the path `target` at which the container sees it. The mount is
    read-only, unless `device` is true: the source is then a device file that programs may use. A file system mounted
    below `source` is read-only only if it has its own bind (see kernel/mounts.py)."""

    source: str
    target: str
    device: bool = False

    def words(self) -> list[str]:
        fields = ("type=bind", f"source={self.source}", f"destination={self.target}", *(() if self.device else ("ro",)))
        return ["--mount", ",".join('"' + field.replace('"', '""') + '"' for field in fields)]


def find_apptainer() -> Apptainer:
    """Return a working Apptainer. If there is none, raises RuntimeUnavailable with a hint on how to repair the
    installation. The call blocks."""
    path = apptainer_program()
    found = Apptainer(path, _version(path))
    # Apptainer works if it can start the portable Python interpreter in an empty root folder.
    with tempfile.TemporaryDirectory(prefix="outrider-probe-") as folder:
        root = Path(folder, "root")
        for name in EMPTY_FOLDERS:
            (root / name).mkdir(parents=True)
        binds = [Bind(str(portable_python()), PORTABLE_AT)]
        command = [*exec_command(found, str(root), binds, {}), *portable_command(), *FLAGS, "-c", "pass"]
        fault = ""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=program_environment(Path(folder)),
                timeout=PROBE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            fault = str(error)
        else:
            if done.returncode != 0:
                fault = done.stderr.strip()[-500:] or f"exit code {done.returncode}"
    if fault:
        raise RuntimeUnavailable(
            f"{path} cannot make a sandbox for this user: {fault}",
            hint="it needs Apptainer 1.1 or newer, user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
            "user.max_user_namespaces=10000), and /dev/fuse for SIF files",
        )
    return found


def _version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeUnavailable(f"{path} does not run: {error}") from error
    match = re.search(r"\d+\.\d+\S*", done.stdout)
    return match.group() if match else done.stdout.strip()


def exec_command(found: Apptainer, image: str, binds: Sequence[Bind], env: Mapping[str, str]) -> list[str]:
    """Return the beginning of the command that runs a program in a container. The caller appends the program and its
    arguments. `env` is the program's environment."""
    return [
        *(found.path, "--quiet", "exec"),
        *ISOLATION,
        *(ROOT_OF_OWN if os.geteuid() else ROOT_AS_ROOT),
        *(word for bind in binds for word in bind.words()),
        *(word for name, value in env.items() for word in ("--env", f"{name}={value}")),
        image,
    ]


def program_environment(folder: Path) -> dict[str, str]:
    """Return the environment for Apptainer itself. PATH leads to Apptainer's helper programs. Apptainer writes its
    files below `folder`."""
    cache = environment("APPTAINER_CACHEDIR")
    return {
        "PATH": environment("PATH") or PATH,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "APPTAINER_TMPDIR": str(folder),
        "APPTAINER_CONFIGDIR": str(folder / "apptainer"),
        **({"APPTAINER_CACHEDIR": cache} if cache else {}),
    }


def in_groups(entrances: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return a command that enters control groups and then runs `command`, so that all processes of `command` are in
    these groups."""
    return ["/bin/sh", "-c", ENTER_GROUPS, "sh", *entrances, "--", *command] if entrances else list(command)


def server_command(size: int, files: int, memory: int, limits: Mapping[str, int]) -> list[str]:
    """Return the command that starts the tool server. The words after BOOT are the arguments of
    guest/isolation/container_entry.py."""
    options = {"bytes": size, "files": files, "memory": memory, **limits}
    return [*portable_command(), *FLAGS, "-c", BOOT, *(f"{name}={value}" for name, value in options.items())]


APPTAINER = ProbeCache(find_apptainer)
