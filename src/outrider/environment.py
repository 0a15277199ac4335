"""The environment of this process. Only this module reads the environment; `config.py` builds a service's settings from
the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

DEFAULT_URL = "http://127.0.0.1:8700"
"""The address of the service for clients that are given no other, not even in the variable OUTRIDER_URL."""


def variables() -> Mapping[str, str]:
    return os.environ


def environment(name: str) -> str | None:
    """Return the value of a variable, such as PATH or XDG_DATA_HOME, or None if the variable is not set."""
    return os.environ.get(name)


def installer_variables() -> dict[str, str]:
    """Return the variables for pip, uv, npm and interpreters that Outrider runs to install a program: the basics, and
    how to reach a package registry. Secrets of this process, such as OUTRIDER_* or AWS_*, are not among them."""
    return {name: value for name, value in os.environ.items() if _INSTALLER_NAME.fullmatch(name)}


_INSTALLER_NAME = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|XDG_\w+|PYENV_ROOT|LD_LIBRARY_PATH"
    r"|(?i:PIP_|UV_(?!PUBLISH_)|NPM_CONFIG_)\w+|(?i:(?:HTTPS?|ALL|NO)_PROXY)|NETRC"
    r"|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|NODE_EXTRA_CA_CERTS"
)


def cache_home() -> Path:
    """Return the folder for everything that Outrider downloads, installs or builds once, such as harness programs and
    images: $OUTRIDER_HOME, else outrider/ in $XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
