"""What the graph trees of torch.compile cost: PyTorch's own allocator and cudagraph_pool.

Each model is compiled with mode="reduce-overhead" and run for all of its sizes, smallest first,
until each has its graphs; once under each allocator, in a process of its own. Both find the same
kernels in a cache that a run before has filled, so that outputs can be compared bit for bit and no
tuning of kernels counts as memory. Prints the README's table and writes one JSON file. Exit code 0
if every output is right and no tree costs more than under PyTorch's own allocator, 1 if not, 2
without GPU.

    python benchmarks/compiled_models.py --output compiled.json
    python benchmarks/compiled_models.py --models mlp resnet18_training --output compiled.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _command import device, positive, write_report
from _team import WorkerError, run_apart
from readme_table import table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ALLOCATORS = ("stock", "ours")

# A size's first run warms up, its second records; the third and the fourth are compared.
_ROUNDS = 4


class Model:
    """A module whose forward gives a tensor: the loss if it is to be trained.

    Args:
        module: on the GPU.
        sizes: the first dimension of the input, or the second for tokens.
        fill: makes the input of a size, from a generator.
        dynamic: which dimension of the input that is.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sizes: Sequence[int],
        fill: Callable[[int, torch.Generator], Tensor],
        dynamic: int,
    ) -> None:
        self.module = module
        self.sizes = sizes
        self.fill = fill
        self.dynamic = dynamic


def _mlp(training: bool) -> Model:
    import torch

    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)]
        layers += [torch.nn.LayerNorm(1024)]
    return _of_rows(torch.nn.Sequential(*layers), (1024,), [64, 200, 512, 1000, 2048], training)


def _resnet18(training: bool) -> Model:
    from torchvision.models import resnet18

    return _of_rows(resnet18(weights=None), (3, 224, 224), [2, 6, 12, 24, 40], training)


def _vit(training: bool) -> Model:
    from torchvision.models import VisionTransformer

    module = VisionTransformer(
        image_size=224, patch_size=16, num_layers=4, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    return _of_rows(module, (3, 224, 224), [2, 5, 12, 30], training)


def _convolutions(training: bool) -> Model:
    """An encoder and decoder with skips: what lives long and short stands side by side."""
    import torch

    class UNet(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            widths = [3, 32, 64, 128]
            self.down = torch.nn.ModuleList(
                torch.nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)
            )
            self.up = torch.nn.ModuleList(
                torch.nn.Conv2d(a + b, b, 3, padding=1) for a, b in [(128, 64), (64, 32)]
            )
            self.last = torch.nn.Conv2d(32, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            skips = []
            for conv in self.down:
                x = conv(x).relu()
                skips.append(x)
                x = torch.nn.functional.max_pool2d(x, 2)
            x = torch.nn.functional.interpolate(x, scale_factor=2.0)
            for conv, skip in zip(self.up, skips[1::-1], strict=True):
                x = torch.nn.functional.interpolate(x, scale_factor=2.0)
                x = conv(torch.cat([x, skip], 1)).relu()
            return self.last(x)

    return _of_rows(UNet(), (3, 128, 128), [2, 7, 16, 33, 48], training)


def _gpt2(training: bool) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, vocab_size=8192, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False
    )
    return _of_tokens(GPT2LMHeadModel(config), config.vocab_size, training)


def _llama(training: bool) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=12,
        vocab_size=8192,
        max_position_embeddings=1024,
        use_cache=False,
    )
    return _of_tokens(LlamaForCausalLM(config), config.vocab_size, training)


