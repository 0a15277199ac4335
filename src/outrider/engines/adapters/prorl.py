"""The adapter for servers with ProRL Agent's route for tokens. Also chooses the adapter for a server that a ProRL
client registers.

The route is `POST URL/generate`. A request has `prompt_ids` and sampling parameters; the reply is one JSON object with
`response_ids` and `logprobs`, not a stream. Invariant: ids are passed on only with exactly one log-probability for each
id.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal

import msgspec
import orjson

from outrider.concurrency.retries import RetryPolicy
from outrider.engines.adapters.ids_json import body_with_ids
from outrider.engines.adapters.options import ServerOptions, read_options, server_url
from outrider.engines.adapters.server_api import LOGPROB_KINDS, checked_logprobs
from outrider.engines.base import (
    Chunk,
    EngineHealth,
    EngineOptions,
    GenerateRequest,
    KnownVersions,
    PauseMode,
    SamplingParams,
)
from outrider.engines.gates import PauseGate
from outrider.engines.http.client import DEFAULT_RETRY, HttpClient
from outrider.engines.http.failures import Sizes, StatusFailure, translate
from outrider.errors import EngineError, EngineMisbehaved, EngineRejected
from outrider.trajectory import FinishReason, TokenMode, VersionSpan

ROUTE = "/generate"
NEUTRAL: dict[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "stop": (),
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
}
"""Sampling parameters that ProRL's route does not take, with the values that do not change the sampling. Any other
value is refused."""


class ProrlOptions(ServerOptions, frozen=True, kw_only=True):
    """The options of a server with ProRL's token route. `logprobs_mode` is the kind of the server's log-probabilities,
    in the words of vLLM's `--logprobs-mode`. `context_tokens` is the length of the model's context, which such a server
    does not report."""

    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    context_tokens: int | None = None


class _Reply(msgspec.Struct):
    response_ids: list[int]
    logprobs: list[float | None] | None = None


class ProrlEngine:
    """Implements `Engine` and `SetsVersion` with one server. The server has no routes for pausing or for weights. A
    pause with mode "finish" therefore waits for the generations in flight, and the other modes are refused. Every
    generation gets the policy version that was set last, because the server reports none."""

    mode = TokenMode.TOKENS

    def __init__(self, options: EngineOptions, *, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        own = read_options(ProrlOptions, options.options)
        self.name = options.name
        self.logprob_kind = LOGPROB_KINDS[own.logprobs_mode]
        self.versions = KnownVersions.of_new_run()
        self._model = options.model
        self._context = own.context_tokens
        self._http = HttpClient(options.name, server_url(options), api_key=own.api_key, retry=retry)
        self._gate = PauseGate()

    async def start(self) -> None:
        await self._http.start()

    async def close(self) -> None:
        await self._http.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        sampling = request.sampling
        body = b"".join(body_with_ids(self._body(sampling), "prompt_ids", request.input_ids))
        async with self._gate.passage():
            version = self.versions.served
            try:
                answer = await self._http.post(ROUTE, orjson.Fragment(body), seconds=None)
            except StatusFailure as failure:
                sizes = Sizes(prompt=len(request.input_ids), output=sampling.max_tokens, context=self._context)
                raise translate(failure, self.name, sizes) from None
        try:
            reply = msgspec.convert(answer, _Reply)
        except msgspec.ValidationError as error:
            raise EngineMisbehaved(
                f"engine {self.name!r} answered {ROUTE} without ProRL's fields: {error}",
                hint="a stock vLLM or SGLang server is attached as kind vllm or sglang",
            ) from error
        ids = reply.response_ids
        logprobs = checked_logprobs(ids, reply.logprobs or [], self.name)
        if ids:
            yield Chunk(ids=ids, logprobs=logprobs)
        finish, match = _finish(ids, sampling)
        versions = (VersionSpan(version, 0, len(ids)),) if ids else ()
        yield Chunk(ids=[], logprobs=[], finish=finish, stop_match=match, versions=versions)

    def _body(self, sampling: SamplingParams) -> dict[str, Any]:
        """Return the request body without the ids. Raises EngineRejected for a sampling parameter that the route does
        not take."""
        for name, neutral in NEUTRAL.items():
            if getattr(sampling, name) != neutral:
                raise EngineRejected(
                    f"engine {self.name!r} has no parameter {name}: ProRL's token route takes temperature, top_p,"
                    " max_tokens and seed",
                    field=name,
                    hint="leave the parameter out, or attach a stock server as kind vllm or sglang",
                )
        body: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "logprobs": 0,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    async def health(self) -> EngineHealth:
        """Report the server as healthy if it sends any reply with a status below 500, such as 404, because ProRL's API
        has no route for health."""
        try:
            await self._http.check("/health")
        except StatusFailure as failure:
            if failure.status >= 500:
                return EngineHealth(ok=False, detail=translate(failure, self.name).message)
        except EngineError as error:
            return EngineHealth(ok=False, detail=error.message)
        return EngineHealth(ok=True, model=self._model, context_tokens=self._context, version=self.versions.served)

    async def set_version(self, version: int) -> None:
        self.versions = self.versions.with_version(version)

    async def pause(self, mode: PauseMode) -> None:
        if mode != "finish":
            raise EngineRejected(
                f"engine {self.name!r} cannot {mode} generations: ProRL's token route has no pause",
                hint='pause with "finish"',
            )
        self._gate.close()
        await self._gate.drained()

    async def resume(self) -> None:
        self._gate.open()


def _finish(ids: list[int], sampling: SamplingParams) -> tuple[FinishReason, int | None]:
    """Return the reason why a generation ended, and its stop token or None. The reply reports neither, so both are
    derived from the ids."""
    if ids and ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP, ids[-1]
    return (FinishReason.LENGTH if len(ids) >= sampling.max_tokens else FinishReason.STOP), None


async def kind_of_server(address: str, *, api_key: str | None = None) -> str:
    """Return the kind of engine at an address that a ProRL client registers:

    - `vllm` or `sglang`, if all models in the server's list have this value as `owned_by`.
    - Otherwise `openai`, if the address ends in `/v1`.
    - Otherwise `prorl`.

    Raises EngineUnavailable if no server answers, and InvalidField if the address is not a URL."""
    http = HttpClient(address, server_url(EngineOptions(name=address, url=address)), api_key=api_key)
    await http.start()
    models: Any = None
    try:
        models = await http.get("/v1/models")
    except (StatusFailure, EngineMisbehaved):  # the server does not list its models
        pass
    finally:
        await http.close()
    cards = models.get("data") if isinstance(models, dict) else None
    owners = {str(card.get("owned_by")) for card in cards if isinstance(card, dict)} if isinstance(cards, list) else {}
    for owner in ("vllm", "sglang"):
        if owners == {owner}:
            return owner
    return "openai" if address.rstrip("/").endswith("/v1") else "prorl"
