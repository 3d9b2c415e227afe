#!/usr/bin/env python3
"""Times PyTorch's training step on a CPU, for `flashgla bench model_training_step --peer`.

A LLaMA-like model of the size of the preset transformer-small, in f32: forward, backward, clipping and fused AdamW on
8 x 512 tokens, by torch.compile (which takes a minute or two to compile) or eagerly. Reads the bench's rows as JSON
from standard input, for its problem's name, and prints a row of the same form.

  flashgla bench model_training_step --threads 2 --peer "python3 scripts/torch_training_step.py --threads 2"
"""
import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, HEADS, MLP, WORDS, BATCH, LENGTH = 256, 8, 4, 768, 258, 8, 512
PROBLEM = "transformer d256 8 layers 8x512 tokens f32"


def turned(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * MLP, bias=False), nn.Linear(MLP, WIDTH, bias=False)

    def forward(self, x, cosine, sine):
        heads = self.qkv(self.attention_norm(x)).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turned(q, cosine, sine), turned(k, cosine, sine), v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens, targets, cosine, sine):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cosine, sine)
        return F.cross_entropy(F.linear(self.norm(x), self.embedding.weight).flatten(0, 1), targets.flatten())


def step_of(arguments):
    model = Model()
    loss_of = model if arguments.eager else torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = (torch.randint(0, WORDS, (BATCH, LENGTH)) for _ in range(2))
    half = WIDTH // HEADS // 2
    angles = torch.outer(torch.arange(LENGTH, dtype=torch.float32), 10000.0 ** (-torch.arange(half) / half))
    cosine, sine = angles.cos(), angles.sin()

    def step():
        loss_of(tokens, targets, cosine, sine).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10, help="that are timed, after three")
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    if not any(row["problem"] == PROBLEM for row in json.load(sys.stdin)):
        sys.exit(f"torch_training_step: the bench has no row of '{PROBLEM}'")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    step = step_of(arguments)
    times = []
    for _ in range(3 + arguments.steps):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    name = "torch_eager" if arguments.eager else "torch_compiled"
    json.dump([{"operation": "model_training_step", "implementation": name, "problem": PROBLEM,
                "milliseconds": statistics.median(times[3:])}], sys.stdout)


if __name__ == "__main__":
    main()
