"""A very short run of the soak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime

SOAK = Path(__file__).parent.parent.parent / "scripts" / "soak.py"


@pytest.mark.nightly
@pytest.mark.skipif(not NamespaceRuntime.available().ok, reason="no namespace sandboxes here")
def test_a_short_soak_ends_with_its_figures() -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.2", "--peak-seconds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == 0
    assert found["sessions"] > 0
    assert found["idle_descriptors"] <= found["last_descriptors"]
    assert found["settled_memory_mb"] > 0
