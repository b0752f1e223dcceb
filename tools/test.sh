#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything the tests need, then all of them. Arguments go to ctest: tools/test.sh -R unit
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh test
build=${CQSA_BUILD_DIR:-build/test}
cmake -S . -B "$build" -DCQSA_BUILD_TESTS=ON -DCQSA_BUILD_EXAMPLES=ON ${CQSA_CMAKE_ARGS:-}
cmake --build "$build" -j"$(nproc)"
ctest --test-dir "$build" --output-on-failure -j"$(nproc)" "$@"
