"""The default runtime of `outrider demo` and `outrider harness check`. Tasks do not use it: their default is that of
`RuntimeSpec.kind`. Runtimes are looked up by name, so this module imports none."""

from __future__ import annotations

from outrider.plugins import resolve
from outrider.sandbox.runtimes.base import Availability, RuntimeKind


def default_runtime() -> tuple[str, Availability]:
    """Return the default runtime (`namespace` where usable, else `process`), and the availability of `namespace` on
    this machine."""
    runtime: RuntimeKind = resolve("runtime", "namespace")
    available = runtime.available()
    return ("namespace" if available.ok else "process"), available
