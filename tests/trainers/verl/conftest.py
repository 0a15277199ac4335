"""The tests of this folder import verl. They are not collected if verl is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]
