# SPDX-License-Identifier: Apache-2.0
"""attention_selected() of the Python package on an NVIDIA GPU, with torch. Run it as test_python_cuda.py:

    PYTHONPATH=bindings/python CQSA_LIBRARY=$PWD/build/release/lib/libcqsa.so.0 python3 tests/device/test_python_selected.py [WORD ..]
"""
import math
import sys

import torch

import cqsa
from test_python_cuda import CUDA, SLEEP_CYCLES, close, refused, run, same_bits

NAMES = ("q", "k", "v", "page_table", "cells", "counts")


def problem(dtype=torch.float16, kind="float16", queries=9, heads=24, kv_heads=2, dim=256, pages=40, size=16, width=300, seed=1):
    """Operands by name, and k and v as they are meant, in float64. The table has a hole; one query has no cell, one all of its list."""
    random = torch.Generator().manual_seed(seed)
    shape = (pages, size, kv_heads, dim)
    made = {"q": torch.randn((queries, heads, dim), generator=random).to(dtype)}
    meant = []
    for name in "kv":
        if kind == "int8":
            codes = torch.randint(-127, 128, shape, generator=random, dtype=torch.int8)
            scale = (0.005 + 0.025 * torch.rand((*shape[:3], -(-dim // 64)), generator=random)).half()
            made[name], made[name + "_scale"] = codes, scale
            meant.append(codes.double() * scale.double().repeat_interleave(64, 3)[..., :dim])
        else:
            made[name] = torch.randn(shape, generator=random).to(getattr(torch, kind))
            meant.append(made[name].double())
    made["page_table"] = torch.randperm(pages, generator=random).int()
    made["page_table"][3] = -1
    made["cells"] = torch.stack([torch.randperm(pages * size, generator=random)[:width].sort().values for _ in range(queries)]).int()
    made["counts"] = torch.randint(1, width + 1, (queries,), generator=random).int()
    made["counts"][0], made["counts"][1] = 0, width
    return {name: x.to(CUDA) for name, x in made.items()}, [x.to(CUDA) for x in meant]


def rows_of(table, entries, size, num_pages):
    """Rows of the pool that a list names; what is wrong in it is skipped."""
    rows = []
    for before, cell in zip([-1, *entries], entries):
        if cell < 0 or cell <= before or cell // size >= len(table):
            continue
        page = table[cell // size]
        if 0 <= page < num_pages:
            rows.append(page * size + cell % size)
    return rows


def exact(made, meant):
    q, (k, v) = made["q"].double(), meant
    queries, heads, dim = q.shape
    num_pages, size, kv_heads = k.shape[:3]
    tables, cells, counts = (made[name].tolist() for name in NAMES[3:])
    group = torch.arange(heads, device=CUDA) // (heads // kv_heads)
    out, lse = torch.zeros((queries, heads, v.shape[3]), dtype=torch.float64, device=CUDA), torch.full((heads, queries), -math.inf, device=CUDA).double()
    for i in range(queries):
        table = tables[i] if isinstance(tables[0], list) else tables
        rows = rows_of(table, cells[i][:max(0, counts[i])], size, num_pages)
        if not rows:
            continue
        keys, values = (x.reshape(num_pages * size, kv_heads, -1)[rows][:, group] for x in (k, v))
        s = torch.einsum("hd,nhd->hn", q[i], keys) * dim ** -0.5
        out[i] = torch.einsum("hn,nhd->hd", torch.softmax(s, -1), values)
        lse[:, i] = torch.logsumexp(s, -1)
    return out, lse


def close_lse(got, wanted):
    nothing = wanted == -math.inf
    assert got.dtype == torch.float32 and torch.equal(got == -math.inf, nothing), got
    error = (got.double() - wanted)[~nothing].abs()
    assert (error <= 1e-4 * (1 + wanted[~nothing].abs())).all(), f"largest error of lse {error.max().item():.3g}"


CASES = (  # type of q, of the pools, channels, precision
    (torch.float32, "float32", 72, "default"), (torch.float32, "float16", 128, "split"), (torch.float32, "int8", 256, "f32"),
    (torch.float16, "float16", 64, "default"), (torch.float16, "float16", 128, "split"), (torch.float16, "float16", 256, "fast"),
    (torch.float16, "int8", 256, "split"), (torch.float16, "int8", 128, "fast"), (torch.float16, "int8", 100, "default"),
    (torch.bfloat16, "bfloat16", 128, "default"), (torch.bfloat16, "int8", 256, "split"))


def test_selected_parity():
    for dtype, kind, dim, precision in CASES:
        made, meant = problem(dtype, kind, dim=dim)
        out, lse = cqsa.attention_selected(**made, precision=precision, return_lse=True)
        wanted, wanted_lse = exact(made, meant)
        assert out.dtype == dtype and out.device == CUDA and lse.device == CUDA and not out[0].any()
        close(out, wanted)
        close_lse(lse, wanted_lse)
        same_bits(cqsa.attention_selected(**made, precision=precision, check=True), out)


def test_selected_layouts_and_outputs():
    made, meant = problem()
    wanted, wanted_lse = exact(made, meant)
    by_head = dict(made, k=made["k"].transpose(1, 2).contiguous().transpose(1, 2), v=made["v"].transpose(1, 2).contiguous().transpose(1, 2))
    close(cqsa.attention_selected(**by_head), wanted)
    tables = torch.stack([made["page_table"]] * 9)
    tables[4, 7] = -1
    per_query = dict(made, page_table=tables)
    close(cqsa.attention_selected(**per_query, check=True), exact(per_query, meant)[0])
    wide = dict(made, cells=made["cells"].long(), counts=made["counts"].tolist(), page_table=made["page_table"].cpu())
    out, lse = torch.full((9, 24, 256), math.nan, device=CUDA), torch.full((24, 9), math.nan, device=CUDA)
    got = cqsa.attention_selected(**wide, out=(out, lse), return_lse=True)
    assert got[0] is out and got[1] is lse
    close(out, wanted, torch.float16)
    close_lse(lse, wanted_lse)
    host = dict(made, k=made["k"].cpu())
    refused("DEVICE", lambda: cqsa.attention_selected(**host))


def test_selected_cells_that_nobody_names_may_hold_anything():
    for kind in ("float16", "int8"):
        made, _ = problem(kind=kind, width=60)
        before = cqsa.attention_selected(**made)
        named = torch.zeros(40 * 16, dtype=torch.bool)
        for i, count in enumerate(made["counts"].tolist()):
            named[rows_of(made["page_table"].tolist(), made["cells"][i, :count].tolist(), 16, 40)] = True
        assert not named.all()
        for name in ("k_scale", "v_scale") if kind == "int8" else ("k", "v"):
            made[name].view(40 * 16, 2, -1)[~named.to(CUDA)] = math.nan
        same_bits(cqsa.attention_selected(**made), before)


# What is put where, and what the check says of it.
WRONG = (
    (("cells", (2, 5), lambda made: made["cells"][2, 4]), "args->cells[2][5] is"),
    (("cells", (1, 0), lambda made: -3), "args->cells[1][0] is -3"),
    (("cells", (1, 299), lambda made: 40 * 16), "args->cells[1][299] is 640"),
    (("counts", (3,), lambda made: 301), "args->counts[3] is 301"),
    (("counts", (3,), lambda made: -1), "args->counts[3] is -1"),
    (("page_table", (11,), lambda made: 40), "args->page_table has page 40"),
    (("page_table", (11,), lambda made: -2), "args->page_table has page -2"))


def test_selected_wrong_lists_are_skipped_or_refused():
    for (name, place, value), text in WRONG:
        made, meant = problem()
        made["counts"][2] = 200
        made[name][place] = value(made)
        close(cqsa.attention_selected(**made), exact(made, meant)[0])
        out = torch.full((9, 24, 256), 7.0, device=CUDA)
        refused("INDEX", lambda: cqsa.attention_selected(**made, out=out, check=True), text)
        assert (out == 7).all(), "a refused call wrote"


def test_selected_in_a_graph():
    for kind, precision in (("float16", "default"), ("int8", "split")):
        made, _ = problem(kind=kind)
        out, lse = torch.empty((9, 24, 256), dtype=torch.float16, device=CUDA), torch.empty((24, 9), device=CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cqsa.attention_selected(**made, precision=precision, out=(out, lse), return_lse=True)
        for seed in (5, 6):
            other, meant = problem(kind=kind, seed=seed)
            for name, x in made.items():
                x.copy_(other[name])  # lists too: a graph sees what they hold when it runs
            out.fill_(math.nan), lse.fill_(math.nan)
            graph.replay()
            wanted, wanted_lse = exact(made, meant)
            close(out, wanted)
            close_lse(lse, wanted_lse)
            same_bits(out, cqsa.attention_selected(**made, precision=precision))


def test_selected_check_is_refused_in_a_capture():
    made, _ = problem()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            x = made["q"] * 1
            refused("CAPTURE_UNSAFE", lambda: cqsa.attention_selected(**made, check=True), "stream is being captured")
            y = x + 1  # the capture goes on after a refusal
    except RuntimeError as error:
        raise AssertionError(f"a refused call broke the capture: {error}") from error
    graph.replay()
    close(y, made["q"].double() + 1)


def test_selected_lists_that_appear_late():
    """On torch's current stream: who reads them on another one, or too early, finds lists that are wrong."""
    made, meant = problem()
    wanted = exact(made, meant)[0]
    late = dict(made, cells=torch.full_like(made["cells"], -7), counts=torch.full_like(made["counts"], -7))
    cqsa.attention_selected(**made)  # what loads, loads now
    for check in (False, True):
        late["cells"].fill_(-7), late["counts"].fill_(-7)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            for name in ("cells", "counts"):
                late[name].copy_(made[name])
            out = cqsa.attention_selected(**late, check=check)
            busy = not side.query()
        side.synchronize()
        close(out, wanted)
        assert busy or check, "the call waited for its work"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], globals()))
