#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ptxas said of every kernel of a build: registers, spills, stack, shared memory; and the gates on it.

    tools/ptxas_report.py BUILD/cuda                      prints the table, writes BUILD/cuda/registers.csv; exit 1 when a gate fails
        [--compare docs/kernels/registers-cuda.md]        also fails when the committed table tells something else
        [--update docs/kernels/registers-cuda.md]         writes that table
        [--allowed backends/cuda/spills.txt]              portable kernels that may spill: kernel, code, most bytes, reason
        [--launches PROGRAM]                              prints each kernel with the least and the most dynamic shared memory that it is
                                                          launched with (tests/gpu/list_launches.cpp); a kernel that it lacks is a fault

A spill is a fault in every kernel; one of the portable tier may be excused with a reason, one of the tuned tier
(backends/cuda/sm*) not. So is a note that ptxas ignored setmaxnreg or serialized wgmma.
"""
import argparse
import collections
import csv
import fnmatch
import pathlib
import re
import subprocess
import sys

COLUMNS = ["kernel", "code", "registers", "spilled", "stack", "shared", "source", "compiler"]
Row = collections.namedtuple("Row", COLUMNS)
# ptxas of one release repeats itself; patch releases move a few registers.
TOLERANCE = {"registers": 8, "spilled": 64, "stack": 32, "shared": 1024}
DYNAMIC = "dynamic shared"  # the column
IGNORED_BY_PTXAS = re.compile(r"C75\d\d|setmaxnreg.*ignored|wgmma.*serialized", re.IGNORECASE)


def number(pattern, text):
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def read_log(path):
    """The rows of one log and the lines that are faults in themselves."""
    text = path.read_text()
    head = re.match(r"# source (\S+), code (\S+), compiler (\S+)", text)
    if not head:
        return [], []
    source, code, compiler = head.groups()
    rows = []
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", text)[1:]:
        kernel = re.search(r"entry function '(\S+)'", part).group(1)
        if "Used " not in part:
            continue
        spilled = number(r"(\d+) bytes spill stores", part) or number(r"(\d+) bytes spill loads", part)
        rows.append(Row(kernel, code, number(r"Used (\d+) registers", part), spilled, number(r"(\d+) bytes stack frame", part),
                        number(r"(\d+) bytes smem", part), source, compiler))
    return rows, [f"{source} for {code}: {line.strip()}" for line in text.splitlines() if IGNORED_BY_PTXAS.search(line)]


def read_allowed(path):
    """[(pattern of kernels, pattern of codes, most bytes)]; a reason stands behind them."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    entries = [line.split(None, 3) for line in lines if line.strip() and not line.startswith("#")]
    return [(kernel, code, int(most)) for kernel, code, most, _ in entries]


def read_launches(program):
    """{kernel: bytes of dynamic shared memory, "least-most" where it depends on the problem}."""
    said = subprocess.run([program], stdout=subprocess.PIPE, check=True, text=True).stdout
    lines = [line.split() for line in said.splitlines()]
    return {kernel: least if least == most else f"{least}-{most}" for kernel, least, most in lines}


def is_for(entry, row):
    return fnmatch.fnmatchcase(row.kernel, entry[0]) and fnmatch.fnmatchcase(row.code, entry[1])


def run_as_sm_80(rows, there):
    """The codes that have none of their own of a portable kernel: cqsa_cuda_tier() of cmake/cuda_images.cmake."""
    if "sm_80" not in there:
        return set()
    converts = any(pathlib.PurePath(row.source).name.startswith("fp8_") for row in rows)
    return {"sm_86", "sm_87", "sm_88"} | (set() if converts else {"sm_89"})


def gates(rows, allowed):
    faults = []
    used = set()
    for row in rows:
        if not row.spilled:
            continue
        excuses = [entry for entry in allowed if is_for(entry, row)]
        used.update(excuses)
        if row.source.startswith("backends/cuda/sm") or all(row.spilled > most for _, _, most in excuses):
            faults.append(f"{row.kernel} for {row.code} spills {row.spilled} bytes ({row.source})")
    # An entry for another compiler's code finds no row at all in this build.
    faults += [f"{entry[0]} for {entry[1]} is allowed to spill but does not: take it off the list" for entry in allowed
               if entry not in used and any(is_for(entry, row) for row in rows)]
    codes = {row.code for row in rows}
    # A tuned kernel is for its own architectures; a portable one must be there for all of them.
    for kernel in sorted({row.kernel for row in rows if row.source.startswith("backends/gpu/")}):
        its = [row for row in rows if row.kernel == kernel]
        there = {row.code for row in its}
        faults += [f"{kernel} is not there for {code}" for code in sorted(codes - there - run_as_sm_80(its, there))]
    return faults


def cell(row):
    text = str(row.registers)
    for name in ("spilled", "stack", "shared"):
        if getattr(row, name):
            text += f", {name} {getattr(row, name)}"
    return text


