# SPDX-License-Identifier: Apache-2.0
"""place(): advice about where operands should live."""
import numpy as np
import pytest

import cqsa

CARD = {"name": "card", "backend": "cuda", "host": False, "pinned": True, "device_bytes": 1000}


def test_without_a_device():
    x = np.zeros((2, 3), np.float32)
    found = cqsa.place(x, x, backend="cpu")
    assert found.places == ["host", "host"] and "no device" in found.reason
    assert found.device_bytes == found.pinned_bytes == found.limit_bytes == 0


def test_what_fits_goes_to_the_device():
    sizes = [np.zeros(size, np.int8) for size in (500, 400, 300, 50)]
    found = cqsa.place(*sizes, hardware=CARD)
    assert found.places == ["device", "pinned", "device", "device"]
    assert (found.device_bytes, found.pinned_bytes, found.limit_bytes) == (850, 400, 850)
    assert cqsa.place(*sizes, reserve=0, hardware=CARD).places == ["device", "device", "pinned", "device"]
    assert cqsa.place(*sizes, reserve=1, hardware=CARD).places == ["pinned"] * 4
    assert cqsa.place(*sizes, hardware={**CARD, "pinned": False}).places == ["device", "host", "device", "device"]
    assert cqsa.place(hardware=CARD).places == []
    there = cqsa.Tensor.from_pointer(4096, (10000,), "float32", device="cuda")
    assert cqsa.place(there, sizes[0], hardware=CARD).places == ["device", "device"]


def test_refused():
    x = np.zeros(3, np.float32)
    for reserve in (-0.1, 1.5, float("nan"), "much"):
        with pytest.raises(ValueError):
            cqsa.place(x, reserve=reserve)
    with pytest.raises(ValueError):
        cqsa.place(x, hardware={"name": "odd"})
    with pytest.raises(ValueError):
        cqsa.place(object())


def test_the_reserve_is_of_all_the_memory():
    x = np.zeros(100, np.int8)
    found = cqsa.place(x, hardware={**CARD, "device_bytes": 400, "device_total_bytes": 1000})  # others have 600
    assert found.limit_bytes == 250 and "400 of 1000 bytes free" in found.reason
    assert cqsa.place(x, hardware={**CARD, "device_bytes": 100, "device_total_bytes": 1000}).limit_bytes == 0
