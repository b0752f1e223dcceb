# SPDX-License-Identifier: Apache-2.0
"""cqsa attention --resume: killed at random moments it goes on with the same bits and computes nothing twice."""
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import files

KILLS = 100  # for each of two schedules


@pytest.fixture
def folder():
    """In memory where there is such a folder: the file is then written often."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as name:
        yield Path(name)


def write(folder, heads=24, seqlen=768, dim=32, seed=2):
    rng = np.random.default_rng(seed)
    tensors = {name: rng.standard_normal((1, heads, seqlen, dim)).astype("<f4") for name in "qkv"}
    (folder / "in.safetensors").write_bytes(files.safetensors(tensors))


def command(tool, *arguments, output="out.safetensors"):
    backend = () if "--backend" in arguments else ("--backend", "cpu", "--threads", "1")
    return [tool, "attention", "in.safetensors", "-o", output, *backend, "--json", "--lse", *arguments]


def call(tool, folder, *arguments, status=0, **more):
    done = subprocess.run(command(tool, *arguments, **more), cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    if status == 1:
        assert done.stderr.startswith("cqsa: ") and done.stderr.count("\n") == 1
        return done.stderr
    return json.loads(done.stdout) if status == 0 else done.stderr


def counts(folder):
    """(finished, all) tiles of the state, or None without one."""
    try:
        return struct.unpack_from("<qq", (folder / "state").read_bytes(), 32)[::-1]
    except FileNotFoundError:
        return None


def one_life(tool, folder, arguments, seconds):
    """Runs until it ends or is killed after so long; its JSON, or None."""
    with subprocess.Popen(command(tool, "--resume", "state", *arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        try:
            text, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        assert process.returncode == 0, error
        return json.loads(text)


DEVICE = ("--backend", "fake", "--threads", "2", "--memory", "500KiB")  # tiles of some rows, windows of some keys


@pytest.mark.parametrize("arguments", [("--causal", "top_left"), ("--memory", "1500KiB"), DEVICE], ids=["direct", "mapped", "device"])
def test_killed_at_random_moments(tool, folder, monkeypatch, arguments):
    if arguments == DEVICE:
        plugins = os.environ.get("CQSA_TEST_PLUGIN_DIR")
        if not plugins:
            pytest.skip("no fake device was built")
        monkeypatch.setenv("CQSA_BACKEND_PATH", plugins)
    write(folder)
    start = time.monotonic()
    whole_tasks = call(tool, folder, *arguments, "--resume", "state")["run"]["tasks"]
    lasts = time.monotonic() - start
    wanted = (folder / "out.safetensors").read_bytes()
    call(tool, folder, *arguments, output="plain.safetensors")
    assert (folder / "plain.safetensors").read_bytes() == wanted, "a checkpoint changes no bit"
    assert counts(folder) is None

    moments = random.Random(7)
    kills = resumed = completed = continued = 0
    (folder / "out.safetensors").unlink()
    while kills < KILLS or counts(folder) is not None or (resumed == 0 and kills < 3 * KILLS):
        before = counts(folder)
        continued += before is not None and before[0] > 0
        # The last life is not cut short, and has something to go on from: a busy machine may have killed all of them too early.
        too_early = resumed == 0 and kills < 3 * KILLS and (before is None or before[0] == 0)
        report = one_life(tool, folder, arguments, moments.uniform(0, 0.8 * lasts) if kills < KILLS or too_early else 60)
        if report is None:
            kills += 1
            after = counts(folder)
            if before and after:
                assert after[1] == before[1] and after[0] >= before[0], "a finished tile is never given up"
            continue
        done, total = before or (0, 1)
        if before:
            assert report["run"]["tasks"] * total == whole_tasks * (total - done), "no finished tile is computed again"
            resumed += done > 0
        completed += 1
        assert (folder / "out.safetensors").read_bytes() == wanted
        assert counts(folder) is None and sorted(os.listdir(folder)) == ["in.safetensors", "out.safetensors", "plain.safetensors"]
        (folder / "out.safetensors").unlink()
    print(f"{kills} kills, {continued} lives began with finished tiles, {completed} ended, {resumed} of them resumed")
    assert continued >= 10 and resumed > 0


def interrupted_state(tool, folder, *arguments):
    """A state with something finished, by an interrupt."""
    write(folder, heads=64, seqlen=1024)
    with subprocess.Popen(command(tool, "--resume", "state", *arguments), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        while not (counts(folder) or (0,))[0] and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "cqsa: interrupted; the same command with --resume state goes on from here\n"
    done, total = counts(folder)
    assert 0 < done < total == 64


def test_interrupt_and_go_on(tool, folder):
    interrupted_state(tool, folder)
    done, total = counts(folder)
    report = call(tool, folder, "--resume", "state", "--check")
    assert report["run"]["tasks"] == total - done and report["check"]["pass"]
    assert sorted(os.listdir(folder)) == ["in.safetensors", "out.safetensors"]


def refused(tool, folder, words, *arguments, **more):
    files_before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    error = call(tool, folder, *(arguments or ("--resume", "state")), status=1, **more)
    for word in words:
        assert word in error, error
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == files_before


def test_states_that_do_not_fit(tool, folder):
    interrupted_state(tool, folder)
    state, output, source = (folder / name for name in ("state", "out.safetensors", "in.safetensors"))
    good, out, data = state.read_bytes(), output.read_bytes(), source.read_bytes()
    refused(tool, folder, ["another problem or plan"], "--resume", "state", "--softcap", "7")
    for bad, words in ((good[:-1], ["damaged"]), (good + b"x", ["damaged"]), (b"", ["not one of this library"]),
                       (b"x" + good[1:], ["not one of this library"]), (good[:40] + bytes([good[40] ^ 1]) + good[41:], ["damaged"]),
                       (good[:8] + struct.pack("<I", 2) + good[12:], ["format 2", "reads 1"])):
        state.write_bytes(bad)
        refused(tool, folder, words)
    state.write_bytes(good)
    source.write_bytes(data[:-4] + struct.pack("<f", 1e3))
    refused(tool, folder, ["other inputs"])
    source.write_bytes(data)
    output.write_bytes(out[:-1])
    refused(tool, folder, ["bytes, but the output that was begun has"])
    output.unlink()
    refused(tool, folder, ["cannot be opened to go on with it"])
    lse_of_first_head = len(out) - 64 * 1024 * 33 * 4  # lse comes first
    output.write_bytes(out[:lse_of_first_head] + bytes([out[lse_of_first_head] ^ 1]) + out[lse_of_first_head + 1 :])
    refused(tool, folder, ["the outputs do not have their values"])
    output.write_bytes(out)
    call(tool, folder, "--resume", "state", "--check")


def test_resume_that_cannot_be(tool, folder):
    write(folder, heads=2, seqlen=64)
    refused(tool, folder, ["is an input"], "--resume", "state", output="in.safetensors")
    (folder / "made").mkdir()
    shutil.copy(folder / "in.safetensors", folder / "made" / "out.safetensors")
    error = call(tool, folder, "--resume", "absent/state", status=1)
    assert "absent/state" in error and "No such file" in error
    error = call(tool, folder, "--resume", "state", "--cqs", "3,1", status=1)
    assert "cqs" in error
    error = call(tool, folder, "--resume", "made", status=1)
    assert "made" in error
