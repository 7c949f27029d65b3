"""``cudagraph-pool info``: what is installed, what the machine can do, what enables the pool.

Nothing here imports torch or makes a CUDA context. The driver is asked through ctypes, so that the
answer is the same whether the adapter could be built or not.
"""

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
from typing import Any, Final

from .. import _core
from .._adapter import SUPPORTED, and_the_adapter, no_adapter, releases
from ..integration.environment import VARIABLE, asks
from ..integration.request import parse
from .errors import CommandError
from .run import require

_KERNEL_MODULE: Final = Path("/proc/driver/nvidia/version")
# CUdevice_attribute: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_VMM_SUPPORTED: Final = 102


def info(options: argparse.Namespace) -> int:
    """Says what is installed, what this machine can do, what is enabled. Makes no CUDA context."""
    pairs = lines()
    width = max(len(label) for label, _ in pairs) + 2
    wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, break_long_words=False)
    wrapper.break_on_hyphens = False
    wrapper.subsequent_indent = " " * width
    for label, text in pairs:
        print(wrapper.fill(f"{label:<{width}}{text}"))
    return 0


def lines() -> list[tuple[str, str]]:
    driver, gpus = probe_driver()
    torch = torch_found()
    request = os.environ.get(VARIABLE, "")
    wrong = ""  # why the variable enables nothing
    try:
        if asks(request):
            parse(request)
            require(VARIABLE)
    except (ValueError, CommandError) as error:
        wrong = str(error)
    enabled = f"no: cudagraph_pool.enable() in your program does it, or {VARIABLE}=1 around it"
    if asks(request) and not wrong:
        enabled = f"no: {VARIABLE} does it in a program, at its first use of CUDA"
    return [
        ("cudagraph_pool", _core.__version__),
        ("Python", sys.version.split()[0]),
        ("built for torch", _built_for(torch)),
        ("torch found", torch or "none"),
        ("driver", ", ".join(filter(None, (driver, kernel_module_version())))),
        *(gpus or {"GPUs": "none: replay and demo run on the host driver"}).items(),
        (VARIABLE, wrong or request or "not set"),
        ("enabled", enabled),
    ]


def probe_driver(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[str, dict[str, str]]:
    """What libcuda says without a context: its version, or what is wrong; by its label each GPU."""
    try:
        library = load("libcuda.so.1")
    except OSError:
        return "none (libcuda.so.1 is not installed)", {}
    version, number = "", ctypes.c_int()
    try:
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        version = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
        _call(library, "cuInit", 0)
        _call(library, "cuDeviceGetCount", ctypes.byref(number))
        return version, {f"GPU {index}": _gpu(library, index) for index in range(number.value)}
    except OSError as error:
        return ", ".join(filter(None, (version, str(error)))), {}


def _gpu(library: Any, index: int) -> str:
    device, vmm, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(vmm), _VMM_SUPPORTED, device)
    supported = "supported" if vmm else "NOT supported: the pool cannot serve it"
    size = f"{total.value / (1 << 30):.1f} GiB"
    shown = name.value.decode(errors="replace")
    return f"{shown}, {size}, virtual memory management {supported}"


def _call(library: Any, function: str, *arguments: object) -> None:
    """Raises OSError where the driver fails."""
    if code := getattr(library, function)(*arguments):
        text = ctypes.c_char_p(b"")
        library.cuGetErrorName(code, ctypes.byref(text))
        name = (text.value or b"unknown error").decode()
        raise OSError(f"{function} failed with {code} ({name})")


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


def _built_for(torch: str | None) -> str:
    names = ", ".join(releases())
    if torch is None:
        return names or f"none: install a CUDA build of torch {SUPPORTED}{and_the_adapter()}"
    has_adapter = ".".join(torch.split(".")[:2]) in releases()
    return names if has_adapter else f"{names or 'none'}: {no_adapter(torch)}"
