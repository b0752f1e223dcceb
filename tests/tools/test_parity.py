# SPDX-License-Identifier: Apache-2.0
"""cqsa parity: what it prints when the library is right, and when it is not."""
import json
import os
import shlex
from pathlib import Path

import pytest

SETS = Path(__file__).resolve().parents[1] / "parity"


def json_lines(text):
    return [json.loads(line) for line in text.splitlines()]


def problems_of(name):
    lines = (line.split("#")[0].strip() for line in (SETS / f"{name}.problems").read_text().splitlines())
    return [line for line in lines if line]


def test_smoke_set_passes(run):
    done = run("parity", "--op", "attention", "--problems", "smoke", "--backend", "cpu")
    assert done.stdout.endswith(" 0 skipped, 0 failures: PASS\n") and done.stderr == ""
    assert all(line.startswith("ok ") for line in done.stdout.splitlines()[:-1])


def test_sets_in_the_command_are_the_files(run):
    def seedless(text):
        return [" ".join(word for word in line.split() if not word.startswith("seed=")) for line in text.splitlines()]

    for name in ("smoke", "ci", "gpu"):
        inside = run("parity", "--problems", name, "--list").stdout
        assert seedless(inside) == seedless(run("parity", "--problems", SETS / f"{name}.problems", "--list").stdout)
    count = {name: len(problems_of(name)) for name in ("smoke", "ci", "gpu")}
    assert count["smoke"] >= 30 and count["ci"] >= 300 and count["gpu"] >= 20
    everything = {line.split(" seed=")[1].split()[0] for line in run("parity", "--problems", "all", "--list").stdout.splitlines()}
    assert len(everything) == sum(count.values())


def test_json(run):
    lines = json_lines(run("parity", "--problem", "seqlen=40 dtype=f16 schedule=all budget=none,least", "--json", "--speed").stdout)
    assert [line["record"] for line in lines] == ["machine"] + ["trial"] * 6 + ["summary"]
    assert lines[0]["backend"] and lines[0]["date"] and lines[0]["build"]["version"]
    seconds = lines[-1].pop("seconds")
    assert list(seconds) == ["all", "operands", "fp64", "runs", "checks"] and all(s >= 0 for s in seconds.values())
    assert sum(seconds.values()) - seconds["all"] <= seconds["all"] + 1e-6
    assert lines[-1] == {"record": "summary", "problems": 1, "runs": 6, "skipped": 0, "failures": 0, "pass": True}
    for trial in lines[1:-1]:
        assert trial["pass"] and 0 < trial["max_abs"] <= trial["allowed_max_abs"] and trial["cosine"] > 0.9999
        assert trial["relative_rms"] <= trial["allowed_relative_rms"] and trial["rows"] == 80
        assert trial["seconds"] > 0 and trial["gflops"] == pytest.approx(trial["flops"] / trial["seconds"] * 1e-9)
        assert trial["budget"] == 0 or trial["peak"] <= trial["budget"]
    assert {trial["schedule"].split(":")[0] for trial in lines[1:-1]} == {"direct", "stream", "cqs"}


def test_flops_are_those_of_the_visible_pairs(run):
    def flops(problem):
        return json_lines(run("parity", "--problem", problem, "--json", "--speed").stdout)[1]["flops"]

    assert flops("seqlen=40 heads=3 head_dim=8") == 2 * 16 * 3 * 40 * 40
    assert flops("seqlen=40 heads=3 head_dim=8 causal=top_left") == 2 * 16 * 3 * 40 * 41 / 2
    assert flops("seqlen_q=1 seqlen_k=50 heads=1 head_dim=8 head_dim_v=4 window=9,0") == 2 * 12 * 10


def test_a_failure_prints_a_line_that_fails_again(run):
    # No arithmetic of f16 results is exact: with no tolerance the right result is a wrong one.
    done = run("parity", "--problem", "seqlen=40 schedule=direct,stream dtype=f16 tolerance=0", "--problem", "seqlen=9", status=2)
    assert done.stdout.count("FAIL ") == 2 and done.stdout.count("\nok ") == 1
    assert done.stdout.endswith("2 problems, 3 runs, 0 skipped, 2 failures: FAIL\n")
    again = [line.split("reproduce: ")[1] for line in done.stdout.splitlines() if "reproduce: " in line]
    assert len(again) == 2 and len(set(again)) == 2
    for line in again:
        words = shlex.split(line)
        assert words[:4] == ["cqsa", "parity", "--op", "attention"]
        repeated = run(*words[1:], status=2).stdout
        assert repeated.splitlines()[:2] == done.stdout.splitlines()[3 * again.index(line):][:2]
        exact = run(*words[1:-1], words[-1].replace("tolerance=0", "tolerance=1"))
        assert "1 runs, 0 skipped, 0 failures: PASS" in exact.stdout


