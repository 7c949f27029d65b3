"""Programs of models, as they are captured: families that a seed makes a program of."""

from __future__ import annotations

import random

from models import ConvNet, Transformer, train
from program import Program, arrange, batch_sizes


def decode(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    outputs: list[int] = []
    for batch in program.graphs(arrange(chance, batch_sizes(chance))):
        if outputs and model.keeps == "last":
            program.free(outputs.pop())
        if output := model.run(program, batch):
            outputs.append(output)


def prefill(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    lengths = [64 << i for i in range(chance.randint(3, 6))]
    lengths += [length * 3 // 2 for length in lengths[:-1]]
    for length in program.graphs(arrange(chance, lengths)):
        keep = chance.choice(["none", "last"])
        model.run(program, length, length=length, prefill=True, keep=keep)


def mixed(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    prefills = [(64 << i, "p") for i in range(chance.randint(3, 6))]
    decodes = [(batch, "d") for batch in batch_sizes(chance)]
    order = chance.randint(0, 3)
    captures = prefills + decodes
    if order == 0:
        chance.shuffle(captures)
    elif order == 1:
        captures = sorted(prefills) + sorted(decodes)
    elif order == 2:
        captures = sorted(decodes) + sorted(prefills)
    else:
        chance.shuffle(prefills)
        chance.shuffle(decodes)
        half = len(decodes) // 2
        captures = decodes[:half] + prefills + decodes[half:]
    for tokens, kind in captures:
        program.begin(tokens * 10 + (kind == "p"))
        if kind == "p":
            model.run(program, tokens, length=tokens, prefill=True, keep="none")
        else:
            model.run(program, tokens, keep="none" if chance.random() < 0.5 else None)


def training(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    model.vocabulary = chance.choice([0, 32000])
    model.layers = min(model.layers, 8)
    length = chance.choice([64, 128, 197])
    survive = chance.random() < 0.5
    gradients: list[int] | None = None
    for batch in program.graphs(
        arrange(chance, [1, 2, 4, 8, 12, 16, 24, 32][: chance.randint(3, 8)])
    ):
        program.free(*(gradients or []))
        gradients = [] if survive else None
        train(program, model, batch, length, gradients)


def train_keep(program: Program, chance: random.Random) -> None:
    """Steps of one batch size after another whose gradients are kept for the next one, with an
    optimizer that works on all of them at once, in one block or in a list of blocks.
    """
    model = Transformer(chance)
    model.layers = min(model.layers, 12)
    model.vocabulary = 0
    flat = chance.choice([True, False])
    length = chance.choice([64, 128, 197])
    gradients: list[int] = []
    for batch in program.graphs(
        arrange(chance, [1, 2, 4, 8, 12, 16, 24, 32][: chance.randint(1, 6)])
    ):
        if gradients and chance.random() < 0.5:  # set to None, else added up
            program.free(*gradients)
            gradients = []
        made: list[int] = []
        train(program, model, batch, length, made)
        if gradients:
            program.free(*made)
        else:
            gradients = made
        sizes = [program.live[gradient] for gradient in gradients]
        for _ in range(chance.randint(1, 2)):
            together = [sum(sizes)] if flat else sizes
            program.free(*[program.take(size) for size in together])


def train_lengths(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    model.vocabulary = 0
    model.layers = min(model.layers, 6)
    model.attends_quadratically = True
    batch = chance.choice([1, 2, 4])
    lengths = [64, 128, 192, 256, 320, 384, 448, 512][: chance.randint(3, 8)]
    for length in program.graphs(arrange(chance, lengths)):
        train(program, model, batch, length, None)


def two_models(program: Program, chance: random.Random) -> None:
    first = Transformer(chance)
    second: Transformer | ConvNet = (
        Transformer(chance) if chance.choice([True, False]) else ConvNet(chance)
    )
    a = [("a", batch) for batch in batch_sizes(chance, most=16)]
    b = [("b", min(batch, 48)) for batch in batch_sizes(chance, most=16)]
    captures = a + b
    if chance.random() < 0.6:
        chance.shuffle(captures)
    else:
        captures = [capture for pair in zip(a, b, strict=False) for capture in pair]
    for kind, batch in captures:
        program.begin(batch)
        (first if kind == "a" else second).run(program, batch, keep="none")


def cnn(program: Program, chance: random.Random) -> None:
    model = ConvNet(chance)
    for batch in program.graphs(arrange(chance, batch_sizes(chance, most=32))):
        model.run(program, min(batch, 64), keep=chance.choice(["none", "x"]))


def cnn_resolutions(program: Program, chance: random.Random) -> None:
    model = ConvNet(chance)
    sides = [128, 160, 192, 224, 256, 320, 384, 448, 512]
    captures = [
        (batch, side)
        for batch in chance.sample([1, 2, 4, 8, 16], 3)
        for side in chance.sample(sides, 4)
    ]
    chance.shuffle(captures)
    for batch, side in captures:
        program.begin(batch * 1000 + side)
        model.run(program, batch, resolution=side)


def grid(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    model.attends_quadratically = True
    model.vocabulary = chance.choice([0, 32000])
    lengths = [32, 64, 128, 256, 384, 512]
    captures = [
        (batch, length)
        for batch in chance.sample([1, 2, 4, 8, 16, 32], 4)
        for length in chance.sample(lengths, 4)
    ]
    if chance.random() < 0.7:
        chance.shuffle(captures)
    else:
        captures.sort()
    for batch, length in captures:
        program.begin(batch * 1000 + length)
        model.run(program, batch * length, length=length, prefill=True, keep="none")


def keep_all(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    for batch in program.graphs(arrange(chance, batch_sizes(chance))):
        model.run(program, batch, keep="all")


def late_free(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    lag = chance.randint(1, 5)
    outputs: list[int] = []
    for batch in program.graphs(arrange(chance, batch_sizes(chance))):
        while len(outputs) > lag:
            program.free(outputs.pop(0 if chance.random() < 0.5 else -1))
        outputs.append(_kept(model.run(program, batch, keep="all")))


def recapture(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    held: dict[int, int] = {}
    batches = arrange(chance, batch_sizes(chance, most=20))
    for _ in range(len(batches) * 2):
        batch = chance.choice(batches)
        program.begin(batch)
        if batch in held:
            program.free(held.pop(batch))
        held[batch] = _kept(model.run(program, batch, keep="all"))


def streams(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    count = chance.randint(2, 4)
    for batch in program.graphs(arrange(chance, batch_sizes(chance, most=16))):
        for program.stream in range(count):
            model.run(program, max(1, batch // count), keep="none")


def moe(program: Program, chance: random.Random) -> None:
    take = program.take
    hidden = chance.choice([512, 1024, 2048])
    experts = chance.choice([4, 8, 16])
    layers = chance.randint(2, 8)
    vocabulary = chance.choice([0, 32000])
    for batch in program.graphs(arrange(chance, batch_sizes(chance))):
        x = take(batch * hidden * 2)
        for _ in range(layers):
            logits = take(batch * experts * 4)
            top = take(batch * 2 * 8)
            program.free(logits)
            routing = [top, take(batch * 2 * 4), take(batch * 2 * 4), take((experts + 1) * 4)]
            rows = -(-batch * 2 // (16 * experts)) * 16 * experts
            inputs = take(rows * hidden * 2)
            gate = take(rows * hidden * 4 * 2)
            program.free(inputs)
            inner = take(rows * hidden * 2 * 2)
            program.free(gate)
            y = take(rows * hidden * 2)
            program.free(inner)
            output = take(batch * hidden * 2)
            program.free(y, x)
            x = output
            program.free(*routing)
        if vocabulary:
            program.touch(batch * vocabulary * 4)
        program.free(x)


def diffusion(program: Program, chance: random.Random) -> None:
    model = ConvNet(chance)
    model.skips = True
    text = Transformer(chance)
    text.vocabulary = 0
    for batch in program.graphs(arrange(chance, batch_sizes(chance, most=12))):
        embedded = _kept(text.run(program, 77 * min(batch, 16), keep="all"))
        model.run(program, min(batch, 16))
        program.free(embedded)


def _kept(output: int | None) -> int:
    assert output is not None
    return output
