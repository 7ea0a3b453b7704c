#!/usr/bin/env python3
"""Measures a training step of GPT-2 124M with AdamW in f32 and bf16, of shardlib and of its peers on this machine, in turns.

The model has 12 layers of width 768, 12 heads and a vocabulary padded to 50304. The tokens are random, and every step has the
same batch. All programs start with the same weights. All except llm.c decay the same weights and clip the gradient norm to 1;
shardlib's step that is compared with llm.c has its settings. Losses under the same settings must agree.

A turn is a process of its own. Its first steps do not count, and a figure is the median of the steps of all turns. The speed of
the machine drifts, so its peak is measured before each turn, and "of the peak" is the median of the turns' shares. Model FLOPs
are those of Chowdhery et al. 2022, appendix B, with half of the attention, because it is causal (the MFU of the program has all
of it): a token takes 6 for each parameter that multiplies (all but the table of positions), and 6 * layers * width * T.

The peers are PyTorch in this system (python3-torch) and in each --torch-root: in one process with two threads, and in two
processes with one thread each over gloo, by DDP and by FSDP2. OpenBLAS is set to the fastest core type. In bf16, PyTorch runs
under autocast. If --llmc names a checkout of llm.c, its train_gpt2.c is a peer for B=4 T=64, its own batch. It needs no starter
pack.

  benchmarks/gpt2_step.py                                        shardlib, and the system's PyTorch
  benchmarks/gpt2_step.py --torch-root DIR                       PyTorch of another Debian (scripts/torch-root.sh DIR makes it)
  benchmarks/gpt2_step.py --llmc DIR                             llm.c (git clone https://github.com/karpathy/llm.c DIR)
  benchmarks/gpt2_step.py --ours --batches 4x64                  the shortest run
"""
import argparse
import array
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

from common import ROOT, built, count, parser_of

sys.path.insert(0, os.path.join(ROOT, "tests"))
import gpt2_oracle  # noqa: E402

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 12, 12, 768, 1024, 50304
PARAMETERS = VOCABULARY * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH  # those that multiply
END_OF_TEXT = 50256
LOSSES_APART = {"f32": 1e-3, "bf16": 5e-2}  # rounding grows from step to step; PyTorch rounds more sums to bf16
NARROW = ("--dtype=bf16",)
# llm.c's. At GPT-2's 6e-4 without warmup the loss of one batch soon jumps, and differences in rounding with it.
LEARNING_RATE = 1e-4
PYTHON = "/usr/bin/python3"  # the one that has the system's packages


class Failed(Exception):
    def __init__(self, reason, command=""):
        super().__init__(f"{command}: {reason}" if command else reason)
        self.reason = reason


def run(command, **more):
    """Returns the command's standard output."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    except OSError as error:
        raise Failed(f"{error.filename}: {error.strerror}") from error
    if ran.returncode != 0:
        last = (ran.stderr.strip() or ran.stdout.strip() or "no message").splitlines()[-1]
        raise Failed(f"{last} (status {ran.returncode})", " ".join(command))
    return ran.stdout


def batches(text):
    """[(sequences, tokens), ...], for argparse."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of sequences x tokens, each above 0, as in 4x64,1x1024")
    return [tuple(map(int, part.split("x"))) for part in text.split(",")]


