"""SGLang's memory saver with graph pools, on adapters and hooks made up after SGLang 0.5.23's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

import pytest

import cudagraph_pool
from cudagraph_pool.integration import sglang

ADAPTERS = "sglang.srt.utils.torch_memory_saver_adapter"
HOOKS = "sglang.srt.plugins.hook_registry"


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"


class Server:
    """A scheduler: its memory saver, which is there or not, graph pools, and what was done."""

    def __init__(self, kind: str) -> None:
        self.done: list[str] = []
        self.fails = ""
        server = self

        class Adapter:
            def pause(self, tag: str) -> None:
                server.do(f"pause {tag}")

            def resume(self, tag: str) -> None:
                server.do(f"resume {tag}")

        self.adapters = {name: type(name, (Adapter,), {}) for name in ("Real", "Noop")}
        self.adapter: Any = self.adapters[kind]()

    def do(self, what: str) -> int:
        self.done.append(what)
        if what == self.fails:
            raise RuntimeError(f"cannot {what}")
        return 86 << 20

    def register(self, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        """And applies it, as SGLang does it later."""
        module, name, method = target.rsplit(".", 2)
        assert module == ADAPTERS
        adapter = self.adapters[name.removeprefix("_TorchMemorySaverAdapter")]
        before = getattr(adapter, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if hook_type is HookType.BEFORE:
                assert hook(*args, **kwargs) is None  # else these were the arguments
                return before(*args, **kwargs)
            result = before(*args, **kwargs)
            assert hook(result, *args, **kwargs) is None
            return result

        setattr(adapter, method, wrapped)

    def release(self, *tags: str) -> None:
        for tag in tags or ("kv_cache", "weights", "cuda_graph"):
            self.adapter.pause(tag)

    def resume(self, *tags: str) -> None:
        for tag in tags or ("cuda_graph", "weights", "kv_cache"):
            self.adapter.resume(tag)


@pytest.fixture(params=["Real", "Noop"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(request.param)
    hooks: Any = ModuleType(HOOKS)
    hooks.HookType, hooks.HookRegistry = HookType, made
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, HOOKS, hooks)
    monkeypatch.setattr(cudagraph_pool, "sleep", lambda: made.do("sleep"), raising=False)
    monkeypatch.setattr(cudagraph_pool, "wake", lambda: made.do("wake"), raising=False)
    sglang.serve_memory_saver.cache_clear()
    for _ in range(2):
        sglang.serve_memory_saver()
    yield made
    sglang.serve_memory_saver.cache_clear()


def test_pools_sleep_last_and_wake_first(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server.release()
    assert server.done == ["pause kv_cache", "pause weights", "pause cuda_graph", "sleep"]
    assert caplog.messages == ["graph pools gave back 86 MiB"]
    server.done.clear()
    server.resume()
    assert server.done == ["wake", "resume cuda_graph", "resume weights", "resume kv_cache"]


def test_other_tags_leave_them(server: Server) -> None:
    server.release("kv_cache")
    server.adapter.pause(tag="weights")
    server.resume("kv_cache", "weights")
    assert not {"sleep", "wake"} & set(server.done)
    server.release("cuda_graph")
    assert server.done[-1] == "sleep"
    server.adapter.resume(tag="cuda_graph")
    assert server.done[-2:] == ["wake", "resume cuda_graph"]


def test_a_pool_that_cannot_sleep_does_not_end_the_server(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.fails = "sleep"
    server.release()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages == ["a graph pool does not sleep: cannot sleep"]


def test_pools_that_cannot_wake_say_so_before_anything_else_is_resumed(server: Server) -> None:
    server.release()
    server.done.clear()
    server.fails = "wake"
    with pytest.raises(RuntimeError, match="cannot wake"):
        server.resume()
    assert server.done == ["wake"]
