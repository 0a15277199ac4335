"""Reads what a client declares about the branch of a call.

A program that knows the purpose of its calls can declare it, in one of two ways: the header `x-outrider-branch`, or a
suffix of the model's name, as in `MODEL@subagent/reviewer`, for programs that can set a model's name but no headers.
Both have the form KIND or KIND/LABEL. The kinds are those that a client can know of (`DECLARABLE`); the label is free.
"""

from __future__ import annotations

import re

import msgspec

from outrider.dialects.base import ModelRequest, WireCall
from outrider.dialects.reading import refuse
from outrider.trajectory import BranchKind

HEADER = b"x-outrider-branch"
DECLARABLE = (BranchKind.MAIN, BranchKind.SUBAGENT, BranchKind.COMPACTION, BranchKind.AUXILIARY)
MAX_LABEL = 64
"""Maximum number of characters of a label."""

_BRANCH = re.compile(rf"({'|'.join(DECLARABLE)})(?:/([\w.-]{{1,{MAX_LABEL}}}))?", re.ASCII)


def with_declaration(call: WireCall, request: ModelRequest) -> ModelRequest:
    """Return the request with the branch that the client declares; the same request if it declares none. The header
    counts more than the suffix. A suffix of another form is a part of the model's name. Raises RequestError for a
    header of another form."""
    header = call.header(HEADER)
    _, at, suffix = request.model.rpartition("@")
    if header is not None:
        declared = _BRANCH.fullmatch(header)
        if declared is None:
            refuse(
                HEADER.decode(),
                f"must be KIND or KIND/LABEL. Kinds: {', '.join(DECLARABLE)}. A label has at most {MAX_LABEL} letters, "
                "digits, '.', '-' and '_'",
            )
    else:
        declared = _BRANCH.fullmatch(suffix) if at else None
    if declared is None:
        return request
    kind, label = BranchKind(declared[1]), declared[2] or ""
    caller = msgspec.structs.replace(request.caller, declared=kind, declared_label=label)
    return msgspec.structs.replace(request, caller=caller)


def without_declaration(model: str | None) -> str | None:
    """Return the model's name without the suffix that declares a branch."""
    name, at, branch = (model or "").rpartition("@")
    return name if at and _BRANCH.fullmatch(branch) else model
