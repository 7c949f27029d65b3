"""transformers' continuous batching, unedited: stock PyTorch against cudagraph_pool.

A Llama-like model of a billion parameters with random weights answers prompts of mixed lengths by
``generate_batch``, which captures a graph for each padded size into a ``torch.cuda.MemPool``. Each
run has a process of its own, ours with ``CUDAGRAPH_POOL=1`` in its environment and nothing else;
stock's and ours take turns. Prints a table of medians and writes JSON. Exit code 0 if all tokens
are equal and every capture of ours was in a pool of ours, 1 if not, 2 without a GPU.

    python benchmarks/continuous_batching.py --output results/continuous_batching.json

captures  Graphs, and how many of them in pools of ours.
pool      MiB that graph pools and MemPools reserve in the end.
minimum   MiB: the most that was ever live in them at once, in whole pages. Ours only.
tokens/s  Of further calls on graphs that are there: the median of a process, and of those.
÷stock    By stock's of the same round: the median of rounds.
digest    Of all tokens of the first call.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from operator import itemgetter

import torch
from _apart import measure_apart, run_script
from _command import (
    add_common,
    add_some,
    new_parser,
    new_report,
    number,
    positive,
    verdict,
    write_report,
)
from _engine import REQUESTS, Row, beside, digest, judge
from _models import text
from _pools import cells, count_captures, measure_pools
from _team import in_turn

from cudagraph_pool._table import format_table

BATCHINGS = ("synchronous", "asynchronous")
ALLOCATORS = ("stock", "ours")


def main(argv: Sequence[str] | None = None) -> int:
    parser = new_parser(__doc__)
    add_some(parser, "--batchings", BATCHINGS)
    parser.add_argument("--prompts", type=positive, default=64)
    parser.add_argument("--tokens", type=positive, default=64, help="new ones for each prompt")
    parser.add_argument("--calls", type=positive, default=5, help="that a process times")
    add_common(parser, rounds=5)
    options = parser.parse_args(argv)
    report = new_report(options)
    asked = (options.prompts, options.tokens, options.calls)
    compared = list(itertools.product(options.batchings, ALLOCATORS))
    for turn, (batching, allocator) in in_turn(options.rounds, compared):
        found = measure_apart(__file__, batching, *asked, CUDAGRAPH_POOL=REQUESTS[allocator])
        run = {"batching": batching, "allocator": allocator, "round": turn}
        report["rows"].append({**run, **found})
        write_report(report, options.output)
    print(_table(report["rows"]))
    return verdict(judge(report["rows"], itemgetter("batching")))


def measure(batching: str, prompts: int, tokens: int, calls: int) -> Row:
    """One run, in a process that may have the pool enabled."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    captures = count_captures()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = text(
            "LlamaForCausalLM",
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=4,
            vocab_size=32_000,
            max_position_embeddings=4096,
            attn_implementation="sdpa",
        )
    model = model.to(torch.bfloat16).eval()
    chance = random.Random(0)
    inputs = [
        [chance.randrange(3, model.config.vocab_size) for _ in range(chance.randint(16, 512))]
        for _ in range(prompts)
    ]
    # Sizes of its own choice depend on the memory that is free. No token ends an answer early.
    arguments = {
        "generation_config": GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(
            num_blocks=256,
            max_batch_tokens=1024,
            use_cuda_graph=True,
            use_async_batching=batching == "asynchronous",
        ),
        "persistent_manager": True,
    }
    answers = model.generate_batch(inputs, **arguments)
    generated = [answer.generated_tokens for answer in answers.values()]
    count = sum(map(len, generated))
    rates = []
    for _ in range(calls):
        began = time.perf_counter()
        model.generate_batch(inputs, **arguments)
        rates.append(count / (time.perf_counter() - began))
    return {
        "captures": captures(),
        "tokens": count,
        "tokens_per_second": statistics.median(rates),
        "digest": digest(generated),
        **measure_pools(),
    }


def _table(rows: Sequence[Row]) -> str:
    """Pools are the same in each round."""
    head = "batching allocator captures of_ours pool minimum tokens/s ÷stock digest"
    lines = [head.split()]
    for batching, allocator in itertools.product(BATCHINGS, ALLOCATORS):
        peers = [row for row in rows if row["batching"] == batching]
        own = [row for row in peers if row["allocator"] == allocator]
        stock = [row for row in peers if row["allocator"] == "stock"]
        if own:
            rate = statistics.median(row["tokens_per_second"] for row in own)
            quotient = number(beside(own, stock, "tokens_per_second"), 1, ".3f")
            figures = [f"{rate:,.0f}", quotient, own[0]["digest"]]
            lines.append([batching, allocator, *cells(own[0]), *figures])
    return format_table(lines, width=sys.maxsize)


if __name__ == "__main__":
    sys.exit(run_script(main, measure))
