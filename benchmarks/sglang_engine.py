"""SGLang, unedited: stock PyTorch against cudagraph_pool.

A model like Llama with random weights answers the same prompts. Each run has a process of its own,
which differs by ``CUDAGRAPH_POOL`` in its environment only; they take turns. Prints a table and
writes JSON. Exit code 0 if all tokens are equal and every capture of ours was in a pool of ours, 1
if not, 2 without a GPU.

    python benchmarks/sglang_engine.py --output results/sglang_engine.json

SGLang 0.5.23 with its kernels and this package must be installed, or lie on PYTHONPATH as ``pip
install --target`` leaves them: the package is enabled by its entry points. Figures are of SGLang's
scheduler, a process of its own, and as those of vllm_engine.py.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _apart import measure_apart, run_script
from _command import add_common, add_some, new_parser, new_report, positive, verdict, write_report
from _engine import REQUESTS, Row, digest, judge
from _team import in_turn
from _vllm_models import LLAMA

from cudagraph_pool._table import format_table, mib

FIGURES = "SGLANG_ENGINE_FIGURES"  # the file that the scheduler writes
_WORKER = "_sglang_worker"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}
_VOCABULARY = 32_000
_CONFIG = {
    **LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": _VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
}
_ENGINE = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "disable_radix_cache": True,  # each call does the same work
    "disable_prefill_cuda_graph": True,
    "attention_backend": "fa3",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "bf16_gemm_backend": "torch",
    "cuda_graph_max_bs_decode": 160,
    "max_running_requests": 160,
    "mem_fraction_static": 0.5,
    "context_length": 2048,
    "random_seed": 0,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--allocators", REQUESTS, default=["stock", "ours"])
    parser.add_argument("--tokens", type=positive, default=64, help="of each of 64 prompts")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments, as JSON")
    add_common(parser, rounds=1, timeout=300)
    options = parser.parse_args(argv)
    report = new_report(options)
    for turn, allocator in in_turn(options.rounds, options.allocators):
        row = _run(allocator, {**_ENGINE, **options.engine}, options.tokens, options.timeout)
        report["rows"].append({"allocator": allocator, "round": turn, **row})
        write_report(report, options.output)
    print(table(report["rows"]))
    return verdict(judge(report["rows"], lambda row: "SGLang"))


def _run(allocator: str, engine: Row, tokens: int, seconds: float) -> Row:
    """One process, with a plugin of SGLang's that measures in the scheduler."""
    with tempfile.TemporaryDirectory() as folder:
        about = Path(folder, f"{_WORKER}-1.0.dist-info")
        about.mkdir()
        about.joinpath("METADATA").write_text(f"Name: {_WORKER}\nVersion: 1.0\n")
        about.joinpath("entry_points.txt").write_text(
            f"[sglang.srt.plugins]\n{_WORKER} = {_WORKER}:measure_captures\n"
        )
        figures = Path(folder, "figures.json")
        paths = [folder, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        variables = {
            **{name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()},
            "CUDAGRAPH_POOL": REQUESTS[allocator],
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            FIGURES: str(figures),
        }
        found = measure_apart(__file__, engine, tokens, seconds=seconds, **variables)
        return {**json.loads(figures.read_text()), **found}


def measure(engine: Row, tokens: int) -> Row:
    import sglang

    chance = random.Random(0)
    lengths = [8 + 11 * n % 150 for n in range(64)]
    prompts = [[chance.randrange(3, _VOCABULARY) for _ in range(n)] for n in lengths]
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_CONFIG))
        began = time.perf_counter()
        server = sglang.Engine(model_path=folder, **engine)
        started = time.perf_counter()
        answers = server.generate(input_ids=prompts, sampling_params=sampling)
        ended = time.perf_counter()
        server.shutdown()
    return {
        "start_seconds": started - began,
        "tokens_per_second": len(prompts) * tokens / (ended - started),
        "digest": digest([answer["output_ids"] for answer in answers]),
    }


def table(rows: Sequence[Row]) -> str:
    cells = ["allocator graphs of_ours pool minimum device KV_tokens capture digest".split()]
    for row in rows:
        sizes = [mib(row[name]) for name in ("pool", "minimum", "device")]
        counts = [str(row[name]) for name in ("captures", "captures_of_ours")]
        rest = [f"{row['kv_tokens']:,}", f"{row['capture_seconds']:.2f}", row["digest"]]
        cells.append([row["allocator"], *counts, *sizes, *rest])
    return format_table(cells)


if __name__ == "__main__":
    sys.exit(run_script(main, measure))
