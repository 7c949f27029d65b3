"""``cudagraph-pool footprint``: what a model takes eager, compiled, and with CUDA graphs."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from .._lazy import torch
from ..tools.footprint import COMPILING, WAYS, as_json, measure_apart, table
from .errors import CommandError


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODULE:FUNCTION",
        help="returns a model, or any function of tensors, and the arguments of a call on the GPU: "
        "a tuple, or a list of tuples for calls of several sizes",
    )
    add("--train", action="store_true", help="run backward passes too, of the mean of the output")
    add("--json", type=Path, metavar="FILE", help="write the figures in bytes")


def footprint(options: argparse.Namespace) -> int:
    """What a model takes eagerly, compiled, with CUDA graphs and with graphs of dynamic shapes,
    these on PyTorch's own allocator and on the pool.
    """
    _check(options)
    for way in COMPILING:
        print(f"compiling {way}", file=sys.stderr)
        measure_apart(options.model, way, options.train)
    found = {}
    for way in WAYS:
        print(f"running {way}", file=sys.stderr)
        found[way] = measure_apart(options.model, way, options.train)
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
        print(f"wrote {options.json}", file=sys.stderr)
    return 1 if any(isinstance(own, str) for own in found.values()) else 0


def _check(options: argparse.Namespace) -> None:
    """Refuses what would fail only after minutes of measuring."""
    module, _, function = options.model.partition(":")
    if not module or not function:
        raise CommandError(f"{options.model!r} is not MODULE:FUNCTION, as in models:resnet")
    file = options.json
    if file and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
        raise CommandError(f"{file}: no file can be written there")
    if importlib.util.find_spec("torch") is None:
        raise CommandError("footprint needs torch, which is not installed here")
    if not torch.cuda.is_available():
        raise CommandError("footprint needs a GPU; torch finds no CUDA device")
