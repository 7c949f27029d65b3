"""`cudagraph-pool info` on machines that this one is not: the driver is a stand-in."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from cudagraph_pool import _adapter, _core
from cudagraph_pool.cli import info as _info
from cudagraph_pool.cli.info import probe_driver
from cudagraph_pool.cli.main import main


class FakeCuda:
    """What ctypes would have loaded: two GPUs, the second without virtual memory management."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.gpus = [("NVIDIA H100", 80 << 30, 1), ("Old GPU", 8 << 30, 0)]

    def __getattr__(self, function: str) -> Any:
        return lambda *given: 999 if function == self.fail else self.answer(function, *given)

    def answer(self, function: str, *given: Any) -> int:
        match function, given:
            case "cuInit", (0,):
                pass
            case "cuDriverGetVersion", (version,):
                version._obj.value = 12080
            case "cuDeviceGetCount", (count,):
                count._obj.value = len(self.gpus)
            case "cuDeviceGet", (device, index):
                device._obj.value = 10 + index  # an ordinal and a device are different things
            case "cuDeviceGetName", (name, _, device):
                name.value = self.gpus[device.value - 10][0].encode()
            case "cuDeviceTotalMem_v2", (size, device):
                size._obj.value = self.gpus[device.value - 10][1]
            case "cuDeviceGetAttribute", (value, 102, device):
                value._obj.value = self.gpus[device.value - 10][2]
            case "cuGetErrorName", (999, name):
                name._obj.value = b"CUDA_ERROR_UNKNOWN"
            case _:
                return 1
        return 0


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetName"])
def test_driver_that_fails(call: str) -> None:
    driver = probe_driver(lambda _: FakeCuda(fail=call))
    assert driver == (f"CUDA 12.8, {call} failed with 999 (CUDA_ERROR_UNKNOWN)", {})


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65  Release Build\n"
            "GCC version:  gcc version 12.2.0\n",
            "580.65",
        ),
        ("nothing\n", None),
    ],
)
def test_kernel_module(tmp_path: Path, text: str, version: str | None) -> None:
    path = tmp_path / "version"
    path.write_text(text)
    assert _info.kernel_module_version(path) == version
    assert _info.kernel_module_version(tmp_path / "none") is None


def test_report_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_info, "probe_driver", lambda: probe_driver(lambda _: FakeCuda()))
    monkeypatch.setattr(_info, "kernel_module_version", lambda: "580.65.06")
    monkeypatch.setattr(_info, "torch_found", lambda: "2.11.0")
    report = dict(_info.lines())
    assert report["cudagraph_pool"] == _core.__version__
    assert report["torch found"] == "2.11.0"
    assert report["driver"] == "CUDA 12.8, 580.65.06"
    assert report["GPU 0"] == "NVIDIA H100, 80.0 GiB, virtual memory management supported"
    assert "NOT supported" in report["GPU 1"]
    assert "GPUs" not in report
    assert report["enabled"].startswith("no")


def test_what_is_longer_than_a_line_is_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_info, "lines", lambda: [("a label", "many words " * 20), ("b", "one")])
    assert main(["info"]) == 0
    first, *others, last = capsys.readouterr().out.splitlines()
    assert max(map(len, (first, *others))) <= 80
    assert {line[:9] for line in others} == {" " * 9}
    assert last == "b        one"


@pytest.mark.parametrize(
    ("has", "found", "said"),
    [
        (["2.11"], "2.11.0+cu130", "2.11"),
        (["2.11"], None, "2.11"),
        (["2.11"], "2.12.1", "2.11: cudagraph_pool {} was built for torch 2.11 alone"),
        ([], "2.11.0", "none: cudagraph_pool {} was built without an adapter for PyTorch, and"),
        ([], "2.10.0", "none: cudagraph_pool {} supports torch {all}, and this is"),
        ([], None, "none: install a CUDA build of torch {all}, then its adapter"),
    ],
)
def test_what_it_was_built_for(
    monkeypatch: pytest.MonkeyPatch, has: list[str], found: str | None, said: str
) -> None:
    for module in (_info, _adapter):
        monkeypatch.setattr(module, "releases", lambda: has)
    monkeypatch.setattr(_info, "torch_found", lambda: found)
    shown = dict(_info.lines())["built for torch"]
    assert shown.startswith(said.format(_core.__version__, all=_adapter.SUPPORTED))
    assert ("--force-reinstall" in shown) == ("was built" in said or not (has or found))


@pytest.mark.parametrize(
    ("request_text", "said", "does_it"),
    [
        ("", "not set", False),
        ("off", "off", False),
        ("Yes", "Yes", True),
        ("2", "'2' is not understood", False),
    ],
)
def test_what_the_variable_does(
    monkeypatch: pytest.MonkeyPatch, request_text: str, said: str, does_it: bool
) -> None:
    monkeypatch.setenv("CUDAGRAPH_POOL", request_text)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ["cudagraph_pool"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    report = dict(_info.lines())
    assert report["CUDAGRAPH_POOL"].startswith(said)
    enabled = "CUDAGRAPH_POOL does it in" if does_it else "cudagraph_pool.enable() in your"
    assert report["enabled"].startswith(f"no: {enabled} ")


def test_variable_that_torch_does_not_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAGRAPH_POOL", "1")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    report = dict(_info.lines())
    assert "unset TORCH_DEVICE_BACKEND_AUTOLOAD" in report["CUDAGRAPH_POOL"]
    assert report["enabled"].startswith("no: cudagraph_pool.enable()")