def _of_rows(
    module: torch.nn.Module, shape: Sequence[int], sizes: Sequence[int], training: bool
) -> Model:
    import torch

    class Loss(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x).float().square().mean()

    def fill(rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    return Model(Loss() if training else module, sizes, fill, dynamic=0)


def _of_tokens(module: torch.nn.Module, vocabulary: int, training: bool) -> Model:
    import torch

    class Logits(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, tokens: Tensor) -> Tensor:
            logits = self.module(input_ids=tokens).logits
            if not training:
                return logits
            flat = logits[:, :-1].float().flatten(0, 1)
            return torch.nn.functional.cross_entropy(flat, tokens[:, 1:].flatten())

    def fill(length: int, generator: torch.Generator) -> Tensor:
        return torch.randint(vocabulary, (4, length), generator=generator, device="cuda")

    return Model(Logits(), [48, 100, 256, 512], fill, dynamic=1)


MODELS: dict[str, Callable[[], Model]] = {
    "mlp": lambda: _mlp(False),
    "resnet18": lambda: _resnet18(False),
    "vit": lambda: _vit(False),
    "unet": lambda: _convolutions(False),
    "gpt2": lambda: _gpt2(False),
    "llama": lambda: _llama(False),
    "mlp_training": lambda: _mlp(True),
    "resnet18_training": lambda: _resnet18(True),
    "unet_training": lambda: _convolutions(True),
    "gpt2_training": lambda: _gpt2(True),
}


class Measured:
    """One model under one allocator, in this process."""

    def __init__(self, name: str, ours: bool) -> None:
        import torch

        if ours:
            import cudagraph_pool

            cudagraph_pool.enable()
        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        self._ours = ours
        self._training = name.endswith("_training")
        self._model = MODELS[name]()
        self._module = self._model.module.to("cuda", torch.bfloat16).train(self._training)
        self._compiled = torch.compile(self._module, mode="reduce-overhead")

    def run(self) -> dict[str, Any]:
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        start = time.perf_counter()
        for turn in range(_ROUNDS - 2):
            for size in self._model.sizes:
                self._step(size, seed=turn)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        digests = [{size: self._digest(size) for size in self._model.sizes} for _ in range(2)]
        return {
            "reserved_bytes": self._reserved(),
            "graphs": self._graphs(),
            "seconds": seconds,
            "outputs": digests[0],
            "repeatable": digests[0] == digests[1],
        }

    def _step(self, size: int, seed: int) -> list[Tensor]:
        """The outputs, which the next step overwrites."""
        import torch

        generator = torch.Generator("cuda").manual_seed(1000 * seed + size)
        x = self._model.fill(size, generator)
        torch._dynamo.maybe_mark_dynamic(x, self._model.dynamic)
        torch.compiler.cudagraph_mark_step_begin()
        if not self._training:
            with torch.no_grad():
                return [self._compiled(x)]
        self._module.zero_grad(set_to_none=True)
        loss = self._compiled(x)
        loss.backward()
        return [loss, *(p.grad for p in self._module.parameters() if p.grad is not None)]

    def _digest(self, size: int) -> str:
        import torch

        from cudagraph_pool._measure import digest_of

        outputs = self._step(size, seed=77)
        torch.cuda.synchronize()
        if not all(bool(output.isfinite().all()) for output in outputs):
            raise RuntimeError(f"values of size {size} are not finite")
        return digest_of(outputs)

    def _manager(self) -> Any:
        import torch
        from torch._inductor.cudagraph_trees import get_manager

        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        if manager is None:
            raise RuntimeError("torch.compile made no graphs of this model")
        return manager

    def _graphs(self) -> int:
        manager = self._manager()
        return sum(1 + root.num_descendants() for root in manager.get_roots())

    def _reserved(self) -> int:
        import torch

        pool = tuple(self._manager().cuda_graphs_thread_pool)
        if self._ours:
            from cudagraph_pool import _torch

            # Fails if the tree's pool is none of ours.
            return _torch.stats(torch.cuda.current_device(), pool)["reserved_bytes"]
        return sum(
            segment["total_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == pool
        )


def _measure_model(name: str, cache: Path, timeout: float) -> dict[str, Any]:
    """Fills the cache, then measures under both allocators side by side."""
    # Triton's and inductor's caches lie in folders of this model: others fill theirs meanwhile.
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / name),
        "TRITON_CACHE_DIR": str(cache / name / "triton"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }

    def run(allocator: str) -> dict[str, Any]:
        command = [__file__, "--worker", name, "--allocator", allocator]
        try:
            return run_apart(command, environment, timeout)[0]
        except WorkerError as error:
            return {"error": str(error)}

    filled = run("stock")
    if "error" in filled:
        return {"model": name, "stock": filled, "ours": filled}
    with ThreadPoolExecutor(len(ALLOCATORS)) as executor:
        results = dict(zip(ALLOCATORS, executor.map(run, ALLOCATORS), strict=True))
    return {"model": name, **results}


def _judge(row: dict[str, Any]) -> tuple[bool, str]:
    """Whether all is well, and what to say of the outputs."""
    stock, ours = row["stock"], row["ours"]
    for side in (stock, ours):
        if "error" in side:
            return False, f"FAILED {side['error']}"
    no_larger = ours["reserved_bytes"] <= stock["reserved_bytes"]
    more = "" if no_larger else ", reserves MORE than stock"
    if not stock["repeatable"]:
        return no_larger, f"unrepeatable{more}"
    wrong = [size for size, digest in stock["outputs"].items() if ours["outputs"][size] != digest]
    if wrong:
        return False, f"WRONG at sizes {wrong}"
    return no_larger, f"{len(stock['outputs'])} = stock{more}"


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """What the report says of a model: a verdict in the place of all outputs."""
    sides = {
        name: {key: value for key, value in row[name].items() if key != "outputs"}
        for name in ALLOCATORS
    }
    return {"model": row["model"], **sides, "outputs": _judge(row)[1]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--at-once", type=positive, default=5, help="models measured side by side")
    parser.add_argument("--timeout", type=positive, default=200, help="seconds of one process")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--worker", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--allocator", choices=ALLOCATORS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        print(json.dumps(Measured(options.worker, options.allocator == "ours").run()))
        return 0
    if options.output is None:
        parser.error("the following arguments are required: --output")
    machine = device()
    if machine is None:
        print("compiled_models.py: no CUDA device", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(options.at_once) as executor:
        rows = list(
            executor.map(
                lambda name: _measure_model(name, Path(cache), options.timeout), options.models
            )
        )
    report = {**machine, "rows": [_figures(row) for row in rows]}
    write_report(report, options.output)
    print("\n".join(table(report)))
    verdicts = {row["model"]: _judge(row) for row in rows}
    for name, (_, said) in verdicts.items():
        print(f"{name}: {said}")
    return 0 if all(good for good, _ in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
