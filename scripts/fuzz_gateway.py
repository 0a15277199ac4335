"""Sends odd, broken and ordinary requests to the model gateway, in one dialect, and checks every reply and token.

    python scripts/fuzz_gateway.py --dialect chat --requests 100000 --seed 1

Everything runs in this process: the real gateway and sessions, on a scripted engine that keeps its own record of
prompts and outputs. Prints a verdict (`--json`: as JSON). The exit code is 1, and the command to reproduce the failure
is printed, after a 5xx, a hang, an error in another dialect's format, a reply that its dialect does not allow, or a
token that was lost, trained on twice or labelled wrongly. The fuzzer itself is in tests/support/fuzz; the fast tests
run it with few requests.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"

if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    sys.exit(importlib.import_module("support.fuzz.command").main())
