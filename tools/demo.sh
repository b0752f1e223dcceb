#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from nothing: install, build, then exact attention on the Q, K, V of a real model under a memory budget, checked
# against fp64; and plans of the same heads at 1M and 16M tokens for cards that need not be here.
set -euo pipefail
cd "$(dirname "$0")/.."

memory=${1:-128KiB}
tools/setup.sh build
# The CUDA backend takes minutes more and is of use where there is a device; tools/test.sh builds it wherever there is an nvcc.
cuda=OFF
[ ! -e /dev/nvidiactl ] || cuda=AUTO
echo "building (about two minutes on two cores)"
mkdir -p build
log=build/demo-build.log
{ cmake -S . -B build/release -DCQSA_BUILD_TESTS=OFF -DCQSA_BUILD_EXAMPLES=OFF -DCQSA_BUILD_CUDA=$cuda && cmake --build build/release -j"$(nproc)"; } >"$log" 2>&1 || { cat "$log" >&2; exit 1; }
cqsa=build/release/bin/cqsa

echo "== exact attention of examples/data/minilm_qkv.safetensors within $memory"
"$cqsa" attention examples/data/minilm_qkv.safetensors -o build/attention_out.safetensors --memory "$memory" --check
for tokens in 1M 16M; do
  for card in 8gb 80gb; do
    echo
    echo "== plan: the same heads at $tokens tokens, causal, $card card"
    "$cqsa" plan --seqlen "$tokens" --heads 12 --head-dim 32 --dtype f16 --causal top_left --hardware "examples/data/hardware/card-$card.json"
  done
done
