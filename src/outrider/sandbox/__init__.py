"""Sandboxes: made, prepared, kept warm ahead of sessions, and removed after a crash. `open_sandbox` opens one without a
service.

The room depends on nothing of Outrider but its words (`spec.py`, `errors.py`, `config.py`) and `concurrency/`. Agents,
models and grades do not belong here.
"""

from outrider.sandbox.standalone import open_sandbox as open_sandbox
