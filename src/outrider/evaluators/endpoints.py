"""The external graders named by the operator, and the HTTP calls to them.

A task gives the name of a grader and never an address, so a task can make the service call only the operator's hosts,
and only with their keys. Keys are in environment variables of the service and of its nodes; the settings name the
variables. Invariants: a failed call raises an error that shows no key; redirects are not followed; a reply is at most
MAX_ANSWER bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from outrider.concurrency.retries import RetryPolicy
from outrider.config import GraderConfig
from outrider.environment import environment
from outrider.errors import EvaluatorError, InvalidField
from outrider.redaction import redacted

MAX_ANSWER = 4 << 20
PAUSES = RetryPolicy(first=0.5, longest=10.0, attempts=4)
TRANSIENT = frozenset({502, 503, 504})
"""Statuses of an unreachable grader, or of a proxy in front of it."""
MAX_SAID = 2000
"""Maximum characters of a refusing reply in an error."""
CACHED = 4096
"""Maximum number of judges' replies cached in a process."""


class Refused(EvaluatorError):
    """A grader replied with a `status` that is neither 2xx nor transient. `log_tail` is the reply's text."""

    status = 0


class Endpoints:
    """The endpoints of one process: the graders in the settings by name, the names of the `frozen` models, and a cache
    of judges' replies. `pauses` defines the waits between the attempts of one call."""

    def __init__(
        self, graders: Sequence[GraderConfig] = (), frozen: Sequence[str] = (), *, pauses: RetryPolicy = PAUSES
    ) -> None:
        self._graders = {grader.name: grader for grader in graders}
        self._frozen = frozenset(frozen)
        self._pauses = pauses
        self._secret = secrets.token_bytes(32)
        self._cache: OrderedDict[bytes, Any] = OrderedDict()

    def grader(self, name: str, *, field: str) -> GraderConfig:
        """Return the grader with this name. Raises InvalidField for an unknown name, with all known names."""
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
        """Return a word that the authors of the texts cannot guess. The same texts give the same word during the
        lifetime of this object."""
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

    async def post(
        self,
        grader: GraderConfig,
        path: str,
        body: bytes,
        *,
        seconds: float,
        headers: Mapping[str, str] = {},
        transient: frozenset[int] = TRANSIENT,
    ) -> dict[str, Any]:
        """Send a POST request to a grader and return the JSON object of its reply. Raises EvaluatorError.

        A call that cannot connect, exceeds `seconds` or gets a `transient` status is repeated. For any other status
        except 2xx, raises Refused at once.
        """
        key = variable(grader.key_variable, grader.name)
        sent = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        if key is not None:
            sent["Authorization"] = f"Bearer {key}"
        failure = ""
        attempts = self._pauses.attempts or 1
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(self._pauses.wait(attempt - 1))
            try:
                # No cookies: one evaluation must not pass data to another. Certificates are verified.
                async with (
                    aiohttp.ClientSession(
                        timeout=aiohttp.ClientTimeout(total=seconds), cookie_jar=aiohttp.DummyCookieJar()
                    ) as http,
                    http.post(grader.url.rstrip("/") + path, data=body, headers=sent, allow_redirects=False) as reply,
                ):
                    content = bytearray()
                    async for part in reply.content.iter_chunked(1 << 16):
                        content += part
                        if len(content) > MAX_ANSWER:
                            raise EvaluatorError(f"grader {grader.name!r} answered more than {MAX_ANSWER} bytes")
            except TimeoutError:
                failure = f"did not answer within {seconds:g} s"
            except (aiohttp.ClientError, OSError) as error:  # the error's text may have the operator's address
                failure = f"cannot be reached: {type(error).__name__}"
            else:
                if 200 <= reply.status < 300:
                    return json_object(grader.name, bytes(content))
                failure = f"answered {reply.status}"
                if reply.status not in transient:
                    # The reply is redacted before it is cut, because redaction does not find a key that is cut in two.
                    said = redacted(content.decode("utf-8", "replace"), [key] if key else ())[:MAX_SAID]
                    refused = Refused(
                        f"grader {grader.name!r} {failure}",
                        hint="a redirect is not followed: give its address" if reply.status // 100 == 3 else None,
                        log_tail=said,
                    )
                    refused.status = reply.status
                    raise refused
        raise EvaluatorError(f"grader {grader.name!r} {failure}, {attempts} times", hint="see whether it runs")


def variable(name: str | None, grader: str) -> str | None:
    """Return the value of a grader's variable, without surrounding blanks. Raises EvaluatorError if the variable is not
    set."""
    if name is None:
        return None
    if not (value := (environment(name) or "").strip()):  # a value read from a file may end with a newline
        raise EvaluatorError(
            f"the variable {name} of grader {grader!r} is not set",
            hint="set it in the environment of the service and of its nodes",
        )
    return value


def json_object(name: str, content: bytes) -> dict[str, Any]:
    """Parse the JSON object in a reply of the grader `name`. Raises EvaluatorError for anything else."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvaluatorError(f"grader {name!r} answered something that is not JSON") from error
    if not isinstance(found, dict):
        raise EvaluatorError(f"grader {name!r} answered JSON that is no object")
    return found