def parse_cell(text):
    parts = text.split(", ")
    values = {"registers": int(parts[0]), "spilled": 0, "stack": 0, "shared": 0}
    for part in parts[1:]:
        name, value = part.split()
        values[name] = int(value)
    return values


def matrix(rows, launches):
    codes = sorted({row.code for row in rows}, key=lambda c: (number(r"(\d+)", c), c))
    cells = {(row.kernel, row.code): cell(row) for row in rows}
    columns = ["kernel", *([DYNAMIC] if launches else []), *codes]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for kernel in sorted({row.kernel for row in rows}):
        dynamic = [launches.get(kernel, "")] if launches else []
        lines.append(f"| `{kernel}` | " + " | ".join(dynamic + [cells.get((kernel, code), "") for code in codes]) + " |")
    return lines


def compilers(rows):
    """Their releases: nvcc-13.0. A patch release moves little."""
    return sorted({release(row.compiler) for row in rows})


def release(compiler):
    return ".".join(compiler.split(".")[:2])


def document(rows, launches):
    return "\n".join([
        "# Registers and shared memory of the CUDA kernels", "",
        f"Compilers: {', '.join(compilers(rows))}. A cell is registers a thread, then, where there are any, bytes spilled, bytes of stack a",
        "thread, bytes of static shared memory. Dynamic shared memory is what a block gets from the host code, in bytes: from the smallest",
        "problem to the largest where that depends on it, on chips from sm_70 to sm_90 (`tests/gpu/list_launches.cpp`). `sm_70(PTX)` is PTX by",
        "clang, assembled for the oldest architecture that ptxas knows. Made by `tools/ptxas_report.py BUILD/cuda --launches",
        "BUILD/bin/gpu_launches --update docs/kernels/registers-cuda.md`; a test compares.", "",
        *matrix(rows, launches), ""])


def read_document(path):
    """(releases of compilers, {(kernel, code): values}, {kernel: dynamic shared memory})."""
    text = path.read_text()
    table = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    cells, dynamic = {}, {}
    for line in table[1:]:
        kernel = line[0].strip("`")
        for column, value in zip(table[0][1:], line[1:]):
            if column == DYNAMIC:
                dynamic[kernel] = value
            elif value:
                cells[kernel, column] = parse_cell(value)
    return re.search(r"Compilers: (.+?)\. ", text).group(1).split(", "), cells, dynamic


def compare_launches(rows, launches, dynamic, path):
    kernels = {row.kernel for row in rows}
    return [f"{path}: {kernel} has {dynamic.get(kernel) or 'no'} bytes of dynamic shared memory, now {launches[kernel]}"
            for kernel in sorted(kernels & launches.keys()) if dynamic.get(kernel) != launches[kernel]]


def compare(rows, launches, path):
    known, cells, dynamic = read_document(path)
    for compiler in compilers(rows):
        if compiler not in known:
            print(f"{path} is of {', '.join(known)}: what {compiler} made is not compared")
    rows = [row for row in rows if release(row.compiler) in known]
    faults = compare_launches(rows, launches, dynamic, path)
    here = {(row.kernel, row.code): row for row in rows}
    for key, row in here.items():
        if key not in cells:
            faults.append(f"{path} has no {row.kernel} for {row.code}")
            continue
        for name, most in TOLERANCE.items():
            if abs(getattr(row, name) - cells[key][name]) > most:
                faults.append(f"{path}: {row.kernel} for {row.code} has {name} {cells[key][name]}, now {getattr(row, name)}")
    codes = {row.code for row in rows}
    faults += [f"{path} still has {kernel} for {code}" for kernel, code in cells if code in codes and (kernel, code) not in here]
    return [fault + "; --update writes it" for fault in faults]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--compare", type=pathlib.Path)
    parser.add_argument("--update", type=pathlib.Path)
    parser.add_argument("--allowed", type=pathlib.Path)
    parser.add_argument("--launches")
    options = parser.parse_args()

    rows, faults = [], []
    for log in (options.folder / "logs.txt").read_text().split():
        found, notes = read_log(options.folder / log)
        rows += found
        faults += notes
    if not rows:
        sys.exit(f"{options.folder} has no log of ptxas with a kernel in it")
    rows.sort(key=lambda row: (row.kernel, number(r"(\d+)", row.code), row.code))
    with open(options.folder / "registers.csv", "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    launches = read_launches(options.launches) if options.launches else {}
    print("\n".join(matrix(rows, launches)))

    faults += gates(rows, read_allowed(options.allowed))
    if launches:
        faults += [f"{options.launches} launches no {kernel}" for kernel in sorted({row.kernel for row in rows} - launches.keys())]
    if options.update:
        options.update.parent.mkdir(parents=True, exist_ok=True)
        options.update.write_text(document(rows, launches))
    elif options.compare:
        faults += compare(rows, launches, options.compare)
    for fault in faults:
        print("FAULT:", fault)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
