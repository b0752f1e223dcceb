#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what building and testing need, and only what is missing. Debian and Ubuntu; elsewhere it lists the names and goes on.
#   tools/setup.sh build | test | harden (test, and what sanitizers and fuzzers need) | docs (the reference's pages)
#                  gpu (test, and compilers of device code beside nvcc: clang for sm_70 and for AMD chips; CUDA itself is not Debian's)
set -euo pipefail

build=(g++ cmake make git libhwy-dev nlohmann-json3-dev libcli11-dev libfmt-dev)
# An oracle for the formats of quantized matrices, and a checker of types: of PyPI, pinned, and not needed: their tests are skipped without.
oracle=gguf==0.19.0
types=mypy==2.4.1
packages=$(cd "$(dirname "$0")/.." && pwd)/build/python-packages
test=(catch2 libdlpack-dev libboost-context-dev binutils clang python3 python3-numpy python3-pytest python3-hypothesis python3-cffi python3-pip pkg-config)
harden=(clang libclang-rt-dev)
docs=(doxygen)
gpu=(clang-19 lld-19 rocm-device-libs libamdhip64-dev)

wanted=("${build[@]}")
case ${1:-build} in
  test) wanted+=("${test[@]}") ;;
  harden) wanted+=("${test[@]}" "${harden[@]}") ;;
  docs) wanted+=("${docs[@]}") ;;
  gpu) wanted+=("${test[@]}" "${gpu[@]}") ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "not a Debian system: please see that these are installed: ${wanted[*]}" >&2
  exit 0
fi
missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done

# Into a folder of the build: what the tests take of it is skipped where it cannot be had. gguf without what it wants: its decoders need numpy only.
fetch() {
  echo "installing: $* into build/python-packages"
  python3 -m pip --disable-pip-version-check install --quiet --target "$packages" "$@" >/dev/null 2>&1 || echo "$* cannot be had: its tests are skipped"
}
fetch_packages() {
  case ${1:-build} in build | docs) return 0 ;; esac
  [ -e "$packages/gguf/quants.py" ] || fetch --no-deps "$oracle"
  [ -e "$packages/mypy/__main__.py" ] || fetch "$types"
}

[ ${#missing[@]} -eq 0 ] && { fetch_packages "${1:-build}"; exit 0; }

sudo=
[ "$(id -u)" -eq 0 ] || sudo=sudo
echo "installing: ${missing[*]}"
log=$(mktemp)
if ! { $sudo apt-get update && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
rm -f "$log"
fetch_packages "${1:-build}"
