# SPDX-License-Identifier: Apache-2.0
"""The command on a device with a memory of its own: the fake one, under a name that the library knows."""
import json
import os
import shutil

import pytest


@pytest.fixture
def environment(tmp_path):
    plugins = os.environ.get("CQSA_TEST_PLUGIN_DIR")
    if not plugins:
        pytest.skip("no fake device was built")
    folder = tmp_path / "plugins"
    folder.mkdir()
    shutil.copy(os.path.join(plugins, "libcqsa_fake.so"), folder / "libcqsa_cuda.so")
    return {**os.environ, "CQSA_BACKEND_PATH": str(folder)}


def test_doctor_examines_the_device(run, environment, tmp_path):
    report = json.loads(run("doctor", "--json", env=environment, timeout=300).stdout)
    assert report["pass"]
    cuda = next(b for b in report["backends"] if b["name"] == "cuda")
    assert cuda["state"] == "ready" and cuda["device"] == "fake device" and cuda["devices"] == 1
    machine = cuda["hardware"]
    assert machine["host"] is False and machine["pinned"] is True and machine["name"] == "fake device"
    assert 0 < machine["device_bytes"] <= machine["device_total_bytes"] == 1 << 30
    for rate in ("flops_64", "flops_128", "copy_in", "copy_out", "host_copy", "device_copy", "launch_seconds"):
        assert machine[rate] > 0, rate
    assert all(check["pass"] for check in cuda["check"]) and len(cuda["check"]) == 3
    small, large = (row["seqlen"] for row in cuda["capacity"]["largest_seqlen"][:2])
    assert small is None or (large is None or large > small > 0)
    # What it printed is a machine to plan for.
    (tmp_path / "hw.json").write_text(json.dumps(machine))
    plan = json.loads(run("plan", "--seqlen", 100000, "--heads", 8, "--head-dim", 64, "--dtype", "f16", "--memory", "64MiB", "--hardware",
                          "hw.json", "--json").stdout)
    assert plan["schedule"] == "stream" and plan["peak_device_bytes"] <= 64 << 20
