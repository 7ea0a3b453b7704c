#!/usr/bin/env python3
"""How much of FSDP's communication hides behind computation: gpt_fsdp on two ranks in network namespaces (root).

First over a link without a limit: that step's time is T_compute, with the copies that communicating takes on any link.
Then over links so slow that what a rank sends in a step, by --plan, takes T_wire = 0.25, 0.5 and 1 times T_compute, with
and without --prefetch. Prints the median seconds of a step over the ideal, T_compute + max(0, T_wire - T_compute), and
over what nothing overlapping would take, T_compute + T_wire.

  benchmarks/overlap.py --examples build/benchmarks/examples
"""
import argparse
import json
import os
import re
import shlex
import statistics
import tempfile

from pipeline import ROOT, Hosts, ran

UNLIMITED = "100gbit"
RATIOS = [0.25, 0.5, 1]
FLAGS = ["--no-prefetch", "--prefetch"]


def sent(program):
    """Bytes that a rank sends in a step."""
    number, unit = re.search(r"^  all +\d+ +([\d.]+) (\w*B)$", ran(program + ["--plan", "--mesh=d=2"]), re.M).groups()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def step_seconds(command):
    """The median of a run's steps; its first two do not count."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        ran(command + [f"--metrics={metrics}"])
        with open(metrics) as lines:
            return statistics.median([json.loads(line)["step_seconds"] for line in lines][2:])


def over_link(program, rate, flags):
    """The seconds of a step over a link, for each flag."""
    with Hosts(rate) as mpirun:
        return [step_seconds(shlex.split(mpirun) + program + [flag]) for flag in flags]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", default=os.path.join(ROOT, "build/benchmarks/examples"), help="folder of gpt_fsdp")
    parser.add_argument("--data", default=os.path.join(ROOT, "build/data/kjv.txt"), help="a text")
    for name, default in (("steps", 10), ("batch", 8), ("seq", 128), ("layers", 6), ("d-model", 512)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default {default})")
    options = parser.parse_args()
    if options.steps < 3:
        parser.error("--steps: the first two do not count; give at least 3")
    program = [os.path.join(options.examples, "gpt_fsdp"), f"--data={options.data}", f"--steps={options.steps}",
               f"--batch={options.batch}", f"--seq={options.seq}", f"--layers={options.layers}",
               f"--d-model={options.d_model}", "--n-kv=4", f"--d-head={options.d_model // 8}",
               f"--d-ff={3 * options.d_model}", "--max-tokens=0"]
    size = sent(program)
    # The faster of the two: what prefetching itself costs counts against it.
    compute = min(over_link(program, UNLIMITED, FLAGS))
    print(f"{options.layers} layers, d_model {options.d_model}, batch {options.batch} x {options.seq} tokens, 2 ranks; "
          f"a rank sends {size / 1e6:.0f} MB a step and computes {1e3 * compute:.0f} ms")
    print(f"{'T_wire/T_compute':<17}{'rate':>12}{'':>14}{'ms a step':>10}{'over ideal':>12}{'over serial':>13}")
    for ratio in RATIOS:
        wire = ratio * compute
        rate = f"{8 * size / wire / 1e6:.0f}mbit"
        ideal, serial = compute + max(0, wire - compute), compute + wire
        for flag, time in zip(FLAGS, over_link(program, rate, FLAGS)):
            print(f"{ratio:<17}{rate:>12}{flag[2:]:>14}{1e3 * time:>10.0f}{time / ideal:>12.2f}{time / serial:>13.2f}", flush=True)


if __name__ == "__main__":
    main()
