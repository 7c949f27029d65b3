"""Captures of library models as traces, without a GPU: from fake tensors, which allocate nothing.

    python benchmarks/model_traces.py --output FOLDER
    python benchmarks/model_traces.py --models bert densenet --output FOLDER --kept --train
    python benchmarks/model_traces.py --models bert --sizes $(seq 16 8 512) --output FOLDER

One trace for each model: a capture for each batch size or length, smallest first, of a forward pass
or, with --train, of a training step. What kernels allocate for themselves alone is not there.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _command import add_some, new_parser, positive
from _models import images, segmentation, text, timm, tokens, vision
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_LLAMA = {"num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}


def _text(name: str, **config: Any) -> Callable[[], nn.Module]:
    return partial(text, name, use_cache=False, **config)


# What makes it, its input of a size, and the sizes.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], Iterable[int]]] = {
    "bert": (_text("BertModel"), tokens(16), (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)),
    "convnext": (partial(vision, "convnext_tiny"), images(224), range(2, 25, 2)),
    "deeplab": (partial(segmentation, "deeplabv3_resnet50"), images(320), range(2, 10)),
    "densenet": (partial(vision, "densenet121"), images(224), range(2, 33, 3)),
    "efficientnet": (partial(timm, "efficientnet_b0"), images(224), range(2, 65, 4)),
    "fcn": (partial(segmentation, "fcn_resnet50"), images(520), range(1, 9)),
    "gpt2": (_text("GPT2LMHeadModel", n_layer=8), tokens(4), range(64, 1025, 96)),
    "llama": (_text("LlamaForCausalLM", **_LLAMA, **_HEADS), tokens(2), range(64, 2049, 192)),
    "mixer": (partial(timm, "mixer_b16_224"), images(224), range(2, 33, 3)),
    "resnet101": (partial(vision, "resnet101"), images(224), range(2, 33, 3)),
    "roberta": (_text("RobertaModel", num_hidden_layers=8), tokens(8), range(32, 513, 48)),
    "swin": (partial(vision, "swin_t"), images(224), range(2, 33, 2)),
    "vgg": (partial(vision, "vgg16"), images(224), range(1, 17)),
    "vit": (partial(vision, "vit_b_16"), images(224), range(2, 33, 3)),
}


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """While it is on, writes down which storages come and go on a device.

    ``events`` is the capture under way. What is freed between two belongs to the second.
    """

    def __init__(self, device: str, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.events: list[list[int]] = []
        self._device = device
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type == self._device:
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known or key in self._alive or storage.nbytes() == 0:
            return
        number, self._count = self._count, self._count + 1
        self.events.append([1, number, storage.nbytes(), 0])

        def freed(_: object) -> None:
            del self._alive[key]
            self.events.append([-1, number])

        self._alive[key] = weakref.ref(storage, freed)


def step_of(model: nn.Module, trains: bool) -> Callable[[Tensor], Tensor]:
    parameters = list(model.parameters())

    def step(given: Tensor) -> Tensor:
        with torch.set_grad_enabled(trains):
            output = model(given)
            if not isinstance(output, Tensor):
                output = next(iter(output.values()))
            if not trains:
                return output
            loss = output.float().square().mean()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            return torch.stack([loss.detach(), *(g.norm() for g in gradients if g is not None)])

    return step


def capture(
    name: str, trains: bool, keeps: bool, sizes: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """A capture for each size (default: the model's), its result copied out.

    If ``keeps``, results stay in the pool too.
    Autograd asks a CUDA device's driver for its context, so a training step is one of the CPU's.
    """
    make, new_input, usual = MODELS[name]
    device = "cpu" if trains else "cuda"
    graphs = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = make().train(trains)
            inputs = {size: new_input(size) for size in sizes or usual}
        torch.set_default_dtype(torch.float32)
        step = step_of(model, trains)
        results = {size: torch.empty_like(step(given)) for size, given in inputs.items()}
        gc.collect()
        known = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
        kept = []
        with Recorder(device, known) as recorder:
            for size, given in inputs.items():
                output = step(given)
                results[size].copy_(output)
                if keeps:
                    kept.append(output)
                del output
                gc.collect()
                graphs.append({"key": size, "events": recorder.events})
                recorder.events = []
    return graphs


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--models", MODELS)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--kept", action="store_true", help="results stay in the pool")
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument(
        "--sizes", nargs="+", type=positive, metavar="N", help="instead of the models' own"
    )
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    way = ("_train" if options.train else "") + ("_kept" if options.kept else "")
    for model in options.models:
        graphs = capture(model, options.train, options.kept, options.sizes)
        path = options.output / f"{model}{way}.json.gz"
        document = {"name": model + way, "torch": torch.__version__, "stock": {"reserved": 0}}
        with gzip.GzipFile(path, "wb", mtime=0) as file:
            file.write(json.dumps({**document, "graphs": graphs}, separators=(",", ":")).encode())
        print(f"{path}: {len(graphs)} graphs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