def test_failures_are_in_json_and_report(run, tmp_path):
    done = run("parity", "--problem", "seqlen=40 tolerance=0", "--json", "--speed", "--report", "report.txt", "--threads", "1", status=2)
    trial = json_lines(done.stdout)[1]
    assert not trial["pass"] and "max abs" in trial["failure"]
    assert "seconds" not in trial  # nothing wrong is timed
    assert trial["reproduce"] == ("cqsa parity --op attention --threads 1 --problem "
                                  "'seqlen=40 tolerance=0 seed=1 schedule=auto budget=none'")
    report = (tmp_path / "report.txt").read_text()
    for word in ("date ", "cpu ", "build ", "backend ", "reproduce: ", "1 failures: FAIL"):
        assert word in report


def test_what_the_library_refuses_is_a_failure(run):
    done = run("parity", "--problem", "seqlen=40 varlen=1 schedule=cqs", "--problem", "seqlen=40 budget=17",
               "--problem", "seqlen=40 dtype=f32 dtype_kv=f16", status=2)
    for words in ("CQSA_ATTENTION_VARLEN", "17", "dtype_kv"):
        assert words in done.stdout
    assert done.stdout.count("reproduce: ") == 3


def test_seed_changes_the_data_and_nothing_else_does(run):
    def errors(*arguments):
        return [line.split("seqlen")[0] for line in run("parity", "--problem", "seqlen=40", *arguments).stdout.splitlines()[:-1]]

    assert errors("--threads", "1") == errors("--threads", "2") == errors("--seed", "1")
    assert errors() != errors("--seed", "2")


def test_problem_files(run, tmp_path):
    (tmp_path / "my.problems").write_text("# mine\n\n  seqlen=4  # four\nseqlen_k=5 seqlen_q=3 seed=77\r\n")
    listed = run("parity", "--problems", "my.problems", "--list", "--seed", "5").stdout.splitlines()
    assert listed == ["seqlen=4 seed=5 schedule=auto budget=none", "seqlen_k=5 seqlen_q=3 seed=77 schedule=auto budget=none"]
    assert "2 problems, 2 runs" in run("parity", "--problems", "my.problems").stdout


def test_parts_make_up_the_set(run):
    whole = run("parity", "--problems", "ci", "--list", "--seed", "9").stdout.splitlines()
    parts = [run("parity", "--problems", "ci", "--list", "--seed", "9", "--part", f"{i}/3").stdout.splitlines() for i in (1, 2, 3)]
    assert sorted(line for part in parts for line in part) == sorted(whole)
    assert all(len(part) > len(whole) / 6 for part in parts)
    seeds = [[int(word[5:]) for word in line.split() if word.startswith("seed=")][0] for line in parts[1]]
    assert all((seed - 9) % 3 == 1 for seed in seeds)
    assert run("parity", "--problem", "seqlen=4", "--part", "2/2").stdout == "0 problems, 0 runs, 0 skipped, 0 failures: PASS\n"
    done = run("parity", "--problems", "smoke", "--part", "2/9", "--backend", "cpu", "--quiet").stdout.splitlines()
    assert len(done) == 2 and " s: operands " in done[0] and done[1].endswith(" 0 skipped, 0 failures: PASS")


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "1/", "/2", "a/b", "1/2/3", "1/2 ", "+1/2", "01/2", "-1/2", "1/99999999999"])
def test_parts_that_are_none(run, part):
    assert "I/N with 1 <= I <= N is wanted" in run("parity", "--problem", "seqlen=4", f"--part={part}", status=1).stderr


