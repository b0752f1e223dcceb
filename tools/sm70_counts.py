#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Instructions of the sm_70 attention kernels for a tile of 32 keys, counted in their PTX, as a Markdown table.

    python3 tools/sm70_counts.py FOLDER        FOLDER has <kernel>.ptx; those that are missing are left out

The kernels mark their phases (CQSA_SM70_PHASE in backends/cuda/sm70/pack.cuh). Counts are of one warp and one tile: both loops are
unrolled, so that what stands between two marks runs once; only, the stores of q k^T and the loads beside them are there twice, for
scales of 32 channels, and then run twice. The rows below "published" follow from what is known of that kernel: the
same 16 rows by 32 keys by 64 channels of a warp, but q read again from shared memory for each chunk, int8 values fetched byte by byte,
one buffer.
"""
import argparse
import collections
import pathlib
import re
import sys

KERNELS = ("selected_d256_split", "selected_d256_fast", "attention_d256_split", "attention_d256_fast")
MARK = re.compile(r"// phase (\w+) (\d+)")
KINDS = (
    ("mma", re.compile(r"\bmma\.sync")),
    ("shared load, 16 bytes", re.compile(r"\bld\.shared\.v4\.[bfu]32|\bld\.shared\.v2\.[bu]64")),
    ("shared load, less", re.compile(r"\bld\.shared\.")),
    ("shared store", re.compile(r"\bst\.shared\.")),
    ("f16 conversion", re.compile(r"\bcvt\.\w+\.?f16\.f32|\bcvt\.f32\.f16")),
    ("f32 arithmetic", re.compile(r"\b(add|sub|mul|fma|max)(\.\w+)*\.f32")),
    ("shuffle", re.compile(r"\bshfl\.")),
)


def count(text):
    """{(phase, parts): Counter}; of a line the first kind that fits."""
    counts, phase = collections.defaultdict(collections.Counter), ("other", 0)
    for line in text.splitlines():
        mark = MARK.search(line)
        if mark:
            phase = (mark.group(1), int(mark.group(2)))
        elif not line.lstrip().startswith("//"):
            for name, pattern in KINDS:
                if pattern.search(line):
                    counts[phase][name] += 1
                    break
    return counts


def published(parts):
    """The least that the published kernel executes for the same work, by the same kinds: 16 rows, 32 keys, 64 channels, int8."""
    steps, key_blocks, channel_blocks = 16, 2, 4  # of 4 channels; per quad pair, 8 keys or 8 channels each
    q_loads = parts * steps // 2  # a fragment is 8 bytes, two of them in a load of 16
    v_loads = 8 * channel_blocks * 4  # 8 steps of 4 keys, 4 codes of a fragment, a byte each
    return {
        "mma": parts * steps * key_blocks + parts * 8 * channel_blocks,
        "shared load of q": q_loads,
        "shared load of v": v_loads,
    }


def rows_of(name, text):
    counts = count(text)
    for phase in sorted(counts):
        if phase[0] in ("scores", "values"):
            label = {"scores": "q kᵀ", "values": "p v"}[phase[0]]
            yield [name, f"{label}, {phase[1]} part{'s' if phase[1] > 1 else ''}"] + [str(counts[phase][kind]) for kind, _ in KINDS]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    table = [["kernel", "phase"] + [kind for kind, _ in KINDS]]
    for name in KERNELS:
        path = folder / f"cqsa_sm70_{name}.ptx"
        if path.exists():
            table += rows_of(name, path.read_text())
    if len(table) == 1:
        sys.exit(f"{folder}: no PTX of {', '.join(KERNELS)}")
    table.insert(1, ["---"] * len(table[0]))
    for row in table:
        print("| " + " | ".join(row) + " |")
    for parts in (1, 2):
        print(f"\npublished, {parts} part{'s' if parts > 1 else ''}: " + ", ".join(f"{v} {k}" for k, v in published(parts).items()))


if __name__ == "__main__":
    main()
