# SPDX-License-Identifier: Apache-2.0
"""Arguments that ctypes would wrap, or that would raise something that is not a CqsaError."""
import numpy as np
import pytest

import cqsa


@pytest.mark.parametrize("keywords", [
    {"window": (2**64, 2**64)}, {"window": (-(2**63) - 1, 0)}, {"stream": 2**64}, {"stream": -1},
    {"memory_limit": "9" * 400 + ".5MiB"}, {"memory_limit": 10**400}, {"softcap": 2**2000}, {"softmax_scale": 2**2000},
    {"backend": "\udcff"}, {"backend": "cpu\0x"},
])
def test_numbers_and_names_that_do_not_fit_are_refused_not_wrapped(keywords):
    x = np.ones((1, 1, 4, 8), np.float32)
    with pytest.raises(cqsa.CqsaError) as caught:
        cqsa.attention(x, x, x, **keywords)
    assert 1 <= caught.value.status <= 19


def test_hardware_text_that_nests_deeply_is_refused():
    with pytest.raises(cqsa.CqsaError):
        cqsa.attention_plan((1, 1, 4, 8), (1, 1, 4, 8), hardware='{"a":' * 100000)
