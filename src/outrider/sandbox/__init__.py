"""Sandboxes: made, prepared, kept warm ahead of sessions, and removed after a crash. `open_sandbox` opens one without a
service.

The room depends on nothing of Outrider but its words (`spec.py`, `errors.py`, `config.py`) and `concurrency/`. Agents,
models and grades do not belong here.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from outrider.sandbox.standalone import open_sandbox

__all__ = ["open_sandbox"]


def __getattr__(name: str) -> object:
    """Import `open_sandbox` on first use, because it needs all of this room, and most users need one module of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outrider.sandbox import standalone

    return getattr(standalone, name)
