"""Models that made-up programs run: a transformer, a convolutional network, a training step."""

from __future__ import annotations

import random

from program import Program, round_up


class Transformer:
    """Of random shape and habits."""

    def __init__(self, chance: random.Random) -> None:
        self.layers = chance.randint(2, 16)
        self.hidden = chance.choice([512, 768, 1024, 2048, 4096])
        self.feed_forward = int(self.hidden * chance.choice([2.67, 4, 3.5]))
        self.vocabulary = chance.choice([0, 32000, 50257, 128256, 151936])
        self.query_groups = chance.choice([1, 2, 4, 8])
        self.heads = chance.choice([8, 12, 16, 32])
        self.element = chance.choice([2, 2, 4])
        self.workspace = chance.choice([0, 0, 1 << 20, 4 << 20, 32 << 20, 8519680])
        self.attends_quadratically = chance.random() < 0.5
        self.padding = chance.choice([1, 1, 8, 16, 64])
        self.keeps = chance.choice(["last", "all", "none"])
        self.gated = chance.random() < 0.6
        self.workspace_from = chance.choice([0, 0, 16, 64])  # tokens on
        self.small_blocks = chance.random() < 0.7
        self.split_keys = chance.random() < 0.3

    def run(
        self,
        program: Program,
        tokens: int,
        length: int = 1,
        keep: str | None = None,
        prefill: bool = False,
    ) -> int | None:
        """Runs sequences of `length`, `tokens` in all; returns the output if it is kept."""
        take = program.take
        padded = round_up(tokens, self.padding)
        activation = padded * self.hidden * self.element
        x = take(activation)
        position = [take(padded * 8)] if self.small_blocks else []
        for _ in range(self.layers):
            x = self._attention(program, x, tokens, length, prefill)
            normed = take(activation)
            gate = take(padded * self.feed_forward * self.element * (2 if self.gated else 1))
            program.free(normed)
            inner = take(padded * self.feed_forward * self.element)
            program.free(gate)
            down = take(activation)
            program.free(inner)
            y = take(activation)
            program.free(down, x)
            x = y
        output = take(activation)
        program.free(x, *position)
        if self.vocabulary:
            rows = max(1, tokens // max(1, length)) if prefill else tokens
            logits = take(rows * self.vocabulary * self.element)
            wide = take(rows * self.vocabulary * 4)
            program.free(output, logits)
            output = wide
        if (keep or self.keeps) == "none":
            program.free(output)
            return None
        return output

    def _attention(self, program: Program, x: int, tokens: int, length: int, prefill: bool) -> int:
        take = program.take
        padded = round_up(tokens, self.padding)
        activation = padded * self.hidden * self.element
        normed = take(activation)
        keys = 2 * self.hidden // self.query_groups
        projected = take(padded * (self.hidden + keys) * self.element)
        needs_workspace = self.workspace and tokens >= self.workspace_from
        workspace = [take(self.workspace)] if needs_workspace else []
        if self.small_blocks:
            program.touch(padded * 4)
        program.free(*workspace, normed)
        if self.attends_quadratically and length > 1:
            scores_size = max(1, tokens // length) * self.heads * length * length * self.element
            scores = take(scores_size)
            probabilities = take(scores_size)
            program.free(scores)
            attended = take(activation)
            program.free(probabilities)
        else:
            attended = take(activation)
            if self.small_blocks and not prefill:
                program.touch(padded * self.heads * 4)
            if self.split_keys and tokens < 32:
                parts = take(padded * self.heads * 8 * 128 * 4)
                weights = take(padded * self.heads * 8 * 4)
                program.free(parts, weights)
        program.free(projected)
        out = take(activation)
        program.free(attended)
        y = take(activation)
        program.free(out, x)
        return y


class ConvNet:
    """Of random shape, with workspaces that depend on the layer."""

    def __init__(self, chance: random.Random) -> None:
        stages = chance.randint(3, 5)
        self.blocks = [chance.randint(1, 4) for _ in range(stages)]
        self.channels = chance.choice([32, 64, 96])
        self.resolution = chance.choice([112, 192, 224, 256, 384])
        self.element = chance.choice([2, 4])
        self.workspaces = [
            chance.choice([0, 0, 1 << 20, 8 << 20, chance.randint(1, 64 << 20)]) for _ in range(8)
        ]
        self.skips = chance.random() < 0.4
        self.workspace_from = chance.choice([0, 4, 16])  # batch on
        chance.random()  # nothing depends on it any more, but the programs of each seed stay

    def run(
        self, program: Program, batch: int, resolution: int | None = None, keep: str = "none"
    ) -> int | None:
        resolution = resolution or self.resolution
        x = program.take(batch * 3 * resolution * resolution * self.element)
        skips: list[int] = []
        channels = self.channels
        side = resolution // 2
        for i, blocks in enumerate(self.blocks):
            for j in range(blocks):
                size = batch * channels * side * side * self.element
                y = program.take(size)
                workspace = self.workspaces[(i + j) % 8] * (batch >= self.workspace_from)
                if workspace:
                    program.touch(workspace if (i + j) % 3 else workspace + batch * 4096)
                wide = program.take(size * (4 if j % 2 else 1))
                program.free(y)
                y = program.take(size)
                program.free(wide)
                if j == 0 and self.skips:
                    skips.append(x)
                else:
                    program.free(x)
                x = y
            side = max(1, side // 2)
            channels *= 2
        for skip in reversed(skips):
            y = program.take(program.live[skip] * 2)
            program.free(x, skip)
            x = y
        pooled = program.take(batch * channels * self.element)
        program.free(x)
        output = program.take(batch * 1000 * self.element)
        program.free(pooled)
        if keep == "none":
            program.free(output)
            return None
        return output


def train(
    program: Program, model: Transformer, batch: int, length: int, gradients: list[int] | None
) -> None:
    """Forward keeps activations, backward frees them. Gradients of parameters go to the list, or
    are freed where there is none.
    """
    take = program.take
    tokens = batch * length
    activation = tokens * model.hidden * model.element
    inner = tokens * model.feed_forward * model.element
    saved: list[tuple[int, ...]] = []
    x = take(activation)
    for _ in range(model.layers):
        kept = [take(activation), take(3 * activation)]
        if model.attends_quadratically:
            scores_size = batch * model.heads * length * length * model.element
            scores = take(scores_size)
            kept.append(take(scores_size))
            program.free(scores)
        kept += [take(activation), take(batch * model.heads * length * 4), take(activation)]
        kept += [take(tokens * 4), take(activation), take(inner), take(inner)]
        y = take(activation)
        saved.append((*kept, x))
        x = y
    loss: list[int] = []
    if model.vocabulary:
        logits = take(tokens * model.vocabulary * model.element)
        softmax = take(tokens * model.vocabulary * 4)
        program.free(logits)
        loss = [take(4), take(tokens * model.vocabulary * model.element)]
        program.free(softmax)
    gradient = take(activation)
    program.free(*reversed(loss))
    for *others, wide, narrow, first in reversed(saved):
        inner_gradient = take(inner)
        if model.workspace:
            program.touch(model.workspace)
        weights = [take(model.hidden * model.feed_forward * model.element)]
        program.free(narrow, wide, inner_gradient)
        y = take(activation)
        program.free(gradient)
        gradient = y
        weights.append(take(model.hidden * model.hidden * model.element))
        if gradients is None:
            program.free(*weights)
        else:
            gradients += weights
        program.free(*others, first)
    program.free(gradient, x)
