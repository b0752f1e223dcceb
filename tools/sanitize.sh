#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the library and its C and C++ tests with a sanitizer and runs them. Further arguments go to ctest.
#   tools/sanitize.sh address | thread [-R unit ..]
#   tools/sanitize.sh fuzzers
# address is address,undefined. A build of its own in build/sanitize-<which>, or in $CQSA_BUILD_DIR. fuzzers only builds those of
# tests/fuzz, in that of address: tools/fuzz.sh runs them.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  address | fuzzers) which=address checks=address,undefined fuzzers=ON ;;
  thread) which=thread checks=thread fuzzers=OFF ;;
  *)
    echo "usage: tools/sanitize.sh address|thread|fuzzers [ctest arguments]" >&2
    exit 2
    ;;
esac
build=${CQSA_BUILD_DIR:-build/sanitize-$which}
target=all
[ "$1" != fuzzers ] || target=fuzz
shift
tools/setup.sh harden

# clang: its run-time libraries are in the programs, and TSan knows more of what a thread pool does than g++'s. No Python: an
# interpreter would have to be sanitized too. No command: it is tested through Python.
cmake -S . -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_BUILD_TYPE=None \
  -DCQSA_SANITIZE=$checks -DCQSA_BUILD_FUZZERS=$fuzzers -DCQSA_BUILD_TESTS=ON -DCQSA_BUILD_PYTHON=OFF -DCQSA_BUILD_TOOLS=OFF -DCQSA_BUILD_EXAMPLES=OFF
cmake --build "$build" -j"$(nproc)" --target $target
[ $target = all ] || exit 0

# Sanitized code is some ten times slower, so fewer random problems; the seeds are those of the tests otherwise.
export CQSA_PROPERTY_COUNT=${CQSA_PROPERTY_COUNT:-12}
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_string_checks=1:allocator_may_return_null=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-second_deadlock_stack=1}
ctest --test-dir "$build" --output-on-failure -j"$(nproc)" "$@"
