"""The environment of this process: its variables, its machine and the installed packages. No other module reads
environment variables; `config.py` makes a service's settings from the variables that this module returns."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8700"
"""The address at which a client expects the service, if the caller gives no address and OUTRIDER_URL is not set."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def variables() -> Mapping[str, str]:
    return os.environ


def environment(name: str) -> str | None:
    """Return the value of a variable, such as PATH or XDG_DATA_HOME, or None if the variable is not set."""
    return os.environ.get(name)


@cache
def installed_version(distribution: str) -> str:
    """Return the version of an installed distribution, such as "outrider". The result is cached, because a lookup
    parses the distribution's metadata, which takes milliseconds and a file descriptor. Raises `importlib.metadata`'s
    PackageNotFoundError."""
    from importlib.metadata import version  # imported late: few programs need it

    return version(distribution)


def install_command(extra: str) -> str:
    """Return the command that installs the packages of one of Outrider's extras, such as "docker". It names the
    packages themselves, because Outrider is not published on a package index."""
    return f"pip install {' '.join(map(shlex.quote, _packages(extra)))}"


def _packages(extra: str) -> list[str]:
    from importlib.metadata import requires  # imported late: few programs need it

    packages: list[str] = []
    for line in requires("outrider") or ():
        package, _, marker = line.partition(";")
        if not re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            continue
        if own := re.fullmatch(r"outrider\[(.*)\]", package.strip()):
            packages += (each for inner in own[1].split(",") for each in _packages(inner))
        else:
            packages.append(package.strip())
    return packages


def host_id() -> str:
    """Return an id of this machine's boot and this process's network namespace. Processes with the same id share both.
    Returns "" if it cannot be read."""
    try:
        return f"{BOOT_ID.read_text().strip()} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return ""


def installer_variables() -> dict[str, str]:
    """Return the environment for the installers and interpreters (pip, uv, npm) with which Outrider installs a program.
    It contains basic variables and those that configure access to a package registry. It does not contain secrets of
    this process, such as OUTRIDER_* or AWS_*."""
    return {name: value for name, value in os.environ.items() if _INSTALLER_NAME.fullmatch(name)}


_INSTALLER_NAME = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|PYENV_ROOT|LD_LIBRARY_PATH"
    r"|(?i:PIP_|UV_(?!PUBLISH_))\w+|(?i:NPM_CONFIG_).+|(?i:(?:HTTPS?|ALL|NO)_PROXY)|NETRC"
    r"|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
)


def cache_home() -> Path:
    """Return the cache folder. It keeps what Outrider downloads, installs or builds only once, such as harness programs
    and images. The folder is $OUTRIDER_HOME, or else outrider/ in $XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
