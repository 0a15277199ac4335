"""Chooses the runtime of `outrider demo` and `outrider harness check` if the user names none. For tasks, the default of
`RuntimeSpec.kind` applies instead. This module imports no runtime, because runtimes are looked up by name."""

from __future__ import annotations

from outrider.plugins import resolve
from outrider.sandbox.runtimes.base import Availability, RuntimeKind


def default_runtime() -> tuple[str, Availability]:
    """Return the default runtime, and whether this machine supports `namespace`. The default is `namespace` if it is
    supported, and `process` otherwise."""
    runtime: RuntimeKind = resolve("runtime", "namespace")
    available = runtime.available()
    return ("namespace" if available.ok else "process"), available
