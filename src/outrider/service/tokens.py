"""Authenticates callers of the control API by the operator's token, or by tokens with roles, which are stored as
digests.

Invariants: the text of a token appears only in the reply to the request that creates it; once a token exists, no caller
is admitted without one.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.errors import InvalidField, Unauthorized
from outrider.redaction import KEY_PREFIX
from outrider.schemas import NewToken, TokenView, reply_of
from outrider.service.principals import LOCAL, OPERATOR, Principal
from outrider.spec import TokenSpec
from outrider.store.rows import TokenRow
from outrider.store.store import Store

DAY = 86400.0
HINT = (
    "set OUTRIDER_TOKEN for Outrider's commands, clients and bridges; others send the header"
    " `Authorization: Bearer TOKEN`"
)
REVOKED, EXPIRED = "this token was revoked", "this token has expired"
EXPIRY_CHECK_SECONDS = 60.0
"""Maximum seconds between two checks whether the token of a running call has expired. There is a maximum because the
event loop's clock stands still while the machine is suspended, and does not change when the system clock is set."""


class RevokedMeanwhile(Exception):
    """The caller's token was revoked, or has expired, while the call was running. The text of the error says which."""


class TokenRegistry:
    """The tokens of a service. `operator` is the token in the settings.

    Tokens are compared by their SHA-256 digests. No slow hash is needed, because a token is 32 random bytes and cannot
    be guessed. The duration of a comparison reveals nothing about the text of a token.
    """

    def __init__(self, store: Store, operator: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._operator = None if operator is None else _digest(operator.encode())
        self._clock = clock
        self._calls: dict[asyncio.Task[object], str] = {}
        """The token name of each running call, by the asyncio task of the call."""
        self._revoked: set[str] = set()
        """Names of the tokens that this process has revoked. `call` refuses these tokens, because a call may be
        authenticated just before its token is revoked, and begin just after that."""

    async def required(self) -> bool:
        """Return True if callers need a token."""
        return self._operator is not None or await self._store.has_tokens()

    async def caller(self, text: bytes | None) -> Principal:
        """Return the caller to whom a token belongs. `text` is None for a request without a token. Raises
        Unauthorized."""
        if text is not None:
            digest = _digest(text)
            if self._operator is not None and secrets.compare_digest(digest, self._operator):
                return OPERATOR
            if (row := await self._store.token(digest)) is not None:
                if row.revoked is not None:
                    raise Unauthorized(REVOKED, hint="ask the operator for another one")
                if row.expires is not None and row.expires <= self._clock():
                    raise Unauthorized(EXPIRED, hint="ask the operator for another one")
                return Principal(row.name, row.role, row.tenant, row.max_queued, row.expires)
        if not await self.required():
            return LOCAL
        raise Unauthorized(
            "this service requires a token" if text is None else "this is not a token of this service", hint=HINT
        )

    @contextmanager
    def call(self, caller: Principal) -> Iterator[None]:
        """Record a running call of this caller while the block runs. Raises RevokedMeanwhile if the caller's token is
        already revoked, or if the call is cancelled because the token is revoked or expires."""
        task = asyncio.current_task()
        assert task is not None
        if caller.name in self._revoked:
            raise RevokedMeanwhile(REVOKED)
        self._calls[task] = caller.name
        loop, reason, timer = asyncio.get_running_loop(), REVOKED, None

        def check(expires: float) -> None:
            nonlocal reason, timer
            left = expires - self._clock()
            if left > 0:
                timer = loop.call_later(min(left, EXPIRY_CHECK_SECONDS), check, expires)
            elif self._calls.pop(task, None) is not None:
                reason = EXPIRED
                task.cancel()

        if caller.expires is not None:
            left = max(0.0, caller.expires - self._clock())
            timer = loop.call_later(min(left, EXPIRY_CHECK_SECONDS), check, caller.expires)
        try:
            yield
        except asyncio.CancelledError:
            if task in self._calls:
                raise
            task.uncancel()
            raise RevokedMeanwhile(reason) from None
        finally:
            self._calls.pop(task, None)
            if timer is not None:
                timer.cancel()

    async def create(self, spec: TokenSpec) -> NewToken:
        """Create a token. Raises Conflict if another token has or had this name. Without `spec.tenant`, also raises
        Conflict if a tenant has this name. Raises InvalidField if Outrider reserves the name, or if the first token is
        not an admin's."""
        if spec.name in (LOCAL.name, OPERATOR.name):
            raise InvalidField(f"{spec.name!r} is reserved for callers without a stored token", field="name")
        if spec.role != "admin" and not await self.required():
            raise InvalidField(
                "the first token must be an admin's: once a token exists, every call needs a token",
                field="role",
                hint="make one with `outrider token create --role admin`, or set OUTRIDER_TOKEN for the service",
            )
        text = KEY_PREFIX + secrets.token_urlsafe(32)
        now = self._clock()
        row = TokenRow(
            name=spec.name,
            digest=_digest(text.encode()),
            role=spec.role,
            max_queued=spec.max_queued,
            created=now,
            expires=None if spec.expires_days is None else now + spec.expires_days * DAY,
            tenant=spec.tenant or spec.name,
        )
        await self._store.add_token(row, joins=spec.tenant is not None)
        return NewToken(token=reply_of(TokenView, row), text=text)

    async def revoke(self, name: str) -> TokenView:
        """Revoke a token, and cancel its running calls, such as event streams, long polls and relay workers. Raises
        NotFound for an unknown name."""
        view = reply_of(TokenView, await self._store.revoke_token(name))
        self._revoked.add(name)
        for task, of in list(self._calls.items()):
            if of == name and task is not asyncio.current_task():
                del self._calls[task]
                task.cancel()
        return view

    async def listed(self) -> tuple[TokenView, ...]:
        return tuple(reply_of(TokenView, row) for row in await self._store.tokens())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
