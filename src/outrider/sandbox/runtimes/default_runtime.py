"""The runtime of `outrider demo` and `outrider harness check` when none is named. A task that names none has the
default of `RuntimeSpec.kind`. Runtimes are looked up by name; no runtime is imported here."""

from __future__ import annotations

from outrider.plugins import resolve
from outrider.sandbox.runtimes.base import Availability, RuntimeKind


def default_runtime() -> tuple[str, Availability]:
    """Return the default runtime (`namespace` where usable, else `process`), and the availability of `namespace` on
    this machine."""
    runtime: RuntimeKind = resolve("runtime", "namespace")
    available = runtime.available()
    return ("namespace" if available.ok else "process"), available
