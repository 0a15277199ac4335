"""Signs callbacks and requests to external graders. A receiver verifies a callback like this:

    group = outrider.callbacks.verify(request.headers, body, secret)

The signatures follow the Standard Webhooks specification (https://www.standardwebhooks.com), which has libraries in
other languages. Invariant: `verify` accepts only a body that the holder of the secret has signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence

import msgspec

from outrider.errors import InvalidField, RequestError, Unauthorized
from outrider.schemas import GroupView, JsonGroupView

ID = "webhook-id"
TIMESTAMP = "webhook-timestamp"
SIGNATURE = "webhook-signature"
SCHEME = "v1,"
ENCODED = "whsec_"
"""The prefix of a secret that is written in base64."""
MIN_SECRET = 16
"""Minimum characters of a secret. A shorter one could be found from one signature by brute force."""
TOLERANCE_SECONDS = 300.0


def signed_headers(secret: str, group_id: str, body: bytes, *, now: float) -> dict[str, str]:
    """Return the headers of a callback: the group's id, the time `now`, and a signature of the id, the time and the
    body."""
    timestamp = str(int(now))
    return {ID: group_id, TIMESTAMP: timestamp, SIGNATURE: _signature(secret, group_id, timestamp, body)}


def verify(
    headers: Mapping[str, str],
    body: bytes,
    secret: str | Sequence[str],
    *,
    tolerance: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> GroupView:
    """Check the signature of a callback, and return the group in its body. The arguments are those of
    `check_signature`. Raises Unauthorized for an invalid signature, and RequestError if the body is not a group in
    JSON."""
    check_signature(headers, body, secret, tolerance=tolerance, now=now)
    try:
        return msgspec.json.decode(body, type=JsonGroupView).view()
    except ValueError as error:  # msgspec.DecodeError, or lists of different lengths in a sample
        raise RequestError(f"the body of the callback is no group: {error}") from error


def check_signature(
    headers: Mapping[str, str],
    body: bytes,
    secret: str | Sequence[str],
    *,
    tolerance: float = TOLERANCE_SECONDS,
    now: float | None = None,
) -> None:
    """Check that the sender of a request has the secret. `body` must be the bytes as received.

    While a secret is being replaced, pass both the old and the new secret. `tolerance` is the maximum difference
    between the clocks of service and receiver, in seconds. Within this time, somebody could replay a recorded request.
    Raises Unauthorized if the signature or one of its headers is missing, if the signature does not match, or if the
    time of the signature differs from the current time by more than `tolerance` seconds.
    """
    found = {name.lower(): value for name, value in headers.items()}
    group_id, timestamp, signatures = (found.get(name, "") for name in (ID, TIMESTAMP, SIGNATURE))
    if not (group_id and timestamp and signatures):
        raise Unauthorized(
            "the callback is not signed",
            hint="set callbacks.secret (OUTRIDER_CALLBACKS__SECRET) on the service to the receiver's secret",
        )
    secrets = [secret] if isinstance(secret, str) else secret
    expected = [_signature(each, group_id, timestamp, body).encode() for each in secrets]
    given = [_bytes(one) for one in signatures.split()]
    # A signature covers the text ID.TIMESTAMP.BODY. If the id or the timestamp contained a dot, two different requests
    # could have the same text.
    one_division = "." not in group_id and timestamp.isascii() and timestamp.isdigit()
    # The comparison takes constant time, so that its duration does not reveal how much of a signature is right.
    if not one_division or not any(hmac.compare_digest(one, right) for one in given for right in expected):
        raise Unauthorized(
            "the callback's signature does not match", hint="service and receiver share callbacks.secret"
        )
    clock = time.time() if now is None else now
    if abs(clock - int(timestamp)) > tolerance:
        raise Unauthorized(
            f"the callback was signed {clock - int(timestamp):.0f} s ago",
            hint="it was recorded and sent again, or the clocks differ: set them, or allow for it with `tolerance`",
        )


def check_secret(secret: str) -> None:
    """Raise InvalidField for a secret that is shorter than MIN_SECRET or whose base64 is invalid."""
    if len(secret) < MIN_SECRET:
        raise InvalidField(
            f"a secret needs at least {MIN_SECRET} characters",
            field="callbacks.secret",
            hint="make one: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    try:
        _key(secret)
    except (binascii.Error, ValueError) as error:
        raise InvalidField(f"what follows {ENCODED} is not base64", field="callbacks.secret") from error


def _signature(secret: str, group_id: str, timestamp: str, body: bytes) -> str:
    signed = b".".join((_bytes(group_id), _bytes(timestamp), body))
    return SCHEME + base64.b64encode(hmac.digest(_key(secret), signed, hashlib.sha256)).decode()


def _bytes(header: str) -> bytes:
    """Encode the value of a header. Characters that UTF-8 cannot encode become escapes."""
    return header.encode("utf-8", "backslashreplace")


def _key(secret: str) -> bytes:
    if not secret.startswith(ENCODED):
        return secret.encode()
    return base64.b64decode(secret.removeprefix(ENCODED), validate=True)