# What is made by several threads is the same as by one: operands of every type and layout, with NaN where no query looks.
@pytest.mark.parametrize("line", [
    "seqlen=700 heads=4 kv_heads=2 head_dim=128 dtype=f16 layout=gapped causal=bottom_right rows=9",
    "seqlen=900 heads=3 head_dim=72 dtype=bf16 layout=transposed window=40,0 rows=9",
    "seqlen_q=3 seqlen_k=4K batch=3 heads=4 head_dim=64 dtype=bf16 dtype_kv=i8 kv_group=32 page=16 seqused=1 rows=9",
    "seqlen=600 batch=3 heads=4 head_dim=64 dtype=f32 dtype_kv=e4m3fn scale=token varlen=1 layout=reversed rows=9",
    "seqlen=300 heads=2 dtype=f64 mask=bhqk bias=hqk rows=9"])
def test_threads_make_the_same_operands(run, line):
    def numbers(threads):
        trial = json_lines(run("parity", "--problem", line, "--json", "--threads", threads, "--backend", "cpu").stdout)[1]
        return [trial[key] for key in ("pass", "rows", "max_abs", "allowed_max_abs", "relative_rms", "cosine")]

    assert numbers("1") == numbers("5") and numbers("1")[0]


@pytest.mark.parametrize("line, words", [
    ("seqlen", ["key=value"]),
    ("seqlen=4 colour=red", ["colour", "head_dim"]),
    ("seqlen=4 seqlen=5", ["twice"]),
    ("head_dim=4", ["seqlen"]),
    ("seqlen=-1", ["seqlen=-1"]),
    ("seqlen=many", ["many"]),
    ("seqlen=99999999999999999999", ["seqlen"]),
    ("seqlen=4 head_dim=577", ["576"]),
    ("seqlen=4 heads=3 kv_heads=2", ["multiple"]),
    ("seqlen=4 dtype=f7", ["bf16"]),
    ("seqlen=4 causal=left", ["top_left"]),
    ("seqlen=4 window=3", ["comma"]),
    ("seqlen=4 mask=x", ["bhqk"]),
    ("seqlen=4 schedule=best", ["stream"]),
    ("seqlen=4 schedule=cqs:7", ["cqs:7:1"]),
    ("seqlen=4 budget=lots", ["lots"]),
    ("seqlen=4 lse=yes", ["0 or 1"]),
    ("seqlen=4 seed=-1", ["seed"]),
    ("seqlen=4 range=0", ["range"]),
    ("seqlen=4 tolerance=nan", ["tolerance"]),
])
def test_bad_lines_name_the_line_and_the_mistake(run, tmp_path, line, words):
    (tmp_path / "bad.problems").write_text(f"seqlen=1\n{line}\n")
    error = run("parity", "--problems", "bad.problems", status=1).stderr
    assert "bad.problems:2: " in error
    for word in words:
        assert word in error, error


@pytest.mark.parametrize("arguments, words", [
    (("--op", "moe"), ["moe", "attention"]),
    (("--problems", "absent"), ["absent", "No such file"]),
    (("--problems", "/dev/null"), ["regular file"]),
    (("--problems", "smoke", "--problem", "seqlen=1"), ["not both"]),
    (("--backend", "warp"), ["warp"]),
    (("--seed", "x"), ["--seed"]),
    (("--problem", "seqlen=1", "--report", "absent/report.txt"), ["absent/report.txt"]),
])
def test_bad_arguments(run, arguments, words):
    error = run("parity", *arguments, status=1).stderr
    for word in words:
        assert word in error, error


# Sanitizers want to be the first library, so that CQSA_WRONG_EXECUTE is empty with them.
@pytest.mark.skipif(not os.environ.get("CQSA_WRONG_EXECUTE"), reason="no library to load before the library was built")
@pytest.mark.parametrize("wrong, words", [
    ("value", "wrong result: max abs"),
    ("unwritten", "wrong result: max abs inf"),
    ("lse", "lse max abs"),
    ("before", "around or between the elements of out"),
    ("input", "the input v was changed"),
    ("workspace", "around the workspace"),
    ("memory", "above the plan's"),
])
def test_every_kind_of_wrong_run_is_seen(run, wrong, words):
    environment = {**os.environ, "LD_PRELOAD": os.environ["CQSA_WRONG_EXECUTE"], "CQSA_WRONG": wrong}
    arguments = ("parity", "--problem", "seqlen=20 layout=gapped schedule=direct", "--backend", "cpu")
    done = run(*arguments, env=environment, status=2)
    assert words in done.stdout and "reproduce: " in done.stdout
    run(*arguments, env={**environment, "CQSA_WRONG": "nothing"})


