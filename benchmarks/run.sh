#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the benchmarks and runs those of the C library on the CPU; prints two tables of benchmarks/results, cpu-attention and out-of-core.
# The others say at their top how to run them: xeon.sh, torch_sdpa.py, python_overhead.py, gpu_leaf.cu, streaming.cpp, host_cost.cpp.
# On a quiet machine, please.
#   benchmarks/run.sh [--quick]
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh build
dpkg-query -W libopenblas-dev >/dev/null 2>&1 || { [ "$(id -u)" -eq 0 ] && apt-get install -y --no-install-recommends libopenblas-dev >/dev/null; }
cmake -S . -B build/bench -DCQSA_BUILD_BENCHMARKS=ON -DCQSA_BUILD_TESTS=OFF >/dev/null
cmake --build build/bench -j"$(nproc)" >/dev/null

library=$(readlink -f build/bench/lib/libcqsa.so)
stripped=$(mktemp --suffix=.so)
strip -o "$stripped" "$library"
echo "$(date +%F), $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
echo "library, stripped: $(( $(stat -c %s "$stripped") / 1024 )) KiB (bar 3 MiB)"
# An OpenBLAS older than the CPU falls back to a narrower kernel, which would flatter the comparison.
grep -q avx512f /proc/cpuinfo && export OPENBLAS_CORETYPE=SkylakeX
build/bench/bin/bench_cpu_attention "$@" "$stripped"
python3 benchmarks/out_of_core.py --tool build/bench/bin/cqsa
rm -f "$stripped"
