"""The tests of this folder run OpenRLHF's own code. They are not collected if OpenRLHF is not installed.

When it is imported, OpenRLHF imports vLLM, DeepSpeed and CUDA extensions, which cannot be installed without a GPU. The
tests run no code of these packages, so modules whose attributes are mocks replace them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from unittest.mock import MagicMock

collect_ignore_glob = [] if find_spec("openrlhf") else ["test_*.py"]

ABSENT = {"vllm", "deepspeed", "flash_attn", "optree", "ring_flash_attn", "torchvision", "bitsandbytes"}


class Absent(ModuleType):
    def __getattr__(self, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


if find_spec("openrlhf"):
    # These modules look for optional packages, and would find the mocks if they were imported later.
    for name in ("transformers.integrations.flash_attention", "transformers.modeling_utils", "accelerate", "peft"):
        importlib.import_module(name)
    sys.meta_path.append(AbsentFinder())
