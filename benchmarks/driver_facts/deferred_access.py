"""What torch and Triton say to captured tensors whose memory has no access yet.

    python benchmarks/driver_facts/deferred_access.py

A tensor in memory that is mapped without access takes part in a capture; access comes before the
replay, and the result is compared with eager. README.md says what it printed, and
deferred_access.cu asks the driver itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from cuda.bindings import driver as cu

PAGE = 2 << 20
PAGES = 16


def must(result: tuple[Any, ...]) -> Any:
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(result[0])
    return result[1] if len(result) > 1 else None


class Memory:
    """Pages that are mapped, but may not be accessed before `allow()`."""

    def __init__(self) -> None:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = 0
        self.access = cu.CUmemAccessDesc()
        self.access.location = properties.location
        self.access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.address = int(must(cu.cuMemAddressReserve(PAGES * PAGE, 0, cu.CUdeviceptr(0), 0)))
        self.used = 0
        for page in range(PAGES):
            handle = must(cu.cuMemCreate(PAGE, properties, 0))
            must(cu.cuMemMap(cu.CUdeviceptr(self.address + page * PAGE), PAGE, 0, handle, 0))

    def allow(self) -> None:
        must(cu.cuMemSetAccess(cu.CUdeviceptr(self.address), PAGES * PAGE, [self.access], 1))

    def tensor(self, *shape: int) -> torch.Tensor:
        array = SimpleNamespace(
            __cuda_array_interface__={
                "shape": shape,
                "typestr": "<f4",
                "data": (self.address + self.used, False),
                "version": 3,
            }
        )
        tensor = torch.as_tensor(array, device="cuda")
        self.used += -(-tensor.numel() * 4 // 512) * 512
        return tensor


@triton.jit
def triton_add(x: Any, y: Any, n: int, block: tl.constexpr) -> None:
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.store(y + at, tl.load(x + at, mask=inside) + 1.0, mask=inside)


def run_triton(x: torch.Tensor, y: torch.Tensor) -> None:
    triton_add[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), block=256)


def run_matmul(x: torch.Tensor, y: torch.Tensor) -> None:
    torch.mm(x, x.t(), out=y)


def run_conv(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(torch.nn.functional.conv2d(x.view(1, 1, 256, 256), kernel, padding=1).view(256, 256))


CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "elementwise": lambda x, y: torch.add(x, 1, out=y),
    "zero_ and copy_": lambda x, y: y.zero_().copy_(x),
    "cuBLAS": run_matmul,
    "cuDNN": run_conv,
    "softmax": lambda x, y: torch.softmax(x, -1, out=y),
    "sort": lambda x, y: y.copy_(torch.sort(x, -1)[0]),
    "Triton": run_triton,
    "compiled": torch.compile(lambda x, y: y.copy_(torch.sin(x) * 2 + x.sum())),
}

kernel = torch.randn(1, 1, 3, 3, device="cuda")
for name, case in CASES.items():
    source = torch.randn(256, 256, device="cuda")
    expected = torch.empty_like(source)
    case(source, expected)
    torch.cuda.synchronize()
    for mode in ("global", "thread_local"):
        memory = Memory()
        try:
            x, y = memory.tensor(256, 256), memory.tensor(256, 256)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                torch.add(source, 0, out=x)  # a kernel, where copy_() would be a copy
                case(x, y)
            memory.allow()
            graph.replay()
            torch.cuda.synchronize()
            said = "equal" if torch.equal(y, expected) else "not equal"
        except Exception as error:  # the next case is asked all the same
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"{name}, capture mode {mode}: {said}", flush=True)
