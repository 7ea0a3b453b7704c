#!/usr/bin/env python3
"""A training step of GPT-2 on one GPU: its losses against the CPU's, tokens/s, MFU, and the same of PyTorch.

Builds nothing: scripts/gpu.sh does, and runs this. MFU counts the model FLOPs of gpt2_step.py against the GPU's dense
bf16 peak, which is known for the GPUs in PEAKS, or given by --peak. A figure is the median of the steps after the first
--warmup ones. With --times, a run whose kernels wait for each other gives the time of each op. Where there are two GPUs,
the losses on both, which communicate by NCCL, are compared with those on one.

  benchmarks/gpt2_gpu.py --build build/gpu
"""
import argparse
import array
import collections
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

from common import traced_ops
from memory import planned

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PEAKS = {"H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200": 989e12, "A100-SXM4-80GB": 312e12,
         "A100-SXM4-40GB": 312e12, "B200": 2250e12}  # dense bf16 FLOP/s, of the data sheets  # fmt: skip
SIZES = {"gpt2-124m": (12, 768, 12), "gpt2-350m": (24, 1024, 16), "gpt2-774m": (36, 1280, 20), "gpt2-1558m": (48, 1600, 25)}
VOCABULARY, CONTEXT = 50304, 1024


def started(command, remedy, **more):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, **more)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}; {remedy}")
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        sys.exit(f"{' '.join(command)}: no end after {error.timeout:.0f} s\n{text[-2000:]}")


def run(command, remedy, **more):
    ran = started(command, remedy, **more)
    if ran.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {ran.returncode}\n{(ran.stderr or ran.stdout)[-2000:]}")
    for line in ran.stderr.splitlines():
        if line.startswith("note: "):  # such as that GPUs communicate without NCCL
            print(line)
    return ran.stdout


def model_flops(preset, tokens, length):
    layers, width, _ = SIZES[preset]
    parameters = VOCABULARY * width + layers * (12 * width**2 + 13 * width) + 2 * width  # those that multiply
    return tokens * (6 * parameters + 6 * layers * width * length)


def peak_of(gpu):
    """The GPU's dense bf16 FLOP/s; 0 for one that PEAKS does not have. The longest name that matches counts."""
    return next((PEAKS[name] for name in sorted(PEAKS, key=len, reverse=True) if name in gpu), 0)


def largest(build, memory, length):
    """The largest preset, with the most sequences of 32, 16 and 8, whose plan leaves a fifth of the memory free; or None."""
    for preset in reversed(SIZES):
        for batch in (32, 16, 8):
            command = [os.path.join(build, "examples/gpt2"), f"--preset={preset}", f"--vocabulary={VOCABULARY}",
                       f"--batch={batch}", f"--seq={length}", "--mesh=d=1,t=1", "--dtype=bf16"]  # fmt: skip
            if planned(command, 1) <= 0.8 * memory:
                return preset, batch
    return None


def steps_of(lines, count, program):
    steps = [json.loads(line) for line in lines if '"loss"' in line and '"step_seconds"' in line]
    if len(steps) != count:
        sys.exit(f"{program}: {len(steps)} steps in its metrics instead of {count}")
    return steps


def ours(options, preset, batch, length, steps, scratch, *more, device="gpu", env=None, start=(), timeout=None):
    metrics = os.path.join(scratch, "metrics.jsonl")
    if os.path.exists(metrics):
        os.remove(metrics)
    run([*start, os.path.join(options.build, "examples/gpt2"), f"--preset={preset}", f"--vocabulary={VOCABULARY}",
         f"--data={scratch}/tokens.bin", f"--batch={batch}", f"--seq={length}", f"--steps={steps}", "--warmup=0",
         "--learning-rate=1e-4", "--final-learning-rate=1", "--max-tokens=0", f"--device={device}",
         f"--metrics={metrics}", *more],
        "scripts/gpu.sh builds it, and --build names another folder", env={**os.environ, **(env or {})},
        timeout=timeout)  # fmt: skip
    if not os.path.exists(metrics):
        sys.exit(f"{options.build}/examples/gpt2: no {metrics}, which it was to write")
    with open(metrics) as lines:
        return steps_of(lines, steps, "examples/gpt2")


def compare(what, names, steps, limit):
    for one, other in zip(*steps):  # steps_of has counted them
        apart = abs(one["loss"] - other["loss"])
        print(f"{what} step {one['step']}: loss {one['loss']:.5f} on {names[0]}, {other['loss']:.5f} on {names[1]}, apart {apart:.1e}")
        if not apart < limit:
            sys.exit("the losses differ by more than rounding")


def visible(gpus):
    """How many of them programs see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpus) if chosen is None else len([name for name in chosen.split(",") if name])


def ways_to_start(build):
    """Of two devices: as threads, and as ranks if the program is built with MPI."""
    version = run([os.path.join(build, "examples/gpt2"), "--version"], "scripts/gpu.sh builds it")
    return {"threads": ()} | ({"ranks": ("mpirun", "-n", "2")} if "MPI" in version and shutil.which("mpirun") else {})


def on_two(options, scratch, ways, *more, device="gpu"):
    """Compares the losses of two devices with those of one."""
    write_tokens(scratch, 4, 64)
    work = (options.preset, 4, 64, 4, scratch, "--dtype=f32", *more)
    one = ours(options, *work, "--mesh=d=1,t=1", device=device)
    for name, start in ways.items():
        both = ours(options, *work, "--mesh=d=2,t=1", "--collective-timeout=60", device=device, start=start, timeout=900)
        compare("f32", ("one device", f"two {name}"), (one, both), 1e-3)


def torch_steps(options, batch, length, steps, scratch, *more):
    """PyTorch's steps, and why there are none."""
    command = [options.python, os.path.join(ROOT, "benchmarks/torch_gpt2.py"), f"--tokens={scratch}/tokens.bin",
               f"--batch={batch}", f"--length={length}", f"--steps={steps}", "--learning-rate=1e-4", "--device=cuda",
               "--dtype=bf16", *more]  # fmt: skip
    ran = started(command, "--python names an interpreter that has PyTorch, and --no-torch does without")
    if ran.returncode != 0:
        return None, (ran.stderr.strip() or "no message").splitlines()[-1]
    return steps_of(ran.stdout.splitlines(), steps, "benchmarks/torch_gpt2.py"), ""


