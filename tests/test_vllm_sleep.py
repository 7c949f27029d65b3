"""vLLM's sleep mode with graph pools, on a factory and a cumem made up after vLLM 0.33's."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest

import cudagraph_pool
from cudagraph_pool.integration import autoload

LOGGER = "vllm.cudagraph_pool"
MODULE = "vllm.device_allocator.sleep_mode_backend"
BACKEND = "cudagraph_pool.integration.vllm_sleep"
MIB = 1 << 20


class Process:
    """What one of vLLM's workers has: a cumem, graph pools, and what was done to both."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.asleep = False  # graph pools
        self.fails: set[str] = set()
        process = self

        class CuMemBackend:
            def __init__(self) -> None:
                self._state = "RUNNING"

            def suspend(self, level: int = 1) -> None:
                process.do(f"suspend {level}")
                self._state = "SUSPENDED"

            def resume(self, tags: list[str] | None = None) -> None:
                process.do(f"resume {tags}")
                self._state = "RUNNING"

            def discard(self, tags: tuple[str, ...]) -> None:
                process.do(f"discard {tags}")

            def state(self) -> str:
                return self._state

            @classmethod
            def is_supported(cls) -> bool:
                return True

            @classmethod
            def preserves_communicators(cls) -> bool:
                return True

        class SleepModeBackendFactory:
            _registry: ClassVar[dict[str, Callable[[], Any]]] = {"cumem": lambda: CuMemBackend}

            @classmethod
            def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
                if name in cls._registry:
                    raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
                cls._registry[name] = lambda: getattr(
                    importlib.import_module(module_path), class_name
                )

            @classmethod
            def create_backend(cls, name: str) -> Any:
                backend = cls._registry[name]()
                assert backend.is_supported()
                return backend()

        self.cumem = CuMemBackend
        self.factory = SleepModeBackendFactory

    def do(self, what: str) -> None:
        self.done.append(what)
        if what.split()[0] in self.fails:
            raise MemoryError(what)

    def sleep(self) -> int:
        """One pool may fail where others do not; so in wake()."""
        self.asleep = True
        self.do("sleep")
        return 86 * MIB

    def wake(self) -> None:
        self.asleep = False
        self.do("wake")

    def backend(self) -> Any:
        return self.factory.create_backend("cudagraph_pool")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    module: Any = ModuleType(MODULE)
    module.CuMemBackend, module.SleepModeBackendFactory = made.cumem, made.factory
    for name in ("vllm", "vllm.device_allocator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    # That the test's import stands there only as long as the test.
    monkeypatch.setitem(sys.modules, BACKEND, ModuleType(BACKEND))
    monkeypatch.delitem(sys.modules, BACKEND)
    monkeypatch.setattr(cudagraph_pool, "sleep", made.sleep, raising=False)
    monkeypatch.setattr(cudagraph_pool, "wake", made.wake, raising=False)
    autoload._offer_sleep_backend(LOGGER)
    return made


@pytest.mark.parametrize("level", [1, 2])
def test_both_sleep_and_wake(
    process: Process, caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(logging.INFO)
    assert BACKEND not in sys.modules  # before vLLM asks for it
    backend = process.backend()
    assert isinstance(backend, process.cumem)
    assert backend.preserves_communicators()
    for _ in range(2):
        backend.suspend(level)
        assert (process.asleep, backend.state()) == (True, "SUSPENDED")
        backend.resume()
        assert (process.asleep, backend.state()) == (False, "RUNNING")
    assert process.done == ["sleep", f"suspend {level}", "wake", "resume None"] * 2
    assert caplog.messages == ["graph pools gave back 86 MiB"] * 2
    assert {record.name for record in caplog.records} == {LOGGER}


@pytest.mark.parametrize("order", [["weights", "kv_cache"], ["kv_cache", "weights"]])
def test_pools_wake_with_the_last_of_the_tags(process: Process, order: list[str]) -> None:
    backend = process.backend()
    backend.suspend()
    backend.resume(order[:1])
    assert process.asleep
    backend.resume(order[1:])
    assert not process.asleep
    resumes = [f"resume {order[:1]}", "wake", f"resume {order[1:]}"]
    assert process.done == ["sleep", "suspend 1", *resumes]
    process.done.clear()
    backend.suspend()
    backend.resume(order)
    assert process.done == ["sleep", "suspend 1", "wake", f"resume {order}"]


def test_what_gives_up_the_kv_cache_alone_leaves_pools(process: Process) -> None:
    backend = process.backend()
    backend.discard(("kv_cache",))
    backend.resume(["kv_cache"])
    assert process.done == ["discard ('kv_cache',)", "resume ['kv_cache']"]


@pytest.mark.parametrize("fails", ["sleep", "suspend"])
def test_if_one_cannot_sleep_the_other_is_awake(process: Process, fails: str) -> None:
    backend = process.backend()
    process.fails = {fails}
    with pytest.raises(MemoryError, match=fails):
        backend.suspend()
    assert (process.asleep, backend.state()) == (False, "RUNNING")
    assert process.done == ["sleep", *(["suspend 1"] if fails == "suspend" else []), "wake"]
    process.fails.clear()
    backend.suspend()
    assert (process.asleep, backend.state()) == (True, "SUSPENDED")


@pytest.mark.parametrize("fails", ["wake", "resume"])
def test_if_one_cannot_wake_the_other_sleeps(process: Process, fails: str) -> None:
    backend = process.backend()
    backend.suspend()
    backend.resume(["weights"])
    process.done.clear()
    process.fails = {fails}
    with pytest.raises(MemoryError, match=fails):
        backend.resume(["kv_cache"])
    assert process.asleep
    resumes = ["wake", "resume ['kv_cache']"]
    assert process.done == [*resumes[: 1 if fails == "wake" else 2], "sleep"]
    process.fails.clear()
    process.done.clear()
    backend.resume(["kv_cache"])
    assert (process.asleep, process.done) == (False, resumes)


def test_weights_that_cannot_wake_leave_pools_asleep(process: Process) -> None:
    backend = process.backend()
    backend.suspend()
    process.fails = {"resume"}
    with pytest.raises(MemoryError, match="resume"):
        backend.resume(["weights"])
    assert process.asleep
    assert process.done == ["sleep", "suspend 1", "resume ['weights']"]


@pytest.mark.parametrize("named", ["module", "factory", "registration"])
def test_a_vllm_that_takes_no_backend_goes_on(
    process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    caplog.set_level(logging.DEBUG)
    if named == "module":
        monkeypatch.setitem(sys.modules, MODULE, None)
    elif named == "factory":
        del sys.modules[MODULE].SleepModeBackendFactory
    autoload._offer_sleep_backend(LOGGER)
    assert [(record.name, record.levelno) for record in caplog.records] == [(LOGGER, logging.DEBUG)]
    assert "vLLM takes no sleep mode backend" in caplog.messages[0]
