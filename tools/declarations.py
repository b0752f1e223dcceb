#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The declarations of cqsa.h, for languages that read C: no comments, no macros but numbers.

    tools/declarations.py [--check]

Writes bindings/python/cqsa/_declarations.h, and from it what cffi loads (bindings/python/cqsa/_cffi_abi.py), where there is a cffi. --check only tells
whether they are what the header says; exit status 1 if not.
"""
import contextlib
import io
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADER = ROOT / "include/cqsa.h"
PACKAGE = ROOT / "bindings/python/cqsa"
FIRST_LINE = "/* SPDX-License-Identifier: Apache-2.0. The declarations of cqsa.h, by tools/declarations.py. */\n"
NUMBER = re.compile(r"^#define (CQSA_\w+) (\d+)$", re.MULTILINE)


def declarations():
    """The text of _declarations.h."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL).replace("\\\n", " ")
    numbers = ["#define %s %s" % found for found in NUMBER.findall(re.sub(r" +$", "", text, flags=re.MULTILINE))]
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace('extern "C" {', "").replace("CQSA_API ", "")
    text = re.sub(r"\n\s*\n+", "\n", text[:text.rindex("}")] if text.rstrip().endswith("}") else text)
    return FIRST_LINE + "\n".join(numbers) + "\n" + re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip() + "\n"


def abi_module(text):
    """What cffi makes of the declarations, a module that loads no compiler; None without cffi."""
    try:
        import cffi
    except ImportError:
        return None
    builder = cffi.FFI()
    builder.cdef(text)
    builder.set_source("_cffi_abi", None)
    path = PACKAGE / "_cffi_abi.py.new"
    with contextlib.redirect_stdout(io.StringIO()):  # it tells what it does
        builder.emit_python_code(str(path))
    made = path.read_text()
    path.unlink()
    return "# SPDX-License-Identifier: Apache-2.0\n" + made.replace("import _cffi_backend\n", "import _cffi_backend  # type: ignore[import-not-found, import-untyped, unused-ignore]\n")


def main():
    text = declarations()
    files = {PACKAGE / "_declarations.h": text, PACKAGE / "_cffi_abi.py": abi_module(text)}
    bad = [path.name for path, wanted in files.items() if wanted is not None and (not path.exists() or path.read_text() != wanted)]
    if "--check" in sys.argv[1:]:
        if bad:
            print("not what cqsa.h says, run tools/declarations.py:", ", ".join(bad))
        return 1 if bad else 0
    for path, wanted in files.items():
        if wanted is not None:
            path.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
