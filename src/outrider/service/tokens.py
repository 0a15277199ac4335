"""Who calls the control API: the operator's own token, and tokens with roles, of which the store has the digests.

It knows no HTTP. Invariants: the text of a token is only in the reply to its creation; once there is a token, nobody is
let in without one.
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
from outrider.schemas import NewToken, TokenView
from outrider.service.principals import LOCAL, OPERATOR, Principal
from outrider.spec import TokenSpec
from outrider.store.rows import TokenRow
from outrider.store.store import Store

DAY = 86400.0
HINT = (
    "set OUTRIDER_TOKEN for Outrider's commands, clients and bridges; others send the header"
    " `Authorization: Bearer TOKEN`"
)


class RevokedMeanwhile(Exception):
    """The token of a call that is under way was revoked."""


class Tokens:
    """The tokens of a service. `operator` is the one of its settings.

    Texts are compared by their SHA-256. No slow hash is needed: a token is 32 random bytes, which nobody finds by
    trying. And how long the comparison of two digests takes tells nothing of a text.
    """

    def __init__(self, store: Store, operator: str | None, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._operator = None if operator is None else _digest(operator.encode())
        self._clock = clock
        self._calls: dict[asyncio.Task[object], str] = {}
        """The names of the tokens of the calls under way, by the task of each."""
        self._revoked: set[str] = set()
        """Names that were revoked here: a call may have been let in just before, and begin just after."""

    async def required(self) -> bool:
        """Whether callers need a token."""
        return self._operator is not None or bool(await self._store.tokens())

    async def caller(self, text: bytes | None) -> Principal:
        """Who has sent this token; None if none came. Raises Unauthorized."""
        if text is not None:
            digest = _digest(text)
            if self._operator is not None and secrets.compare_digest(digest, self._operator):
                return OPERATOR
            if (row := await self._store.token(digest)) is not None:
                if row.revoked is not None:
                    raise Unauthorized("this token was revoked", hint="ask the operator for another one")
                if row.expires is not None and row.expires <= self._clock():
                    raise Unauthorized("this token has expired", hint="ask the operator for another one")
                return Principal(row.name, row.role, row.tenant, row.max_queued)
        if not await self.required():
            return LOCAL
        raise Unauthorized(
            "this service requires a token" if text is None else "this is not a token of this service", hint=HINT
        )

    @contextmanager
    def call(self, caller: Principal) -> Iterator[None]:
        """A call under way. Raises RevokedMeanwhile in place of the cancellation by which `revoke` ends it."""
        task = asyncio.current_task()
        assert task is not None
        if caller.name in self._revoked:
            raise RevokedMeanwhile
        self._calls[task] = caller.name
        try:
            yield
        except asyncio.CancelledError:
            if task in self._calls:
                raise
            task.uncancel()
            raise RevokedMeanwhile from None
        finally:
            self._calls.pop(task, None)

    async def create(self, spec: TokenSpec) -> NewToken:
        """Raises Conflict for a name that is, or was, another token's, or is that of a tenant which is not asked for,
        and InvalidField for a name of Outrider's own, and for a first token that could not make others."""
        if spec.name in (LOCAL.name, OPERATOR.name):
            raise InvalidField(f"{spec.name!r} stands for those who need no token of this kind", field="name")
        if spec.role != "admin" and not await self.required():
            raise InvalidField(
                "the first token must be an admin's: once there is one, every call needs a token",
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
        return NewToken(token=_view(row), text=text)

    async def revoke(self, name: str) -> TokenView:
        """Revoke a token, and cut off its calls under way: streams of events, long polls, relay workers. Raises
        NotFound."""
        view = _view(await self._store.revoke_token(name))
        self._revoked.add(name)
        for task, of in list(self._calls.items()):
            if of == name and task is not asyncio.current_task():
                del self._calls[task]
                task.cancel()
        return view

    async def listed(self) -> tuple[TokenView, ...]:
        return tuple(map(_view, await self._store.tokens()))


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _view(row: TokenRow) -> TokenView:
    return TokenView(
        name=row.name,
        role=row.role,
        tenant=row.tenant,
        max_queued=row.max_queued,
        created=row.created,
        expires=row.expires,
        revoked=row.revoked,
    )
