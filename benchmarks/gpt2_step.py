#!/usr/bin/env python3
"""A training step of GPT-2 124M in f32 with AdamW: ours and its peers on this machine, taking turns.

The model has 12 layers of width 768, 12 heads and a vocabulary padded to 50304; the tokens are random, the same batch in
every step. All systems clip the gradient norm to 1 and decay the same weights. Each turn starts a process of its own,
leaves its first steps out, and the figure is the median of the steps of all turns. Model FLOPs are those of
Chowdhery et al. 2022, appendix B, with half of the attention, as it is causal: a token takes 6 for each parameter that
multiplies (all but the table of positions), and 6 * layers * width * T.

  benchmarks/gpt2_step.py                   all of it
  benchmarks/gpt2_step.py --only ours       without peers
"""
import argparse
import json
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAYERS, WIDTH, CONTEXT, VOCABULARY = 12, 768, 1024, 50304
PARAMETERS = VOCABULARY * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH  # those that multiply
END_OF_TEXT = 50256


def model_flops(batch, length):
    return batch * length * (6 * PARAMETERS + 6 * LAYERS * WIDTH * length)


def run(command, **more):
    """Its standard output; ends the program where it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if ran.returncode != 0:
        sys.exit(f"gpt2_step.py: {' '.join(command)} ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}")
    return ran.stdout


class Ours:
    """examples/gpt2 on a mesh: devices are threads, or ranks where `ranks` says how many."""

    def __init__(self, options, mesh, ranks=0):
        self.command = ["mpirun", "-n", str(ranks), "--bind-to", "core"] if ranks else []
        self.command += [os.path.join(options.build, "examples/gpt2"), "--preset=gpt2-124m", f"--mesh={mesh}",
                         f"--recompute={options.recompute}", "--warmup=0", "--final-learning-rate=1", "--max-tokens=0",
                         f"--vocabulary={VOCABULARY}", f"--steps={options.warmup + options.steps}"]  # fmt: skip

    def turn(self, batch, length, scratch):
        """A record of every step: loss, step_seconds."""
        metrics = os.path.join(scratch, "metrics.jsonl")
        run(self.command + [f"--batch={batch}", f"--seq={length}", f"--data={scratch}/tokens.bin", f"--metrics={metrics}"])
        with open(metrics) as lines:
            return [json.loads(line) for line in lines]


def systems(options, batch):
    yield "shardlib, 1 process", Ours(options, "d=1,t=1")
    if batch % 2 == 0:
        yield "shardlib, 2 ranks", Ours(options, "d=2,t=1", ranks=2)


def measure(options, batch, length):
    """Prints the table of one batch."""
    with tempfile.TemporaryDirectory() as scratch:
        # nanoGPT's format. One batch is the whole of it, so that every step has the same rows, in some order.
        numbers = random.Random(1)
        with open(os.path.join(scratch, "tokens.bin"), "wb") as file:
            for _ in range(batch * length):
                file.write(struct.pack("<H", numbers.randrange(END_OF_TEXT)))
        chosen = {name: system for name, system in systems(options, batch) if re.search(options.only, name)}
        seconds = {name: [] for name in chosen}
        peak = copy = 0
        for _ in range(options.turns):
            figures = run([os.path.join(options.build, "benchmarks/peak")]).split()
            peak, copy = max(peak, float(figures[0])), max(copy, float(figures[1]))
            for name, system in chosen.items():
                records = system.turn(batch, length, scratch)
                seconds[name] += [record["step_seconds"] for record in records][options.warmup :]
    flops = model_flops(batch, length)
    print(f"B={batch} T={length}: {flops / 1e9:.1f} GFLOP a step; {os.cpu_count()} cores: FMA peak {peak:.1f} GFLOP/s, "
          f"copies {copy:.1f} GB/s read and written")
    print(f"{'':<36} {'ms a step':>9}  {'(middle 80 %)':<17} {'tokens/s':>8} {'of the peak':>11}")
    for name, times in seconds.items():
        times.sort()
        median = statistics.median(times)
        spread = f"({1e3 * times[len(times) // 10]:.0f} .. {1e3 * times[-1 - len(times) // 10]:.0f})"
        print(f"{name:<36} {1e3 * median:>9.0f}  {spread:<17} {batch * length / median:>8.0f} "
              f"{100 * flops / median / (peak * 1e9):>9.1f} %")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/benchmarks"), help="folder with examples/gpt2 and benchmarks/peak")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the systems, those whose name matches")
    parser.add_argument("--batches", default="4x64,1x1024", help="sequences x tokens (default %(default)s)")
    parser.add_argument("--recompute", default="none", help="as examples/gpt2's (default %(default)s)")
    for name, default, what in (("turns", 2, "of each system"), ("warmup", 2, "steps of a turn that do not count"),
                                ("steps", 6, "steps of a turn that count")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    options = parser.parse_args()
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        os.environ[variable] = "1"
    for batch, length in (map(int, part.split("x")) for part in options.batches.split(",")):
        measure(options, batch, length)
        print()


if __name__ == "__main__":
    main()
