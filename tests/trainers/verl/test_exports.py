"""The packages tinker and verifiers accept the output of `outrider.trainers.exports`."""

from __future__ import annotations

import pytest
from tinker import types
from verifiers.v1.graph import MessageNode

from outrider.trainers.exports import tinker_datum, verifiers_nodes
from trainers.sample import row

pytestmark = pytest.mark.trainers


def test_tinkers_datum() -> None:
    made = tinker_datum(row(), advantage=1.5)
    model_input = types.ModelInput.from_ints(made["model_input"])
    datum = types.Datum(model_input=model_input, loss_fn_inputs=made["loss_fn_inputs"])
    assert datum.model_input.to_ints() == row().ids[:-1].tolist()
    assert {name: data.data for name, data in datum.loss_fn_inputs.items()} == made["loss_fn_inputs"]


def test_the_nodes_of_verifiers() -> None:
    nodes = [MessageNode.model_validate(node) for node in verifiers_nodes([row()], decode=str)]
    assert [token for node in nodes for token in node.token_ids] == row().ids.tolist()
    assert [value for node in nodes for value in node.mask] == [bool(one) for one in row().loss_mask]
    assert all(len(node.logprobs) == sum(node.mask) and node.sampled == any(node.mask) for node in nodes)
    assert [node.message.role for node in nodes] == ["user", "assistant", "user", "assistant"]
