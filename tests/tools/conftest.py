# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tool():
    path = os.environ.get("CQSA_TOOL")
    if not path:
        pytest.skip("CQSA_TOOL does not name the command")
    return path


@pytest.fixture
def run(tool, tmp_path):
    """run(*arguments) in a folder of its own -> CompletedProcess. A signal or a second line of errors is a failure."""

    def call(*arguments, status=0, timeout=120, **more):
        done = subprocess.run([tool, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True, timeout=timeout, **more)
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        if status == 1:
            assert done.stderr.startswith("cqsa: ") and done.stderr.count("\n") == 1, done.stderr
        return done

    return call
