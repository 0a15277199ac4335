"""Forms that a reply is held to, by the library `llguidance`: which tokens may come next.

It knows no logits and no batch. Invariant: a form that is not finished allows at least one token.
"""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.constraint import Constraint, ConstraintKind
from outrider.errors import EngineRejected

_LIMITS = {"initial_lexer_fuel": 100_000, "step_lexer_fuel": 20_000, "max_lexer_states": 50_000}
"""A tenth of the library's own, which let one token of `(a{1000}){1000}` take 6 s: all sessions wait for it."""
KEPT_TOKENIZERS = 4
"""By their stop ids, to which clients may add."""

_JSON = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}  # a small model would go on with blanks to its limit
Allowed = npt.NDArray[np.bool_]


class Form:
    """One generation's. It is compiled in whichever thread makes it, and then used in one."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self.failed = False

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self.failed or bool(self._matcher.is_stopped())

    def allowed(self) -> Allowed:
        """The tokens that may come next, bool of shape (vocabulary,)."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(packed, bitorder="little")[: self._vocab].astype(np.bool_)
        if self._matcher.is_error() or not mask.any():
            self.failed = True
            mask = np.ones(self._vocab, dtype=np.bool_)
        return mask

    def accept(self, token: int) -> None:
        if not self.finished and not self._matcher.consume_token(token):
            self.failed = True


class Forms:
    """The forms of one model: `folder` holds its tokenizer.json, `vocab` is how many logits it gives."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self._folder = folder
        self._vocab = vocab
        self._lock = threading.Lock()  # requests are compiled in threads of their own
        self._tokenizers: dict[tuple[int, ...], Any] = {}

    def compile(self, constraint: Constraint, stops: tuple[int, ...]) -> Form:
        """The form, which a stop id may end once it is complete. It may take a second. Raises EngineRejected for one
        that the library cannot read, or where there is no library."""
        if importlib.util.find_spec("llguidance") is None:
            raise EngineRejected(
                "the embedded engine needs llguidance for structured output", hint="pip install 'outrider[embedded]'"
            )
        import llguidance

        try:
            grammar = _grammar(llguidance, constraint)
        except ValueError as error:
            raise EngineRejected(f"a {constraint.kind.value} cannot be read: {error}") from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        matcher = llguidance.LLMatcher(self._tokenizer(llguidance, stops), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise EngineRejected(f"a {constraint.kind.value} cannot be read: {str(matcher.get_error())[:500]}")
        return Form(matcher, self._vocab)

    def _tokenizer(self, library: Any, stops: tuple[int, ...]) -> Any:
        with self._lock:
            known = self._tokenizers.get(stops)
            if known is None:
                text = (self._folder / "tokenizer.json").read_text()
                ends = [token for token in stops if token < self._vocab]
                known = library.LLTokenizer(text, n_vocab=self._vocab, eos_token=ends or None)
                self._tokenizers[stops] = known
                if len(self._tokenizers) > KEPT_TOKENIZERS:
                    del self._tokenizers[next(iter(self._tokenizers))]
            return known


def _grammar(library: Any, constraint: Constraint) -> str:
    matcher, text = library.LLMatcher, constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return str(matcher.grammar_from_json_schema({"type": "object"}, _JSON))
        case ConstraintKind.JSON_SCHEMA:
            return str(matcher.grammar_from_json_schema(text, _JSON))
        case ConstraintKind.REGEX:
            return str(matcher.grammar_from_regex(text))
        case ConstraintKind.GRAMMAR:
            return str(library.grammar_from("grammar", text))
