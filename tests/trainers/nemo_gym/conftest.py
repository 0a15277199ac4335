"""The tests of this folder run NeMo Gym's own code. They are not collected if NeMo Gym is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("nemo_gym") else ["test_*.py", "world.py"]
