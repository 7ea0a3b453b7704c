#!/usr/bin/env python3
"""Compares pipelines with microbatched FSDP on two ranks, in one run, as JaxPP's tutorial does.

The same GPT, global batch and number of microbatches run in turns in five layouts: fully sharded over d=2 (all microbatches at
once, and one after the other as a pipeline takes them), and p=2 under 1F1B, interleaved 1F1B and ZeroBubble. Prints the median
step of each layout. For the pipelines it also prints the last step as measured, and as simulated with its own mean task times.

  benchmarks/pipeline.py             the ranks share memory
  benchmarks/pipeline.py --rate 1    each rank in a network namespace, a veth pair of 1 Gbit/s between (root)
"""
import json
import os
import re
import shlex
import statistics
import tempfile

from common import Hosts, built, gbit, parser_of, ran

LAYOUTS = {
    "FSDP, one batch": ["--mesh=p=1,d=2", "--microbatches=1"],
    "FSDP, microbatched": ["--mesh=p=1,d=2"],
    "1F1B": ["--mesh=p=2", "--schedule=1f1b"],
    "interleaved 1F1B": ["--mesh=p=2", "--schedule=interleaved-1f1b", "--stages=4"],
    "ZeroBubble": ["--mesh=p=2", "--schedule=zero-bubble"],
}


def measure(options, mpirun, layout, folder):
    """Seconds of each step, and the timeline's caption."""
    metrics, timeline = os.path.join(folder, "metrics.jsonl"), os.path.join(folder, "timeline.svg")
    for file in (metrics, timeline):
        if os.path.exists(file):
            os.unlink(file)
    command = shlex.split(mpirun) + [os.path.join(options.examples, "gpt_pipeline"), f"--data={options.data}",
        f"--steps={options.steps}", f"--batch={options.batch}", f"--microbatches={options.microbatches}",
        f"--seq={options.seq}", f"--layers={options.layers}", f"--d-model={options.d_model}", "--n-kv=4",
        f"--d-head={options.d_model // 8}", f"--d-ff={3 * options.d_model}", "--gather=per-microbatch",
        f"--metrics={metrics}", "--max-tokens=0"] + LAYOUTS[layout]
    if "--mesh=p=2" in LAYOUTS[layout]:
        command.append(f"--timeline={timeline}")
    ran(command)
    with open(metrics) as lines:
        seconds = [json.loads(line)["step_seconds"] for line in lines][2:]
    captions = []
    if os.path.exists(timeline):
        with open(timeline) as file:
            captions = re.findall(r"(?:planned|measured): [^<]*", file.read())
    return seconds, captions


def main():
    parser = parser_of(__doc__, "gpt_pipeline", rounds=2, steps=(3, 8), batch=16, microbatches=8, seq=128, layers=8, d_model=256)
    parser.add_argument("--rate", type=gbit, help="bandwidth of a link between the ranks, in Gbit/s")
    options = parser.parse_args()
    built(options.examples, "gpt_pipeline")
    seconds = {layout: [] for layout in LAYOUTS}
    captions = {}
    with tempfile.TemporaryDirectory() as folder:
        def all_rounds(mpirun):
            for _ in range(options.rounds):
                for layout in LAYOUTS:
                    times, captions[layout] = measure(options, mpirun, layout, folder)
                    seconds[layout] += times
        if options.rate:
            with Hosts(options.rate) as mpirun:
                all_rounds(mpirun)
        else:
            all_rounds("mpirun -n 2 --bind-to core")
    base = statistics.median(seconds["FSDP, microbatched"])
    print(f"{options.layers} layers, d_model {options.d_model}, batch {options.batch} x {options.seq} tokens, "
          f"{options.microbatches} microbatches, 2 ranks, "
          + (f"in network namespaces at {options.rate:g} Gbit/s" if options.rate else "sharing memory"))
    print(f"{'layout':<20} {'ms a step':>10}  {'(middle 80 %)':<18} {'microbatched FSDP over it':>26}")
    for layout, times in seconds.items():
        times.sort()
        low, high = times[len(times) // 10], times[-1 - len(times) // 10]
        median = statistics.median(times)
        print(f"{layout:<20} {1e3 * median:>10.0f}  ({1e3 * low:.0f} .. {1e3 * high:.0f})".ljust(53)
              + f"{base / median:>25.2f}")
    for layout, texts in captions.items():
        for text in texts:
            print(f"{layout}: {text.strip()}")


if __name__ == "__main__":
    main()