@pytest.mark.skipif(not os.environ.get("CQSA_WRONG_EXECUTE"), reason="no library to load before the library was built")
def test_a_backend_without_f64_fails_no_problem_in_f64(run):
    environment = {**os.environ, "LD_PRELOAD": os.environ["CQSA_WRONG_EXECUTE"], "CQSA_WRONG": "no f64"}
    problems = ("--problem", "seqlen=20 dtype=f64 schedule=direct", "--problem", "seqlen=20 dtype=f64 schedule=all", "--problem", "seqlen=20")
    done = run("parity", *problems, "--backend", "cpu", "--json", env=environment)
    *trials, summary = json_lines(done.stdout)[1:]
    assert summary["failures"] == 0 and summary["skipped"] > 1 and summary["runs"] >= 1
    assert all(bool(t.get("skipped")) == ("f64" in t["problem"]) for t in trials)


@pytest.mark.skipif(not os.environ.get("CQSA_TEST_PLUGIN_DIR"), reason="no fake device was built")
def test_a_device_backend(run):
    environment = {**os.environ, "CQSA_BACKEND_PATH": os.environ["CQSA_TEST_PLUGIN_DIR"]}
    done = run("parity", "--problems", "smoke", "--backend", "fake", "--json", env=environment)
    lines = json_lines(done.stdout)
    assert lines[0]["backend"] == "fake" and lines[-1]["runs"] >= 60
    # A device has no direct schedule for segments and pages of the host, and no stream for f64; "all" leaves them out and says so.
    skipped = [line for line in lines if line["record"] == "trial" and line.get("skipped")]
    assert len(skipped) == lines[-1]["skipped"] > 0 and all(line["failure"].startswith("no ") and line["budget"] == 0 for line in skipped)


FAKE = {**os.environ, "CQSA_BACKEND_PATH": os.environ.get("CQSA_TEST_PLUGIN_DIR", "")}
on_the_fake = pytest.mark.skipif(not os.environ.get("CQSA_TEST_PLUGIN_DIR"), reason="no fake device was built")


@on_the_fake
@pytest.mark.parametrize("memory", ["device", "pinned", "kv_pinned", "kv_pageable"])
def test_operands_in_the_memory_of_a_device(run, memory):
    done = run("parity", "--problems", "smoke", "--backend", "fake", "--memory", memory, "--json", env=FAKE)
    lines = json_lines(done.stdout)
    assert lines[-1]["runs"] >= 60 and lines[-1]["failures"] == 0
    assert all(f"memory={memory}" in line["problem"] for line in lines if line["record"] == "trial")


@on_the_fake
def test_every_place_of_operands(run):
    line = "seqlen=80 dtype=f16 layout=gapped mask=bhqk schedule=direct budget=none,least memory=all,all_kv"
    done = run("parity", "--problem", line, "--backend", "fake", "--speed", "--json", env=FAKE)
    trials = [x for x in json_lines(done.stdout) if x["record"] == "trial"]
    assert len(trials) == 2 * 6 and all(x["pass"] and x["seconds"] > 0 for x in trials)
    listed = run("parity", "--problem", line, "--list").stdout
    assert listed.count("memory=device") == listed.count("memory=kv_pinned") == 2 and "memory=all" not in listed


@on_the_fake
def test_the_place_is_part_of_a_reproducer(run):
    done = run("parity", "--problem", "seqlen=20 tolerance=0", "--memory", "device", "--backend", "fake", status=2, env=FAKE)
    reproducer = next(line for line in done.stdout.splitlines() if "reproduce: " in line)
    assert "memory=device" in reproducer and "--backend fake" in reproducer


def test_a_host_has_one_memory(run):
    done = run("parity", "--problem", "seqlen=20 memory=all", "--backend", "cpu")
    assert done.stdout.splitlines()[-1] == "1 problems, 1 runs, 2 skipped, 0 failures: PASS"
    done = run("parity", "--problem", "seqlen=20 memory=device", "--backend", "cpu", status=2)
    assert "computes in host memory" in done.stdout
    done = run("parity", "--problem", "seqlen=20 memory=attic", status=1)
    assert "memory=attic: one of pageable, pinned, device, kv_pageable, kv_pinned is wanted" in done.stderr


