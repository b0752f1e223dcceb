# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel py3-none-linux_<machine>: the package and, in cqsa/lib, the library and the GPU plugins built with it, stripped.

    pip wheel ./bindings/python --no-deps            # or tools/wheel.sh, which needs no pip
    python3 cqsa_build.py [FOLDER [LIBRARY]]

A PEP 517 backend that needs only the standard library, CMake and a compiler. The config setting `library` names a finished
libcqsa.so.0 to pack, with the plugins beside it, instead of building one. CQSA_CMAKE_ARGS is handed to CMake.
"""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import Any, Dict, List, Optional, Tuple

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]
LIBRARY_NAME = "libcqsa.so.0"
PLUGIN_NAMES = ("libcqsa_cuda.so", "libcqsa_hip.so")

METADATA = """Metadata-Version: 2.1
Name: cqsa
Version: {version}
Summary: Exact attention under any memory budget
License: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.9
Requires-Dist: numpy>=1.22
Provides-Extra: bfloat16
Requires-Dist: ml_dtypes; extra == "bfloat16"
Provides-Extra: test
Requires-Dist: pytest; extra == "test"
Requires-Dist: hypothesis; extra == "test"
"""

Settings = Optional[Dict[str, Any]]


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: Optional[str] = None) -> str:
    if not sys.platform.startswith("linux"):
        raise SystemExit(f"the library is for Linux, this is {sys.platform}")
    given = (config_settings or {}).get("library")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(given) if given else _build()
        binaries = [library] + [library.with_name(name) for name in PLUGIN_NAMES if library.with_name(name).exists()]
        name = f"cqsa-{_version()}-{_tag()}.whl"
        _write(pathlib.Path(wheel_directory) / name, [_stripped(binary, pathlib.Path(folder)) for binary in binaries])
    return name


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    folder = pathlib.Path(metadata_directory) / _dist_info()
    folder.mkdir(parents=True)
    for name, text in _metadata_files().items():
        (folder / name).write_text(text)
    return folder.name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    raise SystemExit("there is no source distribution: the library's sources are outside of bindings/python; build a wheel")


def _version() -> str:
    match = re.search(r'__version__ = "(.+)"', (PACKAGE / "cqsa" / "_version.py").read_text())
    assert match is not None
    return match.group(1)


def _tag() -> str:
    return f"py3-none-linux_{os.uname().machine}"


def _dist_info() -> str:
    return f"cqsa-{_version()}.dist-info"


def _metadata_files() -> Dict[str, str]:
    return {
        "METADATA": METADATA.format(version=_version()),
        "LICENSE": (ROOT / "LICENSE").read_text(),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: cqsa_build\nRoot-Is-Purelib: false\nTag: {_tag()}\n",
    }


def _build() -> pathlib.Path:
    build = ROOT / "build" / "wheel"
    subprocess.run(["cmake", "-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DCQSA_BUILD_TESTS=OFF", "-DCQSA_BUILD_TOOLS=OFF",
                    "-DCQSA_BUILD_EXAMPLES=OFF", *shlex.split(os.environ.get("CQSA_CMAKE_ARGS", ""))], check=True)
    subprocess.run(["cmake", "--build", build, f"-j{os.cpu_count()}"], check=True)
    return build / "lib" / LIBRARY_NAME


def _stripped(library: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    result = folder / (LIBRARY_NAME if library.name.startswith("libcqsa.so") else library.name)
    shutil.copyfile(library, result)
    strip = shutil.which("strip")
    if strip is not None:
        subprocess.run([strip, "--strip-unneeded", result], check=True)
    return result


def _write(path: pathlib.Path, binaries: List[pathlib.Path]) -> None:
    """The zip file with its RECORD; the same bytes for the same content."""
    files: List[Tuple[str, bytes]] = [(f"cqsa/{file.name}", file.read_bytes())
                                      for file in sorted((PACKAGE / "cqsa").iterdir()) if file.suffix in (".py", ".typed", ".h")]
    files += [(f"cqsa/lib/{binary.name}", binary.read_bytes()) for binary in binaries]
    files += [(f"{_dist_info()}/{name}", text.encode()) for name, text in _metadata_files().items()]
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in files) + f"{_dist_info()}/RECORD,,\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files + [(f"{_dist_info()}/RECORD", record.encode())]:
            entry = zipfile.ZipInfo(name)  # the date is 1980-01-01
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name.startswith("cqsa/lib/") else 0o100644) << 16
            archive.writestr(entry, data)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "."
    os.makedirs(target, exist_ok=True)
    print(os.path.join(target, build_wheel(target, {"library": sys.argv[2]} if len(sys.argv) > 2 else None)))
