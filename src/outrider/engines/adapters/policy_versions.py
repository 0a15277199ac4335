"""Policy versions as engines write them: text labels, and the spans of a reply with a label each.

It knows no route. Invariant: the spans of a reply tile its output tokens, without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.errors import EngineMisbehaved
from outrider.trajectory import VersionSpan

MAX_DIGITS = 10
UNLABELLED = "default"
"""The label of weights that nobody has labelled, in vLLM and SGLang: our version 0, unless we were told another."""


class LabelSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end) sampled by the weights labelled `version`, as on the wire."""

    version: str
    start: int
    end: int


def version_of(label: str, *, unlabelled: int = 0) -> int:
    """The policy version a label stands for; `unlabelled` is that of weights without one. Raises EngineMisbehaved when
    it is not a decimal number."""
    if label == UNLABELLED:
        return unlabelled
    if label.isascii() and label.isdecimal() and len(label) <= MAX_DIGITS:
        return int(label)
    raise EngineMisbehaved(
        f"the engine's weights are labelled {label[:100]!r}, which is not a policy version",
        hint="label them with the version's decimal digits",
    )


def label_of(version: int) -> str:
    return str(version) if version else UNLABELLED


def spans_of(
    labels: Sequence[LabelSpan] | None, *, length: int, version: int, unlabelled: int = 0
) -> tuple[VersionSpan, ...]:
    """The spans of a reply of `length` tokens; one span of `version` where the engine gave none. `unlabelled` is the
    version of weights without a label.

    Raises EngineMisbehaved when the engine's spans do not tile the reply.
    """
    if not length:
        return ()
    if not labels:
        return (VersionSpan(version, 0, length),)
    spans = tuple(VersionSpan(version_of(span.version, unlabelled=unlabelled), span.start, span.end) for span in labels)
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != length or any(span.start != edge for span, edge in zip(spans, edges, strict=False)):
        raise EngineMisbehaved(f"the engine's {len(labels)} spans of weight versions do not cover its {length} tokens")
    return spans
