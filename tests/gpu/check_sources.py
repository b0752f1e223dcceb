# SPDX-License-Identifier: Apache-2.0
"""What no compiler checks about the sources of the GPU backends.

    check_sources.py SOURCE_DIR

The portable tier (backends/gpu) names no vendor outside of port_device.cuh and takes its lane count as a template argument; the
core (src, include) includes no vendor header. Comments may say what they like.
"""
import pathlib
import re
import sys

VENDOR_NAMES = re.compile(r"\b(cuda|hip)[A-Z_]\w*|\bcu[A-Z]\w*|\b(cuda|hip)\w*\.h\b|__CUDA\w*|__HIP\w*|__NV\w*|__AMD\w*|\b__?asm(__|\b)|\basm\b|\b__builtin_amdgcn\w*|"
                          r"\b__(shfl|ballot|syncwarp|activemask|any_sync|all_sync)\w*|\bwarpSize\b|\b(threadIdx|blockIdx|blockDim|gridDim)\b")
# 32 is also a width in bits and a size of a tile; as a lane count it stands beside one of these words.
LANES_32 = re.compile(r"\blanes?\w*\s*(=|==|%|/|\*|&|<|>=)\s*(32|31|64|63)\b|\blane\w*\s*=[^;]*[%&/]\s*(32|31|64|63)u?\b|<\s*32\s*>|\bwarp\w*|"
                      r"\b(thread\w*|tid)(\(\))?\s*(%|/|&|>>)\s*(5|31|32)\b", re.IGNORECASE)
VENDOR_HEADERS = re.compile(r'#\s*include\s*[<"](cuda|hip/|hip_|cublas|cudnn|nv|rocm|hsa/|curand|cub/)')


def code_of(path):
    """The text without comments and string literals' insides; line numbers stay."""
    text = path.read_text()
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    return text


def search(path, pattern, why, faults, root):
    for number, line in enumerate(code_of(path).splitlines(), 1):
        found = pattern.search(line)
        if found:
            faults.append(f"{path.relative_to(root)}:{number}: {found.group().strip()}: {why}")


def main():
    root = pathlib.Path(sys.argv[1])
    faults = []
    portable = sorted(p for p in (root / "backends/gpu").iterdir() if p.suffix in (".cuh", ".cu", ".h", ".cpp") and p.name != "port_device.cuh")
    kernels = [p for p in portable if p.suffix in (".cuh", ".cu")]
    for path in portable:
        search(path, VENDOR_NAMES, "the portable tier names no vendor; port_device.cuh has the neutral names", faults, root)
    for path in kernels:
        search(path, LANES_32, "the lane count is a template argument, 32 or 64", faults, root)
    core = [p for folder in ("src", "include") for p in (root / folder).rglob("*") if p.suffix in (".h", ".cpp")]
    for path in sorted(core):
        search(path, VENDOR_HEADERS, "no vendor header in the core", faults, root)
    for fault in faults:
        print(fault)
    print(f"{len(portable)} files of the portable tier, {len(core)} of the core")
    return bool(faults) or not portable or not core


if __name__ == "__main__":
    sys.exit(main())
