"""vLLM's custom all-reduce where graph memory is mapped, on classes that are made up after its."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from cudagraph_pool.integration import vllm

LOGGER = "vllm.cudagraph_pool"


class CustomAllreduce:
    """As in vLLM 0.11 to 0.23; what it does instead of reducing it tells."""

    in_graph_capture = stream_captures = False

    def should_custom_ar(self, inp: str) -> bool:
        return inp == "small"

    def all_reduce(self, inp: str, *, out: str | None = None, registered: bool = False) -> str:
        return f"{inp} read where it lies" if registered else f"{inp} copied"

    def custom_all_reduce(self, input: str) -> str | None:
        if not self.should_custom_ar(input):
            return None
        if self.in_graph_capture:
            if self.stream_captures:
                return self.all_reduce(input, registered=True)
            return f"{input} warmed up"
        return self.all_reduce(input, registered=False)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, with a class of its own for each test; enabled, as far as is asked."""
    made: Any = ModuleType(vllm._ALL_REDUCE)
    made.CustomAllreduce = type("CustomAllreduce", (CustomAllreduce,), {})
    monkeypatch.setitem(sys.modules, vllm._ALL_REDUCE, made)
    monkeypatch.setattr(vllm, "is_enabled", lambda: True)
    vllm.serve_all_reduce.cache_clear()
    return made


def ways(custom: CustomAllreduce) -> list[str | None]:
    """What it does outside of a capture, in the warm-up of one, and twice in one."""
    found = [custom.custom_all_reduce("small")]
    custom.in_graph_capture = True
    found.append(custom.custom_all_reduce("small"))
    custom.stream_captures = True
    return [*found, custom.custom_all_reduce("small"), custom.custom_all_reduce("small")]


def test_captures_copy(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    vllm.serve_all_reduce(LOGGER)
    assert caplog.messages == []
    assert ways(module.CustomAllreduce()) == [
        "small copied",
        "small warmed up",
        *["small copied"] * 2,
    ]
    assert [(record.name, record.levelno) for record in caplog.records] == [(LOGGER, logging.INFO)]
    assert "copies into its buffer in captures" in caplog.messages[0]


def test_where_the_pool_could_not_be_enabled_nothing_changes(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(vllm, "is_enabled", lambda: False)
    vllm.serve_all_reduce(LOGGER)
    assert ways(module.CustomAllreduce()) == ways(CustomAllreduce())
    assert ways(CustomAllreduce())[-1] == "small read where it lies"
    assert caplog.messages == []


@pytest.mark.parametrize("named", ["nothing", "class", "by position"])
def test_what_is_not_known_at_all_breaks_nothing(
    module: Any, caplog: pytest.LogCaptureFixture, named: str
) -> None:
    del module.CustomAllreduce
    if named == "class":
        module.CustomAllreduce = type("CustomAllreduce", (), {})
    elif named == "by position":
        all_reduce = {"all_reduce": lambda self, inp, registered=False: inp}
        module.CustomAllreduce = type("CustomAllreduce", (), all_reduce)
    vllm.serve_all_reduce(LOGGER)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].endswith("set disable_custom_all_reduce=True")
    assert named != "by position" or not module.CustomAllreduce().should_custom_ar("small")
