"""Calls external graders over HTTP.

Importing this module takes long, because it imports aiohttp. So only evaluators that call a grader import it.
Invariants: the error of a failed call does not show a key; redirects are not followed; a reply has at most MAX_ANSWER
bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from outrider.concurrency.retries import RetryPolicy
from outrider.config import GraderConfig
from outrider.errors import EvaluatorError
from outrider.evaluators.endpoints import variable
from outrider.redaction import redacted

MAX_ANSWER = 4 << 20
TRANSIENT = frozenset({502, 503, 504})
"""HTTP statuses that mean that the grader cannot be reached. Often a proxy sends them."""
MAX_SAID = 2000
"""Maximum characters of a grader's reply that an error message quotes."""


class Refused(EvaluatorError):
    """A grader replied with a `status` that is neither 2xx nor transient. `log_tail` is the text of the reply."""

    def __init__(self, message: str, *, status: int, **about: Any) -> None:
        super().__init__(message, **about)
        self.status = status


async def post(
    grader: GraderConfig,
    path: str,
    body: bytes,
    *,
    seconds: float,
    sign: Callable[[], Mapping[str, str]] = dict,
    pauses: RetryPolicy,
    load: Counter[str],
    transient: frozenset[int] = TRANSIENT,
) -> dict[str, Any]:
    """Send a POST request to a grader and return the JSON object in its reply. Raises EvaluatorError.

    Of the grader's addresses, the call goes to the one with the fewest calls in flight (`load`). The call is repeated
    after a pause (`pauses`) if it cannot connect, exceeds `seconds` or gets one of the statuses in `transient`. A
    repeated call prefers another address. Any other status except 2xx raises Refused at once. `sign` returns further
    headers. It is called for each attempt, because a grader refuses an old signature.
    """
    key = variable(grader.key_variable, grader.name)
    sent = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    failure = ""
    attempts = pauses.attempts or 1
    failed: Counter[str] = Counter()
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(pauses.wait(attempt - 1))
        url = min(grader.urls, key=lambda each: (failed[each], load[each]))
        load[url] += 1
        try:
            # Cookies are off, because one evaluation must not pass data to another. Certificates are verified.
            async with (
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=seconds), cookie_jar=aiohttp.DummyCookieJar()
                ) as http,
                http.post(
                    url.rstrip("/") + path, data=body, headers={**sent, **sign()}, allow_redirects=False
                ) as reply,
            ):
                content = bytearray()
                async for part in reply.content.iter_chunked(1 << 16):
                    content += part
                    if len(content) > MAX_ANSWER:
                        raise EvaluatorError(f"grader {grader.name!r} answered more than {MAX_ANSWER} bytes")
        except TimeoutError:
            failure = f"did not answer within {seconds:g} s"
        except (aiohttp.ClientError, OSError) as error:  # the error's text may contain the operator's address
            failure = f"cannot be reached: {type(error).__name__}"
        else:
            if 200 <= reply.status < 300:
                return json_object(grader.name, bytes(content))
            failure = f"answered {reply.status}"
            if reply.status not in transient:
                # Keys are removed before the reply is shortened, because a key that is cut in two would not be found.
                text = redacted(content.decode("utf-8", "replace"), [key] if key else ())[:MAX_SAID]
                raise Refused(
                    f"grader {grader.name!r} {failure}",
                    hint="redirects are not followed: name the final address in the setting graders"
                    if reply.status // 100 == 3
                    else None,
                    log_tail=text,
                    status=reply.status,
                )
        finally:
            load[url] -= 1
        failed[url] += 1
    raise EvaluatorError(
        f"grader {grader.name!r} {failure}, {attempts} times",
        hint="check that the grader runs at the url in the setting graders",
    )


def json_object(name: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object in a reply of the grader `name`. Raises EvaluatorError for any other reply."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvaluatorError(f"grader {name!r} answered something that is not JSON") from error
    if not isinstance(found, dict):
        raise EvaluatorError(f"grader {name!r} answered JSON that is no object")
    return found
