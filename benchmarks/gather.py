#!/usr/bin/env python3
"""Measures what gathering the weights once a step saves: gpt_fsdp on two ranks in network namespaces (root), over links of 1
and 8 Gbit/s, with one microbatch a step and with several.

Prints the median milliseconds of a step, and of its communication, with --gather per-microbatch and per-step, and the first
over the second. Each of several rounds measures each rate and number of microbatches, with both forms in turn. A ratio is the
median of its rounds, with the least and the most. Both forms have the same losses, except for rounding.

  benchmarks/gather.py --examples build/benchmarks/examples
"""
import statistics
import sys

from common import built, parser_of
from overlap import median, over_link

RATES = [1, 8]
FORMS = ["per-microbatch", "per-step"]


def main():
    options = parser_of(__doc__, "gpt_fsdp", rounds=3, steps=(3, 8), batch=16, microbatches=8, seq=128, layers=8,
                        d_model=256).parse_args()
    program = [built(options.examples, "gpt_fsdp"), f"--data={options.data}", f"--steps={options.steps}",
               f"--batch={options.batch}", f"--seq={options.seq}", f"--layers={options.layers}",
               f"--d-model={options.d_model}", f"--d-ff={3 * options.d_model}", "--max-tokens=0"]
    cases = [(rate, count) for rate in RATES for count in (1, options.microbatches)]
    found = {case: [] for case in cases}
    for _ in range(options.rounds):
        for rate, count in cases:
            flags = [f"--gather={form}" for form in FORMS]
            runs = over_link([*program, f"--microbatches={count}"], rate, flags)
            losses = [rows[-1]["loss"] for rows in runs]
            if abs(losses[0] - losses[1]) > 1e-3 * abs(losses[0]):
                sys.exit(f"gather.py: the losses are {losses}")
            found[rate, count].append([part for rows in runs for part in (median(rows), median(rows, "communication"))])
    print(f"{options.layers} layers, d_model {options.d_model}, batch {options.batch} x {options.seq} tokens, 2 ranks; ms a step "
          "(communication)")
    print(f"{'link':<12}{'microbatches':>12}{FORMS[0]:>22}{FORMS[1]:>22}   {FORMS[0]} over {FORMS[1]}")
    for (rate, count), rounds in found.items():
        ratios = [first / second for first, _, second, _ in rounds]
        times = [1e3 * statistics.median(column) for column in zip(*rounds)]
        forms = "".join(f"{f'{step:.0f} ({sent:.0f})':>22}" for step, sent in (times[:2], times[2:]))
        print(f"{f'{rate} Gbit/s':<12}{count:>12}{forms}   {statistics.median(ratios):.2f} "
              f"({min(ratios):.2f} .. {max(ratios):.2f})")


if __name__ == "__main__":
    main()