def of_turns(values):
    """Their median, least and most."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} .. {max(values):.1f})"


def model_flops(batch, length):
    return batch * length * (6 * PARAMETERS + 6 * LAYERS * WIDTH * length)


class Ours:
    """examples/gpt2 on a mesh: devices are threads, or ranks where `ranks` says how many."""

    def __init__(self, options, mesh, ranks=0, settings=()):
        self.settings = settings
        self.command = ["mpirun", "-n", str(ranks), "--bind-to", "core"] if ranks else []
        self.command += [os.path.join(options.build, "examples/gpt2"), "--preset=gpt2-124m", f"--mesh={mesh}",
                         f"--recompute={options.recompute}", f"--learning-rate={LEARNING_RATE}", "--warmup=0",
                         "--final-learning-rate=1", "--max-tokens=0", f"--vocabulary={VOCABULARY}",
                         f"--steps={options.warmup + options.steps}"]  # fmt: skip

    def turn(self, batch, length, scratch):
        """A record of each step: loss, step_seconds."""
        metrics = os.path.join(scratch, "metrics.jsonl")
        run([*self.command, f"--batch={batch}", f"--seq={length}", f"--data={scratch}/tokens.bin", *self.settings,
             f"--load={scratch}/weights/model.safetensors", f"--metrics={metrics}"])  # fmt: skip
        with open(metrics) as lines:
            return [json.loads(line) for line in lines]


def cpu_has(*words):
    """Whether /proc/cpuinfo has AuthenticAMD and avx512_bf16, for which kernels::has_bf16_gemm is true."""
    with open("/proc/cpuinfo") as info:
        text = info.read()
    return all(word in text for word in words)


class Torch:
    """A script of benchmarks/ under one installation of PyTorch."""

    def __init__(self, root=""):
        self.root = root

    def run(self, threads, scratch, arguments, script="torch_gpt2.py"):
        """In `arguments`, {} stands for the scratch folder."""
        environment = [f"OMP_NUM_THREADS={threads}"]
        if cpu_has("avx512f"):
            environment.append("OPENBLAS_CORETYPE=SKYLAKEX")  # it may not know a newer CPU, and then be five times slower
        inside, sources, enter = scratch, ROOT, []
        if self.root:
            inside, sources, enter = "/scratch", "/shardlib", [os.path.join(ROOT, "scripts/torch-root.sh"), self.root, scratch]
        python = [PYTHON, f"{sources}/benchmarks/{script}"]
        return run(enter + ["env"] + environment + python + [a.format(inside) for a in arguments])


class TorchRun:
    def __init__(self, options, torch, how, dtype="f32"):
        self.options, self.torch, self.how, self.dtype = options, torch, how, dtype
        self.settings = NARROW if dtype == "bf16" else ()

    def turn(self, batch, length, scratch):
        ranks = 1 if self.how == "none" else 2
        threads = max(1, os.cpu_count() // ranks)
        out = self.torch.run(threads, scratch, ["--tokens={}/tokens.bin", "--weights={}/weights/model.safetensors",
            f"--batch={batch}", f"--length={length}", f"--steps={self.options.warmup + self.options.steps}",
            f"--learning-rate={LEARNING_RATE}", f"--parallel={self.how}", f"--ranks={ranks}", f"--threads={threads}", f"--dtype={self.dtype}"])  # fmt: skip
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


class Llmc:
    """llm.c's own training program, built by its Makefile; its batch is 4 x 64, and its AdamW's settings are fixed."""

    settings = ("--beta2=0.999", "--weight-decay=0", "--clip=0")  # in addition to LEARNING_RATE

    def __init__(self, options):
        self.folder = os.path.realpath(options.llmc)
        self.steps = options.warmup + min(options.steps, 3)  # a step takes seconds

    def files(self, scratch):
        """Writes the files that it reads in its working directory."""
        tensors = gpt2_oracle.read(os.path.join(scratch, "weights/model.safetensors"))

        def rows_of_outputs(name):
            _, shape, data = tensors[name]
            if len(shape) == 1:
                return data
            values = array.array("f", data)  # Hugging Face's is [in, out]
            return b"".join(values[column :: shape[1]].tobytes() for column in range(shape[1]))

        with open(os.path.join(scratch, "gpt2_124M.bin"), "wb") as file:
            sizes = (CONTEXT, VOCABULARY, LAYERS, HEADS, WIDTH, VOCABULARY)  # none is padding: its loss is of all tokens too
            file.write(struct.pack("<256i", 20240326, 3, *sizes, *[0] * 248))
            file.write(tensors["wte.weight"][2] + tensors["wpe.weight"][2])
            for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
                for kind in ("weight", "bias"):
                    file.write(b"".join(rows_of_outputs(f"h.{layer}.{part}.{kind}") for layer in range(LAYERS)))
            file.write(tensors["ln_f.weight"][2] + tensors["ln_f.bias"][2])
        with open(os.path.join(scratch, "tokens.bin"), "rb") as file:
            # Inputs, of which the first is 0, and one target more; the batch again and again, one a step: it validates on 5.
            tokens = struct.pack("<H", 0) + file.read() * (self.steps + 5)
        for split in ("train", "val"):
            path = os.path.join(scratch, f"dev/data/tinyshakespeare/tiny_shakespeare_{split}.bin")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(struct.pack("<256i", 20240520, 1, len(tokens) // 2, *[0] * 253) + tokens)

    def turn(self, batch, length, scratch):
        run(["make", "train_gpt2"], cwd=self.folder)
        self.files(scratch)
        steps, said = [], []
        command = ["stdbuf", "-oL", os.path.join(self.folder, "train_gpt2")]
        environment = dict(os.environ, OMP_NUM_THREADS=str(os.cpu_count()))
        with subprocess.Popen(command, cwd=scratch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True) as process:  # fmt: skip
            for line in process.stdout:
                said.append(line.strip())
                took = re.search(r"train loss ([\d.]+) \(took ([\d.]+) ms\)", line)
                if took:
                    steps.append({"loss": float(took[1]), "step_seconds": float(took[2]) / 1e3})
                if len(steps) == self.steps:
                    process.kill()
                    break
        if len(steps) < self.steps:
            said = [line for line in said if "rror" in line] + said[-1:] + ["it printed nothing"]
            raise Failed(f"{said[0]} (status {process.returncode})", command[-1])
        return steps


def pytorches(options):
    """Returns the installations by version, and prints which are missing."""
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
    one, two, plain = "shardlib, 1 process", "shardlib, 2 ranks", "shardlib, 1 process, llm.c's AdamW"
    narrow = f"{one}, bf16"
    yield one, Ours(options, "d=1,t=1"), one
    yield narrow, Ours(options, "d=1,t=1", settings=NARROW), one
    yield "shardlib, 1 process, t=2", Ours(options, "d=1,t=2"), one
    for version, torch in torches.items():
        yield f"PyTorch {version}, 1 process", TorchRun(options, torch, "none"), one
        yield f"PyTorch {version}, 1 process, bf16", TorchRun(options, torch, "none", "bf16"), narrow
    if batch % 2 == 0:
        yield "shardlib, 1 process, d=2", Ours(options, "d=2,t=1"), one
        yield two, Ours(options, "d=2,t=1", ranks=2), one
        for version, torch in torches.items():
            for how in ("ddp", "fsdp2") if int(version.split(".")[0]) >= 2 else ("ddp",):
                yield f"PyTorch {version}, 2 processes, {how.upper()}", TorchRun(options, torch, how), two
    if options.llmc and (batch, length) == (4, 64):
        yield plain, Ours(options, "d=1,t=1", settings=Llmc.settings), one
        yield "llm.c", Llmc(options), plain


def measure(options, torches, batch, length):
    """Prints the table of one batch; returns (name, seconds) for the plot."""
    with tempfile.TemporaryDirectory() as scratch:
        # nanoGPT's format. One batch is the whole of it, so that every step has the same rows, in some order. A row ends
        # with 0 as the inputs of the next begin with it: llm.c takes them from the row before.
        numbers, tokens = random.Random(1), os.path.join(scratch, "tokens.bin")
        with open(tokens, "wb") as file:
            for _ in range(batch):
                file.write(struct.pack(f"<{length}H", *(numbers.randrange(END_OF_TEXT) for _ in range(length - 1)), 0))
        run([os.path.join(options.build, "examples/gpt2"), "--preset=gpt2-124m", f"--vocabulary={VOCABULARY}",
             f"--data={tokens}", f"--seq={length}", f"--batch={batch}", "--steps=0", "--max-tokens=0",
             f"--run={scratch}/initial", f"--export={scratch}/weights"])  # fmt: skip
        chosen = {name: (system, base) for name, system, base in systems(options, torches, batch, length)
                  if re.search(options.only, name)}  # fmt: skip
        if not chosen:
            sys.exit(f"gpt2_step.py: no system's name matches --only '{options.only}'")
        seconds, losses, failures = {name: [] for name in chosen}, {}, {}
        flops = model_flops(batch, length)
        shares, peaks, copies = {name: [] for name in chosen}, [], []
        for _ in range(options.turns):
            for name, (system, _) in chosen.items():
                if name in failures:
                    continue
                peak, copy = map(float, run([os.path.join(options.build, "benchmarks/peak")]).split())
                peaks.append(peak)
                copies.append(copy)
                try:
                    records = system.turn(batch, length, scratch)
                except Failed as error:
                    if isinstance(system, Ours):
                        raise
                    failures[name] = error.reason
                    continue
                steps = [record["step_seconds"] for record in records][options.warmup :]
                seconds[name] += steps
                shares[name].append(flops / statistics.median(steps) / (peak * 1e9))
                losses[name] = [record["loss"] for record in records]
    print(f"B={batch} T={length}: {flops / 1e9:.1f} GFLOP a step; {os.cpu_count()} cores: FMA peak {of_turns(peaks)} GFLOP/s, "
          f"copies {of_turns(copies)} GB/s read and written{', fast bf16' * cpu_has('AuthenticAMD', 'avx512_bf16')}")
    print(f"{'':<34} {'ms a step':>9}  {'(middle 80 %)':<17} {'tokens/s':>8} {'of the peak':>11}  over ours")
    times = {name: sorted(steps) for name, steps in seconds.items() if steps}
    medians = {name: statistics.median(steps) for name, steps in times.items()}
    for name, steps in times.items():
        spread = f"({1e3 * steps[len(steps) // 10]:.0f} .. {1e3 * steps[-1 - len(steps) // 10]:.0f})"
        base = chosen[name][1]
        over = f"{medians[name] / medians[base]:.2f} x {base}" if base in medians and base != name else ""
        print(f"{name:<34} {1e3 * medians[name]:>9.0f}  {spread:<17} {batch * length / medians[name]:>8.0f} "
              f"{100 * statistics.median(shares[name]):>9.1f} %  {over}".rstrip())
    for name, reason in failures.items():
        print(f"{name} did not run: {reason}")
    if losses:
        for dtype, most in LOSSES_APART.items():
            apart = 0
            for settings in {chosen[name][0].settings for name in losses}:
                alike = [steps for name, steps in losses.items() if chosen[name][0].settings == settings]
                if (settings == NARROW) == (dtype == "bf16"):
                    apart = max(apart, *(max(step) - min(step) for step in zip(*alike)))
            print(f"losses of all systems with the same settings in {dtype}, step by step: at most {apart:.1e} apart")
            if apart > most:
                sys.exit(f"gpt2_step.py: not the same model: {losses}")
    return list(medians.items())


def plot(path, tables):
    try:
        import matplotlib
    except ImportError:
        print(f"without a plot: {sys.executable} has no matplotlib; apt-get install -y --no-install-recommends python3-matplotlib, "
              f"and run this with {PYTHON}")
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
    parser = parser_of(__doc__, data=False)
    parser.add_argument("--ours", action="store_true", help="no PyTorch")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the systems, those whose name matches")
    parser.add_argument("--batches", type=batches, default="4x64,1x1024",
                        help="sequences x tokens; llm.c runs 4x64 alone (default %(default)s)")  # fmt: skip
    parser.add_argument("--torch-root", action="append", default=[], metavar="DIR",
                        help="a system made by scripts/torch-root.sh; any number of them")  # fmt: skip
    parser.add_argument("--llmc", metavar="DIR", help="a checkout of llm.c")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the medians")
    parser.add_argument("--recompute", default="none", help="as examples/gpt2's (default %(default)s)")
    for name, least, default, what in (("turns", 1, 3, "of each system"), ("warmup", 0, 2, "steps of a turn that do not count"),
                                       ("steps", 1, 5, "steps of a turn that count")):
        parser.add_argument(f"--{name}", type=count(least), default=default, help=f"{what} (default {default})")
    options = parser.parse_args()
    for program in ("examples/gpt2", "benchmarks/peak"):
        built(options.build, program)
    try:
        re.compile(options.only)
    except re.error as error:
        parser.error(f"--only: {error}")
    if options.plot and not os.access(os.path.dirname(os.path.abspath(options.plot)), os.W_OK):
        parser.error(f"--plot: there is no folder for {options.plot}, or it cannot be written")
    if options.llmc and not os.path.exists(os.path.join(options.llmc, "train_gpt2.c")):
        parser.error(f"--llmc: there is no {options.llmc}/train_gpt2.c: git clone https://github.com/karpathy/llm.c {options.llmc}")
    if not shutil.which("mpirun"):
        sys.exit("gpt2_step.py: mpirun is not there; scripts/setup.sh installs it")
    try:
        torches = {} if options.ours else pytorches(options)
        tables = {}
        for batch, length in options.batches:
            tables[f"GPT-2 124M, B={batch} T={length}"] = measure(options, torches, batch, length)
            print()
    except Failed as error:
        sys.exit(f"gpt2_step.py: {error}")
    if options.plot:
        plot(options.plot, tables)


if __name__ == "__main__":
    main()
