# SPDX-License-Identifier: Apache-2.0
"""Draws the table "All cells" of a page of results: rates of the kernels side by side, one group of bars for each shape.

    python3 benchmarks/plot_cells.py benchmarks/results/2026-11-30-h200-hopper.md OUT.png          (needs matplotlib)
"""
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def cells(path):
    for line in open(path):
        x = [part.strip() for part in line.strip().strip("|").split("|")]
        if len(x) == 13 and x[0].isdigit():
            yield f"{x[0]}\n{x[1]}\n{int(x[2]) // 1024}K", x[4], [float(x[5]), float(x[6]), float(x[7])]


def main():
    rows = list(cells(sys.argv[1]))
    figure, axes = plt.subplots(2, 1, figsize=(12, 8), sharey=True)
    for axis, mask in zip(axes, ("full", "causal")):
        part = [row for row in rows if row[1] == mask]
        for n, (name, colour) in enumerate((("FlashAttention-2", "#b0b0b0"), ("cuDNN", "#6f9fd8"), ("cqsa (cuda_sm90)", "#d8703f"))):
            axis.bar([i + 0.27 * (n - 1) for i in range(len(part))], [row[2][n] for row in part], 0.25, label=name, color=colour)
        axis.set_xticks(range(len(part)), [row[0] for row in part])
        axis.set_ylabel(f"TFLOP/s, {mask}")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(loc="upper left")
    axes[1].set_xlabel("head_dim, query/key heads, tokens; bf16, one H200")
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=90)


if __name__ == "__main__":
    main()
