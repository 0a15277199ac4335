"""Checks a generation's token ids before they are sent to any engine.

Some servers, such as SGLang 0.5.17, exit on an id that their model does not have. The ids of a prompt come from the
renderer and the engines; the ids of a bias and of stops may come from an agent.
"""

from __future__ import annotations

from outrider.engines.base import GenerateRequest
from outrider.errors import EngineRejected, InvalidField
from outrider.tokens.rendering.tokenizer import Vocabulary


def check_ids(request: GenerateRequest, vocabulary: Vocabulary) -> None:
    """Raise InvalidField for a bias or a stop with an id that is no token, and EngineRejected for a prompt with such an
    id or without ids."""
    sampling, end = request.sampling, vocabulary.end
    for field, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token in ids:
            if not 0 <= token < end:
                raise InvalidField(
                    f"{field} names token {token}, which the model does not have",
                    field=field,
                    hint=f"ids: 0 to {end - 1}",
                )
    prompt = request.input_ids
    if not len(prompt) or prompt.min() < 0 or prompt.max() >= end:
        raise EngineRejected(
            "the prompt is empty, or holds a token id that the model does not have: it is sent to no engine",
            hint="please report it: Outrider makes every prompt itself",
        )
