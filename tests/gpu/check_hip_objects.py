# SPDX-License-Identifier: Apache-2.0
"""The code objects of check_portable_hip: that they are AMD code, that every chip has every kernel of the sources, that none spills
more vector registers than MOST_SPILLS, and what they take of the chip.

    check_hip_objects.py BUILD/hip SOURCE_DIR
"""
import pathlib
import re
import struct
import sys

EM_AMDGPU = 224
SPILLS = "VGPRs Spill"
FIELDS = [("VGPRs", "VGPRs"), ("scratch", "ScratchSize [bytes/lane]"), ("VGPR spills", SPILLS), ("LDS", "LDS Size [bytes/block]")]
MOST_SPILLS = 0


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


def check(folder, name, there):
    """The faults of one object; its kernels are added to those that are there for its chip."""
    data = (folder / name).read_bytes()
    log = (folder / (name + ".log")).read_text()
    if data[:4] != b"\x7fELF" or struct.unpack_from("<H", data, 18)[0] != EM_AMDGPU:
        return [f"{name} is not AMD code"]
    faults = []
    found = kernels(log)
    if not found:
        faults.append(f"{name} has no kernel")
    chip, lanes = re.search(r"code (\w+), lanes (\d+)", log).groups()
    for kernel, values in found:
        there.setdefault(chip, set()).add(kernel)
        if SPILLS not in values:
            faults.append(f"{name}: nothing is said of what {kernel} spills")
        elif int(values[SPILLS]) > MOST_SPILLS:
            faults.append(f"{name}: {kernel} spills {values[SPILLS]} VGPRs, allowed are {MOST_SPILLS}")
        if (kernel + ".kd").encode() not in data:
            faults.append(f"{name} has no descriptor of {kernel}")
        print("%-24s %-8s %s lanes  %s" % (kernel, chip, lanes, "  ".join(f"{text} {values.get(key)}" for text, key in FIELDS)))
    return faults


def main():
    folder, root = map(pathlib.Path, sys.argv[1:3])
    names = (folder / "objects.txt").read_text().split()
    there = {}
    faults = [fault for name in names for fault in check(folder, name, there)]
    wanted = {kernel for source in (root / "backends" / "gpu").glob("*.cu") for kernel in re.findall(r"^CQSA_KERNEL\(\w+, (\w+)", source.read_text(), re.M)}
    faults += [f"{kernel} is not there for {chip}" for chip in sorted(there) for kernel in sorted(wanted - there[chip])]
    for fault in faults:
        print("FAULT:", fault)
    return bool(faults) or not names


if __name__ == "__main__":
    sys.exit(main())
