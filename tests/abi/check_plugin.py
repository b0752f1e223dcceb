# SPDX-License-Identifier: Apache-2.0
"""What a backend plugin shows to the loader: its one export, needed libraries, glibc version.

    check_plugin.py <libcqsa_cuda.so>            exit 77: built with sanitizers, which need more; not checked

It must load where there is no driver and beside any libcqsa, so it may need neither of them.
"""
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import check_library
import elf

EXPORTS = {"cqsa_backend_entry_v1"}


def check(library):
    faults = check_library.check_loading(library)
    exports = {s[0] for s in check_library.exported(library)} - set(library.defined_versions().values())
    faults += ["exports %s" % name for name in sorted(exports - EXPORTS)]
    faults += ["does not export %s" % name for name in sorted(EXPORTS - exports)]
    faults += ["takes %s from another library" % name for name, _, defined, _ in library.symbols()
               if not defined and re.match(r"cqsa_|_ZN4cqsa|cuda|cu[A-Z]|hip", name)]
    return faults


def main():
    library = elf.Elf(sys.argv[1])
    if check_library.is_sanitized(library):
        print("built with sanitizers: not checked")
        return 77
    faults = check(library)
    for fault in faults:
        print("%s: %s" % (os.path.basename(sys.argv[1]), fault))
    if not faults:
        print("%d bytes, %s" % (library.loaded_bytes(), check_library.needs(library)))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
