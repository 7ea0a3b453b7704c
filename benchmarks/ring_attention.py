#!/usr/bin/env python3
"""How much of context parallelism's communication hides behind attention: layers of a transformer whose sequences are sharded
over two ranks in network namespaces (root), over links of several rates. A rank has one core.

`zigzag` and `contiguous`: keys and values go round the ring of causal_attention, in two orders of the tokens. `ulysses`: heads
take over the axis between two all_to_all, which hide behind nothing.

For each rate and form it prints the median milliseconds of a step, over max(T_compute, T_wire):

  T_compute   a step without communication: both ranks compute whole sequences, half as many, at the same time (mesh d=2).
  T_wire      what the link needs for the bytes that a rank sends in a step of the form (of `contiguous`, the mean of all ranks).

A step over a link without a limit shows what the copies of communication cost, which no link hides. In `contiguous` order the
second rank computes three quarters of the scores, so that even this step is longer than T_compute.

As machines' speeds drift, everything is measured in each of several rounds; a ratio is the median of its rounds, with the least
and the most. benchmarks/ring_attention.cpp is the program.

  benchmarks/ring_attention.py --build build/release
"""
import argparse
import os
import statistics
import sys

from common import ROOT, built, count, gbit, ran
from tensor_parallel import over_link

FORMS = ["zigzag", "contiguous", "ulysses"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/benchmarks"), help="folder of the build (default: %(default)s)")
    parser.add_argument("--rates", type=gbit, nargs="+", default=[1, 2, 4, 8], metavar="GBIT", help="of the links (default: 1 2 4 8)")
    for name, default in (("rounds", 3), ("steps", 5), ("batch", 2), ("seq", 2048), ("layers", 2), ("d-model", 512)):
        parser.add_argument(f"--{name}", type=count(2 if name == "batch" else 1), default=default, help=f"(default {default})")
    options = parser.parse_args()
    if options.batch % 2 or options.seq % 4:
        parser.error("--batch is a multiple of 2, and --seq of 4: two ranks share them")
    program = [built(options.build, "benchmarks/ring_attention"), f"--seq={options.seq}", f"--layers={options.layers}",
               f"--d-model={options.d_model}", f"--heads={options.d_model // 64}", f"--d-ff={4 * options.d_model}",
               f"--batch={options.batch}", f"--steps={options.steps}"]  # fmt: skip
    alone = [*program, "--mesh=d=2,s=1"]
    forms = {form: [*program, "--mesh=d=1,s=2", f"--form={form}"] for form in FORMS}
    size = {form: int(ran([*command, "--count"])) for form, command in forms.items()}
    print(f"{options.layers} layers, d_model {options.d_model}, {options.batch} x {options.seq} tokens, 2 ranks; a rank sends "
          + ", ".join(f"{size[form] / 1e6:.1f} MB a step ({form})" for form in FORMS))  # fmt: skip
    print(f"{'Gbit/s':<10}{'form':14}{'T_compute ms':>12}{'T_wire ms':>11}{'ms a step':>11}{'over max':>10}")
    rows = {(rate, form): [] for rate in [*options.rates, None] for form in FORMS}
    for _ in range(options.rounds):
        for rate in [*options.rates, None]:
            (compute, expected), *steps = over_link(rate, [alone, *forms.values()])
            for form, (_, loss) in zip(FORMS, steps):
                if form != "zigzag" and abs(loss - expected) > 1e-4 * abs(expected):  # zigzag has the tokens in another order
                    sys.exit(f"ring_attention.py: the loss of {form} is {loss}, that of whole sequences {expected}")
            for form, (time, _) in zip(FORMS, steps):
                wire = 8 * size[form] / (rate * 1e9) if rate else 0
                rows[rate, form].append((time / max(compute, wire), compute, wire, time))
    for (rate, form), rounds in rows.items():
        ratio, compute, wire, time = map(statistics.median, zip(*rounds))
        print(f"{f'{rate:g}' if rate else 'no limit':<10}{form:14}{1e3 * compute:>12.0f}{1e3 * wire:>11.0f}{1e3 * time:>11.0f}{ratio:>10.2f}"
              f"  ({min(rounds)[0]:.2f} .. {max(rounds)[0]:.2f})")  # fmt: skip


if __name__ == "__main__":
    main()
