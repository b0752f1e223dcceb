# SPDX-License-Identifier: Apache-2.0
"""The wheel: its content, and that it works where it is installed, with nothing else."""
import base64
import hashlib
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

import cqsa

BINDINGS = pathlib.Path(__file__).parents[2] / "bindings" / "python"
PACKAGES = pathlib.Path(__file__).parents[2] / "build" / "python-packages"
USE = """
import numpy as np, cqsa
x = np.ones((1, 1, 50, 16), np.float32)
assert cqsa.attention(x, x, x).sum() == 800
print(cqsa._ffi.library_path())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Around the library under test, which spares building another one."""
    cqsa.backends()
    library = cqsa._ffi.library_path()
    if not os.path.isabs(library):
        pytest.skip("the library came from the system's loader")
    folder = tmp_path_factory.mktemp("wheel")
    global plugins
    plugins = [file for file in pathlib.Path(library).parent.glob("libcqsa_*.so") if file.stem in ("libcqsa_cuda", "libcqsa_hip")]
    built = subprocess.run([sys.executable, BINDINGS / "build_backend" / "cqsa_build.py", folder, library], check=True,
                           capture_output=True, text=True)
    return pathlib.Path(built.stdout.strip())


def run(python, code, path=""):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CQSA_", "PYTHON"))}
    return subprocess.run([python, "-c", code], env={**environment, "PYTHONPATH": str(path)}, capture_output=True, text=True, timeout=60)


def test_content(wheel):
    assert wheel.name == f"cqsa-{cqsa.__version__}-py3-none-linux_{os.uname().machine}.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"cqsa-{cqsa.__version__}.dist-info/"
        modules = {f"cqsa/{file.name}" for file in (BINDINGS / "cqsa").iterdir() if file.is_file()}
        binaries = {"cqsa/lib/libcqsa.so.0"} | {f"cqsa/lib/{file.name}" for file in plugins}
        assert set(names) == modules | binaries | {info + name for name in ("METADATA", "WHEEL", "LICENSE", "RECORD")}
        record = dict(line.split(",")[:2] for line in archive.read(info + "RECORD").decode().splitlines())
        assert set(record) == set(names)
        for name, digest in record.items():
            found = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            assert digest == ("" if name.endswith("RECORD") else "sha256=" + found)
        assert f"Version: {cqsa.__version__}\n" in archive.read(info + "METADATA").decode()
    assert wheel.stat().st_size < (3 << 20) + sum(file.stat().st_size for file in plugins)


def test_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    done = run(sys.executable, USE, tmp_path)
    assert done.stdout.strip() == str(tmp_path / "cqsa" / "lib" / "libcqsa.so.0"), done.stderr


def test_installed(wheel, tmp_path):
    made = subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "venv"], capture_output=True)
    python = tmp_path / "venv" / "bin" / "python"
    if made.returncode != 0 or run(python, "import numpy, pip").returncode != 0:
        pytest.skip("no venv with pip and numpy can be made here")
    installed = subprocess.run([python, "-m", "pip", "install", "--no-index", "--disable-pip-version-check", wheel], capture_output=True,
                               text=True)
    assert installed.returncode == 0, installed.stderr
    done = run(python, USE)
    assert str(tmp_path / "venv") in done.stdout, done.stderr
    removed = subprocess.run([python, "-m", "pip", "uninstall", "-y", "cqsa"], capture_output=True, text=True)
    assert removed.returncode == 0 and run(python, "import cqsa").returncode != 0


TYPED = """
import array
from typing import Any
import numpy as np
import cqsa

class Lent:
    def __dlpack__(self, *, stream: Any = None) -> Any: ...

x = np.ones((1, 1, 2, 3), np.float32)
cqsa.attention(x, Lent(), cqsa.Tensor.from_pointer(64, (1, 2), "float32"), mask=[True], window=(1, 1), memory_limit="1MiB")
cqsa.attention(x, memoryview(b""), [[1.0]], causal="top_left", progress=lambda done, total: None)
cqsa.place(x, reserve=0.1).places.append("host")
cqsa.attention(x, x, object())
"""


def test_types(tmp_path):
    """mypy --strict has nothing to say about the package, and knows what an operand may be."""
    environment = dict(os.environ, MYPYPATH=str(BINDINGS), PYTHONPATH=str(PACKAGES))

    def mypy(what):
        command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(what)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    if subprocess.run([sys.executable, "-m", "mypy", "--version"], env=environment, capture_output=True).returncode:
        pytest.skip("no mypy (tools/setup.sh test puts it into build/python-packages)")
    done = mypy(BINDINGS / "cqsa")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "typed.py").write_text(TYPED)
    done = mypy(tmp_path / "typed.py")
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1 and f"typed.py:{TYPED.count(chr(10))}:" in errors[0], done.stdout + done.stderr
