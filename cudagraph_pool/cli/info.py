"""What ``cudagraph-pool info`` prints: what is installed, what the machine can do, what is enabled.

Nothing here imports torch or makes a CUDA context. The driver is asked through ctypes, so that the
answer is the same whether the adapter could be built or not.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import _core
from .._adapter import SUPPORTED, and_the_adapter, no_adapter, releases
from ..integration.environment import VARIABLE, asks
from ..integration.request import parse
from .run import problem

_KERNEL_MODULE: Final = Path("/proc/driver/nvidia/version")
# CUdevice_attribute: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_VMM_SUPPORTED: Final = 102


class _CudaError(Exception):
    """A call of the CUDA driver failed."""


class Gpu(NamedTuple):
    """As the driver describes it."""

    name: str
    total_bytes: int
    vmm: bool


class Driver(NamedTuple):
    """The CUDA driver: ``problem`` says why there is none to use."""

    cuda_version: str | None
    gpus: list[Gpu]
    problem: str | None


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Says what is installed, what this machine can do, and whether the pool is enabled. "
        "No CUDA context is made."
    )
    parser.set_defaults(function=_info)


def _info(options: argparse.Namespace) -> int:
    pairs = lines()
    width = max(len(label) for label, _ in pairs) + 2
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * width
    for label, text in pairs:
        wrapper.initial_indent = f"{label:<{width}}"
        print(wrapper.fill(text))
    return 0


def probe_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver:
    """Asks libcuda for its version and its GPUs, without making a context."""
    try:
        library = load("libcuda.so.1")
    except OSError:
        return Driver(None, [], "none (libcuda.so.1 is not installed)")
    version = None
    try:
        number = ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        version = f"{number.value // 1000}.{number.value % 1000 // 10}"
        _call(library, "cuInit", 0)
        _call(library, "cuDeviceGetCount", ctypes.byref(number))
        return Driver(version, [_gpu(library, index) for index in range(number.value)], None)
    except _CudaError as error:
        return Driver(version, [], str(error))


def _gpu(library: Any, index: int) -> Gpu:
    device, vmm, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(vmm), _VMM_SUPPORTED, device)
    return Gpu(name.value.decode(errors="replace"), total.value, bool(vmm.value))


def _call(library: Any, function: str, *arguments: object) -> None:
    try:
        code = getattr(library, function)(*arguments)
    except AttributeError:
        raise _CudaError(f"libcuda has no {function}: the driver is too old") from None
    if code:
        text = ctypes.c_char_p()
        known = library.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value
        name = text.value.decode() if known and text.value else "unknown error"
        raise _CudaError(f"{function} failed with {code} ({name})")


def kernel_module_version(path: Path = _KERNEL_MODULE) -> str | None:
    """The version of the NVIDIA kernel module, for instance ``580.65.06``."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", path.read_text())
    except OSError:
        return None
    return found[0] if found else None


def torch_found() -> str | None:
    """The version of the torch installed beside this package, from its metadata."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def lines() -> list[tuple[str, str]]:
    """The report, as pairs of label and text."""
    driver = probe_driver()
    kernel = kernel_module_version()
    torch = torch_found()
    names = [f"CUDA {driver.cuda_version}" if driver.cuda_version else "", kernel or ""]
    report = [
        ("cudagraph_pool", _core.__version__),
        ("Python", sys.version.split()[0]),
        ("built for torch", _built_for(torch)),
        ("torch found", torch or "none"),
        ("driver", ", ".join(filter(None, [*names, driver.problem]))),
    ]
    for index, gpu in enumerate(driver.gpus):
        vmm = "supported" if gpu.vmm else "NOT supported: the pool cannot serve it"
        size = f"{gpu.total_bytes / (1 << 30):.1f} GiB"
        report.append((f"GPU {index}", f"{gpu.name}, {size}, virtual memory management {vmm}"))
    if not driver.gpus:
        report.append(("GPUs", "none: replay and demo run on the host driver"))
    request = os.environ.get(VARIABLE, "")
    wrong = _problem(request) if asks(request) else None
    report.append((VARIABLE, wrong or request or "not set"))
    report.append(("enabled", _enabled(asks(request) and wrong is None)))
    return report


def _built_for(torch: str | None) -> str:
    names = ", ".join(releases())
    if torch is None:
        return names or f"none: install a CUDA build of torch {SUPPORTED}{and_the_adapter()}"
    has_adapter = ".".join(torch.split(".")[:2]) in releases()
    return names if has_adapter else f"{names or 'none'}: {no_adapter(torch)}"


def _problem(request: str) -> str | None:
    """Why the variable enables nothing."""
    try:
        parse(request)
    except ValueError as error:
        return str(error)
    return problem(VARIABLE)


def _enabled(is_asked_for: bool) -> str:
    import cudagraph_pool

    if cudagraph_pool.is_enabled():
        return "yes"
    if is_asked_for:
        return f"no: {VARIABLE} does it in a program, at its first use of CUDA"
    return f"no: cudagraph_pool.enable() in your program does it, or {VARIABLE}=1 around it"
