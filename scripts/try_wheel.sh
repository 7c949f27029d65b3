#!/usr/bin/env bash
# Tries a wheel under each release of torch that is supported: its adapter loads, `info` and `replay` run. No GPU is needed.
#   scripts/try_wheel.sh WHEEL [PYTHON]
# The newest torch is installed with CUDA's libraries (5 GB, 2 minutes); the others (1 GB each, one at a time) take them from there.
set -euo pipefail
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_COMPILE=0 PIP_ROOT_USER_ACTION=ignore

root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
python=${2:-python3}
read -ra releases <<<"$(sed -n 's/^releases=(\(.*\))$/\1/p' "$root/scripts/build_wheels.sh")"
newest=${releases[-1]}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# installed FOLDER ARGUMENT...
installed() {
  "$python" -m pip install --quiet --only-binary=:all: --target "$work/$1" "${@:2}"
}

installed wheel "$wheel"
installed "$newest" "torch==$newest"
cd "$work" # not where the sources are
for release in "${releases[@]}"; do
  if [ "$release" != "$newest" ]; then
    installed "$release" --no-deps "torch==$release"
    ln -s "../$newest/nvidia" "$release/nvidia"
  fi
  export PYTHONPATH=$work/wheel:$work/$release:$work/$newest
  "$python" -m cudagraph_pool info
  "$python" -m cudagraph_pool replay "$root/tests/traces/mlp_asc.json.gz"
  "$python" -W ignore - "$release" <<'LOADS'
import os.path
import sys
import torch
import cudagraph_pool as cgp
assert torch.__version__.split("+")[0] == sys.argv[1], torch.__version__
print(f"torch {sys.argv[1]}: cudagraph_pool {cgp.__version__} loads {os.path.basename(cgp.library_path())}")
LOADS
  [ "$release" = "$newest" ] || rm -r "${work:?}/$release"
done
