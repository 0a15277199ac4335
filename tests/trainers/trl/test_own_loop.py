"""The training loop of examples/own_loop.py: its loss, and a training that is continued from its checkpoint."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from outrider.client.client import Client
from outrider.client.sampling import DynamicSampler, SamplerState
from outrider.lab.demo.dialogue import POLICY
from support.later import torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"

# Warnings of transformers and torch are not ours.
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def uniform() -> Any:
    """Return a model whose probabilities depend only on its bias, and not on the ids of its input."""

    class Uniform(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(4))

        def forward(self, input_ids: Any) -> Any:
            return SimpleNamespace(logits=self.bias.expand(*input_ids.shape, 4))

    return Uniform()


def test_each_rollout_has_the_same_weight_in_the_loss(loop: ModuleType) -> None:
    """Rollout a has one row of one token and reward 1, rollout b seven rows of two tokens and reward 0."""

    def row(session: str, token: int, length: int, reward: float | None) -> Any:
        ids, mask = [0] + [token] * length, [0] + [1] * length
        logprobs = [0.0] + [-torch.log(torch.tensor(4.0)).item()] * length
        return SimpleNamespace(session_id=session, ids=ids, loss_mask=mask, logprobs=logprobs, reward=reward)

    def session(name: str, reward: float) -> Any:
        return SimpleNamespace(result=SimpleNamespace(session_id=name, verdict=SimpleNamespace(reward=reward)))

    rows = [row("a", 1, 1, 1.0), *(row("b", 2, 2, 0.0) for _ in range(7)), row("b", 3, 5, None)]
    group = SimpleNamespace(samples=rows, sessions=[session("a", 1.0), session("b", 0.0)])
    model = uniform()
    loss = loop.loss_of(model, SimpleNamespace(groups=[group]))
    loss.backward()
    # By hand: advantages 1 and -1, ratios 1; the gradient of log p(token) is 1 - 1/4 there and -1/4 elsewhere.
    advantage = 0.5 / (0.5 + 1e-4)
    expected = [0.0, -advantage / 2, advantage / 2, 0.0]
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert model.bias.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_training_continues_from_its_checkpoint(
    loop: ModuleType, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler's state is read in the client's thread, because it changes there all the time."""
    read_in = set()
    state = DynamicSampler.state

    def noted(sampler: DynamicSampler) -> SamplerState:
        read_in.add(threading.current_thread())
        return state(sampler)

    monkeypatch.setattr(DynamicSampler, "state", noted)
    torch.set_num_threads(1)
    checkpoint = tmp_path / "loop.pt"
    first = loop.train(client, str(POLICY), checkpoint, steps=2, groups=2)
    before = torch.load(checkpoint)
    version = client.policy().version
    means = loop.train(client, str(POLICY), checkpoint, steps=4, groups=2)
    after = torch.load(checkpoint)
    assert means[:2] == first
    assert len(means) == 4
    assert client.policy().version == version + 2
    moved = [name for name, value in after["model"].items() if not torch.equal(value, before["model"][name])]
    assert moved
    pending = {each.number for each in loop.msgspec.json.decode(before["sampler"], type=loop.SamplerState).pending}
    assert pending
    assert read_in
    assert threading.current_thread() not in read_in