def write_tokens(scratch, batch, length):
    with open(os.path.join(scratch, "tokens.bin"), "wb") as file:
        array.array("H", random.Random(1).choices(range(50000), k=batch * length)).tofile(file)


def row(name, steps, options, preset, batch, length, peak):
    seconds = statistics.median(step["step_seconds"] for step in steps[options.warmup :])
    tokens = batch * length
    mfu = f"{model_flops(preset, tokens, length) / seconds / peak:.1%}" if peak else "-"
    print(f"| {name} | {batch} x {length} | {seconds * 1e3:.1f} | {tokens / seconds:,.0f} | {mfu} | "
          f"{steps[0]['loss']:.4f} .. {steps[-1]['loss']:.4f} |", flush=True)  # fmt: skip


def op_times(folder):
    """Seconds of each op in a run's trace, and calls, of the steps that it has."""
    seconds, calls = collections.Counter(), collections.Counter()
    for event in traced_ops(folder):
        op = f"{event['name']} `{event['args'].get('spec', '')}`".replace(" ``", "")
        seconds[op] += event["dur"] / 1e6
        calls[op] += 1
    return seconds, calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/gpu"), help="with examples/gpt2 (default %(default)s)")
    parser.add_argument("--python", default="python3", help="the one that has PyTorch (default %(default)s)")
    parser.add_argument("--preset", default="gpt2-124m", choices=list(SIZES))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--peak", type=float, default=0, help="the GPU's dense bf16 FLOP/s")
    parser.add_argument("--recompute", default="none", help="as examples/gpt2's (default %(default)s)")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-losses", action="store_true", help="no comparisons of losses, with the CPU's and those of two GPUs")
    parser.add_argument("--largest", action="store_true", help="a row for the largest preset that fits the GPU's memory, too")
    parser.add_argument("--times", action="store_true", help="the time of each op")
    parser.add_argument("--check-options", action="store_true", help="end after the options")
    options = parser.parse_args()
    if options.steps <= options.warmup:
        parser.error(f"--steps {options.steps} must be more than --warmup {options.warmup}, as a figure is of the steps after it")
    if options.warmup < 0:
        parser.error(f"--warmup {options.warmup} must be at least 0")
    if options.check_options:
        return
    gpus = run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], "this machine has no driver for NVIDIA GPUs").splitlines()
    if not gpus:
        sys.exit("nvidia-smi: it names no GPU")
    gpu, peak = gpus[0], options.peak or peak_of(gpus[0])
    megabytes = run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], "").splitlines()[0]
    with tempfile.TemporaryDirectory() as scratch:
        if not options.no_losses:
            write_tokens(scratch, 4, 64)
            for dtype in ("f32", "bf16"):
                both = [ours(options, options.preset, 4, 64, 4, scratch, f"--dtype={dtype}", device=d) for d in ("cpu", "gpu")]
                compare(dtype, ("the CPU", "the GPU"), both, 1e-3 if dtype == "f32" else 3e-2)
            if visible(gpus) > 1:
                on_two(options, scratch, ways_to_start(options.build))
            else:
                print("two GPUs: left out, as programs see one")
        write_tokens(scratch, options.batch, options.length)
        print(f"\n{options.preset}, bf16, on one {gpu}, peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown: give --peak for the MFU'}\n")
        print("| program | batch | ms a step | tokens/s | MFU | loss |\n|---|---|---|---|---|---|")
        work = (options.batch, options.length)
        row("shardlib", ours(options, options.preset, *work, options.steps, scratch, "--dtype=bf16", f"--recompute={options.recompute}"), options, options.preset, *work, peak)
        if not options.no_torch and options.preset == "gpt2-124m":
            for name, more in (("PyTorch", ()), ("PyTorch, compiled", ("--compile",))):
                steps, reason = torch_steps(options, *work, options.steps, scratch, *more)
                if steps is None:
                    print(f"\n{name}: left out ({reason})")
                    break
                row(name, steps, options, options.preset, *work, peak)
        if options.largest and (fits := largest(options.build, float(megabytes) * 2**20, options.length)):
            preset, batch = fits
            write_tokens(scratch, batch, options.length)
            steps = ours(options, preset, batch, options.length, options.steps, scratch, "--dtype=bf16")
            row(f"shardlib, {preset}", steps, options, preset, batch, options.length, peak)
            write_tokens(scratch, options.batch, options.length)
        if options.times:
            ours(options, options.preset, *work, 8, scratch, "--dtype=bf16", f"--recompute={options.recompute}", "--trace", f"--run={scratch}/run", env={"CUDA_LAUNCH_BLOCKING": "1"})
            seconds, calls = op_times(os.path.join(scratch, "run"))
            print("\n| op | calls | ms | share |\n|---|---|---|---|")
            whole = sum(seconds.values())
            for op, spent in seconds.most_common(30):
                print(f"| {op} | {calls[op]} | {spent * 1e3:.2f} | {spent / whole:.1%} |")


if __name__ == "__main__":
    main()
