"""The external graders that the operator configures. `grader_calls.py` calls them.

A task names a grader, and never gives an address. So the service calls only the operator's hosts, each with its own
key. The keys are in environment variables of the service and of its nodes. The settings name these variables.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from outrider.concurrency.retries import RetryPolicy
from outrider.config import GraderConfig
from outrider.errors import InvalidField

PAUSES = RetryPolicy(first=0.5, longest=10.0, attempts=4)
CACHED = 4096
"""Maximum number of judges' replies that a process caches."""


class Endpoints:
    """The external graders in the settings, and a cache of judges' replies.

    frozen: the names of models that are never trained.
    pauses: the waits between attempts of one call.
    load: the number of calls in flight, by address."""

    def __init__(
        self, graders: Sequence[GraderConfig] = (), frozen: Sequence[str] = (), *, pauses: RetryPolicy = PAUSES
    ) -> None:
        self._graders = {grader.name: grader for grader in graders}
        self._frozen = frozenset(frozen)
        self.pauses = pauses
        self.load: Counter[str] = Counter()
        self._secret = secrets.token_bytes(32)
        self._cache: OrderedDict[bytes, Any] = OrderedDict()

    def grader(self, name: str, *, field: str) -> GraderConfig:
        """Return the grader with this name. If there is none, raises InvalidField with a hint that lists the known
        names."""
        if name not in self._graders:
            known = ", ".join(sorted(self._graders)) or "none"
            raise InvalidField(
                f"there is no grader {name!r}", field=field, hint=f"the operator's setting graders has: {known}"
            )
        return self._graders[name]

    def check_frozen(self, name: str, *, field: str) -> None:
        """Raise InvalidField for an unknown frozen model."""
        if name not in self._frozen:
            known = ", ".join(sorted(self._frozen)) or "none"
            raise InvalidField(
                f"there is no frozen model {name!r}", field=field, hint=f"the operator's setting frozen has: {known}"
            )

    def mark(self, *texts: str) -> str:
        """Return a delimiter that the authors of `texts` cannot guess. For the same texts, an Endpoints object always
        returns the same delimiter."""
        return hmac.new(self._secret, json.dumps(texts).encode(), hashlib.sha256).hexdigest()[:12]

    def cached(self, key: bytes) -> Any:
        """Return the value cached under `key`, or None."""
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def cache(self, key: bytes, value: Any) -> None:
        self._cache[key] = value
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)
