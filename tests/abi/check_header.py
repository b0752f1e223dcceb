# SPDX-License-Identifier: Apache-2.0
"""cqsa.h alone, and every *_INIT macro, compile without a warning in each dialect of C and C++ with each compiler here.

    check_header.py <cqsa.h>
"""
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import header

C_COMPILERS = ["gcc", "clang", "clang-14", "clang-19"]
CXX_COMPILERS = ["g++", "clang++", "clang++-14", "clang++-19"]
C_DIALECTS = ["c99", "c11", "c17"]
CXX_DIALECTS = ["c++11", "c++14", "c++17", "c++20"]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wundef", "-Werror"]


def source(path):
    """The header first and twice, then one object of each struct by its macro."""
    lines = ['#include "cqsa.h"', '#include "cqsa.h"']
    for macro in header.initialisers(path):
        struct = macro[:-len("_INIT")].lower()
        lines += ["%s make_%s(void);" % (struct, struct), "%s make_%s(void) { %s s = %s; return s; }" % (struct, struct, struct, macro)]
    return "\n".join(lines) + "\n"


def compiles(compiler, dialect, language, path, text):
    extra = ["-Wstrict-prototypes"] if language == "c" else []
    command = [compiler, "-std=" + dialect, "-x", language, "-fsyntax-only", "-I", os.path.dirname(os.path.abspath(path))]
    result = subprocess.run(command + WARNINGS + extra + ["-"], input=text, universal_newlines=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode != 0:
        print("%s -std=%s:\n%s" % (compiler, dialect, result.stdout))
    return result.returncode == 0


def uncommented(path):
    """Functions whose comment does not say the thread class and since when there is one."""
    text = open(path, encoding="utf-8").read()
    bad = []
    for match in re.finditer(r"\nCQSA_API [^;]*?(cqsa_\w+)\(", text):
        comment = text[:match.start()].rstrip()
        start = comment.rfind("/*") if comment.endswith("*/") else -1
        if start < 0 or "Thread class:" not in comment[start:] or "Since " not in re.sub(r"\s+\*?\s*", " ", comment[start:]):
            bad.append(match.group(1))
    return bad


def main():
    path = sys.argv[1]
    if uncommented(path):
        print("no comment with 'Thread class:' and 'Since':", ", ".join(uncommented(path)))
        return 1
    text = source(path)
    macro = {"CQSA_" + s[len("cqsa_"):].upper() + "_INIT": f[0][0] == "struct_size" for s, f in header.structs(path).items()}
    wanted = {m for m, sized in macro.items() if sized}  # a struct inside of others may have one too
    if not wanted <= set(header.initialisers(path)) <= set(macro):
        print("structs without a macro, or macros without a struct:", sorted(wanted ^ set(header.initialisers(path))))
        return 1
    done, failed = 0, 0
    for compilers, dialects, language in ((C_COMPILERS, C_DIALECTS, "c"), (CXX_COMPILERS, CXX_DIALECTS, "c++")):
        for compiler in filter(shutil.which, compilers):
            for dialect in dialects:
                done += 1
                failed += not compiles(compiler, dialect, language, path, text)
    print("%d of %d combinations of compiler and dialect failed" % (failed, done))
    return failed != 0 or done == 0


if __name__ == "__main__":
    sys.exit(main())
