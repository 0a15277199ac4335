"""The tests of this folder run tinker-cookbook's own code. They are not collected if tinker-cookbook is not
installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("tinker_cookbook") else ["test_*.py", "world.py"]
