"""The shares of clients in the service's file descriptors, and the process's limit of open files."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from outrider.wire.file_descriptors import EACH_LEAST, EACH_MOST, SESSIONS, shares

RAISED = """
import resource
from outrider.wire.file_descriptors import available, raise_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
print(available(), raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=True)
    available, raised, soft, hard, before = map(int, done.stdout.split())
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert (available, raised, soft, hard) == (most, most, most, before)


@pytest.mark.parametrize("descriptors", [64, 256, 1024, 4096, 20_000, 65_536])
def test_what_clients_can_take_leaves_more_than_half(descriptors: int) -> None:
    share = shares(descriptors)
    assert share.sandboxes + share.control < descriptors / 2
    assert EACH_LEAST <= share.session <= EACH_MOST
    assert share.session == EACH_LEAST or share.session * SESSIONS <= share.sandboxes


POOR = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 512))
from outrider.doctor import diagnose
[found] = diagnose().limits
print(found.ok, found.detail, found.hint, sep="|")
"""


@pytest.mark.deep
def test_doctor_says_when_they_are_few() -> None:
    done = subprocess.run([sys.executable, "-c", POOR], capture_output=True, text=True, check=True)
    ok, detail, hint = done.stdout.strip().split("|")
    assert (ok, detail.split(",")[0]) == ("False", "512")
    assert "LimitNOFILE" in hint
