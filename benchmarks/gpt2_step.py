#!/usr/bin/env python3
"""A training step of GPT-2 124M in f32 with AdamW: ours and its peers on this machine, taking turns.

The model has 12 layers of width 768, 12 heads and a vocabulary padded to 50304; the tokens are random, the same batch in
every step. All but llm.c clip the gradient norm to 1, decay the same weights and begin with the same ones, and their losses
must agree. A turn is a process of its own; its first steps do not count, and the figure is the median of the steps of all
turns. Model FLOPs are those of Chowdhery et al. 2022, appendix B, with half of the attention, as it is causal: a token takes
6 for each parameter that multiplies (all but the table of positions), and 6 * layers * width * T.

Peers: PyTorch in this system (python3-torch) and in each --torch-root, in one process with two threads, and in two
processes with one thread each over gloo, by DDP and by FSDP2; OpenBLAS is told its core type. llm.c where --llmc names it.

  benchmarks/gpt2_step.py                                        ours, and the system's PyTorch
  benchmarks/gpt2_step.py --torch-root DIR                       PyTorch of another Debian (scripts/torch-root.sh DIR makes it)
  benchmarks/gpt2_step.py --ours --batches 4x64                  the quickest
"""
import argparse
import json
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile

from pipeline import ROOT

LAYERS, WIDTH, CONTEXT, VOCABULARY = 12, 768, 1024, 50304
PARAMETERS = VOCABULARY * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH  # those that multiply
END_OF_TEXT = 50256
LOSSES_APART = 1e-3  # rounding grows from step to step
PYTHON = "/usr/bin/python3"  # the one that has the system's packages


class Failed(Exception):
    def __init__(self, reason, command=""):
        super().__init__(f"{command}: {reason}" if command else reason)
        self.reason = reason


def run(command, **more):
    """Its standard output."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    if ran.returncode != 0:
        last = (ran.stderr.strip() or ran.stdout.strip() or "no message").splitlines()[-1]
        raise Failed(f"{last} (status {ran.returncode})", " ".join(command))
    return ran.stdout


def model_flops(batch, length):
    return batch * length * (6 * PARAMETERS + 6 * LAYERS * WIDTH * length)


class Ours:
    """examples/gpt2 on a mesh: devices are threads, or ranks where `ranks` says how many."""

    def __init__(self, options, mesh, ranks=0):
        self.command = ["mpirun", "-n", str(ranks), "--bind-to", "core"] if ranks else []
        self.command += [os.path.join(options.build, "examples/gpt2"), "--preset=gpt2-124m", f"--mesh={mesh}",
                         f"--recompute={options.recompute}", "--warmup=0", "--final-learning-rate=1", "--max-tokens=0",
                         f"--vocabulary={VOCABULARY}", f"--steps={options.warmup + options.steps}"]  # fmt: skip

    def turn(self, batch, length, scratch):
        """A record of each step: loss, step_seconds."""
        metrics, weights = os.path.join(scratch, "metrics.jsonl"), os.path.join(scratch, "weights.safetensors")
        command = self.command + [f"--batch={batch}", f"--seq={length}", f"--data={scratch}/tokens.bin", f"--metrics={metrics}"]
        run(command + ([f"--load={weights}"] if os.path.exists(weights) else []))
        with open(metrics) as lines:
            return [json.loads(line) for line in lines]


class Torch:
    """benchmarks/torch_gpt2.py under one installation of PyTorch."""

    def __init__(self, root=""):
        self.root = root

    def run(self, threads, scratch, arguments):
        """`arguments` speak of the scratch folder as {}."""
        environment = [f"OMP_NUM_THREADS={threads}"]
        with open("/proc/cpuinfo") as info:
            if "avx512f" in info.read():
                environment.append("OPENBLAS_CORETYPE=SKYLAKEX")  # of newer CPUs it may know none, and be five times slower
        inside, sources, enter = scratch, ROOT, []
        if self.root:
            inside, sources, enter = "/scratch", "/shardlib", [os.path.join(ROOT, "scripts/torch-root.sh"), self.root, scratch]
        python = [PYTHON, f"{sources}/benchmarks/torch_gpt2.py"]
        return run(enter + ["env"] + environment + python + [a.format(inside) for a in arguments])


class TorchRun:
    def __init__(self, options, torch, how):
        self.options, self.torch, self.how = options, torch, how

    def turn(self, batch, length, scratch):
        ranks = 1 if self.how == "none" else 2
        threads = max(1, os.cpu_count() // ranks)
        out = self.torch.run(threads, scratch, ["--tokens={}/tokens.bin", f"--batch={batch}", f"--length={length}",
            f"--steps={self.options.warmup + self.options.steps}", f"--parallel={self.how}", f"--ranks={ranks}",
            f"--threads={threads}"])  # fmt: skip
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


class Llmc:
    """llm.c's own training program, in a checkout with its starter pack; its batch is 4 x 64."""

    def __init__(self, folder):
        self.folder = folder

    def turn(self, batch, length, scratch):
        run(["make", "train_gpt2"], cwd=self.folder)
        steps = []
        command = ["stdbuf", "-oL", "./train_gpt2"]
        environment = dict(os.environ, OMP_NUM_THREADS=str(os.cpu_count()))
        with subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                took = re.search(r"train loss ([\d.]+) \(took ([\d.]+) ms\)", line)
                if took:
                    steps.append({"step_seconds": float(took[2]) / 1e3})
                if len(steps) == 5:  # a step takes seconds
                    process.kill()
        if not steps:
            raise Failed(f"{self.folder}/train_gpt2 printed no step; its README's starter pack has what it needs")
        return steps


