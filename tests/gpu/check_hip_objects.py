# SPDX-License-Identifier: Apache-2.0
"""The code objects of check_portable_hip: that they are AMD code with the kernels of the source in them, and what they take of the chip.

    check_hip_objects.py BUILD/hip
"""
import pathlib
import re
import struct
import sys

EM_AMDGPU = 224
FIELDS = [("VGPRs", "VGPRs"), ("scratch", "ScratchSize [bytes/lane]"), ("VGPR spills", "VGPRs Spill"), ("LDS", "LDS Size [bytes/block]")]


def kernels(log):
    """[(kernel, {field: number})] from the remarks of clang's resource analysis."""
    found = []
    for line in log.splitlines():
        remark = re.search(r"remark:\s+(.+?): (\S+) \[-Rpass-analysis", line)
        if not remark:
            continue
        if remark.group(1) == "Function Name":
            found.append((remark.group(2), {}))
        elif found:
            found[-1][1][remark.group(1)] = remark.group(2)
    return found


def check(folder, name):
    data = (folder / name).read_bytes()
    log = (folder / (name + ".log")).read_text()
    if data[:4] != b"\x7fELF" or struct.unpack_from("<H", data, 18)[0] != EM_AMDGPU:
        return [f"{name} is not AMD code"]
    faults = []
    found = kernels(log)
    if not found:
        faults.append(f"{name} has no kernel")
    lanes = re.search(r"lanes (\d+)", log).group(1)
    for kernel, values in found:
        if (kernel + ".kd").encode() not in data:
            faults.append(f"{name} has no descriptor of {kernel}")
        print("%-24s %-8s %s lanes  %s" % (kernel, name.split(".")[-2], lanes, "  ".join(f"{text} {values.get(key)}" for text, key in FIELDS)))
    return faults


def main():
    folder = pathlib.Path(sys.argv[1])
    names = (folder / "objects.txt").read_text().split()
    faults = [fault for name in names for fault in check(folder, name)]
    for fault in faults:
        print("FAULT:", fault)
    return bool(faults) or not names


if __name__ == "__main__":
    sys.exit(main())
