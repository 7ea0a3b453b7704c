#!/usr/bin/env python3
"""Measures the cost of the safeguards that are always on, as a share of a training step of GPT-2 124M, FSDP on two ranks of
this machine.

Every communication writes a record (the flight recorder) and a fingerprint of its call. Over shared memory the fingerprint
goes with the call. Over MPI it is a message of its own, which may wait for the slowest rank while the communication itself
runs. The program measures their times alone, in a loop, and multiplies them by the communications of a step, as --plan counts
them. So a cost that overlaps with others counts, too.

  benchmarks/always_on.py --build build/benchmarks
"""
import re

from common import built, count, parser_of, ran
from gpt2_step import VOCABULARY
from overlap import median, steps

RANKS = ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none"]


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=count(3), default=6, help="of the run; the first two do not count")
    options = parser.parse_args()
    said = ran(RANKS + [built(options.build, "benchmarks/figures"), "--safeguards"])
    record, compare = (float(us) for us in re.search(r"recorded in ([\d.]+) us.* in ([\d.]+) us more", said).groups())
    command = [built(options.build, "examples/gpt2"), "--preset=gpt2-124m", f"--vocabulary={VOCABULARY}", "--mesh=d=2,t=1",
               f"--data={options.data}", "--batch=4", "--seq=64", "--recompute=none", "--max-tokens=0",
               f"--steps={options.steps}"]  # fmt: skip
    calls = int(re.search(r"^  all +(\d+) ", ran(command + ["--plan"]), re.M).group(1))
    step = 1e6 * median(steps(RANKS + command))
    print(f"a step of B=4 T=64: {step / 1e3:.0f} ms, with {calls} communications a rank")
    print(f"a record and a fingerprint: {record:.2f} us, {100 * calls * record / step:.4f} % of the step")
    print(f"with a comparison over MPI itself: {record + compare:.2f} us, {100 * calls * (record + compare) / step:.4f} %")


if __name__ == "__main__":
    main()
