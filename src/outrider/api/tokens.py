"""Control routes for tokens: create, list and revoke them while the service runs."""

from __future__ import annotations

from typing import Annotated

from outrider.api.control_router import ControlRouter, Created, Serving, body
from outrider.errors import Conflict
from outrider.schemas import NewToken, TokenList, TokenView
from outrider.spec import TokenSpec

ROUTES = ControlRouter("/tokens")


@ROUTES.get("", "admin", TokenList)
async def tokens(service: Serving) -> TokenList:
    """List all tokens, including expired and revoked ones. The reply does not contain their texts."""
    return TokenList(tokens=await service.tokens.listed())


@ROUTES.post("", "admin", NewToken, status=201, errors=(Conflict,))
async def create(service: Serving, spec: Annotated[TokenSpec, body(TokenSpec)], created: Created) -> NewToken:
    """Create a token. Only this reply shows the token's text."""
    new = await service.tokens.create(spec)
    created(name=new.token.name)
    return new


@ROUTES.delete("/{name}", "admin", TokenView)
async def revoke(service: Serving, name: str) -> TokenView:
    """Revoke a token at once: its running calls are cut off. The token's name cannot be used again."""
    return await service.tokens.revoke(name)
