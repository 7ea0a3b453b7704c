#!/usr/bin/env python3
"""GPT-2 in PyTorch, from 1.13 on: the peer of benchmarks/gpt2_step.py and gpt2_gpu.py, which run it.

Trains on one batch, a file of uint16 tokens, with scaled_dot_product_attention and fused AdamW if the version has them.
Prints a JSON object for each step, as examples/gpt2 --metrics does.

  torch_gpt2.py --tokens FILE --weights FILE --batch 4 --length 64                             one process
  torch_gpt2.py --tokens FILE --weights FILE --batch 4 --length 64 --parallel ddp --ranks 2    over gloo; or fsdp2
  torch_gpt2.py --tokens FILE --batch 32 --length 1024 --device cuda --dtype bf16 --compile    on a GPU; random weights
"""
import argparse
import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
import gpt2_oracle  # noqa: E402

CONTEXT, VOCABULARY = 1024, 50304
SIZES = {"gpt2-124m": (12, 768, 12), "gpt2-350m": (24, 1024, 16), "gpt2-774m": (36, 1280, 20), "gpt2-1558m": (48, 1600, 25)}  # layers, width, heads


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.attn.c_attn(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        heads = attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0)).transpose(1, 2).reshape(x.shape)
        x = x + self.attn.c_proj(heads)
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


def attention(q, k, v):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length = q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class GPT2(nn.Module):
    """The mean loss of a batch."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, inputs, targets):
        x = self.wte(inputs) + self.wpe(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def model_of(preset, path):
    """With the weights of Hugging Face's file, which stores a layer's matrices as [in, out]."""
    model = GPT2(*SIZES[preset])
    if path is None:
        for p in model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        return model
    tensors = gpt2_oracle.read(path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            _, shape, data = tensors[name]
            stored = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
            p.copy_(stored.T if name.startswith("h.") and p.dim() == 2 else stored)
    return model


def optimizer_of(model, options):
    # The leaves that decay are examples/gpt2's: all but biases and the scales of norms.
    groups = [{"params": [p for p in model.parameters() if (p.dim() == 2) == decays], "weight_decay": decay}
              for decays, decay in ((True, options.weight_decay), (False, 0.0))]  # fmt: skip
    settings = {"lr": options.learning_rate, "betas": (0.9, 0.95), "eps": 1e-8}
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4):
        return torch.optim.AdamW(groups, fused=True, **settings)
    return torch.optim.AdamW(groups, foreach=True, **settings)


def parallel(model, how):
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.h:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def train(rank, options):
    ranks = options.ranks
    torch.set_num_threads(options.threads)
    if options.parallel != "none":
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        os.environ.setdefault("USE_LIBUV", "0")  # Debian builds without it
        torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    model = parallel(model_of(options.preset, options.weights).to(options.device), options.parallel)
    optimizer = optimizer_of(model, options)
    if options.compile:
        model = torch.compile(model)
    tokens = torch.frombuffer(bytearray(open(options.tokens, "rb").read()), dtype=torch.int16).long() & 0xFFFF
    tokens = tokens.to(options.device)
    rows = tokens.view(options.batch, options.length).chunk(ranks)[rank]
    inputs = F.pad(rows[:, :-1], (1, 0))  # a row's first token has nothing before it
    for step in range(options.steps):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled=options.dtype == "bf16"):
            loss = model(inputs, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        value = loss.detach()
        if ranks > 1:
            torch.distributed.all_reduce(value)
        value = value.item() / ranks
        if rank == 0:
            print(json.dumps({"step": step, "loss": value, "step_seconds": time.perf_counter() - begin}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="store_true", help="print PyTorch's version and leave")
    parser.add_argument("--tokens", metavar="FILE", help="batch * length uint16")
    parser.add_argument("--weights", metavar="FILE", help="the initial ones: safetensors with Hugging Face's names; on a GPU random ones without it")
    parser.add_argument("--preset", default="gpt2-124m", choices=list(SIZES), help="(default %(default)s)")
    parser.add_argument("--parallel", default="none", choices=["none", "ddp", "fsdp2"])
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"], help="bf16: under autocast")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="(default %(default)s)")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    for name, default in (("batch", 4), ("length", 64), ("steps", 8), ("ranks", 1), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    for name, default in (("learning-rate", 6e-4), ("weight-decay", 0.1), ("clip", 1.0)):
        parser.add_argument(f"--{name}", type=float, default=default, help="(default %(default)s)")
    options = parser.parse_args()
    if options.version:
        print(torch.__version__)
    elif not options.tokens or not (options.weights or options.device == "cuda"):
        parser.error("--tokens and --weights say what to train on and where to begin")
    elif options.parallel == "none":
        train(0, options)
    else:
        torch.multiprocessing.spawn(train, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
