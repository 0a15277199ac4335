"""Starts, prepares and stops sandboxes, starts some of them in advance for later sessions, and cleans up after a crash.
`open_sandbox` opens a sandbox without a service.

This package imports only `concurrency/` and modules directly in `outrider/`, such as `spec.py` and `config.py`. It must
not depend on agents, models or grades.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outrider.sandbox.standalone import open_sandbox

__all__ = ["open_sandbox"]


def __getattr__(name: str) -> object:
    """Import `open_sandbox` on first use. This import loads the whole package, but most importers need only one
    module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.sandbox import standalone

    return getattr(standalone, name)
