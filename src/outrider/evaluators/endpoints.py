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

from outrider.callbacks import MIN_SECRET, check_secret
from outrider.concurrency.retries import RetryPolicy
from outrider.config import GraderConfig
from outrider.environment import environment
from outrider.errors import EvaluatorError, InvalidField

PAUSES = RetryPolicy(first=0.5, longest=10.0, attempts=4)
CACHED = 4096
"""Maximum number of judges' replies that a process caches."""


class Endpoints:
    """The external graders in the settings, and a cache of judges' replies.

    frozen: the names of models that are never trained.
    pauses: the waits between attempts of one call.
    called_here: True if this process calls the graders. Such a process must have the graders' keys.
    load: the number of calls in flight, by address."""

    def __init__(
        self,
        graders: Sequence[GraderConfig] = (),
        frozen: Sequence[str] = (),
        *,
        pauses: RetryPolicy = PAUSES,
        called_here: bool = False,
    ) -> None:
        self._graders = {grader.name: grader for grader in graders}
        self._frozen = frozenset(frozen)
        self.pauses = pauses
        self._called_here = called_here
        self.load: Counter[str] = Counter()
        self._secret = secrets.token_bytes(32)
        self._cache: OrderedDict[bytes, Any] = OrderedDict()

    def grader(self, name: str, *, field: str) -> GraderConfig:
        """Return the grader with this name. If there is none, raises InvalidField with a hint that lists the known
        names. Also raises InvalidField if `called_here` is True and the grader's key is missing."""
        if name not in self._graders:
            known = ", ".join(sorted(self._graders)) or "none"
            raise InvalidField(
                f"there is no grader {name!r}", field=field, hint=f"the operator's setting graders has: {known}"
            )
        grader = self._graders[name]
        self._key(grader.key_variable, grader, field)
        return grader

    def check_signing_key(self, grader: GraderConfig, *, field: str) -> None:
        """Raise InvalidField if the grader's signing key is too short or invalid. Also raise InvalidField if
        `called_here` is True and the key is missing."""
        secret = self._key(grader.secret_variable, grader, field)
        if secret is None:
            return
        try:
            check_secret(secret)
        except InvalidField as error:
            name = grader.secret_variable
            raise InvalidField(
                f"the variable {name} of grader {grader.name!r} has no usable key: {error.message}",
                field=field,
                hint=f"the setting graders names {name} as secret_variable of {grader.name!r}: set the same key of at"
                f" least {MIN_SECRET} characters in the environment of the service and of its nodes",
            ) from None

    def _key(self, name: str | None, grader: GraderConfig, field: str) -> str | None:
        """Return the value of the environment variable `name`. Only a process that calls the grader needs the value. So
        for a variable that is not set, raises InvalidField if `called_here` is True, and returns None if not."""
        try:
            return variable(name, grader.name)
        except EvaluatorError as error:
            if not self._called_here:
                return None
            raise InvalidField(error.message, field=field, hint=error.hint) from None

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


def variable(name: str | None, grader: str) -> str | None:
    """Return the value of the environment variable `name`, without surrounding whitespace, or None if `name` is None.
    Raises EvaluatorError if the variable is not set."""
    if name is None:
        return None
    if not (value := (environment(name) or "").strip()):  # a value read from a file may end with a newline
        raise EvaluatorError(
            f"the variable {name} of grader {grader!r} is not set",
            hint="set it in the environment of the service and of its nodes",
        )
    return value
