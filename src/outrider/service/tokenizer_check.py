"""Refuses an engine that serves another model: its tokenizer differs from the tokenizer of the prompts' renderer."""

from __future__ import annotations

from outrider.engines.base import ChatEngine, Engine, TokenizesText
from outrider.errors import ModelMismatch
from outrider.tokens.rendering.tokenizer import Tokenizer

PROBE = "Outrider 0123456789 <|im_start|>user\nnaïve 测试\n\tdef f(x): return x  # 🙂<tool_call></tool_call>"
"""Text that tokenizers of different model families split differently: digits, special tokens, accents, other scripts,
indented code, an emoji."""


class TokenizerCheck:
    """Checks every engine added to the engine pool. Engines that cannot tokenise are accepted."""

    def __init__(self, tokenizer: Tokenizer, *, frozen: str | None = None) -> None:
        """`frozen` is the name of a frozen model that the engines serve, None for the policy."""
        self._tokenizer = tokenizer
        self._frozen = frozen
        self._expected = tokenizer.encode(PROBE)

    async def __call__(self, engine: Engine | ChatEngine) -> None:
        """Check an engine. Raises ModelMismatch, or EngineUnavailable when the engine does not respond."""
        if not isinstance(engine, TokenizesText):
            return
        ids = await engine.token_check(PROBE)
        if ids is not None and ids != self._expected:
            raise ModelMismatch(
                f"engine {engine.name!r} tokenises text differently from {self._tokenizer.name_or_path}",
                field="model.tokenizer" if self._frozen is None else "frozen.tokenizer",
                hint="the engine serves another model: attach the right one, or start with its --tokenizer"
                if self._frozen is None
                else f"name the folder of its model as the `tokenizer` of the frozen model {self._frozen!r}",
            )
