"""The same examples on every machine, loaded or not."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("tokens", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tokens")
