"""A model that answers and learns in turn: its CUDA graphs sleep while it is trained.

As in reinforcement learning: the model writes answers by captured graphs, is trained on them
eagerly, and writes the next ones by the same graphs with its new weights. While it is trained, the
memory of the graphs belongs to the training step. Prints a line for each round.

    python examples/rollout.py
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import cudagraph_pool as cgp

HIDDEN, HEADS, LAYERS, VOCABULARY = 512, 8, 4, 4096
SIZES = (16, 32, 64)  # answers at a time
CONTEXT, ANSWER = 128, 16  # tokens that are read, and written


class Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.feed = nn.Sequential(
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 4 * HIDDEN),
            nn.GELU(),
            nn.Linear(4 * HIDDEN, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Policy(nn.Module):  # type: ignore[misc]
    """The logits of the token that follows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens))[:, -1])


@torch.inference_mode()
def write(runner: cgp.GraphRunner, prompts: Tensor) -> Tensor:
    """The prompts, and an answer to each."""
    tokens = prompts
    for _ in range(ANSWER):
        chances = runner(tokens[:, -CONTEXT:]).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], 1)
    return tokens


def rewards(tokens: Tensor) -> Tensor:
    """Of each answer: how much of it is even."""
    return (tokens[:, CONTEXT:] % 2 == 0).float().mean(1)


def train(policy: Policy, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Makes answers that are better than the others more likely. The weights change in place."""
    advantage = rewards(tokens) - rewards(tokens).mean()
    for end in range(CONTEXT, CONTEXT + ANSWER):
        logits = policy(tokens[:, end - CONTEXT : end])
        loss = F.cross_entropy(logits, tokens[:, end], reduction="none")
        (advantage * loss).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "This example captures CUDA graphs, and torch finds no CUDA device here.",
            file=sys.stderr,
        )
        return 1
    torch.manual_seed(0)
    cgp.enable()
    policy = Policy().cuda()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    pool = cgp.GraphPool()
    runner = cgp.GraphRunner(policy, sizes=SIZES, pool=pool, progress=False)
    probes = {size: torch.randint(VOCABULARY, (size, CONTEXT), device="cuda") for size in SIZES}
    with torch.inference_mode():
        answered = {size: runner(probe).clone() for size, probe in probes.items()}
    for number in range(1, options.rounds + 1):
        prompts = torch.randint(VOCABULARY, (SIZES[-1], CONTEXT), device="cuda")
        tokens = write(runner, prompts).clone()  # a tensor of inference mode cannot be trained on

        given = runner.sleep()
        train(policy, optimizer, tokens)
        runner.wake()

        with torch.inference_mode():
            for size, probe in probes.items():
                before, answered[size] = answered[size], runner(probe).clone()
                error = (answered[size] - policy(probe)).abs().max().item()
                change = (answered[size] - before).abs().max().item()
                if not error < change / 100:
                    print(
                        f"{size} answers: {error} beside eager's, {change} since", file=sys.stderr
                    )
                    return 1
        print(
            f"round {number}: {rewards(tokens).mean():.0%} even; while it was trained, the graphs "
            f"gave back {given / 2**20:.0f} MiB; they were back in "
            f"{pool.stats()['last_wake_seconds'] * 1e3:.1f} ms, and compute with the new weights",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
