#!/usr/bin/env python3
"""Measures the memory of a training step of GPT-2 124M under each --recompute policy, and the time that the policy costs.

Each policy runs on one device and on two ranks. MB and pages are the sums of all ranks:

  planned MB      the peak that --plan prints
  pool/plan       the peak of the pool over it (that of rank 0, once for each rank)
  pages/plan      the pages that the pool's blocks have touched, over it; the part above pool/plan is fragmentation
  start MB        the process without the pool's pages when the first weights are made: MPI, text, code
  growth/plan     the growth of the process since then, by its proportional set size, which counts shared pages once
  others MB       the part of the growth that is not the pool's, mostly memory of libraries, which the plan does not count
  faults a step   page faults, from the third step on
  over none       the median step over that of --recompute none, with fastest over slowest and slowest over fastest

  benchmarks/memory.py --build build/benchmarks
"""
import json
import os
import re
import statistics
import sys
import tempfile
import threading

from common import built, count, parser_of, ran

POLICIES = ["none", "marked", "everything"]

MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)\n((?:\w+: .*\n)+)", re.M)


def pages(program):
    """Returns the proportional bytes of all processes that run the program, those of their pools, and their page faults."""
    total = pool = faults = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe") != program:
                continue
            with open(f"/proc/{pid}/smaps") as smaps, open(f"/proc/{pid}/stat") as stat:
                mappings = MAPPING.findall(smaps.read())
                faults += int(stat.read().rpartition(")")[2].split()[7])
        except OSError:  # it has ended
            continue
        before = ("", 0)  # the end of the mapping before this one, and its bytes
        for begin, end, name, fields in mappings:
            size = 1024 * int(re.search(r"^Pss: +(\d+) kB", fields, re.M).group(1))
            total += size
            # The pools of ranks are files in memory. Of a process's own memory, only the pool asks for huge pages, except for
            # its beginning.
            if name.startswith("/memfd:shardlib"):
                pool += size
            elif not name and re.search(r"^VmFlags:.* hg\b", fields, re.M):
                pool += size + (before[1] if before[0] == begin else 0)
            before = (end, size)
    return total, pool, faults


def planned(command, ranks):
    """The sum of the peaks of all ranks, as --plan prints them."""
    figure = "most at once, with buffers" if ranks == 1 else "  the same under MPI, in one node"
    return ranks * int(re.search(rf"^  {figure} .* (\d+) bytes", ran(command + ["--plan"]), re.M).group(1))


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=count(4), default=8, help="of a run; the first two do not count (default %(default)s)")
    parser.add_argument("--batch", type=count(), default=2, help="sequences (default %(default)s)")
    parser.add_argument("--seq", type=count(), default=512, help="tokens of each (default %(default)s)")
    options = parser.parse_args()
    gpt2 = os.path.realpath(built(options.build, "examples/gpt2"))

    def run(ranks, policy):
        """Returns the seconds of each step, the bytes of all ranks (of the plan, the pool, its pages, the process at the start,
        its growth, and the growth outside of the pool), and the page faults of a step."""
        command = [gpt2, "--preset=gpt2-124m", f"--data={options.data}", "--vocabulary=50257", f"--batch={options.batch}",
                   f"--seq={options.seq}", f"--mesh=d={ranks},t=1", f"--recompute={policy}", "--max-tokens=0"]  # fmt: skip
        plan = planned(command, ranks)
        with tempfile.TemporaryDirectory() as folder:
            metrics = os.path.join(folder, "metrics.jsonl")
            mpirun = ["mpirun", "-n", str(ranks), "--bind-to", "core"] if ranks > 1 else []
            samples, done = [], threading.Event()  # a sample is the number of steps done, and the result of pages()

            def steps_done():
                try:
                    with open(metrics) as lines:
                        return sum(1 for _ in lines)
                except FileNotFoundError:
                    return 0

            def watch():
                # Sample less often once the weights exist, because reading all pages takes time of a core from the steps.
                while not done.wait(0.25 if samples and samples[-1][2] >= plan / 5 else 0.02):
                    steps, sample = steps_done(), pages(gpt2)
                    if sample[0] > 0:
                        samples.append((steps, *sample))

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                ran(mpirun + command + [f"--steps={options.steps}", f"--metrics={metrics}"])
            finally:
                done.set()
                watcher.join()
            with open(metrics) as lines:
                steps = [json.loads(line) for line in lines]
        seconds = [step["step_seconds"] for step in steps[2:]]
        pool = ranks * max(step["memory_bytes"] for step in steps)
        while samples and samples[-1][0] == len(steps):  # the process is ending
            samples.pop()
        made = next((i for i, sample in enumerate(samples) if sample[2] >= plan / 5), 0)
        if made == 0:
            sys.exit("memory.py: the process was not seen before it had its weights: the machine is too busy, or --batch too small")
        start = samples[made - 1][1] - samples[made - 1][2]
        growth = max(total for _, total, _, _ in samples) - start
        others = max(total - mapped for _, total, mapped, _ in samples) - start
        steady = [(done, faults) for done, _, _, faults in samples if 2 <= done < len(steps)]
        faults = (steady[-1][1] - steady[0][1]) / max(1, steady[-1][0] - steady[0][0])
        return seconds, plan, pool, max(mapped for _, _, mapped, _ in samples), start, growth, others, faults

    print(f"GPT-2 124M, f32, batch {options.batch} x {options.seq} tokens; bytes of all ranks together")
    print("devices   recompute   planned MB  pool/plan  pages/plan  start MB  growth/plan  others MB  faults a step  ms a step  over none  (least .. most)")
    for ranks in (1, 2):
        none = None
        for policy in POLICIES:
            seconds, plan, pool, mapped, start, growth, others, faults = run(ranks, policy)
            none = none or seconds
            middle = statistics.median(seconds)
            print(f"{'1 process' if ranks == 1 else f'{ranks} ranks':<10}{policy:<11}{plan / 1e6:11.0f}{pool / plan:11.3f}"
                  f"{mapped / plan:12.3f}{start / 1e6:10.0f}{growth / plan:13.3f}{others / 1e6:11.0f}{faults:15.0f}"
                  f"{middle * 1e3:11.0f}{middle / statistics.median(none):11.2f}  ({min(seconds) / max(none):.2f} .. "
                  f"{max(seconds) / min(none):.2f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
