"""Reports modules that the agent has added and that shadow a module which pytest imports. An example is a new
`iniconfig.py` in the repository.

The evaluator sends this text as `sitecustomize.py`, with a final line that calls `start`. Python runs this file when it
starts, before any module of the repository can be imported. The file needs only Python 3.6. Invariant: the file imports
only modules that are already loaded, because any other import could load one of the agent's modules.
"""

import _frozen_importlib as bootstrap
import _frozen_importlib_external as external
import os
import sys
from typing import Any


class ShadowFinder:
    """An import hook that loads no module. It reports the import of a file in `new` if `sys.path` or Python itself has
    another module with the same name."""

    def __init__(self, new: Any, path: str, key: str) -> None:
        self._new = new
        self._path = path
        self._key = key

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        found = external.PathFinder.find_spec(name) if path is None else None
        file = os.path.realpath(str(found.origin)) if found is not None else ""
        if file not in self._new:
            return
        others = [entry for entry in sys.path if not file.startswith(os.path.realpath(entry) + os.sep)]
        if bootstrap.BuiltinImporter.find_spec(name) or external.PathFinder.find_spec(name, others):
            report = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(report, f'{{"key": "{self._key}", "changed": "the module {name}"}}\n'.encode())
            os.close(report)


def start(new: Any, path: str, key: str, option: str) -> None:
    """If `option` makes this process load the plugin, watch imports until pytest loads the repository's `conftest.py`.
    In every process, also run the `sitecustomize.py` that this text has replaced."""
    if new and option in os.environ.get("PYTEST_ADDOPTS", ""):
        sys.meta_path.insert(0, ShadowFinder(new, path, key))
    place = os.path.dirname(__file__)
    found = external.PathFinder.find_spec("sitecustomize", [each for each in sys.path if each != place])
    if found is not None and found.loader is not None:
        module = sys.modules["sitecustomize"] = bootstrap.module_from_spec(found)
        found.loader.exec_module(module)
