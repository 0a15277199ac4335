"""Checks a generation's token ids before any engine gets them.

Some servers end themselves over an id that their model does not have: SGLang 0.5.17 does. The ids of a prompt are the
renderer's and the engines' own; those of a bias and of stops may come from an agent. It knows no engine.
"""

from __future__ import annotations

from outrider.engines.base import GenerateRequest
from outrider.errors import EngineRejected, InvalidField
from outrider.tokens.rendering.tokenizer import Vocabulary


def check_ids(request: GenerateRequest, vocabulary: Vocabulary) -> None:
    """Raises InvalidField for a bias or a stop with an id that is no token, and EngineRejected for such a prompt."""
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
