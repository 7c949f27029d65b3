#!/usr/bin/env bash
# Compiles the adapter against the headers of every torch release that is supported, since its base class changes in
# nearly each (csrc/torch/torch_version.h). Only checks the syntax and the types: nothing is linked or run.
#
#   scripts/check_torch_releases.sh [RELEASE...]     default: all of them
#
# Headers are taken from the wheels on PyPI, one at a time, and kept in $CGP_TORCH_HEADERS (default:
# ~/.cache/cudagraph_pool/torch_headers; 65 MB a release), CUDA's from its wheels. $CXX chooses the compiler, $PYTHON the interpreter (whose headers pybind11 needs).
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
cache=${CGP_TORCH_HEADERS:-${XDG_CACHE_HOME:-$HOME/.cache}/cudagraph_pool/torch_headers}
python=${PYTHON:-python3}
cxx=${CXX:-clang++}
releases=("$@")
[ ${#releases[@]} -gt 0 ] || releases=(2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
# A wheel for one Python is enough: the headers are the same in all.
wheel_for=(--python-version 3.11 --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64)

# fetch FOLDER REQUIREMENT PATTERN: unpacks what matches PATTERN in the wheel of REQUIREMENT into $cache/FOLDER.
fetch() {
  [ -e "$cache/$1/complete" ] && return
  local wheels
  wheels=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$wheels'" RETURN
  echo "fetching $2"
  "$python" -m pip download --quiet --no-deps "${wheel_for[@]}" --dest "$wheels" "$2"
  rm -rf "${cache:?}/$1"
  mkdir -p "$cache/$1"
  "$python" - "$wheels"/*.whl "$cache/$1" "$3" <<'UNPACK'
import fnmatch, sys, zipfile
wheel, folder, pattern = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [n for n in archive.namelist() if fnmatch.fnmatch(n, pattern)])
UNPACK
  touch "$cache/$1/complete"
}

fetch cuda_runtime 'nvidia-cuda-runtime>=13,<14' '*/include/*'
fetch cuda_crt 'nvidia-cuda-crt>=13,<14' '*/include/*'
python_include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$python_include/Python.h" ] || { echo "no Python.h in $python_include: set PYTHON" >&2; exit 2; }

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

# no_other_signature INCLUDE: whether each method of ours that is one of the class's by name overrides it. Those newer than
# the oldest release have no `override` to say so. Torch's headers are no system headers here: of those compilers report nothing.
no_other_signature() {
  "$cxx" -std=c++20 -fsyntax-only -Woverloaded-virtual -Werror -I"$root/csrc" -I"$1" "${system[@]}" -x c++ - \
    <<<'#include "torch/graph_allocator.h"'
}

mapfile -t sources < <(find "$root/csrc/torch" "$root/csrc/python" \( -path '*/torch/*.cc' -o -name 'torch_*.cc' \) \
  ! -name '*_test*.cc' ! -name '*_benchmark.cc' ! -name 'fake_*')
precompiled=$(mktemp -d)
trap 'rm -rf "$precompiled"' EXIT
system=(-isystem "$cache/cuda_runtime/nvidia/cu13/include" -isystem "$cache/cuda_crt/nvidia/cu13/include"
  -isystem "$python_include")
status=0
for release in "${releases[@]}"; do
  fetch "torch-$release" "torch==$release" 'torch/include/*'
  every_method "$cache/torch-$release/torch/include/c10/cuda/CUDACachingAllocator.h" || status=1
  no_other_signature "$cache/torch-$release/torch/include" || status=1
  compile=("$cxx" -std=c++20 -fPIC -fvisibility=hidden -Wall -Wextra -Wconversion -Wshadow -Werror
    -Wno-inconsistent-missing-override # of methods that the oldest release has not
    -I"$root/csrc"
    -isystem "$cache/torch-$release/torch/include" "${system[@]}")
  # What nearly all of them include is compiled once.
  echo '#include <c10/cuda/CUDACachingAllocator.h>' >"$precompiled/torch.h"
  "${compile[@]}" -x c++-header "$precompiled/torch.h" -o "$precompiled/torch.h.gch" || status=1
  printf '%s\0' "${sources[@]}" |
    xargs -0 -n 1 -P "$(nproc)" "${compile[@]}" -fsyntax-only -include "$precompiled/torch.h" || {
      echo "torch $release: does not compile" >&2
      status=1
    }
  [ $status -ne 0 ] || echo "torch $release: compiles"
done
exit $status
