#!/usr/bin/env python3
"""Measures how much of tensor parallelism's communication overlaps with the products: layers of a transformer on two ranks in
network namespaces (root), over links of several rates. A rank has one core.

In `separate`, gathers and scatters are ops of their own, before and after the products. In `collective-matmul`, the products
take shards as they arrive and send the shards of their sums (gathering, einsum_scatter). In `interleaved`, the batch has two
halves, and the collectives of one run during all ops of the other (all_gather_start, reduce_scatter_start). All compute the same
loss.

For each rate and form it prints the median milliseconds of a step, over max(T_compute, T_wire):

  T_compute   a step without communication: both ranks compute half of the heads and of the feed-forward width for all tokens,
              at the same time (mesh d=2, each with a batch of its own). Norms and sums of the residual stream are those of
              all tokens there, and those of half of them in the forms.
  T_wire      what the link needs for the bytes that a rank sends in a step of the form.

A step over a link without a limit shows what the copies of communication cost, which no link hides.

The speed of a machine drifts, so each of several rounds measures everything. A ratio is the median of its rounds, with the least
and the most. benchmarks/tensor_parallel.cpp is the program.

  benchmarks/tensor_parallel.py --build build/release
"""
import sys

from layers import layer_parser, print_table, program_of

FORMS = ["separate", "collective-matmul", "interleaved"]


def check(_, losses):
    """All forms compute the same loss. The program without communication has half of the weights."""
    low, high = min(losses.values()), max(losses.values())
    if high - low > 1e-4 * abs(low):
        sys.exit(f"tensor_parallel.py: the losses are {losses}")


def main():
    options = layer_parser(__doc__, rounds=3, steps=5, batch=2, seq=512, layers=4, d_model=512).parse_args()
    heads, ff = options.d_model // 64, 4 * options.d_model
    program = program_of("tensor_parallel", options)
    parallel = [*program, f"--batch={options.batch}", f"--heads={heads}", f"--d-ff={ff}", "--mesh=d=1,t=2"]
    alone = [*program, f"--batch={2 * options.batch}", f"--heads={heads // 2}", f"--d-ff={ff // 2}", "--mesh=d=2,t=1"]
    print_table(options, alone, {form: [*parallel, f"--form={form}"] for form in FORMS}, check)


if __name__ == "__main__":
    main()
