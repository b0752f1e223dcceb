# SPDX-License-Identifier: Apache-2.0
"""Calls in time: progress, cancellation, Ctrl-C, threads, fork, and what a call costs."""
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import cqsa
import exact


@pytest.fixture
def operands(random):
    return tuple(random.standard_normal((1, 2, 700, 64)).astype(np.float32) for _ in "qkv")


def test_progress(operands):
    seen = []
    thread = threading.get_ident()
    out = cqsa.attention(*operands, progress=lambda done, total: seen.append((done, total, threading.get_ident())))
    exact.assert_close(out, exact.attention(*operands)[0])
    assert seen and {t for _, _, t in seen} == {thread}
    done = [d for d, _, _ in seen]
    assert done == sorted(done) and 0 <= done[0] and all(d <= total for d, total, _ in seen)
    assert done[-1] == seen[-1][1]


def test_progress_with_info(operands):
    seen = []
    _, info = cqsa.attention(*operands, progress=lambda *now: seen.append(now), return_info=True)
    assert seen and info["run"]["tasks"] >= 1


@pytest.mark.parametrize("answer", [None, 0, True, "", []])
def test_only_false_cancels(operands, answer):
    cqsa.attention(*operands, progress=lambda done, total: answer)


def test_false_cancels(operands):
    calls = []
    with pytest.raises(RuntimeError) as caught:
        cqsa.attention(*operands, progress=lambda *now: calls.append(now) or False)
    assert caught.value.status_name == "CQSA_ERROR_CANCELLED" and len(calls) == 1
    exact.assert_close(cqsa.attention(*operands), exact.attention(*operands)[0])


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_of_progress_comes_through(operands, error):
    def progress(done, total):
        raise error

    with pytest.raises(type(error)) as caught:
        cqsa.attention(*operands, progress=progress)
    assert caught.value is error


def long_operands(rows=100000):
    q = np.random.default_rng(0).standard_normal((1, 2, rows, 64)).astype(np.float32)
    return q, q, q


@pytest.mark.parametrize("with_progress", [False, True])
def test_ctrl_c_stops_a_long_run(with_progress):
    operands = long_operands()
    handler = signal.getsignal(signal.SIGINT)
    cqsa.attention(*(x[:, :, :8] for x in operands))
    # The signal must arrive while the library runs, so it is sent by another process.
    sender = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, 2)"])
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            while time.monotonic() < started + 30:
                cqsa.attention(*operands, progress=(lambda done, total: None) if with_progress else None)
    finally:
        sender.wait()
    assert signal.getsignal(signal.SIGINT) is handler


def test_long_runs_say_what_was_wrong(random):
    q, k, v = long_operands()
    with pytest.raises(ValueError) as caught:
        cqsa.attention(q, k[..., :63], v)
    assert "head_dim" in str(caught.value)


def test_eight_threads(random):
    problems = [tuple(random.standard_normal((2, 2, rows, 32)).astype(np.float32) for _ in "qkv") for rows in range(30, 110, 10)]
    wanted = [exact.attention(*problem)[0] for problem in problems]
    failures = []
    barrier = threading.Barrier(8)

    def work(problem, want):
        try:
            barrier.wait()
            for turn in range(20):
                exact.assert_close(cqsa.attention(*problem), want)
                with pytest.raises(ValueError) as caught:
                    cqsa.attention(problem[0], problem[1][..., :turn + 1], problem[2])
                assert f" {turn + 1}" in str(caught.value)  # each thread gets its own message
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(problems, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


FIRST_CALLS_AT_ONCE = """
import threading, numpy as np, cqsa
x = np.ones((1, 1, 50, 16), np.float32)
results = []
threads = [threading.Thread(target=lambda: results.append(cqsa.attention(x, x, x).sum())) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert results == [800.0] * 8, results
"""


def run_python(code, **environment):
    paths = os.pathsep.join(path for path in [os.path.dirname(os.path.dirname(cqsa.__file__)), os.environ.get("PYTHONPATH")] if path)
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths, **environment},
                          capture_output=True, text=True, timeout=60)


def test_first_calls_at_once():
    done = run_python(FIRST_CALLS_AT_ONCE)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork(operands):
    wanted = cqsa.attention(*operands)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if np.array_equal(cqsa.attention(*operands), wanted) else 2
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status) == 0
    np.testing.assert_array_equal(cqsa.attention(*operands), wanted)


def test_nothing_is_left_behind(operands):
    """Operands are released when a call ends, also one that failed."""
    q = operands[0].copy()
    before = sys.getrefcount(q)
    for options in ({}, {"return_info": True}, {"progress": lambda done, total: None}, {"softcap": -1.0}):
        try:
            cqsa.attention(q, q, q, **options)
        except ValueError:
            pass
    assert sys.getrefcount(q) == before
