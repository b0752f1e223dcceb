# SPDX-License-Identifier: Apache-2.0
"""Segments, used lengths and pages: each sequence against float64 on its own."""
import numpy as np
import pytest

import cqsa
import exact

CU_Q, CU_K = [0, 5, 5, 22, 30], [0, 9, 12, 12, 40]


@pytest.fixture
def segments(random):
    return (random.standard_normal((33, 4, 32)).astype(np.float32), random.standard_normal((41, 2, 32)).astype(np.float32),
            random.standard_normal((41, 2, 24)).astype(np.float32))


def one_by_one(q, k, v, cu_q, cu_k, used=None, **options):
    """[total_q, heads, dim_v] and [heads, total_q]; rows past the last segment are empty."""
    out, lse = np.zeros((q.shape[0], q.shape[1], v.shape[2])), np.full((q.shape[1], q.shape[0]), -np.inf)
    for b in range(len(cu_q) - 1):
        rows = slice(cu_q[b], cu_q[b + 1])
        keys = slice(cu_k[b], cu_k[b + 1] if used is None else cu_k[b] + used[b])
        part = exact.attention(*(x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])), **options)
        out[rows], lse[:, rows] = part[0][0].swapaxes(0, 1), part[1][0]
    return out, lse


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("kind", [list, np.int32, np.int64])
def test_segments(segments, causal, kind):
    cu = (CU_Q, CU_K) if kind is list else (np.array(CU_Q, kind), np.array(CU_K, kind))
    out, lse = cqsa.attention(*segments, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=causal, return_lse=True)
    wanted, wanted_lse = one_by_one(*segments, CU_Q, CU_K, causal=causal)
    exact.assert_close(out, wanted)
    exact.assert_close(lse, wanted_lse)


def test_segments_ignore_layout_and_take_mixed_index_types(segments):
    wanted = cqsa.attention(*segments, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, window=(4, 4), sinks=[0, 1, 2, 3])
    got = cqsa.attention(*segments, cu_seqlens_q=np.array(CU_Q, np.int32), cu_seqlens_k=np.array(CU_K, np.uint16),
                         window=(4, 4), sinks=[0, 1, 2, 3], layout="bshd")
    np.testing.assert_array_equal(got, wanted)
    every_other = np.repeat(np.array(CU_Q), 2)[::2]
    np.testing.assert_array_equal(wanted, cqsa.attention(*segments, cu_seqlens_q=every_other, cu_seqlens_k=CU_K,
                                                         window=(4, 4), sinks=[0, 1, 2, 3]))


def test_segments_with_used_keys(segments):
    used = [3, 0, 0, 28]
    out = cqsa.attention(*segments, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, seqused_k=used, causal="bottom_right")
    exact.assert_close(out, one_by_one(*segments, CU_Q, CU_K, used, causal="bottom_right")[0])


def test_segments_may_carry_a_budget(segments):
    options = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    wanted, info = cqsa.attention(*segments, return_info=True, **options)
    limit = info["plan"]["peak_host_bytes"]
    np.testing.assert_array_equal(cqsa.attention(*segments, memory_limit=limit, backend="cpu", **options), wanted)


def test_used_keys_of_a_batch(random):
    q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 4, 6, 16), (3, 2, 20, 16), (3, 2, 20, 16)))
    used = np.int32([20, 7, 0])
    out, lse = cqsa.attention(q, k, v, seqused_k=used, causal="bottom_right", return_lse=True)
    for b in range(3):
        wanted = exact.attention(q[b:b + 1], k[b:b + 1, :, :used[b]], v[b:b + 1, :, :used[b]], causal="bottom_right")
        exact.assert_close(out[b:b + 1], wanted[0])
        exact.assert_close(lse[b:b + 1], wanted[1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_pages(random, page_size, layout):
    batch, keys = 3, 21
    pages = -(-keys // page_size)
    q = random.standard_normal((batch, 4, 6, 16)).astype(np.float32)
    pool_k, pool_v = (random.standard_normal((batch * pages + 5, page_size, 2, 16)).astype(np.float32) for _ in "kv")
    table = random.permutation(batch * pages + 5)[:batch * pages].reshape(batch, pages)
    used = [21, 9, 0]
    turn = (lambda x: x.swapaxes(1, 2)) if layout == "bshd" else (lambda x: x)
    out = turn(cqsa.attention(turn(q), pool_k, pool_v, page_table=table, seqused_k=used, causal="bottom_right",
                              layout=layout))
    for b in range(batch):
        k, v = (pool[table[b]].reshape(1, -1, 2, 16).swapaxes(1, 2)[:, :, :used[b]] for pool in (pool_k, pool_v))
        exact.assert_close(out[b:b + 1], exact.attention(q[b:b + 1], k, v, causal="bottom_right")[0])


def test_absent_pages_are_hidden(random):
    q = random.standard_normal((1, 2, 5, 16)).astype(np.float32)
    pool = random.standard_normal((4, 4, 2, 16)).astype(np.float32)
    pool[0] = np.nan
    out = cqsa.attention(q, pool, pool, page_table=[[2, -1, 3]], seqused_k=[12])
    x = pool[[2, 1, 3]].reshape(1, 12, 2, 16).swapaxes(1, 2)
    exact.assert_close(out, exact.attention(q, x, x, mask=np.arange(12) // 4 != 1)[0])


def refuse(status_name, *arrays, **options):
    with pytest.raises(ValueError) as caught:
        cqsa.attention(*arrays, **options)
    assert caught.value.status_name == "CQSA_ERROR_" + status_name, str(caught.value)


def test_refused(segments):
    q, k, v = segments
    refuse("INDEX", q, k, v, cu_seqlens_q=[0, 40], cu_seqlens_k=[0, 41])
    refuse("INDEX", q, k, v, cu_seqlens_q=[0, 9, 5], cu_seqlens_k=[0, 20, 41])
    refuse("SHAPE", q, k, v, cu_seqlens_q=[0, 33], cu_seqlens_k=[0, 20, 41])
    refuse("NULL_POINTER", q, k, v, cu_seqlens_q=[0, 33])
    refuse("SHAPE", q[None], k, v, cu_seqlens_q=[0, 33], cu_seqlens_k=[0, 41])
    refuse("INDEX", q, k, v, cu_seqlens_q=[0, 33], cu_seqlens_k=[0, 41], seqused_k=[42])
    refuse("DTYPE", q, k, v, cu_seqlens_q=[0.5, 33], cu_seqlens_k=[0, 41])
    pool, rows = np.zeros((4, 4, 2, 16), np.float32), np.zeros((1, 2, 5, 16), np.float32)
    refuse("INDEX", rows, pool, pool, page_table=[[0, 4]])
    refuse("INDEX", rows, pool, pool, page_table=np.int64([[0, 1 << 32]]))
    refuse("INDEX", rows, pool, pool, page_table=np.int64([[0, -2]]))
    refuse("SHAPE", rows, pool, pool, page_table=[[0, 1]], seqused_k=[9])
