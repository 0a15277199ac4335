"""Which runtime is used where nobody names one. It knows no runtime but by name."""

from __future__ import annotations

from outrider.plugins import resolve
from outrider.runtimes.base import Availability, RuntimeKind


def default_runtime() -> tuple[str, Availability]:
    """The runtime to use where nobody names one: `namespace` where it works, else `process`. Also what the machine says
    of `namespace`."""
    runtime: RuntimeKind = resolve("runtime", "namespace")
    available = runtime.available()
    return ("namespace" if available.ok else "process"), available
