"""Samples in the shapes of trainers that read data: no part of a row is lost, and each shape keeps the rules of its
trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import InvalidField
from outrider.trainers.exports import nemo_gym_reply, prime_rl_sample, spans_of, tinker_datum, verifiers_nodes
from outrider.trajectory import Sample
from trainers.sample import row


@st.composite
def rows(draw: st.DrawFn) -> Sample:
    mask = [0, *draw(st.lists(st.sampled_from([0, 1]), min_size=1, max_size=30))]
    ids = draw(st.lists(st.integers(0, 1 << 17), min_size=len(mask), max_size=len(mask)))
    logprobs = [draw(st.floats(-50, 0)) if trained else 0.0 for trained in mask]
    return row(ids=ids, loss_mask=mask, logprobs=logprobs, versions=[2 if one else -1 for one in mask])


@given(rows())
def test_spans_are_the_whole_row(sample: Sample) -> None:
    spans = list(spans_of(sample.loss_mask.tolist()))
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    assert (spans[0].start, spans[-1].end) == (0, len(sample.ids))
    assert all({*sample.loss_mask[span.start : span.end].tolist()} == {int(span.trained)} for span in spans)
    assert all(one.trained != other.trained for one, other in itertools.pairwise(spans))


@given(rows())
def test_nemo_gyms_prompts_extend_each_other(sample: Sample) -> None:
    request = {"responses_create_params": {"input": "x"}, "agent_ref": {"name": "outrider"}, "_rowidx": 3}
    reply = nemo_gym_reply(sample, request, decode=str)
    assert (reply["reward"], reply["_rowidx"], reply["agent_ref"]) == (0.75, 3, {"name": "outrider"})
    seen: list[int] = []
    for item in reply["response"]["output"]:
        assert item["prompt_token_ids"][: len(seen)] == seen  # NeMo RL asserts the same
        assert len(item["generation_token_ids"]) == len(item["generation_log_probs"]) > 0
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
        assert item["content"][0]["text"] == str(item["generation_token_ids"])
    assert seen == sample.ids[: len(seen)].tolist()
    generated = [value for item in reply["response"]["output"] for value in item["generation_log_probs"]]
    assert generated == [value for value, one in zip(sample.logprobs, sample.loss_mask, strict=True) if one]


@given(rows())
def test_a_verifiers_path_is_the_row(sample: Sample) -> None:
    nodes = verifiers_nodes([sample, sample])
    for path in (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]):
        assert path[0]["parent"] is None
        assert [token for node in path for token in node["token_ids"]] == sample.ids.tolist()
        assert [value for node in path for value in node["mask"]] == [bool(one) for one in sample.loss_mask]
        assert all(len(node["logprobs"]) == sum(node["mask"]) for node in path)
    assert all(nodes[node["parent"]]["parent"] != node["parent"] for node in nodes if node["parent"] is not None)


@given(rows())
def test_a_prime_rl_sample_has_columns_of_one_length(sample: Sample) -> None:
    made = prime_rl_sample(sample, env_name="coin", temperature=0.7, advantage=-1.5)
    columns = [made[name] for name in ("token_ids", "mask", "logprobs", "temperatures", "advantages")]
    assert {len(column) for column in columns} == {len(sample.ids)}
    assert made["advantages"] == [-1.5 if one else 0.0 for one in sample.loss_mask]


def test_advantages_may_be_given_for_each_id() -> None:
    sample = row(turn_spans=((3, 5), (7, 10)), turn_rewards=(0.5, None))
    due = sample.token_rewards()
    assert due == [0, 0, 0, 0, 0.5, 0, 0, 0, 0, 0.75]
    given = [1.0, *due[1:]]
    assert prime_rl_sample(sample, env_name="coin", temperature=1.0, advantage=given)["advantages"] == due
    assert tinker_datum(sample, advantage=given)["loss_fn_inputs"]["advantages"] == due[1:]
    with pytest.raises(InvalidField, match="9 advantages for 10 ids"):
        prime_rl_sample(sample, env_name="coin", temperature=1.0, advantage=due[1:])


@given(rows())
def test_a_tinker_datum_predicts_the_next_id(sample: Sample) -> None:
    made = tinker_datum(sample, advantage=2.0)
    inputs = made["loss_fn_inputs"]
    assert made["model_input"] + inputs["target_tokens"][-1:] == sample.ids.tolist()
    assert set(inputs) == {"target_tokens", "logprobs", "advantages"}  # tinker.Datum has no mask
    assert {len(column) for column in (*inputs.values(), made["weights"])} == {len(made["model_input"])}
    trained = [place for place, one in enumerate(sample.loss_mask) if one]
    assert [inputs["target_tokens"][place - 1] for place in trained] == sample.ids[trained].tolist()
    assert [inputs["logprobs"][place - 1] for place in trained] == sample.logprobs[trained].tolist()
    assert sum(made["weights"]) == len(trained)
    assert [place + 1 for place, value in enumerate(inputs["advantages"]) if value] == trained


@pytest.mark.parametrize(
    "export",
    [
        lambda sample: nemo_gym_reply(sample, {}),
        lambda sample: prime_rl_sample(sample, env_name="x", temperature=1.0, advantage=1.0),
        lambda sample: verifiers_nodes([sample]),
        lambda sample: tinker_datum(sample, advantage=1.0),
    ],
)
def test_a_row_without_a_reward_is_refused(export: Callable[[Sample], Any]) -> None:
    export(row())
    with pytest.raises(InvalidField, match="has no reward"):
        export(row(reward=None))


def test_a_row_that_begins_with_a_trained_id_is_no_datum() -> None:
    with pytest.raises(InvalidField, match="has no prompt"):
        tinker_datum(row(loss_mask=[1] * 10), advantage=1.0)
