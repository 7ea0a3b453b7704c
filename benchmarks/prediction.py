#!/usr/bin/env python3
"""Compares the time of a step with that which --plan predicts: FSDP on two ranks in network namespaces, over links of several
rates.

Two numbers are fitted over a link without a limit. --plan-efficiency makes the prediction without communication equal to the
step without its communication. The largest rate at which the cores copy is the bytes of a step over the seconds of its
communication without the latencies. The links are not fitted: the bandwidth of a link is its rate without the headers of
Ethernet, IP and TCP, or the rate of the copies if that is less, because the cores copy while the link sends. So a row whose rate
is above that of the copies tests the fit, and a row below it tests the link. Nothing overlaps in this program, so the measured
step is compared with the slower of the two sums.
"of communication" is the same ratio for the part of a step that is not computation.
The speed of a machine drifts, so each rate has its own time of computation, measured before and after it, in several rounds.
Printed numbers are medians of the rounds.
Needs root, iproute2, and an idle machine.

  benchmarks/prediction.py --build build/benchmarks
"""
import os
import re
import statistics
import sys

from common import PAYLOAD, built, count, gbit, parser_of, ran, seconds
from overlap import UNLIMITED, median, over_link, sent

UNITS = {"s": 1, "ms": 1e-3, "µs": 1e-6}


def step_by_plan(command, peak, efficiency, bandwidth, latency):
    """The seconds of a step that --plan predicts."""
    text = ran(command + ["--plan", f"--plan-flops={peak}", f"--plan-efficiency={efficiency}",
               f"--plan-bandwidth={bandwidth}", f"--plan-latency={latency}"])  # fmt: skip
    found = re.search(r"nothing overlapping +([\d.]+) (\S+)", text)
    return float(found.group(1)) * UNITS[found.group(2)]


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--rates", nargs="+", type=gbit, default=[1, 2, 4, 8], help="of the link, in Gbit/s")
    parser.add_argument("--rounds", type=count(), default=3, help="of all rates (default %(default)s)")
    parser.add_argument("--latency", type=seconds, default=50e-6, help="seconds of a message of no bytes")
    parser.add_argument("--steps", type=count(3), default=8, help="of a run; the first two do not count")
    parser.add_argument("--batch", type=count(), default=16, help="sequences (default %(default)s)")
    parser.add_argument("--layers", type=count(), default=8, help="of the model (default %(default)s)")
    parser.add_argument("--d-model", type=count(), default=256, help="width of the model (default %(default)s)")
    options = parser.parse_args()
    peak = float(ran([built(options.build, "benchmarks/peak")]).split()[0]) * 1e9 / os.cpu_count()

    command = [built(options.build, "examples/gpt_fsdp"), f"--data={options.data}", "--mesh=d=2,t=1",
               f"--batch={options.batch}", "--seq=128", f"--layers={options.layers}", f"--d-model={options.d_model}",
               "--n-kv=4", f"--d-head={options.d_model // 8}", f"--d-ff={3 * options.d_model}", "--max-tokens=0",
               f"--steps={options.steps}"]  # fmt: skip

    def predicted(efficiency, bandwidth, latency=options.latency):
        return step_by_plan(command, peak, efficiency, bandwidth, latency)

    def measured(rate):
        """The median seconds of a step, and of its communication."""
        (rows,) = over_link(command, rate, [None])
        return median(rows), median(rows, "communication")

    print(f"{options.layers} layers, d_model {options.d_model}, batch {options.batch} x 128 tokens, FSDP on 2 ranks; peak of one "
          f"core {peak / 1e9:.0f} GFLOP/s")
    print("link      computing ms  of the peak  copies Gbit/s  predicted ms  measured ms  of communication  "
          "measured over predicted (least .. most)")
    floor, size = predicted(1, 1e15, latency=0), sent(command)
    latencies = predicted(1, 1e15) - floor
    found = {rate: [] for rate in options.rates}
    before = measured(UNLIMITED)
    for _ in range(options.rounds):
        for rate in options.rates:
            step, _ = measured(rate)
            after = measured(UNLIMITED)
            whole, communication = ((a + b) / 2 for a, b in zip(before, after))
            before = after
            if communication <= latencies:
                sys.exit(f"prediction.py: messages of --latency {options.latency} take longer than the step communicates: "
                         f"give a shorter --latency")
            computing, copies = whole - communication, size / (communication - latencies)
            plan = predicted(floor / computing, min(rate * 1e9 / 8 * PAYLOAD, copies))
            found[rate].append((computing, copies, plan, step))
    for rate, rounds in found.items():
        computing, copies, plan, step = (statistics.median(column) for column in zip(*rounds))
        ratios = sorted(measured / planned for _, _, planned, measured in rounds)
        alone = (step - computing) / (plan - computing)
        print(f"{f'{rate:g} Gbit/s':<10}{computing * 1e3:12.0f} {100 * floor / computing:10.0f} % {copies * 8e-9:13.1f} "
              f"{plan * 1e3:13.0f} {step * 1e3:12.0f} {alone:17.2f} {statistics.median(ratios):25.2f} "
              f"({ratios[0]:.2f} .. {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
