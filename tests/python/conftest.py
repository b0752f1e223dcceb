# SPDX-License-Identifier: Apache-2.0
import pathlib
import sys

import numpy as np
import pytest

try:
    import cqsa  # noqa: F401
except ImportError:
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bindings" / "python"))


@pytest.fixture
def random():
    return np.random.default_rng(20240611)


def pytest_configure():
    from cqsa import CqsaLibraryError, _ffi

    try:
        _ffi.library()
    except CqsaLibraryError as error:
        pytest.exit(str(error), returncode=2)  # one clear line instead of a failure per test
