"""The folders of published weights: which of them the service loads, and which stay on disk after failures."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.errors import InvalidField, ServiceError
from outrider.trainers.weight_publishing import WEIGHTS, PolicyWeights
from support.later import torch


class Control:
    """The policy of a service. The next updates raise the errors in `before`, before the version is set, or in `after`,
    after the version is set."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.loaded: list[str] = []
        self.before: list[Exception] = []
        self.after: list[Exception] = []

    def policy(self) -> Any:
        return SimpleNamespace(version=self.version)

    def update_policy(self, version: int, *, mode: str = "finish", weights: str | None = None) -> Any:
        if self.before:
            raise self.before.pop()
        assert weights is not None
        assert (Path(weights) / WEIGHTS).is_file()
        self.version = version
        self.loaded.append(Path(weights).name)
        if self.after:
            raise self.after.pop()
        return self.policy()


def parameters(value: float = 0.0) -> Any:
    return [("w", torch.full((2,), value))]


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_versions_stay_on_disk(tmp_path: Path) -> None:
    (tmp_path / "version-6").mkdir()  # a folder of an earlier run
    service = Control(version=3)
    with PolicyWeights(service, tmp_path, keep=2) as weights:
        assert [weights.publish(parameters(value)) for value in (1.0, 2.0, 3.0)] == [7, 8, 9]
        assert weights.read(7) is None
        assert (weights.read(9) or {})["w"].tolist() == [3.0, 3.0]
    assert there(tmp_path) == ["version-6", "version-8", "version-9"]
    assert service.loaded == ["version-7", "version-8", "version-9"]


def test_a_folder_that_somebody_has_removed_does_not_end_the_training(tmp_path: Path) -> None:
    with PolicyWeights(Control(), tmp_path, keep=1) as weights:
        first = weights.publish(parameters())
        shutil.rmtree(weights.folder(first))
        assert weights.read(first) is None
        assert weights.publish(parameters()) == first + 1
    assert there(tmp_path) == ["version-2"]


def test_a_publication_that_failed_is_not_written_over(tmp_path: Path) -> None:
    service = Control()
    with PolicyWeights(service, tmp_path, keep=1) as weights:
        service.before = [ServiceError("away")]
        with pytest.raises(ServiceError):
            weights.publish(parameters(1.0))
        service.after = [ServiceError("the reply is lost")]
        with pytest.raises(ServiceError):
            weights.publish(parameters(2.0))
        assert (service.version, there(tmp_path)) == (2, ["version-2"])
        assert weights.publish(parameters(3.0)) == 3
    assert there(tmp_path) == ["version-3"]
    assert service.loaded == ["version-2", "version-3"]


def test_an_adapter_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with PolicyWeights(Control(), tmp_path) as weights, pytest.raises(InvalidField, match="adapter"):
        weights.publish([("base_model.w", torch.zeros(2))])
    assert there(tmp_path) == []
