# SPDX-License-Identifier: Apache-2.0
"""cqsa bench attention, and benchmarks/plot.py on what it prints."""
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("bench", "attention", "--seqlen", "64,96", "--heads", "2", "--head-dim", "16,32", "--runs", "1", "--backend", "cpu")


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines(run):
    done = run(*SMALL, "--dtype", "f32,bf16", "--causal", "none,top_left", "--threads", "1,2", "--peak", "--json-lines")
    lines = json_lines(done.stdout)
    assert lines[0]["record"] == "machine" and lines[0]["cpu"] is not None
    peaks = [line for line in lines if line["record"] == "peak"]
    assert [peak["threads"] for peak in peaks] == [1, 2] and all(peak["gflops"] > 0 for peak in peaks)
    cells = [line for line in lines if line["record"] == "bench"]
    assert len(cells) == 2 * 2 * 2 * 2 * 2 and len(lines) == 1 + 2 + len(cells)
    assert len({tuple(cell[key] for key in ("dtype", "causal", "head_dim", "seqlen", "threads")) for cell in cells}) == len(cells)
    peak = {p["threads"]: p["gflops"] for p in peaks}
    for cell in cells:
        assert cell["pass"] and cell["seconds"] > 0 and cell["max_abs"] <= cell["allowed_max_abs"] and cell["rows"] == 64
        assert cell["share_of_peak"] == pytest.approx(cell["gflops"] / peak[cell["threads"]])


def test_table(run):
    done = run(*SMALL, "--kv-heads", "1", "--batch", "2", "--memory", "none,least", "--schedule", "direct,stream,cqs:3:1")
    rows = [line for line in done.stdout.splitlines() if line.startswith(("f32 ", "bf16 "))]
    assert len(rows) == 2 * 2 * 2 * 2 * 3
    assert all("2/1" in row and "ms" in row or "us" in row for row in rows)
    assert "GFLOP/s" in done.stdout and "of peak" in done.stdout and done.stderr == ""


def test_a_cell_that_the_library_refuses_fails(run):
    done = run("bench", "attention", "--seqlen", "64", "--head-dim", "16", "--dtype", "f32", "--memory", "17,none", "--runs", "1", status=2)
    assert "FAIL: " in done.stdout and "reproduce: cqsa parity --op attention" in done.stdout


@pytest.mark.parametrize("arguments, words", [
    ((), ["subcommand"]),
    (("moe",), ["moe"]),
    (("attention", "--seqlen", "many"), ["seqlen=many"]),
    (("attention", "--seqlen", "1K,"), ["seqlen="]),
    (("attention", "--dtype", "f7"), ["f7"]),
    (("attention", "--kv-heads", "3"), ["multiple"]),
    (("attention", "--memory", "lots"), ["lots"]),
    (("attention", "--schedule", "best"), ["best"]),
    (("attention", "--threads", "-1"), []),
    (("attention", "--runs", "0"), ["--runs"]),
    (("attention", "--backend", "warp"), ["warp"]),
])
def test_bad_arguments(run, arguments, words):
    error = run("bench", *arguments, status=1).stderr
    for word in words:
        assert word in error, error


def plot(*arguments):
    return subprocess.run([sys.executable, BENCHMARKS / "plot.py", *map(str, arguments)], capture_output=True, text=True)


def test_plot(run, tmp_path):
    results = tmp_path / "results.jsonl"
    results.write_text(run(*SMALL, "--peak", "--json-lines").stdout)
    done = plot(results)
    assert done.returncode == 0, done.stderr
    svg = (tmp_path / "results.svg").read_text()
    xml.etree.ElementTree.fromstring(svg)
    machine = json_lines(results.read_text())[0]
    assert machine["date"][:10] in svg and "FMA peak" in svg and "GFLOP/s" in svg and "bf16, D 32" in svg


def test_committed_plots_are_those_of_their_results(tmp_path):
    results = sorted((BENCHMARKS / "results").glob("*.jsonl"))
    assert results
    for path in results:
        done = plot(path, "-o", tmp_path / "again.svg")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "again.svg").read_text() == path.with_suffix(".svg").read_text()


@pytest.mark.parametrize("text, words", [("", "no result"), ("{", "line 1"), ('{"record": "machine"}', "no result")])
def test_plot_of_bad_results(tmp_path, text, words):
    (tmp_path / "bad.jsonl").write_text(text)
    done = plot(tmp_path / "bad.jsonl")
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1
    assert plot(tmp_path / "absent.jsonl").returncode == 1


@pytest.mark.skipif(not os.environ.get("CQSA_TEST_PLUGIN_DIR"), reason="no fake device was built")
def test_operands_on_a_device(run):
    environment = {**os.environ, "CQSA_BACKEND_PATH": os.environ["CQSA_TEST_PLUGIN_DIR"]}
    arguments = ("bench", "attention", "--seqlen", "64", "--heads", "2", "--head-dim", "32", "--dtype", "f32", "--runs", "1",
                 "--backend", "fake", "--operands", "device,pinned,pageable")
    cells = [line for line in json_lines(run(*arguments, "--json-lines", env=environment).stdout) if line["record"] == "bench"]
    assert [cell["operands"] for cell in cells] == ["device", "pinned", "pageable"] and all(cell["seconds"] > 0 for cell in cells)
    assert cells[0]["schedule"] == "direct"
    assert "  device  " in run(*arguments, env=environment).stdout
