"""Converts between policy versions and the text labels of engines. An engine labels its weights, and may report a label
for each span of tokens in a reply.

Invariant: the spans of a reply cover its output tokens without gap or overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from outrider.errors import EngineMisbehaved
from outrider.trajectory import VersionSpan

MAX_DIGITS = 10
UNLABELLED = "default"
"""The label that vLLM and SGLang report until a label is set. In this module, `unlabelled` is the policy version that
this label stands for, 0 by default."""


class LabelSpan(msgspec.Struct, frozen=True):
    """A span as engines report it: the weights labelled `version` have sampled the output tokens [start, end)."""

    version: str
    start: int
    end: int


def version_of(label: str, *, unlabelled: int = 0) -> int:
    """Return the policy version for a label. The label UNLABELLED stands for version `unlabelled`. Any other label must
    be a decimal number of at most MAX_DIGITS digits; otherwise raises EngineMisbehaved."""
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
    """Return the version spans of a reply of `length` tokens. If the engine has sent no spans, return one span of
    `version`. The label UNLABELLED stands for version `unlabelled`.

    Raises EngineMisbehaved if the engine's spans do not cover the reply exactly, or if a label is not a version.
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
