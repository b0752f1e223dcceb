#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The CPU backend on a machine with AMX: its tests with real tiles, every path against the FMA peak, and torch in the same run.
# Nothing is built there: the programs are built elsewhere (CQSA_BUILD_BENCHMARKS=ON) and carried.
#   benchmarks/xeon.sh --pack FOLDER BUILD    here: copies what is needed into FOLDER (about 10 MiB)
#   FOLDER/benchmarks/xeon.sh [THREADS]       there: prints the tables, in about 5 minutes
# FOLDER/build/bin/bench_cpu_paths --tiles measures the tiles that the entries offer.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = --pack ]; then
  to=$2 build=$3
  mkdir -p "$to/build/bin" "$to/build/lib" "$to/benchmarks" "$to/bindings/python" "$to/tests"
  for program in bench_cpu_paths test_cpu_leaf test_properties test_determinism run_vectors cqsa; do
    strip -o "$to/build/bin/$program" "$build/bin/$program"
  done
  strip -o "$to/build/lib/libcqsa.so.0" "$build/lib/libcqsa.so.0"
  cp benchmarks/xeon.sh benchmarks/torch_sdpa.py "$to/benchmarks"
  cp -r bindings/python/cqsa "$to/bindings/python"
  cp -r tests/vectors "$to/tests"
  du -sh "$to"
  exit
fi

threads=${1:-16}
bin=$PWD/build/bin
export LD_LIBRARY_PATH=$PWD/build/lib CQSA_LIBRARY=$PWD/build/lib/libcqsa.so.0 PYTHONPATH=$PWD/bindings/python PYTHONDONTWRITEBYTECODE=1
failed=0
step() { echo; echo "## $1"; shift; local start=$SECONDS; local status=0; "$@" || status=$?; [ "$status" = 0 ] || { failed=1; echo "FAILED ($status): $*"; }; echo "($((SECONDS - start)) s)"; }

date +%F
lscpu | grep -E '^(Model name|CPU\(s\)|Thread|Core|Socket|L1d|L2|L3|CPU max)' || true
grep -m1 -o -E -w '(avx512_bf16|amx_tile|amx_bf16|amx_int8|avx512_fp16)' /proc/cpuinfo | tr '\n' ' ' || true
echo
# Which entry takes bf16: cpu_amx, or why not.
"$bin/cqsa" plan --seqlen 8192 --heads 16 --head-dim 128 --dtype bf16 | tail -n 12 || true

step "tests with this CPU's instructions" timeout 40 "$bin/test_cpu_leaf"
step "conformance vectors" timeout 20 bash -c '"$0" tests/vectors | tail -n 3; exit "${PIPESTATUS[0]}"' "$bin/run_vectors"
step "properties" timeout 30 env CQSA_PROPERTY_COUNT=300 "$bin/test_properties" "any schedule in any budget*"
step "paths" timeout 90 "$bin/bench_cpu_paths" --threads "$threads" --seconds 0.15
step "torch" timeout 200 python3 benchmarks/torch_sdpa.py --threads "$threads" --heads 16 --seconds 0.3 --turns 2
exit "$failed"
