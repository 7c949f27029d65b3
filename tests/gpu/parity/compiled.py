"""An allocator in C for torch.cuda.memory.CUDAPluggableAllocator, which counts what it gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
int cudaMalloc(void** pointer, size_t bytes);
int cudaFree(void* pointer);
int64_t counting_allocations, counting_live_blocks, counting_live_bytes;
void* counting_malloc(size_t bytes, int device, void* stream) {
  void* pointer = NULL;
  (void)device, (void)stream;
  if (cudaMalloc(&pointer, bytes) != 0) return NULL;
  ++counting_allocations, ++counting_live_blocks, counting_live_bytes += (int64_t)bytes;
  return pointer;
}
void counting_free(void* pointer, size_t bytes, int device, void* stream) {
  (void)device, (void)stream;
  --counting_live_blocks, counting_live_bytes -= (int64_t)bytes;
  cudaFree(pointer);
}
"""


def cuda_runtime() -> str:
    """The CUDA runtime that torch has loaded into this process: no other may be linked."""
    import torch

    torch.cuda.init()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(line.split()[-1] for line in lines if "/libcudart.so" in line)


def compile_allocator(folder: Path) -> Path:
    """Builds it; its functions are ``counting_malloc`` and ``counting_free``."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang", "g++"))))
    source, library = folder / "counting.c", folder / "libcounting.so"
    source.write_text(SOURCE)
    options = ["-x", "c", "-shared", "-fPIC", "-O1", "-o", str(library)]
    command = [compiler, *options, str(source), "-x", "none", cuda_runtime()]
    subprocess.run(command, check=True)
    return library
