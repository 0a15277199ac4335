"""A feature of the machine is probed once. A missing feature is probed again after a while."""

from __future__ import annotations

import pytest

from outrider.errors import RuntimeUnavailable
from outrider.sandbox.runtimes.probe_cache import ProbeCache


class Probe:
    """A probe that fails as long as `broken` is True."""

    def __init__(self, *, broken: bool) -> None:
        self.broken = broken
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.broken:
            raise RuntimeUnavailable("not here", hint="install it")
        return "found"


def test_a_finding_is_kept() -> None:
    probe = Probe(broken=False)
    cache = ProbeCache(probe)
    assert [cache.get(), cache.get()] == ["found", "found"]
    assert probe.calls == 1


def test_a_failure_is_told_again_without_a_probe_for_a_while() -> None:
    probe = Probe(broken=True)
    cache = ProbeCache(probe)
    for _ in range(2):
        with pytest.raises(RuntimeUnavailable, match="not here") as raised:
            cache.get()
        assert raised.value.hint == "install it"
    assert probe.calls == 1


def test_what_was_repaired_is_found() -> None:
    probe = Probe(broken=True)
    cache = ProbeCache(probe, retry_seconds=0.0)
    with pytest.raises(RuntimeUnavailable):
        cache.get()
    probe.broken = False
    assert cache.get() == "found"
