#!/usr/bin/env python3
"""One layer of a mixture of experts in PyTorch, from 1.13 on: the peer of benchmarks/moe_layer.cpp, run by benchmarks/moe.py.

Prints a JSON object: the milliseconds of each round, of the forward pass alone and with the backward pass, and the loss.

  torch_moe.py --numbers FILE --form dropless --top-k 2 --rounds 5                   as transformers' Mixtral: by index, expert by expert
  torch_moe.py --numbers FILE --form one-hot --slots 320 --top-k 2 --rounds 5        as GShard and Switch
"""
import argparse
import json
import os
import sys
import time

import torch
from torch.nn import functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests"))
import gpt2_oracle  # noqa: E402


def numbers_of(path):
    tensors = {name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
               for name, (_, shape, data) in gpt2_oracle.read(path).items()}  # fmt: skip
    tensors["x"] = tensors["x"][0]  # of one place
    return {name.replace("/", ".").removeprefix("experts."): tensor.requires_grad_() for name, tensor in tensors.items()}


def routed(w, top_k):
    best, chosen = (w["x"] @ w["router"]).softmax(-1).topk(top_k, dim=-1)
    return best / best.sum(-1, keepdim=True), chosen


def dropless(w, options):
    """The rows of each expert by index, one expert after the other."""
    weights, chosen = routed(w, options.top_k)
    y = torch.zeros_like(w["x"])
    for i in range(w["router"].shape[1]):
        token, k = torch.where(chosen == i)
        if token.numel() == 0:
            continue
        rows = w["x"][token]
        rows = (F.silu(rows @ w["w_gate"][i]) * (rows @ w["w_up"][i])) @ w["w_down"][i].T
        y.index_add_(0, token, rows * weights[token, k, None])
    return y


def one_hot(w, options):
    """Dispatch and combine are products with tensors of tokens x experts x slots."""
    weights, chosen = routed(w, options.top_k)
    expert = F.one_hot(chosen, w["router"].shape[1]).float()
    rows = expert.flatten(0, 1)
    place = ((rows.cumsum(0) - rows) * rows).sum(-1).view(chosen.shape)
    slot = (place[..., None] == torch.arange(options.slots)).float()
    combine = torch.einsum("tkx,tkc->txc", expert * weights[..., None], slot)
    dispatch = (combine.detach() > 0).float()
    sent = torch.einsum("txc,tm->xcm", dispatch, w["x"])
    hidden = F.silu(torch.bmm(sent, w["w_gate"])) * torch.bmm(sent, w["w_up"])
    return torch.einsum("txc,xcm->tm", combine, torch.bmm(hidden, w["w_down"].transpose(1, 2)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="store_true", help="print PyTorch's version and leave")
    parser.add_argument("--numbers", metavar="FILE", help="what moe_layer --save wrote")
    parser.add_argument("--form", choices=["dropless", "one-hot"])
    for name, default in (("top-k", 2), ("slots", 0), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    options = parser.parse_args()
    if options.version:
        print(torch.__version__)
        return
    torch.set_num_threads(options.threads)
    w = numbers_of(options.numbers)
    form = dropless if options.form == "dropless" else one_hot
    times = {"forward": [], "both": []}
    for turn in range(options.rounds + 1):  # the first one does not count
        for kind, found in times.items():
            for tensor in w.values():
                tensor.grad = None
            begin = time.perf_counter()
            with torch.set_grad_enabled(kind == "both"):
                loss = form(w, options).square().mean()
            if kind == "both":
                loss.backward()
            if turn > 0:
                found.append(1e3 * (time.perf_counter() - begin))
    print(json.dumps({**times, "loss": loss.item()}))


if __name__ == "__main__":
    main()
