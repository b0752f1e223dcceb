# SPDX-License-Identifier: Apache-2.0
"""Everything in cqsa.h has a comment that Doxygen finds, and no comment refers to what is not there.

    check_reference.py <repository> <folder for the pages>

Exit status 77 where there is no doxygen. To know that the check sees what it is for, a declaration without a comment must be found too.
"""
import os
import shutil
import subprocess
import sys


def warnings(root, header, out):
    """What Doxygen says of a header."""
    os.makedirs(out, exist_ok=True)
    settings = open(os.path.join(root, "docs/api/Doxyfile"), encoding="utf-8").read()
    settings += "\nINPUT = %s\nOUTPUT_DIRECTORY = %s\n" % (header, out)
    result = subprocess.run(["doxygen", "-"], cwd=root, input=settings, universal_newlines=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return result.returncode, result.stdout


def main():
    root, out = sys.argv[1:]
    if not shutil.which("doxygen"):
        print("skipped: no doxygen")
        return 77
    header = os.path.join(root, "include/cqsa.h")
    status, text = warnings(root, header, out)
    if status != 0:
        print(text)
        return 1
    bare = os.path.join(out, "bare", "cqsa.h")
    os.makedirs(os.path.dirname(bare), exist_ok=True)
    lines = open(header, encoding="utf-8").read().replace("/* Name of the backend in use", "\nCQSA_API int cqsa_bare(void);\n/* Name of the backend in use", 1)
    open(bare, "w", encoding="utf-8").write(lines)
    status, text = warnings(root, bare, os.path.join(out, "bare"))
    if status == 0 or "cqsa_bare" not in text:
        print("a function without a comment was not found:", text)
        return 1
    print(len([name for name in os.listdir(os.path.join(out, "html")) if name.endswith(".html")]), "pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
