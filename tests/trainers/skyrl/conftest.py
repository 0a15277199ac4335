"""These tests run SkyRL's own code: where it is not installed they are not collected."""

from __future__ import annotations

import sys
import typing
from importlib.util import find_spec

import typing_extensions

# The import of another conftest may have left a stand-in for the module in sys.modules.
collect_ignore_glob = [] if find_spec("skyrl") else ["test_*.py"]

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3 gives pydantic the one of typing, which needs 3.12
