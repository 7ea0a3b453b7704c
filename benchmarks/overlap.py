#!/usr/bin/env python3
"""Measures how much of FSDP's communication overlaps with computation: gpt2 on two ranks in network namespaces (root).

The first link has no limit. T_copy is the time of communication in a step without --prefetch over this link: the copies that
communication takes on any link. T_compute is the rest of that step, or of the step with --prefetch if that is less. The other
links are so slow that the bytes that a rank sends in a step, as --plan counts them, take T_wire = 0.25, 0.5 and 1 times
T_compute. The program runs over them with and without --prefetch, and prints the median seconds of a step over

  the ideal, T_compute + T_copy + max(0, T_wire - T_compute);
  the shortest step that the order of gpt2 allows (shortest_step below);
  a step without any overlap, T_compute + T_copy + T_wire;
  max(T_compute, T_wire), which a step with copies cannot reach.

Packets are long, so that the work of a network card takes little time of the cores (Hosts in common.py). Up to 3 % of a step's
bytes pass at any speed after pauses; prefetching hides them.

The model has as many layers as GPT-2. With fewer layers, the weights of the first layer and the last gradients, which cannot
overlap, would be a larger part of a step.

The speed of a machine drifts, so each of several rounds measures T_compute before each slow link. A printed ratio is the median
of its rounds; that over the ideal has the least and the most, too.

Before all this, a few steps on four ranks must have the losses of four threads, to the bit.

  benchmarks/overlap.py --examples build/benchmarks/examples
"""
import json
import os
import re
import shlex
import statistics
import sys
import tempfile

from common import PACKET, Hosts, built, parser_of, ran

UNLIMITED = None
RATIOS = [0.25, 0.5, 1]
FLAGS = ["--no-prefetch", "--prefetch"]


def sent(program):
    """Bytes that a rank sends in a step."""
    number, unit = re.search(r"^  all +\d+ +([\d.]+) (\w*B)$", ran(program + ["--plan", "--mesh=d=2"]), re.M).groups()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def steps(command):
    """The records of a run's steps."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = os.path.join(folder, "metrics.jsonl")
        ran(command + [f"--metrics={metrics}"])
        with open(metrics) as lines:
            return [json.loads(line) for line in lines]


def median(rows, part=None):
    """The median seconds of a step, or of a part of it; the first two steps do not count."""
    return statistics.median(row["seconds"][part] if part else row["step_seconds"] for row in rows[2:])


def long_packet():
    """The bytes of a long packet. Linux before 6.3 accepts the setting for packets above 64 KB, and ignores it."""
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    return 190_000 if release >= (6, 3) else PACKET


def over_link(program, rate, flags=FLAGS, packet=PACKET):
    """The steps of a run with each flag over a link of `rate` Gbit/s; None is no flag."""
    with Hosts(rate, packet=packet) as mpirun:
        return [steps(shlex.split(mpirun) + program + [flag] * (flag is not None)) for flag in flags]


def shortest_step(layers, forward, backward, rest, wire):
    """The seconds of a step with only these waits: a layer waits for its weights, and at most two layers have gathered weights;
    the sums of a layer's gradients wait for half of its backward pass; the optimizer and the next step wait for all sums.
    """
    block = wire / (3 * layers)  # a layer receives its weights in both passes, and sends its gradients
    now = link = 0.0
    for compute, sums in ((forward / layers, False), (backward / layers, True)):
        there = [now + block, now + 2 * block][:layers]
        link = there[-1]
        for i in range(layers):
            begin = max(now, there[i])
            now = begin + compute
            if sums:
                link = max(link, begin + compute / 2) + block
            if len(there) < layers:
                link = max(link, now) + block
                there.append(link)
    return max(now, link) + rest


def check_four_hosts(program):
    """Ends this program unless four ranks have the losses of four threads."""
    short = program + ["--mesh=d=4", "--prefetch"]
    with Hosts(1, 4) as mpirun:
        apart = steps(shlex.split(mpirun) + short)
    losses, expected = ([row["loss"] for row in rows] for rows in (apart, steps(short)))
    if losses != expected:
        sys.exit(f"overlap.py: on four hosts the losses are {losses}, on four threads {expected}")
    print("4 ranks in 4 network namespaces: the losses of 4 threads, to the bit")


def main():
    options = parser_of(__doc__, "gpt2", rounds=3, steps=(3, 10), batch=8, seq=128, layers=12, d_model=512).parse_args()
    program = [built(options.examples, "gpt2"), f"--data={options.data}", f"--steps={options.steps}",
               f"--batch={options.batch}", f"--seq={options.seq}", f"--layers={options.layers}",
               f"--d-model={options.d_model}", "--heads=8", f"--d-ff={4 * options.d_model}",
               f"--context={options.seq}", "--max-tokens=0"]
    check_four_hosts(program[:2] + ["--steps=3", "--batch=8", "--seq=32", "--layers=3", "--max-tokens=0"])
    size = sent(program)
    print(f"{options.layers} layers, d_model {options.d_model}, batch {options.batch} x {options.seq} tokens, 2 ranks; "
          f"a rank sends {size / 1e6:.0f} MB a step, in packets of up to {long_packet() / 1e3:.0f} kB")
    print(f"{'T_wire/T_compute':<17}{'T_compute ms':>12}{'T_copy ms':>11}{'Gbit/s':>8}{'':>13}{'ms a step':>10}{'over ideal':>12}{'':16}"
          f"{'over shortest':>14}{'over serial':>13}{'over max':>10}")
    found = {ratio: {flag: [] for flag in FLAGS} for ratio in RATIOS}
    for _ in range(options.rounds):
        for ratio in RATIOS:
            apart, prefetching = over_link(program, UNLIMITED, packet=long_packet())
            # The ideal is made of the faster of the two, so the cost of prefetching itself counts against it.
            fastest = min(apart, prefetching, key=median)
            copy = median(apart, "communication")
            compute, optimizer = median(fastest) - copy, median(fastest, "optimizer")
            wire = ratio * compute
            forward = median(fastest, "forward") / (median(fastest, "forward") + median(fastest, "backward"))
            passes = median(fastest) - optimizer
            shortest = shortest_step(options.layers, forward * passes, (1 - forward) * passes, optimizer, wire)
            rate = 8 * size / wire / 1e9
            for flag, rows in zip(FLAGS, over_link(program, rate, packet=long_packet())):
                time, ideal = median(rows), compute + copy + max(0, wire - compute)
                found[ratio][flag].append((time / ideal, compute, copy, rate, time, time / shortest,
                                           time / (compute + copy + wire), time / max(compute, wire)))
    for ratio, flags in found.items():
        for flag, rounds in flags.items():
            over_ideal, compute, copy, rate, time, over_shortest, over_serial, over_max = map(statistics.median, zip(*rounds))
            spread = f"({min(rounds)[0]:.2f} .. {max(rounds)[0]:.2f})"
            print(f"{ratio:<17}{1e3 * compute:>12.0f}{1e3 * copy:>11.0f}{rate:>8.2f}{flag[2:]:>13}{1e3 * time:>10.0f}{over_ideal:>12.2f}"
                  f"{spread:>16}{over_shortest:>14.2f}{over_serial:>13.2f}{over_max:>10.2f}")


if __name__ == "__main__":
    main()