def pytorches(options):
    """The installations by version; says which are missing."""
    found = {}
    for root in [""] + options.torch_root:
        torch = Torch(root)
        try:
            if root and not os.path.exists(root.rstrip("/") + ".ready"):
                raise Failed(f"scripts/torch-root.sh {root} makes it")
            with tempfile.TemporaryDirectory() as scratch:
                found[torch.run(1, scratch, ["--version"]).strip().split("+")[0]] = torch
        except Failed as error:
            how = "apt-get install -y --no-install-recommends python3-torch libopenblas0-openmp"
            print(f"without PyTorch {'in ' + root if root else 'of this system'}: {error.reason if root else how}")
    return found


def systems(options, torches, batch, length):
    """(name, what runs it, the name of ours that it is compared with)."""
    one, two = "shardlib, 1 process", "shardlib, 2 ranks"
    yield one, Ours(options, "d=1,t=1"), one
    for version, torch in torches.items():
        yield f"PyTorch {version}, 1 process", TorchRun(options, torch, "none"), one
    if batch % 2 == 0:
        yield two, Ours(options, "d=2,t=1", ranks=2), one
        for version, torch in torches.items():
            for how in ("ddp", "fsdp2") if int(version.split(".")[0]) >= 2 else ("ddp",):
                yield f"PyTorch {version}, 2 processes, {how.upper()}", TorchRun(options, torch, how), two
    if options.llmc and (batch, length) == (4, 64):
        yield "llm.c", Llmc(options.llmc), one


