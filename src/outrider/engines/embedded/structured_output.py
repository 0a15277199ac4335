"""Structured output: the next tokens allowed by a JSON schema, a regular expression or a grammar, using `llguidance`.

Invariant: a grammar that is not finished allows at least one token.
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
"""The library's limits for one constraint: a tenth of its defaults. With the defaults, one token of `(a{1000}){1000}`
took 6 s, and every sequence of the batch waits for each token."""

MAX_TOKENIZERS = 4
"""Maximum number of the library's tokenizers kept, one for each set of stop ids. Clients choose stop ids, so the number
needs a bound."""

_JSON = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""JSON may have at most 20 blanks in a row. Without a bound a small model writes blanks until its token limit."""


class Grammar:
    """The grammar of one sequence, and the sequence's position in it. Not thread-safe."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher = matcher
        self._vocab = vocab
        self.failed = False
        """True once the library has reached one of its limits, or has refused a sampled token. Every token is allowed
        then, and the sequence ends with ABORT."""

    @property
    def finished(self) -> bool:
        """True once no token may follow."""
        return self.failed or bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the tokens allowed next, bool of shape (vocabulary,)."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(packed, bitorder="little")[: self._vocab].astype(np.bool_)
        if self._matcher.is_error() or not mask.any():
            self.failed = True
            mask = np.ones(self._vocab, dtype=np.bool_)
        return mask

    def accept(self, token: int) -> None:
        """Take the next token of the sequence."""
        if not self.finished and not self._matcher.consume_token(token):
            self.failed = True


class GrammarCompiler:
    """Compiles constraints for one model: `folder` holds its tokenizer.json, `vocab` is the number of its logits."""

    def __init__(self, folder: Path, vocab: int) -> None:
        self._folder = folder
        self._vocab = vocab
        self._lock = threading.Lock()  # constraints may be compiled at once, each in its own thread
        self._tokenizers: dict[tuple[int, ...], Any] = {}

    def compile(self, constraint: Constraint, stops: tuple[int, ...]) -> Grammar:
        """Compile the constraint to a grammar that ends with one of the ids in `stops`. May take a second.

        Raises EngineRejected for a constraint that the library cannot read, or if the library is missing.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise EngineRejected(
                "the embedded engine needs llguidance for structured output", hint="pip install 'outrider[embedded]'"
            )
        import llguidance

        matcher: Any = llguidance.LLMatcher
        try:
            match constraint.kind:
                case ConstraintKind.JSON_OBJECT:
                    grammar = matcher.grammar_from_json_schema({"type": "object"}, _JSON)
                case ConstraintKind.JSON_SCHEMA:
                    grammar = matcher.grammar_from_json_schema(constraint.text, _JSON)
                case ConstraintKind.REGEX:
                    grammar = matcher.grammar_from_regex(constraint.text)
                case ConstraintKind.GRAMMAR:
                    grammar = llguidance.grammar_from("grammar", constraint.text)
        except ValueError as error:
            raise EngineRejected(f"a {constraint.kind.value} cannot be read: {error}") from error
        limits = llguidance.LLParserLimits(**_LIMITS)
        made = matcher(self._tokenizer(llguidance, stops), grammar, log_level=0, limits=limits)
        if made.is_error():
            raise EngineRejected(f"a {constraint.kind.value} cannot be read: {str(made.get_error())[:500]}")
        return Grammar(made, self._vocab)

    def _tokenizer(self, library: Any, stops: tuple[int, ...]) -> Any:
        """Return the library's tokenizer with `stops` as its end-of-sequence ids. A new tokenizer replaces the
        oldest."""
        with self._lock:
            known = self._tokenizers.get(stops)
            if known is None:
                text = (self._folder / "tokenizer.json").read_text()
                ends = [token for token in stops if token < self._vocab]
                known = library.LLTokenizer(text, n_vocab=self._vocab, eos_token=ends or None)
                self._tokenizers[stops] = known
                if len(self._tokenizers) > MAX_TOKENIZERS:
                    del self._tokenizers[next(iter(self._tokenizers))]
            return known
