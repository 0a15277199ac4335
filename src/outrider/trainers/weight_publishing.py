"""Publishes the weights of a policy in training to the engines of a service, through a folder that the trainer and the
engines can read. Invariants:

- A published version is higher than all earlier versions of the service.
- Each version has its own folder, which is complete before its path is sent to the service.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from outrider.errors import InvalidField

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.schemas import PolicyStatus

WEIGHTS = "model.safetensors"
PREFIX = "version-"
NOT_OPEN = "open it first: `with PolicyWeights(client) as weights:`"


class PolicyControl(Protocol):
    """The methods of a service that `PolicyWeights` calls; `client.Client` has them."""

    def policy(self) -> PolicyStatus: ...
    def update_policy(
        self, version: int, *, mode: Literal["finish", "abort"] = "finish", weights: str | None = None
    ) -> PolicyStatus: ...


class PolicyWeights:
    """Publishes weights to the engines of a service.

        with PolicyWeights(client, model="models/tiny") as weights:
            weights.publish(model.named_parameters())

    folder: the folder for weights. The engines must be able to read it under the same path. None makes a temporary
        folder, for engines on this machine.
    model: the folder from which the model was loaded. Its configuration and tokenizer are copied into each version's
        folder, for engines that load whole folders.
    keep: the number of versions that stay on disk. A version whose publication has just failed stays in addition.
    mode: "finish" lets running generations finish before the engines load the weights. "abort" cuts running generations
        off.
    """

    def __init__(
        self,
        client: PolicyControl,
        folder: Path | str | None = None,
        *,
        model: Path | str | None = None,
        keep: int = 2,
        mode: Literal["finish", "abort"] = "finish",
    ) -> None:
        if keep < 1:
            raise InvalidField(f"keep is {keep}; it must be at least 1", field="keep")
        self.version = -1
        """The highest version that was published or passed to `begin_above`; -1 if there is none."""
        self._client = client
        self._folder = Path(folder) if folder is not None else None
        self._model = Path(model) if model is not None else None
        self._keep = keep
        self._mode = mode
        self._written: list[int] = []
        self._failed: int | None = None
        """The version of the last publication if it failed. The service may have this version nevertheless."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._folder is None:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-weights-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def begin_above(self, version: int) -> None:
        """Publish only versions above `version` from now on, even if the service has a lower version. A trainer that
        continues from a checkpoint passes the checkpoint's version, because a new service starts at a lower version."""
        self.version = max(self.version, version)

    def publish(self, parameters: Iterable[tuple[str, Tensor]]) -> int:
        """Write the parameters to disk, make every engine load them, and return the new version. Generations wait until
        all engines have loaded the parameters.

        The parameters must have the names of the published model, and tied parameters must be given once. Raises
        InvalidField for the parameters of an adapter, and the errors of the service.
        """
        from safetensors.torch import save_file

        tensors = {name: value.detach().cpu().contiguous() for name, value in parameters}
        if adapter := next((name for name in tensors if name.startswith("base_model.") or ".lora_" in name), None):
            raise InvalidField(
                f"{adapter} belongs to an adapter, and engines load whole models",
                field="parameters",
                hint="merge the adapter, and publish the merged model's parameters",
            )
        assert self._folder is not None, NOT_OPEN
        # The folder may contain versions of an earlier run or of a failed publication. The new version is higher than
        # all these versions, so no folder is written twice.
        there = [path.name.removeprefix(PREFIX) for path in self._folder.glob(f"{PREFIX}*")]
        numbers = [int(number) for number in there if number.isdecimal()]
        current = self._client.policy().version
        version = 1 + max(self.version, current, *numbers)
        if self._failed == current:
            self._note(self._failed)
        elif self._failed is not None:
            shutil.rmtree(self.folder(self._failed), ignore_errors=True)
        self._failed = None
        folder = self.folder(version)
        folder.mkdir(parents=True)
        try:
            for file in self._model.iterdir() if self._model else ():
                if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".index.json")):
                    shutil.copyfile(file, folder / file.name)
            save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        except BaseException:  # after any error or cancellation, because half a model must not stay on disk
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._failed = version
        self._client.update_policy(version, mode=self._mode, weights=str(folder))
        self._failed = None
        self._note(version)
        return version

    def _note(self, version: int) -> None:
        """Record that the service has the version `version`, and remove the oldest folders beyond `keep`."""
        self.version = max(self.version, version)
        self._written.append(version)
        while len(self._written) > self._keep:
            # An error is ignored, because the service already has the new version. For example, another program may
            # have removed the folder.
            shutil.rmtree(self.folder(self._written.pop(0)), ignore_errors=True)

    def read(self, version: int) -> Mapping[str, Tensor] | None:
        """Return the parameters of a version that this object published, or None if they are no longer on disk."""
        from safetensors.torch import load_file

        file = self.folder(version) / WEIGHTS
        if version not in self._written or not file.exists():
            return None
        tensors: Mapping[str, Tensor] = load_file(file)
        return tensors

    def folder(self, version: int) -> Path:
        assert self._folder is not None, NOT_OPEN
        return self._folder.absolute() / f"{PREFIX}{version}"
