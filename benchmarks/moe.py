#!/usr/bin/env python3
"""Measures one layer of a mixture of experts, forward and backward, in f32 on this machine, in turns: shardlib's layer, which
chooses rows by index, the one-hot form (products that dispatch and combine, as in GShard and Switch), and PyTorch.

The layer has a router, two experts for a token, and SwiGLU. All forms have the same random tokens and weights. Every expert has
a gradient, and so have the tokens. Dropless forms compute the same loss, and those with a capacity of 1.25 drop the same rows,
so the losses must agree. shardlib's layer also computes the router's two losses. A turn is a process of its own that has all
cores. Its first round does not count. A figure is the median of the rounds of all turns, with the middle 80 %.

The peers are PyTorch in this system (python3-torch) and in each --torch-root, in two forms: expert by expert, by index, as
transformers' Mixtral has it, and one-hot. benchmarks/moe_layer.cpp and benchmarks/torch_moe.py are the programs.

  benchmarks/moe.py                             shardlib, and the system's PyTorch
  benchmarks/moe.py --torch-root DIR            PyTorch of another Debian (scripts/torch-root.sh DIR makes it)
  benchmarks/moe.py --build build/release --turns 2 --rounds 3
"""
import json
import math
import os
import statistics
import sys
import tempfile

from common import built, count, parser_of, ran
from gpt2_step import Failed, pytorches

CAPACITY = 1.25
SHAPES = [  # tokens, width, experts, width of an expert
    (2048, 512, 8, 1024),
    (2048, 512, 64, 128),
]


class Ours:
    def __init__(self, program, form):
        self.program, self.form = program, form

    def turn(self, sizes, options, scratch):
        capacity = [] if self.form == "dropless" else [f"--capacity={CAPACITY}"]
        return json.loads(ran([self.program, *sizes, f"--form={self.form}", *capacity, f"--rounds={options.rounds}"]))


class Torch:
    def __init__(self, torch, form):
        self.torch, self.form = torch, form

    def turn(self, sizes, options, scratch):
        cores = os.cpu_count()
        out = self.torch.run(cores, scratch, ["--numbers={}/numbers.safetensors", f"--form={self.form}", f"--top-k={options.top_k}",
            f"--slots={options.slots}", f"--rounds={options.rounds}", f"--threads={cores}"], "torch_moe.py")  # fmt: skip
        return json.loads(out.splitlines()[-1])


def spread(times):
    times = sorted(times)
    low, high = times[int(0.1 * (len(times) - 1))], times[int(0.9 * (len(times) - 1))]
    return f"{statistics.median(times):7.1f}  ({low:.1f} .. {high:.1f})"


def measure(options, program, torches, shape):
    tokens, width, experts, ff = shape
    sizes = [f"--tokens={tokens}", f"--d-model={width}", f"--experts={experts}", f"--d-ff={ff}", f"--experts-per-token={options.top_k}"]
    options.slots = math.ceil(CAPACITY * tokens * options.top_k / experts)
    systems = {"dropless, by index": Ours(program, "dropless"), f"capacity {CAPACITY}, by index": Ours(program, "capacity"),
               f"capacity {CAPACITY}, one-hot": Ours(program, "one-hot")}  # fmt: skip
    for version, torch in torches.items():
        systems[f"PyTorch {version}, dropless, by index"] = Torch(torch, "dropless")
        systems[f"PyTorch {version}, capacity {CAPACITY}, one-hot"] = Torch(torch, "one-hot")
    found, losses = {name: {"forward": [], "both": []} for name in systems}, {}
    with tempfile.TemporaryDirectory() as scratch:
        ran([program, *sizes, f"--save={scratch}/numbers.safetensors"])
        for _ in range(options.turns):
            for name, system in systems.items():
                try:
                    turn = system.turn(sizes, options, scratch)
                except Failed as error:
                    sys.exit(f"moe.py: {name}: {error}")
                for kind, times in found[name].items():
                    times += turn[kind]
                losses.setdefault("dropless" if "dropless" in name else "capacity", []).append(turn["loss"])
    print(f"{tokens} tokens of width {width}, {experts} experts of width {ff}, {options.top_k} for a token")
    print(f"{'':42}{'forward, ms':>10}{'(middle 80 %)':>18}{'both, ms':>14}{'(middle 80 %)':>18}  both over dropless")
    ours = statistics.median(found["dropless, by index"]["both"])
    for name, times in found.items():
        ratio = statistics.median(times["both"]) / ours
        print(f"{name:42}{spread(times['forward']):26}  {spread(times['both']):30}{ratio:6.2f} x")
    apart = max(max(some) / min(some) - 1 for some in losses.values())
    print(f"losses of all forms that compute the same: at most {apart:.1e} apart\n")
    if apart > 1e-4:
        sys.exit("moe.py: the losses differ")


def main():
    parser = parser_of(__doc__, data=False)
    parser.add_argument("--torch-root", action="append", default=[], metavar="DIR", help="another Debian with PyTorch; may be repeated")
    parser.add_argument("--turns", type=count(), default=4, help="processes of each (default %(default)s)")
    parser.add_argument("--rounds", type=count(), default=5, help="rounds of a process (default %(default)s)")
    options = parser.parse_args()
    options.top_k = 2
    program = built(options.build, "benchmarks/moe_layer")
    torches = pytorches(options)
    for shape in SHAPES:
        measure(options, program, torches, shape)


if __name__ == "__main__":
    main()
