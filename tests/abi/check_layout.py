# SPDX-License-Identifier: Apache-2.0
"""The binary interface that cqsa.h describes, compared with golden/: functions, struct layouts, constants.

    check_layout.py <cqsa.h> [--cc gcc] [--update]

The layouts and values are printed by a C program made from the header, so it is the compiler that says them. The program also
fails when a struct has a byte that belongs to no field: either the reader missed one, or there is hidden padding, which
must be a named `reserved` field instead.
"""
import argparse
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import golden
import header

HERE = os.path.dirname(os.path.abspath(__file__))

PROGRAM = """
#include "cqsa.h"
#include <stddef.h>
#include <stdio.h>
#include <string.h>
static int holes;
static size_t end;
static const char *current;
static void begin(const char *name, size_t size) {
  printf("%%s size %%zu\\n", name, size);
  current = name;
  end = 0;
}
static void field(const char *name, size_t offset, size_t size, const char *type) {
  printf("%%s %%s offset %%zu size %%zu %%s\\n", current, name, offset, size, type);
  if (offset != end) fprintf(stderr, "%%s: bytes %%zu to %%zu belong to no field\\n", current, end, offset), ++holes;
  end = offset + size;
}
static void finish(size_t size) {
  if (size != end) fprintf(stderr, "%%s: bytes %%zu to %%zu belong to no field\\n", current, end, size), ++holes;
}
int main(void) {
%s
  return holes != 0;
}
"""


def layout_program(path):
    lines = []
    for struct, fields in header.structs(path).items():
        lines.append('  begin("%s", sizeof(%s));' % (struct, struct))
        for name, kind in fields:
            lines.append('  field("%s", offsetof(%s, %s), sizeof(((%s *)0)->%s), "%s");' % (name, struct, name, struct, name, kind))
        lines.append("  finish(sizeof(%s));" % struct)
    return PROGRAM % "\n".join(lines)


def constants_program(path):
    lines = ['  printf("%s %%lld\\n", (long long)(%s));' % (name, name) for name in header.constants(path)]
    return PROGRAM % "\n".join(lines)


def run_program(text, path, cc):
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "p.c"), os.path.join(folder, "p")
        open(source, "w").write(text)
        subprocess.run([cc, "-std=c99", "-I", os.path.dirname(os.path.abspath(path)), source, "-o", program], check=True)
        result = subprocess.run([program], stdout=subprocess.PIPE, universal_newlines=True)
    return result.stdout.splitlines(), result.returncode


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("header")
    parser.add_argument("--cc", default="cc")
    parser.add_argument("--golden", default=os.path.join(HERE, "golden"))
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    layout, holes = run_program(layout_program(options.header), options.header, options.cc)
    values, _ = run_program(constants_program(options.header), options.header, options.cc)
    prototypes = [text + ";" for text in header.typedefs(options.header) + list(header.functions(options.header).values())]
    failed = holes
    for lines, name in ((prototypes, "functions.txt"), (layout, "layout.txt"), (values, "constants.txt")):
        failed |= golden.compare(lines, os.path.join(options.golden, name), options.update)
    print("%d functions, %d structs, %d constants" % (len(header.functions(options.header)), len(header.structs(options.header)), len(values)))
    return failed


if __name__ == "__main__":
    sys.exit(main())
