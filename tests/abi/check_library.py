# SPDX-License-Identifier: Apache-2.0
"""What libcqsa.so shows to the loader: exported symbols, soname, needed libraries, glibc version, size.

    check_library.py <libcqsa.so> <cqsa.h>            exit 77: built with sanitizers, which need more; not checked
"""
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import elf
import header

ALLOWED = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
HIGHEST_GLIBC = (2, 34)
MOST_BYTES = 3 << 20


def exported(library):
    return [s for s in library.symbols() if s[0] and s[2] and s[1] != elf.STB_LOCAL]


def is_sanitized(library):
    return any(re.match(r"lib(asan|tsan|ubsan|clang_rt)", name) for name in library.dynamic(elf.DT_NEEDED)) or any(
        name.startswith(("__asan_", "__tsan_", "__ubsan_", "__sanitizer_")) for name, _, _, _ in library.symbols())


def check_loading(library):
    """What keeps a library from being loaded everywhere, or from being unloaded."""
    faults = []
    for kind in (elf.SHT_DYNSYM, elf.SHT_SYMTAB):
        # Only in the dynamic table does such a symbol keep the library from being unloaded; in the other one it is local.
        for name, binding, defined, _ in library.symbols(kind):
            if binding == elf.STB_GNU_UNIQUE and defined:
                faults.append("has the unique symbol %s: dlclose would not unload it" % name)
    for name in library.dynamic(elf.DT_NEEDED):
        if name not in ALLOWED:
            faults.append("needs %s, allowed are %s" % (name, ", ".join(sorted(ALLOWED))))
    for file, version in library.needed_versions():
        match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
        if not match or (int(match.group(1)), int(match.group(2))) > HIGHEST_GLIBC:
            faults.append("needs %s of %s, the highest allowed is GLIBC_%d.%d" % ((version, file) + HIGHEST_GLIBC))
    return faults


def needs(library):
    """A text: the libraries, and the highest version of glibc."""
    versions = [v for _, v in library.needed_versions()]
    return "needs %s, up to %s" % (" ".join(library.dynamic(elf.DT_NEEDED)),
                                   max(versions, key=lambda v: [int(n) for n in re.findall(r"\d+", v)]))


def check(library, header_path):
    faults = check_loading(library)
    wanted = set(header.functions(header_path))
    names = library.defined_versions()
    public = {s[0] for s in exported(library)} - {"CQSA_0"}
    for name in sorted(public - wanted):
        faults.append("exports %s, which cqsa.h does not declare" % name)
    for name in sorted(wanted - public):
        faults.append("does not export %s" % name)
    for name, _, _, version in exported(library):
        if name in wanted and names.get(version) != "CQSA_0":
            faults.append("%s has the symbol version %s, wanted CQSA_0" % (name, names.get(version)))
    if library.dynamic(elf.DT_SONAME) != ["libcqsa.so.0"]:
        faults.append("soname is %s, wanted libcqsa.so.0" % library.dynamic(elf.DT_SONAME))
    if library.loaded_bytes() > MOST_BYTES:
        faults.append("has %d bytes, wanted at most %d" % (library.loaded_bytes(), MOST_BYTES))
    return faults


def main():
    library = elf.Elf(sys.argv[1])
    if is_sanitized(library):
        print("built with sanitizers: not checked")
        return 77
    faults = check(library, sys.argv[2])
    for fault in faults:
        print("%s: %s" % (os.path.basename(sys.argv[1]), fault))
    if not faults:
        print("%d functions, %d bytes, %s" % (len(header.functions(sys.argv[2])), library.loaded_bytes(), needs(library)))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