def test_selected_cells(run):
    done = run("parity", "--op", "attention-selected", "2100", "5", "--samples", "2", "--backend", "cpu")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:4] == ["context", "queries", "kv", "prec"] and lines[-1] == "6 runs, 0 skipped, 0 failures: PASS"
    assert [line.split()[:4] for line in lines[1:-1]] == [["2100", "5", kv, precision] for kv in ("f16", "int8")
                                                          for precision in ("f32", "split", "fast")]
    assert all(line.endswith("  ok") and float(line.split()[8]) > 0 for line in lines[1:-1])


def test_selected_cells_as_json(run):
    lines = json_lines(run("parity", "--op", "attention-selected", "600", "--queries", "3", "--kv", "int8", "--json", "--backend", "cpu").stdout)
    assert [line["record"] for line in lines] == ["machine"] + ["trial"] * 3 + ["summary"]
    for trial in lines[1:-1]:
        assert trial["pass"] and trial["kv"] == "int8" and (trial["context"], trial["queries"]) == (600, 3)
        assert 0 < trial["max_abs"] <= trial["allowed_max_abs"] and 0 < trial["lse_max_abs"] <= trial["lse_allowed"]
        assert trial["seconds"] > 0 and trial["off_f32"] <= trial["allowed_off_f32"] or trial["precision"] == "fast"


def test_selected_cells_depend_on_the_seed(run):
    errors = {seed: [line["max_abs"] for line in json_lines(run("parity", "--op", "attention-selected", "100", "2", "--seed", str(seed), "--json",
                                                                 "--backend", "cpu").stdout)[1:-1]] for seed in (1, 2)}
    assert errors[1] != errors[2]


@pytest.mark.parametrize("words, text", [
    (("--op", "attention-selected", "--problems", "ci"), "--problems is nothing that --op attention-selected has"),
    (("--op", "attention-selected", "--list"), "--list is nothing that"),
    (("--op", "attention-selected", "--part", "1/2"), "--part is nothing that"),
    (("--op", "attention-selected", "100", "--kv", "f64"), "f16, int8 or f16,int8 is wanted"),
    (("--op", "attention-selected", "100", "1000000"), "the number of queries is 1000000, wanted 1 to 65536"),
    (("--op", "attention", "8192"), "a context is nothing that --op attention has"),
    (("--op", "attention", "--kv", "f16"), "--kv is nothing that --op attention has"),
    (("--op", "merge"), 'attention, attention-selected, fp8-quantize or fp8-gemm is wanted'),
])
def test_options_of_another_operation_are_refused(run, words, text):
    assert text in run("parity", *words, status=1).stderr


@pytest.mark.skipif(not os.environ.get("CQSA_WRONG_EXECUTE"), reason="no library to load before the library was built")
@pytest.mark.parametrize("wrong, failures, words", [
    ("value", 2, "out is off by 1.00e-03 on the sampled queries"),  # less than q in f16 is off by
    ("unwritten", 3, "out is off by inf on the sampled queries"),
    ("lse", 3, "lse is off by"),
    ("split", 1, "e-05 on the sampled queries, allowed"),
    ("elsewhere", 1, "out is off by 1.00e-02 from the f32 run"),
])
def test_wrong_selected_cells_are_seen(run, wrong, failures, words):
    environment = {**os.environ, "LD_PRELOAD": os.environ["CQSA_WRONG_EXECUTE"], "CQSA_WRONG": wrong}
    arguments = ("parity", "--op", "attention-selected", "2100", "5", "--samples", "2", "--kv", "int8", "--backend", "cpu")
    done = run(*arguments, env=environment, status=2)
    assert words in done.stdout and done.stdout.endswith(f"3 runs, 0 skipped, {failures} failures: FAIL\n")
    again = next(line.split("reproduce: ")[1] for line in done.stdout.splitlines() if "reproduce: " in line)
    assert shlex.split(again)[1:6] == ["parity", "--op", "attention-selected", "2100", "5"]
    run(*arguments, env={**environment, "CQSA_WRONG": "nothing"})


@pytest.mark.skipif(not os.environ.get("CQSA_WRONG_EXECUTE"), reason="no library to load before the library was built")
def test_a_precision_that_is_not_there_is_skipped(run):
    environment = {**os.environ, "LD_PRELOAD": os.environ["CQSA_WRONG_EXECUTE"], "CQSA_WRONG": "no tensor cores"}
    done = run("parity", "--op", "attention-selected", "100", "2", "--backend", "cpu", env=environment)
    assert done.stdout.endswith("2 runs, 4 skipped, 0 failures: PASS\n")
