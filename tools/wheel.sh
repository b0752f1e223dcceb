#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Python wheel with the library inside: tools/wheel.sh [FOLDER], by default build/dist. Prints its path.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh build
command -v python3 >/dev/null || { echo "python3 is not installed" >&2; exit 1; }
exec python3 bindings/python/build_backend/cqsa_build.py "${1:-build/dist}"
