"""The check of samples against the recorded calls: a true sample has no fault, and each changed id, mask or
log-probability is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.lab.certify.judge import sample_faults
from outrider.lab.certify.rows import ScriptedStep
from outrider.lab.certify.scripted_model import PromptState, ScriptedCall
from outrider.lab.fakes.scripted_engine import scripted_logprob
from outrider.lifecycle import StopReason
from outrider.trajectory import BranchKind, LogprobKind, Sample, TokenMode
from support.samples import changed_sample, make_sample


def call(prompt: list[int], output: list[int]) -> ScriptedCall:
    return ScriptedCall(
        session_key="s-1",
        state=PromptState(row=None),
        step=ScriptedStep(),
        prompt=np.array(prompt, dtype=np.int32),
        output=output,
    )


CALLS = [call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6])]
IDS = [1, 2, 3, 4, 5, 6]
MASK = [0, 0, 1, 1, 0, 1]


def sample(**changed: Any) -> Sample:
    ids = changed.pop("ids", IDS)
    mask = changed.pop("loss_mask", MASK)
    logprobs = [scripted_logprob(at, ids[at]) if mask[at] else 0.0 for at in range(len(ids))]
    whole = make_sample(
        group_id="g",
        session_id="s",
        attempt=1,
        sample_index=0,
        row=0,
        rows=1,
        kind=BranchKind.MAIN,
        turns=(0, 1),
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        versions=[0 if one else -1 for one in mask],
        prompt_length=2,
        reward=1.0,
        mode=TokenMode.TOKENS,
        logprob_kind=LogprobKind.SAMPLING,
        stop_reason=StopReason.COMPLETED,
        min_version=0,
        max_version=0,
    )
    return changed_sample(whole, **changed)


def test_a_true_row_has_no_fault() -> None:
    assert sample_faults([sample()], CALLS) == []
    assert sample_faults([sample(loss_mask=[0, 0, 0, 0, 0, 1])], CALLS) == [], "what is not trained on needs no proof"


@pytest.mark.parametrize("at", range(len(IDS)))
def test_any_changed_id_is_found(at: int) -> None:
    [fault] = sample_faults([sample(ids=[*IDS[:at], 9, *IDS[at + 1 :]])], CALLS)
    assert "the engine did not sample" in fault


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_mask_over_context_is_found(at: int) -> None:
    [fault] = sample_faults([sample(loss_mask=[*MASK[:at], 1, *MASK[at + 1 :]])], CALLS)
    assert "trains on 1 ids" in fault


def test_a_log_probability_of_another_place_is_found() -> None:
    [fault] = sample_faults([sample(logprobs=[0.0, 0.0, *sample().logprobs[1:5]])], CALLS)
    assert "log-probabilities" in fault
