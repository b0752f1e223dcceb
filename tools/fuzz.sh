#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the fuzzers of tests/fuzz and runs each for so many seconds from its seeds, two at a time.
#   tools/fuzz.sh SECONDS [safetensors npy gguf hardware_json params]
# They are made in the build folder of tools/sanitize.sh address, which has the library for them. What they learn is kept in
# build/fuzz/corpus; a finding is printed and left in build/fuzz/findings. The random seed is 1, so that
# CI is decided by the change and not by chance; CQSA_FUZZ_SEED=0 hunts with another one each time.
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:?usage: tools/fuzz.sh SECONDS [target ..]}
shift
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(safetensors npy gguf hardware_json params)
build=${CQSA_BUILD_DIR:-build/sanitize-address}
work=build/fuzz
CQSA_BUILD_DIR=$build tools/sanitize.sh fuzzers

export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
mkdir -p "$work/findings"

run() {
  local name=$1 log=$work/fuzz_$1.log
  mkdir -p "$work/corpus/$name"
  if "$build/bin/fuzz_$name" -seed="${CQSA_FUZZ_SEED:-1}" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=2048 -print_final_stats=1 \
      -artifact_prefix="$work/findings/$name-" "$work/corpus/$name" "tests/fuzz/seeds/$name" >"$log" 2>&1; then
    echo "fuzz_$name: nothing found, $(awk '/number_of_executed_units/ { print $2 }' "$log") runs"
  else
    tail -60 "$log"
    echo "fuzz_$name: see above; the input is in $work/findings, and $build/bin/fuzz_$name <input> repeats it"
    return 1
  fi
}

# Two processes at a time: the machine that decides has two cores.
failed=0
for ((i = 0; i < ${#targets[@]}; i += 2)); do
  pids=()
  for name in "${targets[@]:i:2}"; do
    run "$name" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
done
exit $failed
