#!/usr/bin/env bash
# clang-tidy over the C++ sources without torch's headers, tests and benchmarks. Needs clang-tidy
# and clang, version 14 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/tidy
rm -rf "$build"
cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ >/dev/null
# Several at a time, as they are compiled: what takes long is to look at the headers.
units=$(find "$build" -path '*/Unity/*.cxx' | grep -vE '/cgp_(benchmark|core_counted|tests)\.dir/')
xargs -P "$(nproc)" -n 1 clang-tidy -p "$build" --quiet --checks=-bugprone-suspicious-include <<<"$units"
echo "clang-tidy: $(xargs cat <<<"$units" | grep -c '^#include') files without a finding"
