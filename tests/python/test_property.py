# SPDX-License-Identifier: Apache-2.0
"""Random problems under random budgets against float64 (needs hypothesis)."""
import numpy as np
import pytest

import cqsa
import exact

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

options = st.fixed_dictionaries({}, optional={
    "causal": st.sampled_from(["none", "top_left", "bottom_right"]),
    "window": st.tuples(st.integers(-1, 40), st.integers(-1, 40)),
    "softcap": st.sampled_from([0.0, 0.5, 20.0]),
    "softmax_scale": st.sampled_from([None, 0.05, 1.0]),
    "schedule": st.sampled_from(["auto", "direct", "stream"]),
})


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(batch=st.integers(0, 3), kv_heads=st.integers(1, 3), ratio=st.integers(1, 3), rows=st.integers(0, 90),
                  keys=st.integers(0, 90), dim=st.integers(1, 80), dim_v=st.integers(1, 80), seed=st.integers(0, 2**32 - 1),
                  reverse=st.tuples(*[st.sampled_from([1, -1])] * 4), limit=st.integers(10, 24), options=options)
def test_any_problem(batch, kv_heads, ratio, rows, keys, dim, dim_v, seed, reverse, limit, options):
    random = np.random.default_rng(seed)
    turn = tuple(slice(None, None, step) for step in reverse)
    q, k, v = (random.standard_normal(shape).astype(np.float32)[turn] for shape in (
        (batch, kv_heads * ratio, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim_v)))
    numerics = {name: value for name, value in options.items() if name != "schedule"}
    try:
        out, lse, info = cqsa.attention(q, k, v, backend="cpu", memory_limit=1 << limit, return_lse=True, return_info=True,
                                        **options)
    except cqsa.CqsaMemoryError as error:
        assert error.status_name == "CQSA_ERROR_BUDGET_TOO_SMALL" and str(1 << limit) in str(error)
        return
    wanted, wanted_lse = exact.attention(q, k, v, **numerics)
    exact.assert_close(out, wanted)
    exact.assert_close(lse, wanted_lse)
    assert info["run"]["peak_host_bytes"] <= info["plan"]["peak_host_bytes"] <= 1 << limit
