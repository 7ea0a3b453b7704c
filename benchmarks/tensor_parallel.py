#!/usr/bin/env python3
"""How much of tensor parallelism's communication hides inside the products: layers of a transformer on two ranks in network
namespaces (root), over links of several rates. A rank has one core.

`separate`: gathers and scatters are ops of their own, before and after the products. `collective-matmul`: the products take
shards as they arrive and send those of their sums (gathering, einsum_scatter). Both compute the same loss.

For each rate and form it prints the median milliseconds of a step, over max(T_compute, T_wire):

  T_compute   a step without communication: both ranks compute half of the heads and of the feed-forward width for all tokens,
              at the same time (mesh d=2, each with a batch of its own). Norms and sums of the residual stream are those of
              all tokens there, and those of half of them in the forms.
  T_wire      what the link needs for the bytes that a rank sends in a step of the form.

A step over a link without a limit shows what the copies of communication cost, which no link hides.

As machines' speeds drift, everything is measured in each of several rounds; a ratio is the median of its rounds, with the least
and the most. benchmarks/tensor_parallel.cpp is the program.

  benchmarks/tensor_parallel.py --build build/release
"""
import argparse
import json
import os
import shlex
import statistics
import sys

from common import ROOT, Hosts, built, count, gbit, ran
from overlap import long_packet

FORMS = ["separate", "collective-matmul"]


def over_link(rate, commands):
    """The median seconds of a step, and the loss, of each command on two ranks over a link of so many Gbit/s."""
    with Hosts(rate, packet=long_packet()) as mpirun:
        found = [json.loads(ran(shlex.split(mpirun) + command)) for command in commands]
    return [(statistics.median(one["seconds"]), one["loss"]) for one in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/benchmarks"), help="folder of the build (default: %(default)s)")
    parser.add_argument("--rates", type=gbit, nargs="+", default=[1, 2, 4, 8], metavar="GBIT", help="of the links (default: 1 2 4 8)")
    for name, default in (("rounds", 3), ("steps", 5), ("batch", 2), ("seq", 512), ("layers", 4), ("d-model", 512)):
        parser.add_argument(f"--{name}", type=count(), default=default, help=f"(default {default})")
    options = parser.parse_args()
    heads, ff = options.d_model // 64, 4 * options.d_model
    program = [built(options.build, "benchmarks/tensor_parallel"), f"--seq={options.seq}", f"--layers={options.layers}",
               f"--d-model={options.d_model}", f"--steps={options.steps}"]  # fmt: skip
    parallel = program + [f"--batch={options.batch}", f"--heads={heads}", f"--d-ff={ff}", "--mesh=d=1,t=2"]
    alone = program + [f"--batch={2 * options.batch}", f"--heads={heads // 2}", f"--d-ff={ff // 2}", "--mesh=d=2,t=1"]
    forms = {form: parallel + [f"--form={form}"] for form in FORMS}
    size = {form: int(ran([*command, "--count"])) for form, command in forms.items()}
    print(f"{options.layers} layers, d_model {options.d_model}, {options.batch} x {options.seq} tokens, 2 ranks; a rank sends "
          + ", ".join(f"{size[form] / 1e6:.0f} MB a step ({form})" for form in FORMS))  # fmt: skip
    print(f"{'Gbit/s':<10}{'form':20}{'T_compute ms':>12}{'T_wire ms':>11}{'ms a step':>11}{'over max':>10}")
    rows = {(rate, form): [] for rate in [*options.rates, None] for form in FORMS}
    for _ in range(options.rounds):
        for rate in [*options.rates, None]:
            (compute, _), *steps = over_link(rate, [alone, *forms.values()])
            losses = [loss for _, loss in steps]
            if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
                sys.exit(f"tensor_parallel.py: the losses are {losses}")
            for form, (time, _) in zip(FORMS, steps):
                wire = 8 * size[form] / (rate * 1e9) if rate else 0
                rows[rate, form].append((time / max(compute, wire), compute, wire, time))
    for (rate, form), rounds in rows.items():
        ratio, compute, wire, time = map(statistics.median, zip(*rounds))
        print(f"{f'{rate:g}' if rate else 'no limit':<10}{form:20}{1e3 * compute:>12.0f}{1e3 * wire:>11.0f}{1e3 * time:>11.0f}{ratio:>10.2f}"
              f"  ({min(rounds)[0]:.2f} .. {max(rounds)[0]:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
