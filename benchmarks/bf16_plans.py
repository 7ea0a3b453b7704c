#!/usr/bin/env python3
"""Prints the peak of a step in bf16 over that of the same step in f32, as --plan counts them, for models of the size of GPT-2
124M. The table has a line for each mesh and batch, and a column for each --recompute policy. The peak of a pipeline is the
highest of its ranks.

  benchmarks/bf16_plans.py --build build/benchmarks
"""
import re

from common import built, parser_of, ran

SIZES = ["--vocabulary=50257", "--layers=12", "--d-model=768", "--n-q-per-kv=1", "--n-kv=12", "--d-head=64", "--d-ff=2048"]
PROGRAMS = {"gpt2": (["--preset=gpt2-124m", "--vocabulary=50257"], ["d=1", "d=8", "d=4,t=2"]),
            "gpt_fsdp": (SIZES, ["d=1", "d=8", "d=4,t=2"]),
            "gpt_pipeline": ([*SIZES, "--microbatches=2"], ["p=2", "p=2,d=4", "p=2,d=2,t=2"])}  # fmt: skip
BATCHES = [(8, 64), (8, 1024), (64, 64), (64, 1024)]
POLICIES = ["none", "dots", "marked", "attention", "everything"]
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def peak(command):
    """The most bytes at once of any device; of the later ranks of a pipeline the plan prints four digits."""
    plan = ran([*command, "--plan"])
    first = int(re.search(r"^  most at once, with buffers .* (\d+) bytes", plan, re.M)[1])
    later = re.findall(r"^ +[1-9]\d*(?: +[\d.]+ [kMGT]?B){4} +([\d.]+) ([kMGT]B)", plan, re.M)
    return max([first, *(float(number) * UNITS[unit] for number, unit in later)])


def main():
    options = parser_of(__doc__, data=False).parse_args()
    for program, (sizes, meshes) in PROGRAMS.items():
        path, found = built(options.build, f"examples/{program}"), []
        print(f"{program:<34}" + "".join(f"{policy:>12}" for policy in POLICIES))
        for mesh in meshes:
            for batch, seq in BATCHES:
                ratios = []
                for policy in POLICIES:
                    step = [path, *sizes, f"--mesh={mesh}", f"--batch={batch}", f"--seq={seq}", f"--recompute={policy}"]
                    ratios.append(peak([*step, "--dtype=bf16"]) / peak([*step, "--dtype=f32"]))
                print(f"  {f'{mesh}, {batch} x {seq} tokens':<32}" + "".join(f"{ratio:12.4f}" for ratio in ratios), flush=True)
                found += ratios
        print(f"  {min(found):.4f} to {max(found):.4f}; above 1 in {sum(r > 1 for r in found)} of {len(found)} plans\n")


if __name__ == "__main__":
    main()
