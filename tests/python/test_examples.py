# SPDX-License-Identifier: Apache-2.0
"""The examples run, and stay as short as the README promises."""
import pathlib

import pytest

from test_calls import run_python

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


def test_fp8_linear():
    text = (EXAMPLES / "fp8_linear.py").read_text()
    assert text.count("\n") <= 119
    done = run_python(f"__file__ = {str(EXAMPLES / 'fp8_linear.py')!r}\n" + text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("current scaling: ") and "delayed, step 5: y 0.0" in done.stdout


@pytest.mark.parametrize("name, most_lines", [("quickstart.py", 5), ("attention.py", 15), ("mapped.py", 16), ("torch_sdpa.py", 13)])
def test_example(name, most_lines):
    if name == "torch_sdpa.py":
        pytest.importorskip("torch")
    text = (EXAMPLES / name).read_text()
    assert text.count("\n") <= most_lines
    done = run_python(f"__file__ = {str(EXAMPLES / name)!r}\n" + text)
    assert done.returncode == 0 and "schedule=" in done.stdout, done.stderr