def measure(options, torches, batch, length):
    """Prints the table of one batch; returns (name, seconds) for the plot."""
    with tempfile.TemporaryDirectory() as scratch:
        # nanoGPT's format. One batch is the whole of it, so that every step has the same rows, in some order.
        numbers = random.Random(1)
        with open(os.path.join(scratch, "tokens.bin"), "wb") as file:
            for _ in range(batch * length):
                file.write(struct.pack("<H", numbers.randrange(END_OF_TEXT)))
        if torches:
            next(iter(torches.values())).run(1, scratch, ["--export={}/weights.safetensors"])
        chosen = {name: (system, base) for name, system, base in systems(options, torches, batch, length)
                  if re.search(options.only, name)}  # fmt: skip
        seconds, losses, failures = {name: [] for name in chosen}, {}, {}
        peak = copy = 0
        for _ in range(options.turns):
            figures = run([os.path.join(options.build, "benchmarks/peak")]).split()
            peak, copy = max(peak, float(figures[0])), max(copy, float(figures[1]))
            for name, (system, _) in chosen.items():
                if name in failures:
                    continue
                try:
                    records = system.turn(batch, length, scratch)
                except Failed as error:
                    if isinstance(system, Ours):
                        raise
                    failures[name] = error.reason
                    continue
                seconds[name] += [record["step_seconds"] for record in records][options.warmup :]
                losses[name] = [record["loss"] for record in records if "loss" in record]
    flops = model_flops(batch, length)
    print(f"B={batch} T={length}: {flops / 1e9:.1f} GFLOP a step; {os.cpu_count()} cores: FMA peak {peak:.1f} GFLOP/s, "
          f"copies {copy:.1f} GB/s read and written")
    print(f"{'':<34} {'ms a step':>9}  {'(middle 80 %)':<17} {'tokens/s':>8} {'of the peak':>11}  over ours")
    times = {name: sorted(steps) for name, steps in seconds.items() if steps}
    medians = {name: statistics.median(steps) for name, steps in times.items()}
    for name, steps in times.items():
        spread = f"({1e3 * steps[len(steps) // 10]:.0f} .. {1e3 * steps[-1 - len(steps) // 10]:.0f})"
        base = chosen[name][1]
        over = f"{medians[name] / medians[base]:.2f} x {base}" if base in medians and base != name else ""
        print(f"{name:<34} {1e3 * medians[name]:>9.0f}  {spread:<17} {batch * length / medians[name]:>8.0f} "
              f"{100 * flops / medians[name] / (peak * 1e9):>9.1f} %  {over}".rstrip())
    for name, reason in failures.items():
        print(f"{name} did not run: {reason}")
    if torches and losses:
        apart = max(max(step) - min(step) for step in zip(*(steps for steps in losses.values() if steps)))
        print(f"losses of all systems, step by step: at most {apart:.1e} apart")
        if apart > LOSSES_APART:
            sys.exit(f"gpt2_step.py: not the same model: {losses}")
    return list(medians.items())


def plot(path, tables):
    try:
        import matplotlib
    except ImportError:
        print("without a plot: apt-get install -y --no-install-recommends python3-matplotlib")
        return
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "shardlib"  # the same picture for the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(tables), squeeze=False, figsize=(8, 0.5 + 0.45 * sum(len(t) + 2 for t in tables.values())),
                                   gridspec_kw={"height_ratios": [len(t) + 1 for t in tables.values()]})  # fmt: skip
    for ax, (title, rows) in zip(axes.flat, tables.items()):
        names, values = [name for name, _ in rows], [1e3 * seconds for _, seconds in rows]
        bars = ax.barh(names, values, color=["#2166ac" if name.startswith("shardlib") else "#bbbbbb" for name in names])
        ax.bar_label(bars, [f"{value:.0f}" for value in values], padding=3)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        ax.set_title(f"{title}: ms a step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/benchmarks"), help="folder with examples/gpt2 and benchmarks/peak")
    parser.add_argument("--ours", action="store_true", help="no peers")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the systems, those whose name matches")
    parser.add_argument("--batches", default="4x64,1x1024", help="sequences x tokens (default %(default)s)")
    parser.add_argument("--torch-root", action="append", default=[], metavar="DIR", help="a system made by scripts/torch-root.sh; any number of them")
    parser.add_argument("--llmc", metavar="DIR", help="a checkout of llm.c with its starter pack")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the medians")
    parser.add_argument("--recompute", default="none", help="as examples/gpt2's (default %(default)s)")
    for name, default, what in (("turns", 2, "of each system"), ("warmup", 2, "steps of a turn that do not count"),
                                ("steps", 6, "steps of a turn that count")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    options = parser.parse_args()
    if not shutil.which("mpirun"):
        sys.exit("gpt2_step.py: mpirun is not there; scripts/setup.sh installs it")
    try:
        torches = {} if options.ours else pytorches(options)
        tables = {}
        for batch, length in (map(int, part.split("x")) for part in options.batches.split(",")):
            tables[f"GPT-2 124M, B={batch} T={length}"] = measure(options, torches, batch, length)
            print()
    except Failed as error:
        sys.exit(f"gpt2_step.py: {error}")
    if options.plot:
        plot(options.plot, tables)


if __name__ == "__main__":
    main()
