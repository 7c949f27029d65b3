"""Programs that nobody writes, each against something that a pool may count on."""

from __future__ import annotations

import random

from models import Transformer
from program import Program, batch_sizes

PAGE = 2 << 20


def anything(program: Program, chance: random.Random) -> None:
    largest = chance.choice([PAGE // 2, 4 * PAGE, 32 * PAGE, 256 * PAGE])
    survival = chance.choice([0, 0.02, 0.2])
    old: list[int] = []
    for _ in range(chance.randint(3, 40)):
        program.begin(chance.randint(1, 1000))
        own: list[int] = []
        for _ in range(chance.randint(5, 200)):
            if own and chance.random() < 0.48:
                program.free(own.pop(chance.randrange(len(own))))
            else:
                own.append(
                    program.take(int(largest * chance.random() ** chance.choice([1, 3, 6])) + 1)
                )
            if old and chance.random() < 0.02:
                program.free(old.pop(chance.randrange(len(old))))
        for block in own:
            if chance.random() < survival:
                old.append(block)
            else:
                program.free(block)


def sawtooth(program: Program, chance: random.Random) -> None:
    for _ in program.graphs(range(1, 1 + chance.randint(3, 20))):
        blocks: list[int] = []
        count = chance.randint(5, 60)
        unit = chance.choice(
            [PAGE // 3, PAGE + 512, 3 * PAGE - 512, int(PAGE * chance.uniform(0.5, 9))]
        )
        for _ in range(chance.randint(1, 4)):
            for i in range(count):
                blocks.append(program.take(unit * (i % 7 + 1) + chance.randint(0, 3) * 512))
            if chance.random() < 0.5:
                chance.shuffle(blocks)
            while len(blocks) > chance.randint(0, 3):
                program.free(blocks.pop() if chance.random() < 0.7 else blocks.pop(0))
        program.free(*blocks)


def extremes(program: Program, chance: random.Random) -> None:
    """From a byte to 8 GiB."""
    for _ in program.graphs(range(1, 1 + chance.randint(2, 12))):
        blocks: list[tuple[int, int]] = []
        live = 0
        for _ in range(chance.randint(5, 80)):
            size = int(2 ** chance.uniform(0, 33))
            if live + size > 100 << 30:
                continue
            live += size
            blocks.append((program.take(size), size))
            if chance.random() < 0.5:
                block, size = blocks.pop(chance.randrange(len(blocks)))
                live -= size
                program.free(block)
        chance.shuffle(blocks)
        for block, size in blocks:
            if not (size < PAGE and chance.random() < 0.3):
                program.free(block)


def tiny(program: Program, chance: random.Random) -> None:
    for _ in program.graphs(range(1, 1 + chance.randint(3, 30))):
        blocks: list[int] = []
        for _ in range(chance.randint(50, 400)):
            blocks.append(program.take(chance.choice([1, 8, 512, 513, 1024, 4096, 65536])))
            if chance.random() < 0.3:
                large = program.take(chance.randint(1, 12 * PAGE))
                program.take(chance.randint(1, 3000))
                program.free(large)
            if chance.random() < 0.5 and blocks:
                program.free(blocks.pop(chance.randrange(len(blocks))))


def comb(program: Program, chance: random.Random) -> None:
    """Every so-many-th block stays."""
    unit = chance.choice([PAGE, PAGE + 512, PAGE * 2, PAGE // 2 + 512, PAGE - 512])
    every = chance.choice([2, 3, 4])
    old: list[int] = []
    for _ in program.graphs(range(1, 1 + chance.randint(3, 12))):
        count = chance.randint(10, 80)
        for i, block in enumerate([program.take(unit) for _ in range(count)]):
            if i % every == 0:
                old.append(block)
            else:
                program.free(block)
        program.free(*[program.take(unit * chance.randint(2, 9)) for _ in range(count // 6)])
        if chance.random() < 0.6:
            for _ in range(len(old) // 2):
                program.free(old.pop(chance.randrange(len(old))))


def pinned(program: Program, chance: random.Random) -> None:
    """A tiny survivor in the middle of large temporary work, again and again."""
    for _ in program.graphs(range(1, 1 + chance.randint(3, 20))):
        blocks: list[int] = []
        for _ in range(chance.randint(5, 40)):
            blocks.append(program.take(int(PAGE * chance.uniform(0.3, 6))))
            program.take(chance.choice([512, 4096, 100000]))
        chance.shuffle(blocks)
        program.free(*blocks)


def liar(program: Program, chance: random.Random) -> None:
    """Begins like the capture before at another scale, and then stops or does something else."""
    steps = chance.randint(10, 60)
    sizes = [int(2 ** chance.uniform(10, 24)) for _ in range(steps)]
    lives = [chance.randint(1, steps) for _ in range(steps)]
    powers = [chance.choice([0, 1, 1, 1, 2]) for _ in range(chance.randint(1, steps))]
    for _ in range(chance.randint(4, 25)):
        scale = chance.choice([0.03, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 8, 15])
        program.begin(int(scale * 100))
        honest = chance.choice([2, 3, 5, 8, steps // 2, steps])
        rest = chance.choice([scale, scale, 0.01, 0.1, 0.5])
        live: list[tuple[int, int]] = []
        for i in range(steps):
            size = sizes[i] * (scale if i < honest else rest) ** powers[i % len(powers)]
            if size < 8 << 30:
                live.append((i + lives[i], program.take(size)))
            for end, block in list(live):
                if end <= i:
                    program.free(block)
                    live.remove((end, block))
        program.free(*(block for _, block in live))


def alternate(program: Program, chance: random.Random) -> None:
    """Two models that look alike, in turn."""
    first = Transformer(chance)
    second = Transformer(chance)
    second.hidden = first.hidden * chance.choice([1, 2])
    second.layers = chance.randint(2, 16)
    second.element = first.element
    second.small_blocks = first.small_blocks
    second.workspace = first.workspace
    batches = batch_sizes(chance, most=12)
    for i in range(chance.randint(8, 40)):
        batch = chance.choice(batches)
        program.begin(batch)
        if i % 2:
            first.run(program, batch, keep="none")
        else:
            second.run(program, batch * chance.choice([1, 2, 8]), keep="none")


def many_graphs(program: Program, chance: random.Random) -> None:
    model = Transformer(chance)
    model.layers = 1
    model.workspace = chance.choice([0, 1 << 20])
    for _ in range(chance.choice([1000, 2000, 3000])):
        batch = chance.randint(1, 512)
        program.begin(batch)
        model.run(program, batch, keep=chance.choice(["none", "none", "none", "all"]))


def edges(program: Program, chance: random.Random) -> None:
    """A granule more or less than whole pages."""
    sizes = [PAGE - 512, PAGE, PAGE + 1, PAGE + 512, 2 * PAGE - 512, 2 * PAGE, 2 * PAGE + 512]
    sizes += [PAGE // 2, PAGE // 2 + 1, 3 * PAGE // 2, 512, 511, 1]
    for _ in program.graphs(range(1, 1 + chance.randint(3, 25))):
        blocks: list[int] = []
        for _ in range(chance.randint(10, 120)):
            if blocks and chance.random() < 0.45:
                program.free(blocks.pop(chance.randrange(len(blocks))))
            else:
                blocks.append(program.take(chance.choice(sizes) * chance.choice([1, 1, 1, 5, 17])))
        for block in blocks:
            if chance.random() < 0.95:
                program.free(block)
