"""Makes and prepares sandboxes, keeps warm sandboxes for later sessions, and removes what a crash leaves behind.
`open_sandbox` opens a sandbox without a service.

This package imports only `concurrency/` and modules of Outrider's top folder, such as `spec.py`, `errors.py` and
`config.py`. Agents, models and grades do not belong here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outrider.sandbox.standalone import open_sandbox

__all__ = ["open_sandbox"]


def __getattr__(name: str) -> object:
    """Import `open_sandbox` on first use, because this import loads the whole package, and most importers need only one
    module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.sandbox import standalone

    return getattr(standalone, name)
