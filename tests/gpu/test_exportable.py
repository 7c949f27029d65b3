"""Memory of graph pools that other processes can be given: what SGLang's all-reduce does with the
inputs of a capture (sglang/srt/distributed/device_communicators/vmm_utils.py), by one process.
"""

from __future__ import annotations

import ctypes
import os

import pytest

import cudagraph_pool as cgp

from .shared import Driver
from .work import PAGE, torch

pytestmark = pytest.mark.usefixtures("enabled")

_FILE_DESCRIPTOR = ctypes.c_int(1)  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_NONE = ctypes.c_ulonglong(0)


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int))


def export(driver: Driver, address: int) -> tuple[int, int, int]:
    """The mapping around `address`: its start, its size, and a descriptor of what lies behind."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver.call(
        "cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)
    )
    handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
    driver.call("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(address))
    try:
        driver.call(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            handle,
            _FILE_DESCRIPTOR,
            _NONE,
        )
    finally:
        driver.call("cuMemRelease", handle)
    return start.value, size.value, descriptor.value


class Peer:
    """What another process does with an exported handle: maps it behind an address of its own."""

    def __init__(self, driver: Driver, descriptor: int, size: int) -> None:
        self._driver, self._size = driver, size
        handle, address = ctypes.c_ulonglong(), ctypes.c_uint64()
        driver.call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(handle),
            ctypes.c_void_p(descriptor),
            _FILE_DESCRIPTOR,
        )
        length, zero = ctypes.c_size_t(size), ctypes.c_size_t(0)
        driver.call(
            "cuMemAddressReserve", ctypes.byref(address), length, zero, ctypes.c_uint64(0), _NONE
        )
        driver.call("cuMemMap", address, length, zero, handle, _NONE)
        access = AccessDesc(type=1, id=torch.cuda.current_device(), flags=3)
        driver.call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
        driver.call("cuMemRelease", handle)
        self.address = address.value

    def close(self) -> None:
        address, size = ctypes.c_uint64(self.address), ctypes.c_size_t(self._size)
        self._driver.call("cuMemUnmap", address, size)
        self._driver.call("cuMemAddressFree", address, size)


def test_a_peer_sees_what_a_replay_writes() -> None:
    cgp.enable(exportable=True)
    driver, graph = Driver(), torch.cuda.CUDAGraph()
    x = torch.arange(1 << 20, dtype=torch.int32, device="cuda")
    with torch.cuda.graph(graph):
        y = x * 3
    start, size, descriptor = export(driver, y.data_ptr())
    assert start <= y.data_ptr() < start + size
    assert size % PAGE == 0
    peer = Peer(driver, descriptor, size)
    os.close(descriptor)
    x.add_(5)
    graph.replay()
    seen = torch.empty_like(y)
    count = min(y.numel(), (start + size - y.data_ptr()) // 4)
    driver.call(
        "cuMemcpyDtoD_v2",
        ctypes.c_uint64(seen.data_ptr()),
        ctypes.c_uint64(peer.address + y.data_ptr() - start),
        ctypes.c_size_t(4 * count),
    )
    assert torch.equal(seen[:count], x[:count] * 3)
    torch.cuda.synchronize()
    peer.close()
