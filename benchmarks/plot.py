#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws what `cqsa bench attention --json-lines` measured: GFLOP/s over the sequence length, one line for each type, head_dim, causal
rule, schedule and count of threads, and the FMA peak where it was measured. SVG, with nothing but Python's own library.

    cqsa bench attention --peak --json-lines > benchmarks/results/today.jsonl
    benchmarks/plot.py benchmarks/results/today.jsonl [-o today.svg]
"""
import argparse
import html
import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT = 900, 520
LEFT, RIGHT, TOP, BOTTOM = 70, 270, 64, 60  # margins; the legend is in the right one
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a5a00"]
DASHES = ["", "6 3", "2 3", "8 3 2 3"]


def read(path):
    """The records of a file; a sentence instead of an exception's text for what is wrong with it."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            record["record"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}: line {number} is no record of cqsa bench --json-lines") from None
        records.append(record)
    return records


def series_of(cells):
    """{name: [(seqlen, GFLOP/s), ..]}; what is the same for all cells is no part of the names."""
    keys = ["dtype", "head_dim", "causal", "schedule", "threads", "heads", "kv_heads", "batch", "budget"]
    varying = [key for key in keys if len({cell[key] for cell in cells}) > 1 or key in ("dtype", "head_dim")]
    labels = {"dtype": "{}", "head_dim": "D {}", "causal": "causal {}", "schedule": "{}", "threads": "{} threads", "heads": "{} heads",
              "kv_heads": "{} key heads", "batch": "batch {}", "budget": "{} bytes"}
    series = {}
    for cell in cells:
        name = ", ".join(labels[key].format(cell[key]) for key in varying)
        series.setdefault(name, []).append((cell["seqlen"], cell["gflops"]))
    return {name: sorted(points) for name, points in series.items()}


def round_step(largest):
    """A step of 1, 2 or 5 times a power of ten that makes at most ten."""
    step = 10 ** math.floor(math.log10(largest))
    return next(s for s in (step / 10, step / 5, step / 2, step) if largest / s <= 10)


def text(x, y, words, anchor="start", size=13):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(words)}</text>'


def line(x1, y1, x2, y2, colour, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'


class Axes:
    """Lengths on a logarithmic scale to the right, rates upwards from 0."""

    def __init__(self, lengths, largest):
        self.lengths, self.step = lengths, round_step(largest)
        self.top = self.step * math.ceil(largest / self.step)

    def x(self, length):
        low, high = math.log2(self.lengths[0] or 1), math.log2(self.lengths[-1] or 1)
        share = 0.5 if low == high else (math.log2(length or 1) - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, rate):
        return HEIGHT - BOTTOM - rate / self.top * (HEIGHT - TOP - BOTTOM)

    def draw(self):
        out = []
        for i in range(round(self.top / self.step) + 1):
            rate = i * self.step
            out.append(line(LEFT, self.y(rate), WIDTH - RIGHT, self.y(rate), "#dddddd"))
            out.append(text(LEFT - 8, self.y(rate) + 4, f"{rate:g}", "end"))
        for length in self.lengths:
            out.append(line(self.x(length), self.y(0), self.x(length), self.y(0) + 5, "#000000"))
            out.append(text(self.x(length), self.y(0) + 20, str(length), "middle"))
        out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "tokens", "middle"))
        out.append(text(8, TOP - 10, "GFLOP/s"))
        return out


def draw(records, path):
    cells = [r for r in records if r["record"] == "bench" and r.get("gflops")]
    machine = next((r for r in records if r["record"] == "machine"), None)
    if not cells or machine is None:
        raise ValueError(f"{path}: there is no result of cqsa bench --json-lines in it")
    peaks = [r for r in records if r["record"] == "peak"]
    axes = Axes(sorted({cell["seqlen"] for cell in cells}), max(r["gflops"] for r in cells + peaks))
    title = f"cqsa {machine['cqsa']} attention, {machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}, backend {machine['backend']}"
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', text(LEFT, 26, title, size=15)]
    out += axes.draw()
    legend = WIDTH - RIGHT + 20
    for peak in peaks:
        y = axes.y(peak["gflops"])
        out += [line(LEFT, y, WIDTH - RIGHT, y, "#888888", "4 4"), text(legend, y + 4, f"FMA peak, {peak['isa']}, {peak['threads']} threads", size=12)]
    lowest_peak = max([axes.y(p["gflops"]) for p in peaks], default=TOP - 20)
    for i, (name, points) in enumerate(series_of(cells).items()):
        colour, dash = COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]
        places = [(axes.x(length), axes.y(rate)) for length, rate in points]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        y = lowest_peak + 26 + 19 * i
        out += [f'<line x1="{legend}" y1="{y:.1f}" x2="{legend + 24}" y2="{y:.1f}" stroke="{colour}" stroke-width="2"{dashes}/>',
                text(legend + 32, y + 4, name, size=12)]
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines of cqsa bench attention")
    parser.add_argument("-o", "--output", type=Path, help="default: the same name with .svg")
    options = parser.parse_args()
    try:
        svg = draw(read(options.results), options.results)
        (options.output or options.results.with_suffix(".svg")).write_text(svg)
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    main()
