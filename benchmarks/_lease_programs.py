"""Programs whose pool sleeps a thousand times, or lends what it has. For leases.py."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _lease_captures import driver_calls, scratch_bytes
from _measure import Captures, same_bits
from _workloads import Workload
from torch import Tensor, nn
from two_stream_models import linears

import cudagraph_pool as cgp

GIB = 1 << 30

_SETTLED = 100  # cycles, before what is held is noted
_SEEDS = range(3)  # of inputs


class Cycles(Captures):
    """Graphs that each keep a copy of their output in the pool, replayed and captured anew at
    random between sleeps.
    """

    def __init__(self, workload: Callable[[torch.device], Workload], device: torch.device) -> None:
        super().__init__(workload, device, ours=True)
        self._pool: Any = cgp.GraphPool(device)
        self._kept: dict[int, Tensor] = {}
        self._expected: dict[tuple[int, int], Tensor] = {}

    def run(self, cycles: int, seed: int) -> dict[str, Any]:
        """What is held before and after so many cycles, and how many outputs were wrong."""
        chance = random.Random(seed)
        keys = list(self.workload.keys)[7::8]
        for key in chance.sample(keys, len(keys)):
            self._capture(key)
            for number in _SEEDS:
                self.workload.fill(key, seed=number)
                self._run_eagerly(key)
                self._expected[key, number] = self.workload.outputs(key)[0].clone()
        wrong = 0
        before: dict[str, int] = {}
        began = time.perf_counter()
        for cycle in range(_SETTLED + cycles):
            if cycle == _SETTLED:
                before, began = self._held(), time.perf_counter()
            if cycle % 8 == 0:
                self._capture(chance.choice(keys))
            wrong += sum(not self._replays(*chance.choice(list(self._expected))) for _ in range(2))
            last = key, number = chance.choice(list(self._expected))
            wrong += not self._replays(*last)
            keep = chance.choices(("live", "offload", "nothing"), (8, 1, 1))[0]
            self._pool.sleep(keep=keep)
            if cycle % 16 == 0:  # what the pages held must not be there by chance
                torch.empty(GIB, dtype=torch.uint8, device=self._device).fill_(0xA5)
                torch.cuda.synchronize(self._device)
                torch.cuda.empty_cache()
            self._pool.wake()
            if keep != "nothing":
                wrong += not same_bits(self._kept[key], self._expected[last])
        seconds = time.perf_counter() - began
        return {
            "cycles": cycles,
            "wrong": wrong,
            "seconds": seconds,
            "before": before,
            "after": self._held(),
        }

    def _capture(self, key: int) -> None:
        """Anew, if it was before."""
        self._graphs.pop(key, None)
        self._kept.pop(key, None)
        graph = torch.cuda.CUDAGraph()
        with cgp.graph(graph, self._pool, stream=self._stream):
            self.workload.step(key)
            self._kept[key] = self.workload.outputs(key)[0].clone()
        self._graphs[key] = graph

    def _replays(self, key: int, number: int) -> bool:
        """Whether a replay gives what eager work gave, in the pool too."""
        self.workload.fill(key, seed=number)
        (output,) = self._replay_one(key)
        expected = self._expected[key, number]
        return same_bits(output, expected) and same_bits(self._kept[key], expected)

    def _held(self) -> dict[str, int]:
        """Of the device, the host and the driver. ``driver_bytes`` is what the device has less
        without what PyTorch reports as reserved; ``addresses`` counts reservations.
        """
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        calls = driver_calls(self._device)
        said = self._pool.stats()
        status = Path("/proc/self/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return {
            "driver_bytes": total - free - torch.cuda.memory_reserved(self._device),
            "host_bytes": int(resident.split()[1]) << 10,
            "host_maps": len(Path("/proc/self/maps").read_text().splitlines()),
            "handles": calls("cuMemCreate") - calls("cuMemRelease"),
            "addresses": calls("cuMemAddressReserve") - calls("cuMemAddressFree"),
            **{name: said[name] for name in ("reserved_bytes", "ranges", "page_mappings")},
        }


class ScratchGraph:
    """A graph of blocks that are all live at once, and of nothing else.

    Attributes:
        given (Tensor): what it writes to all of them.
        result (Tensor): the sum of what it reads there later.
    """

    def __init__(self, pool: cgp.GraphPool, total: int, seed: int, cycles: int = 0) -> None:
        self.given = torch.ones((), dtype=torch.int32, device=pool.device)
        self.result = torch.zeros((), dtype=torch.int64, device=pool.device)
        chance = random.Random(seed)
        sizes: list[int] = []
        while sum(sizes) < total:
            sizes.append(min(chance.randrange(1, 65) << 20, total - sum(sizes)))
        self._values = total // 4
        self._graph = torch.cuda.CUDAGraph()
        with cgp.graph(self._graph, pool):
            blocks = [self.given.expand(size // 4).contiguous() for size in sizes]
            torch.cuda._sleep(cycles)
            self.result.zero_()
            for block in blocks:
                self.result.add_(block.sum(dtype=torch.int64))
            del blocks, block

    def replay(self, value: int) -> Tensor:
        """Returns a copy of whether the result is right, which nobody has waited for."""
        self.given.fill_(value)
        self._graph.replay()
        return self.result == self._values * value


class Step:
    """One of training: of ``layers`` layers, each of which saves 64 MiB for its gradients."""

    def __init__(
        self, device: torch.device, seed: int, layers: int = 16, width: int = 4096
    ) -> None:
        torch.manual_seed(seed)
        with torch.device(device):
            made = linears(layers, width, width, device)
            self._model = nn.Sequential(*(m for one in made for m in (one, nn.GELU())))
            self._given = torch.randn(width, width, dtype=torch.bfloat16)
            self.loss = torch.zeros(())
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, rows: int) -> Tensor:
        self._model.zero_grad(set_to_none=False)
        return self._model(self._given[:rows]).float().square().mean()

    def results(self) -> list[Tensor]:
        return [self.loss.clone(), *(p.grad.clone() for p in self._model.parameters())]


class Lending:
    """Eager steps beside a pool whose graph has ``total`` bytes of scratch."""

    def __init__(self, device: torch.device, seed: int, total: int = 2 * GIB) -> None:
        cgp.enable()
        self._device = device
        self._pool = cgp.GraphPool(device)
        self._graph = ScratchGraph(self._pool, total, seed)
        self._slow = ScratchGraph(self._pool, total, seed + 1, cycles=1_000_000_000)
        self._step = Step(device, seed)

    def run(self, steps: int) -> dict[str, Any]:
        for lends in (False, True):  # what libraries make once
            self._train(3, lends, rows=64)
        lent = self._train(steps, True)
        alone = self._train(steps, False)
        same = all(map(same_bits, lent.pop("results"), alone.pop("results")))
        free = scratch_bytes(self._pool.snapshot())
        return {
            "steps": steps,
            "reserved_bytes": self._pool.stats()["reserved_bytes"],
            "peak_bytes": {"lent": lent["peak_bytes"], "alone": alone["peak_bytes"]},
            "step_ratio": lent["step_seconds"] / alone["step_seconds"],
            "equal": same and lent["replays_right"] and alone["replays_right"],
            "free_bytes": free,
            "lendable_bytes": self._pool.stats()["lendable_bytes"],
            "extra_bytes": self._extra_bytes(free * 95 // 100),
            **self._beside_a_kernel(),
        }

    def _train(self, steps: int, lends: bool, rows: int = 4096) -> dict[str, Any]:
        """Steps, between replays. ``peak_bytes`` is the most that the device has less meanwhile.
        With a loan, what lets the host wait for the device is an error.
        """
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.synchronize(self._device)
        free = lowest = torch.cuda.mem_get_info(self._device)[0]
        right, seconds = [], []
        for number in range(steps):
            right.append(self._graph.replay(2 * number + 1))
            began = time.perf_counter()
            with self._lending() if lends else contextlib.nullcontext():
                loss = self._step.forward(rows)
                lowest = min(lowest, torch.cuda.mem_get_info(self._device)[0])
                loss.backward()
                lowest = min(lowest, torch.cuda.mem_get_info(self._device)[0])
                self._step.loss.copy_(loss.detach())
                del loss
            right.append(self._graph.replay(2 * number + 2))
            torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return {
            "peak_bytes": free - lowest,
            "step_seconds": median(seconds),
            "replays_right": all(bool(one) for one in right),
            "results": self._step.results(),
        }

    @contextlib.contextmanager
    def _lending(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            with self._pool.lend():
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def _extra_bytes(self, size: int) -> int:
        """What the device has less while one block of that size is borrowed."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self._device)[0]
        with self._pool.lend():
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
            extra = int(free - torch.cuda.mem_get_info(self._device)[0])
            del block
        return extra

    def _beside_a_kernel(self) -> dict[str, Any]:
        """Whether a loan, what is computed in it, and the replay after it wait on the device, and
        the host does not: for a graph on another stream that takes half a second between its
        writing and its reading.
        """
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        torch.cuda.synchronize(self._device)
        ran = torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            right = [self._slow.replay(5)]
            ran.record()
        began = time.perf_counter()
        with self._lending():
            block = torch.full((GIB,), 3, dtype=torch.uint8, device=self._device)
            total.copy_(block.sum(dtype=torch.int64))
            del block
        right.append(self._graph.replay(7))
        seconds = time.perf_counter() - began
        waited = bool(ran.query())
        torch.cuda.synchronize(self._device)
        right.append(total == 3 * GIB)
        return {
            "loan_seconds": seconds,
            "waited": waited,
            "ordered": all(bool(one) for one in right),
        }
