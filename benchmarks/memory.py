#!/usr/bin/env python3
"""What a training step of GPT-2 124M keeps in memory, and what keeping less of it costs in time.

For each --recompute policy, on one device and on two ranks: the pool's high-water mark beside --plan's figure, the growth of
the proportional set size from the program's start to its most (of all ranks together, so that shared pages count once)
beside the same, and the median step beside that of --recompute none. Data, tokenizer, code and oneDNN's own memory are in
the growth, and not in the plan.

  benchmarks/memory.py --build build/benchmarks
"""
import argparse
import json
import os
import re
import statistics
import tempfile
import threading

from pipeline import ROOT, ran

POLICIES = ["none", "seqax", "everything"]


def proportional_set_size(program):
    """Bytes of all processes that run the program."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe") != program:
                continue
            with open(f"/proc/{pid}/smaps_rollup") as lines:
                total += 1024 * int(re.search(r"^Pss: +(\d+) kB", lines.read(), re.M).group(1))
        except (OSError, AttributeError):  # it has ended
            continue
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/benchmarks"), help="build folder")
    parser.add_argument("--data", default=os.path.join(ROOT, "build/data/kjv.txt"), help="text to train on (scripts/text.sh)")
    parser.add_argument("--steps", type=int, default=8, help="of a run; the first two do not count")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=512)
    options = parser.parse_args()
    gpt2 = os.path.realpath(os.path.join(options.build, "examples/gpt2"))

    def run(ranks, policy):
        """Seconds of a step; the plan's, the pool's and the system's bytes, the last two of all ranks."""
        command = [gpt2, "--preset=gpt2-124m", f"--data={options.data}", "--vocabulary=50257", f"--batch={options.batch}",
                   f"--seq={options.seq}", f"--mesh=d={ranks},t=1", f"--recompute={policy}", "--max-tokens=0"]  # fmt: skip
        plan = ran(command + ["--plan"])
        planned = ranks * int(re.search(r"^  most at once, with buffers .* (\d+) bytes", plan, re.M).group(1))
        with tempfile.TemporaryDirectory() as folder:
            metrics = os.path.join(folder, "metrics.jsonl")
            mpirun = ["mpirun", "-n", str(ranks), "--bind-to", "core"] if ranks > 1 else []
            first, most, done = [], [0], threading.Event()

            def watch():
                while not done.wait(0.02):
                    now = proportional_set_size(gpt2)
                    if now > 0:
                        first.append(now)
                        most[0] = max(most[0], now)

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                ran(mpirun + command + [f"--steps={options.steps}", f"--metrics={metrics}"])
            finally:
                done.set()
                watcher.join()
            with open(metrics) as lines:
                steps = [json.loads(line) for line in lines]
        seconds = statistics.median(step["step_seconds"] for step in steps[2:])
        return seconds, planned, ranks * max(step["memory_bytes"] for step in steps), most[0] - first[0]

    print(f"GPT-2 124M, f32, batch {options.batch} x {options.seq} tokens; bytes of all ranks together")
    print("devices   recompute    planned MB   pool/plan   growth/plan   ms a step   over none")
    for ranks in (1, 2):
        none = None
        for policy in POLICIES:
            seconds, planned, pool, growth = run(ranks, policy)
            none = none or seconds
            print(f"{'1 process' if ranks == 1 else f'{ranks} ranks':<10}{policy:<11}{planned / 1e6:12.0f}{pool / planned:12.3f}"
                  f"{growth / planned:14.3f}{seconds * 1e3:12.0f}{seconds / none:12.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
