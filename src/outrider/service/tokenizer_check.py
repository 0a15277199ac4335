"""Refuses engines that tokenise text differently from the tokenizer that renders the prompts. Such an engine serves the
wrong model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outrider.engines.base import ChatEngine, Engine, TokenizesText
from outrider.errors import ModelMismatch
from outrider.tokens.rendering.tokenizer import Tokenizer

PROBE = "Outrider 0123456789 <|im_start|>user\nnaïve 测试\n\tdef f(x): return x  # 🙂<tool_call></tool_call>"
"""A text that tokenizers of different model families split differently, because of its digits, special tokens, accents,
Chinese characters, code and emoji."""


def tokenizer_check(tokenizer: Tokenizer, frozen: str | None) -> Callable[[Engine | ChatEngine], Awaitable[None]]:
    """Return a function that checks an engine before it is added to a pool. `frozen` is the name of the frozen model
    that the pool serves, or None for the policy.

    An engine that cannot tokenise is accepted. The check raises ModelMismatch, or EngineUnavailable if the engine does
    not respond."""
    expected = tokenizer.encode(PROBE)

    async def check(engine: Engine | ChatEngine) -> None:
        ids = await engine.token_check(PROBE) if isinstance(engine, TokenizesText) else None
        if ids is not None and ids != expected:
            raise ModelMismatch(
                f"engine {engine.name!r} tokenises text differently from {tokenizer.name_or_path}",
                field="model.tokenizer" if frozen is None else "frozen.tokenizer",
                hint="the engine serves another model: attach the right one, or start with its --tokenizer"
                if frozen is None
                else f"name the folder of its model as the `tokenizer` of the frozen model {frozen!r}",
            )

    return check
