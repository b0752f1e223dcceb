# SPDX-License-Identifier: Apache-2.0
"""The decoders of the package gguf, without the rest of it, which wants packages of its own. tools/setup.sh puts it into build/python-packages."""
import importlib
import importlib.util
import pathlib
import sys
import types

import pytest

PACKAGES = pathlib.Path(__file__).parents[2] / "build" / "python-packages"


def gguf(part):
    """The module gguf.<part>; skips the test where the package is not there."""
    name = "gguf." + part
    if name in sys.modules:
        return sys.modules[name]
    if "gguf" not in sys.modules:
        found = importlib.util.find_spec("gguf")
        folders = list(found.submodule_search_locations) if found else [str(PACKAGES / "gguf")]
        if not pathlib.Path(folders[0], "quants.py").exists():
            pytest.skip("no package gguf: tools/setup.sh test")
        package = types.ModuleType("gguf")
        package.__path__ = folders
        sys.modules["gguf"] = package
    return importlib.import_module(name)
