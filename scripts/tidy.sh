#!/usr/bin/env bash
# clang-tidy over the C++ sources without torch's headers, tests and benchmarks. Needs clang-tidy
# and clang, version 14 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/tidy
cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_UNITY_BUILD=OFF >/dev/null
sources=$(find csrc/core csrc/driver csrc/exec csrc/testing -name '*.cc' \
  ! -name '*_test.cc' ! -name '*_benchmark.cc' | sort)
if ! grep -q cuda_driver.cc "$build/compile_commands.json"; then
  sources=$(grep -v /cuda_ <<<"$sources") # CUDA's headers are not here
fi
xargs -P "$(nproc)" -n 1 clang-tidy -p "$build" --quiet <<<"$sources"
echo "clang-tidy: $(wc -l <<<"$sources") files without a finding"
