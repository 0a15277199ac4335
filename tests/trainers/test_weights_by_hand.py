"""The weights and advantages of the bridges, compared with the formulas of docs/trainers/weights.md on random batches.
This module repeats the formulas with sums over single tokens, and needs no trainer. The tests of the real trainers'
losses are in the folders of the trainers."""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from outrider.trainers.skyrl import row_weights
from outrider.trainers.trl import RowAdvantage, _weighed
from support.later import torch


class Row(NamedTuple):
    group: str
    rollout: int
    number: int
    mask: list[int]
    reward: float


def drawn(seed: int) -> list[Row]:
    """Return random groups of one to four rollouts of one to five rows. The main row has the highest number. Some rows
    and some whole rollouts do not train, rewards are negative or equal, and some rows have rewards of their own."""
    draw = random.Random(seed)
    rows = []
    for group in ("a_b", "c", "d"):
        equal = draw.random() < 0.3
        for rollout in range(draw.randint(1, 4)):
            reward = -0.1 if equal else draw.choice([-2.0, -0.1, 0.0, 1.0])
            trains = draw.random() < 0.85
            count = draw.randint(1, 5)
            for number in range(count):
                mask = [int(trains and draw.random() < 0.5) for _ in range(draw.randint(1, 6))]
                own = reward if number == count - 1 or draw.random() < 0.7 else reward + 1.5
                rows.append(Row(group, rollout, number, mask, own))
    draw.shuffle(rows)
    return rows


def advantage_of(row: Row, rows: list[Row], *, by_std: bool) -> float:
    main: dict[int, Row] = {}
    for each in rows:
        if each.group == row.group and each.number >= main.get(each.rollout, each).number:
            main[each.rollout] = each
    rewards = [each.reward for each in main.values()]
    if len(rewards) < 2:
        return 0.0
    if not by_std:
        return row.reward - fmean(rewards)
    return (row.reward - fmean(rewards)) / (stdev(rewards) + 1e-6) if len(set(rewards)) > 1 else 0.0


def token_weight(kind: str, row: Row, rows: list[Row]) -> float:
    """Return the weight of a token that trains."""
    tokens: defaultdict[tuple[str, int], int] = defaultdict(int)
    for each in rows:
        if any(each.mask):
            tokens[each.group, each.rollout] += sum(each.mask)
    match kind:
        case "outrider_rollout":
            return 1 / len(tokens) / tokens[row.group, row.rollout]
        case "outrider_row":
            return 1 / sum(any(each.mask) for each in rows) / sum(row.mask)
        case _:
            return 1 / sum(tokens.values())


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("kind", ["outrider_rollout", "outrider_row", "outrider_token"])
def test_verls_estimators(kind: str, by_std: bool) -> None:
    from outrider.trainers.verl_advantages import ESTIMATORS  # imports torch

    for seed in range(60):
        rows = drawn(seed)
        if not any(any(row.mask) for row in rows):
            continue
        keys = [f"{row.group}_{row.rollout}_{row.number}" for row in rows] + ["pad"] * (seed % 3)
        width = 6
        mask = torch.zeros(len(keys), width, dtype=torch.long)
        scores = torch.zeros(len(keys), width)
        for at, row in enumerate(rows):
            mask[at, : len(row.mask)] = torch.tensor(row.mask)
            scores[at, len(row.mask) - 1] = row.reward
        found, returns = ESTIMATORS[kind](
            token_level_rewards=scores, response_mask=mask, index=keys, config={"norm_adv_by_std_in_grpo": by_std}
        )
        assert not found[len(rows) :].any()
        for at, row in enumerate(rows):
            expected = advantage_of(row, rows, by_std=by_std)
            for place, trains in enumerate(row.mask):
                assert float(returns[at, place]) == pytest.approx(expected * trains, rel=1e-4, abs=1e-5)
                # verl divides the row's sum by the row's trained tokens, and the sum over the rows by their number
                weighed = float(found[at, place]) / len(keys) / max(sum(row.mask), 1)
                wanted = token_weight(kind, row, rows) * expected if trains else 0.0
                assert weighed == pytest.approx(wanted, rel=1e-4, abs=1e-6), (seed, row)


def in_rollouts(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each rollout, in the order in which SkyRL has them: the main row last."""
    found = defaultdict(list)
    for row in sorted(rows):
        found[row.group, row.rollout].append(row)
    return [*found.values()]


def test_skyrls_weights_over_mini_batches_of_whole_rollouts() -> None:
    for seed in range(60):
        rollouts = in_rollouts(drawn(seed))
        half = len(rollouts) // 2
        parts = [[row for rollout in part for row in rollout] for part in (rollouts[:half], rollouts[half:])]
        parts = [part for part in parts if part]
        rows = [row for part in parts for row in part]
        bounds, start = [], 0
        for part in parts:
            bounds.append((start, start + len(part)))
            start += len(part)
        last = [row == rollout[-1] for rollout in rollouts for row in rollout]
        mask = torch.zeros(len(rows) + 1, 6, dtype=torch.long)  # the last row is padding
        for at, row in enumerate(rows):
            mask[at, : len(row.mask)] = torch.tensor(row.mask)
        weights = row_weights(mask, [*last, True], bounds).tolist()
        assert weights[-1] == 0.0
        for part, (begin, _) in zip(parts, bounds, strict=True):
            trained = sum(sum(row.mask) for row in part)
            for at, row in enumerate(part, begin):
                # SkyRL divides the sum over tokens by the mini-batch's trained tokens
                of_rollout = sum(sum(one.mask) for one in part if (one.group, one.rollout) == (row.group, row.rollout))
                wanted = token_weight("outrider_rollout", row, part) if of_rollout else 0.0
                assert weights[at] / max(trained, 1) == pytest.approx(wanted, rel=1e-5), (seed, row)


def test_trls_micro_batches_of_whole_and_of_cut_rollouts() -> None:
    for seed in range(60):
        rows = [row for row in drawn(seed) if any(row.mask)]
        of_rollout: defaultdict[tuple[str, int], int] = defaultdict(int)
        for row in rows:
            of_rollout[row.group, row.rollout] += sum(row.mask)
        for part in (rows, rows[: len(rows) // 2]):
            if not part:
                continue
            samples: list[dict[str, Any]] = [
                {
                    "advantage": RowAdvantage(1.0, of_rollout[row.group, row.rollout]),
                    "completion_mask": torch.tensor(row.mask),
                }
                for row in part
            ]
            packs = [SimpleNamespace(samples=samples[:1]), SimpleNamespace(samples=samples[1:])]
            assert _weighed(lambda examples: examples, [packs]) == [packs]
            trained = sum(sum(row.mask) for row in part)
            # TRL divides by the micro-batch's trained tokens. A part of a rollout counts as this part of a rollout.
            shares = sum(sum(row.mask) / of_rollout[row.group, row.rollout] for row in part)
            for row, sample in zip(part, samples, strict=True):
                wanted = 1 / of_rollout[row.group, row.rollout] / shares
                assert float(sample["advantage"]) / trained == pytest.approx(wanted)
                if part is rows:
                    assert wanted == pytest.approx(token_weight("outrider_rollout", row, rows))
