#!/usr/bin/env python3
"""Measures how much of context parallelism's communication overlaps with attention: layers of a transformer whose sequences are
sharded over two ranks in network namespaces (root), over links of several rates. A rank has one core.

In `zigzag` and `contiguous`, keys and values go round the ring of causal_attention, in two orders of the tokens. In `ulysses`,
the axis shards the heads between two all_to_all, which do not overlap.

For each rate and form it prints the median milliseconds of a step, over max(T_compute, T_wire):

  T_compute   a step without communication: both ranks compute whole sequences, half as many, at the same time (mesh d=2).
  T_wire      what the link needs for the bytes that a rank sends in a step of the form (of `contiguous`, the mean of all ranks).

A step over a link without a limit shows what the copies of communication cost, which no link hides. In `contiguous` order the
second rank computes three quarters of the scores, so that even this step is longer than T_compute.

The speed of a machine drifts, so each of several rounds measures everything. A ratio is the median of its rounds, with the least
and the most. benchmarks/ring_attention.cpp is the program.

  benchmarks/ring_attention.py --build build/release
"""
import sys

from layers import layer_parser, print_table, program_of

FORMS = ["zigzag", "contiguous", "ulysses"]


def check(expected, losses):
    """All but zigzag, which has the tokens in another order, compute the loss of whole sequences."""
    for form, loss in losses.items():
        if form != "zigzag" and abs(loss - expected) > 1e-4 * abs(expected):
            sys.exit(f"ring_attention.py: the loss of {form} is {loss}, that of whole sequences {expected}")


def main():
    parser = layer_parser(__doc__, rounds=3, steps=5, batch=2, seq=2048, layers=2, d_model=512)
    options = parser.parse_args()
    if options.batch % 2 or options.seq % 4:
        parser.error("--batch is a multiple of 2, and --seq of 4: two ranks share them")
    program = [*program_of("ring_attention", options), f"--heads={options.d_model // 64}", f"--d-ff={4 * options.d_model}",
               f"--batch={options.batch}"]  # fmt: skip
    forms = {form: [*program, "--mesh=d=1,s=2", f"--form={form}"] for form in FORMS}
    print_table(options, [*program, "--mesh=d=2,s=1"], forms, check, digits=1)


if __name__ == "__main__":
    main()
