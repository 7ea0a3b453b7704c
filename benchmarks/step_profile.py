#!/usr/bin/env python3
"""Shows where the time of a training step goes, by the trace of its ops: GPT-2 124M, one process on all cores.

Ops of the same name and spec are one line, for the forward and the backward pass together: milliseconds a step (the median of
the traced steps) and their share. For einsums, the line also has their share of the FMA peak, which is measured right before,
by the FLOPs of the trace. "Between the ops" the program reads data and writes reports.

  benchmarks/step_profile.py                     B=4 T=64 and B=1 T=1024
  benchmarks/step_profile.py --batches 8x128     another batch
  benchmarks/step_profile.py --least 0.3         also ops of 0.3 % of a step
  benchmarks/step_profile.py --dtype bf16        products of bf16; the peak is that of f32
"""
import collections
import statistics
import tempfile

from gpt2_step import VOCABULARY, batches
from common import built, parser_of, percent, ran, traced_ops

TRACED = 5  # steps that --trace has in a run


def profile(options, batch, length):
    peak = float(ran([built(options.build, "benchmarks/peak")]).split()[0])
    with tempfile.TemporaryDirectory() as folder:
        ran([built(options.build, "examples/gpt2"), "--preset=gpt2-124m", f"--vocabulary={VOCABULARY}", "--mesh=d=1,t=1",
             f"--data={options.data}", f"--dtype={options.dtype}", f"--batch={batch}", f"--seq={length}",
             "--recompute=none", "--max-tokens=0", f"--steps={TRACED + 3}", "--trace", f"--run={folder}/run"])  # fmt: skip
        events = traced_ops(f"{folder}/run")
    times, work_of = collections.defaultdict(list), collections.Counter()
    for event in events:
        op = event["name"], event["args"].get("spec", "")
        times[op].append(event["dur"] / 1e3)
        if event["name"].startswith("einsum"):
            work_of[op] += event["args"]["flops"] / 1e9
    step = (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)) / 1e3 / TRACED
    lines = []
    for (name, spec), each in times.items():
        calls = len(each) // TRACED  # every step has the same ops
        time = statistics.median(sum(each[i * calls : (i + 1) * calls]) for i in range(TRACED))
        lines.append((time, f"{name}<`{spec}`>", calls, work_of[name, spec] / TRACED))
    lines.sort(reverse=True)
    few = [line for line in lines if line[0] < options.least / 100 * step]
    lines = lines[: len(lines) - len(few)]
    products = [line for line in lines + few if line[3]]
    total = sum(line[0] for line in lines + few)

    def row(what, calls, time, work=0):
        rate = f"{1e3 * work / time:>9.0f}{100 * 1e3 * work / time / peak:>9.0f} %" if work else ""
        print(f"{what:<66}{calls:>6}{time:>9.1f}{100 * time / step:>7.1f} %{rate}")

    print(f"B={batch} T={length}: {step:.0f} ms a step while it is traced; FMA peak {peak:.0f} GFLOP/s")
    print(f"{'':<66}{'calls':>6}{'ms':>9}{'share':>9}{'GFLOP/s':>9}{'of peak':>11}")
    for time, what, calls, work in lines:
        row(what, calls, time, work)
    row(f"{len(few)} others", sum(line[2] for line in few), sum(line[0] for line in few))
    row("between the ops", "", step - total)
    row("all einsums", sum(line[2] for line in products), sum(line[0] for line in products), sum(line[3] for line in products))
    print()


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=batches, default="4x64,1x1024", help="sequences x tokens (default %(default)s)")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="of the products (default %(default)s)")
    parser.add_argument("--least", type=percent, default=1, help="percent of a step for a line of its own (default %(default)s)")
    options = parser.parse_args()
    for batch, length in options.batches:
        profile(options, batch, length)


if __name__ == "__main__":
    main()
