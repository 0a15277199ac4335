"""The tests of this folder run SkyRL's own code. They are not collected if SkyRL is not installed."""

from __future__ import annotations

import sys
import typing
from importlib.util import find_spec

import typing_extensions

collect_ignore_glob = [] if find_spec("skyrl") else ["test_*.py"]

if sys.version_info < (3, 12):
    # SkyRL 0.3 passes `typing.TypedDict` to pydantic, which accepts this class from Python 3.12 on only.
    typing.TypedDict = typing_extensions.TypedDict
