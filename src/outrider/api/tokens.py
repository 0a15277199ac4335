"""Control routes for tokens: create, list and revoke them while the service runs."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from outrider.api.access import made
from outrider.api.control_bodies import whole_body
from outrider.api.control_replies import json_reply
from outrider.api.openapi import answers, takes
from outrider.errors import Conflict
from outrider.schemas import NewToken, TokenList, TokenView
from outrider.service.admission import parse_body
from outrider.service.service import Service
from outrider.spec import TokenSpec


def token_routes(service: Service) -> APIRouter:
    routes = APIRouter(prefix="/v1/tokens")

    @routes.get("", **answers(TokenList))
    async def tokens() -> Response:
        """List all tokens, including expired and revoked ones, without their texts."""
        return json_reply(TokenList(tokens=await service.tokens.listed()))

    @routes.post("", status_code=201, **takes(TokenSpec), **answers(NewToken, Conflict, status=201))
    async def create(request: Request) -> Response:
        """Create a token. The token's text is in this reply and nowhere else."""
        new = await service.tokens.create(parse_body(TokenSpec, await whole_body(request)))
        made(request, name=new.token.name)
        return json_reply(new, status=201)

    @routes.delete("/{name}", **answers(TokenView))
    async def revoke(name: str) -> Response:
        """Revoke a token at once: calls under way are cut off. The token's name cannot be used again."""
        return json_reply(await service.tokens.revoke(name))

    return routes
