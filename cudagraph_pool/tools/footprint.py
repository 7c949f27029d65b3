"""What a model takes eagerly, compiled, and with CUDA graphs, each in a process of its own."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from .._lazy import torch
from .._table import format_table, mib
from ..integration.environment import VARIABLE
from ..switch import enable

# As often as PyTorch's dashboard runs a model for its memory. The first runs compile, and record.
_ROUNDS: Final = 5


class Way(NamedTuple):
    compile: Mapping[str, Any] | None = None  # arguments of torch.compile, if it is compiled
    ours: bool = False  # whether its graphs are in our pool

    @property
    def has_graphs(self) -> bool:
        return self.compile is not None and "mode" in self.compile


_GRAPHS: Final = {"mode": "reduce-overhead", "dynamic": False}
_DYNAMIC: Final = {"mode": "reduce-overhead", "dynamic": True}
WAYS: Final[Mapping[str, Way]] = {
    "eager": Way(),
    "compiled": Way({"dynamic": False}),
    "graphs, stock": Way(_GRAPHS),
    "graphs, ours": Way(_GRAPHS, ours=True),
    "dynamic graphs, stock": Way(_DYNAMIC),
    "dynamic graphs, ours": Way(_DYNAMIC, ours=True),
}


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one way took, in bytes."""

    allocated: int  # the peak of what tensors occupied, the model's own included
    reserved: int  # the peak of what PyTorch held
    graph_pool: int  # of reserved, what pools of graphs hold in the end
    # What the process has more in the end than with an empty context, beyond what PyTorch holds:
    # kernels, and what the driver keeps for graphs. Other processes' work shows in it.
    driver: int

    @property
    def held(self) -> int:
        """What another program could not have had."""
        return self.reserved + self.driver


# By way; text where it failed.
Found = Mapping[str, "Footprint | str"]


# One for each set of kernels: to compile them takes memory of the first that needs them.
COMPILING: Final = ("compiled", "graphs, stock", "dynamic graphs, stock")


def measure_apart(
    function: str, way: str, train: bool, environment: Mapping[str, str] = os.environ
) -> Footprint | str:
    """What a way took in a process of its own, or what went wrong."""
    # The package that this process runs, not one that lies in the current folder.
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), VARIABLE: "0"}
    command = [sys.executable, "-P", "-m", __name__, function, way, *["train"] * train]
    done = subprocess.run(command, env=environment, capture_output=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return f"the process ended with code {done.returncode}: {last}"
    return Footprint(**json.loads(lines[-1]))


def measure(make: Callable[[], Any], way: Way, train: bool) -> Footprint:
    """What a way takes in this process, which has not used CUDA before."""
    if way.ours:
        enable()
    torch.cuda.synchronize()  # from here on there is a context
    before = _used()
    model, calls = _made(make())
    if isinstance(model, torch.nn.Module):
        model.train(train)
    run = model if way.compile is None else torch.compile(model, **way.compile)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.set_grad_enabled(train):
        for _ in range(_ROUNDS):
            for arguments in calls:
                if way.has_graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                if train and isinstance(model, torch.nn.Module):
                    model.zero_grad(set_to_none=True)
                output = run(*arguments)
                if train:
                    _loss(output).backward()
                del output
    torch.cuda.synchronize()
    segments = torch.cuda.memory_snapshot()
    pools = [s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    if way.has_graphs and not pools:
        raise RuntimeError("torch.compile made no CUDA graphs of it")
    return Footprint(
        allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.max_memory_reserved(),
        graph_pool=sum(pools) if way.has_graphs else 0,
        driver=max(0, _used() - before - torch.cuda.memory_reserved()),
    )


def _made(returned: Any) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    match returned:
        case (model, tuple() as arguments) if callable(model):
            return model, [arguments]
        case (model, [*calls]) if callable(model) and all(isinstance(c, tuple) for c in calls):
            return model, calls
    raise TypeError(
        "the function must return a model and the arguments of a call, as (model, (x, y)), or of "
        "several: (model, [(x, y), ...])"
    )


def _loss(output: Any) -> Any:
    """The output itself, or the mean of its first tensor that a gradient can come from."""
    from torch.utils._pytree import tree_leaves

    for first in tree_leaves(output):
        if getattr(first, "requires_grad", False):
            return first if first.numel() == 1 else first.float().mean()
    raise RuntimeError("no output of the model requires gradients, so that --train has no loss")


def _used() -> int:
    """Of the device, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def ratio(found: Found, way: str) -> float | None:
    """PyTorch's dashboard's: the peak of what is allocated eagerly, divided by this one's."""
    measured = _measured(found)
    if "eager" not in measured or way not in measured:
        return None
    return measured["eager"].allocated / measured[way].allocated


def table(found: Found) -> str:
    rows = [["way", "allocated", "ratio", "reserved", "graph pool", "driver", "held"]]
    for way, own in _measured(found).items():
        compression = ratio(found, way)
        pool = own.graph_pool if WAYS[way].has_graphs else None
        sizes = map(mib, (own.reserved, pool, own.driver, own.held))
        rows.append([way, mib(own.allocated), f"{compression:.2f}" if compression else "-", *sizes])
    failed = [f"{way}: {error}" for way, error in found.items() if isinstance(error, str)]
    return "\n".join([format_table(rows), *failed])


def as_json(found: Found) -> dict[str, Any]:
    """By way, in bytes, with the compression ratio; of a way that failed the error."""
    rows: dict[str, Any] = {way: {"error": error} for way, error in found.items()}
    for way, own in _measured(found).items():
        rows[way] = {**asdict(own), "held": own.held, "compression_ratio": ratio(found, way)}
    return rows


def _measured(found: Found) -> dict[str, Footprint]:
    return {way: own for way, own in found.items() if isinstance(own, Footprint)}


def _work(function: str, way: str, train: str = "") -> None:
    """The process of one way; its last line on stdout is JSON."""
    answer, sys.stdout = sys.stdout, sys.stderr  # whatever the model prints
    sys.path.insert(0, "")  # modules of the current folder are found
    module, _, name = function.partition(":")
    measured = measure(getattr(importlib.import_module(module), name), WAYS[way], bool(train))
    print(json.dumps(asdict(measured)), file=answer)


if __name__ == "__main__":
    _work(*sys.argv[1:])
