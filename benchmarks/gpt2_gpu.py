#!/usr/bin/env python3
"""Measures a training step of GPT-2 on one GPU: tokens/s and MFU, also of PyTorch. Compares its losses with those of the CPU.

scripts/gpu.sh builds the programs and runs this one. MFU counts the model FLOPs of gpt2_step.py against the GPU's dense bf16
peak, which is that of SHEETS or of --peak. A figure is the median of the steps after the first --warmup ones. With --times, a
run whose kernels wait for each other gives the time of each family of kernels and of each op, and its share of the GPU's peak
and memory bandwidth (that of SHEETS, or of --bandwidth). On a machine with two GPUs, it also compares the losses of both, which
communicate by NCCL, with those of one.

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
SHEETS = {"H100 80GB HBM3": (989e12, 3.35e12), "H100 PCIe": (756e12, 2.0e12), "H100 NVL": (835e12, 3.9e12), "H200": (989e12, 4.8e12),
          "A100-SXM4-80GB": (312e12, 2.04e12), "A100-SXM4-40GB": (312e12, 1.56e12), "B200": (2250e12, 7.7e12)}  # fmt: skip
# Figures of data sheets: dense bf16 FLOP/s, and bytes/s of memory.
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


def sheet_of(gpu):
    """The GPU's dense bf16 FLOP/s, and bytes/s; 0 for one that SHEETS does not have. The longest name that matches counts."""
    return next((SHEETS[name] for name in sorted(SHEETS, key=len, reverse=True) if name in gpu), (0, 0))


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
    """The number of GPUs that programs see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(gpus) if chosen is None else len([name for name in chosen.split(",") if name])


def ways_to_start(build):
    """Commands for two devices: as threads, and as ranks if the program is built with MPI."""
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


def torch_steps(options, preset, batch, length, steps, scratch, *more):
    """PyTorch's steps, and why there are none."""
    command = [options.python, os.path.join(ROOT, "benchmarks/torch_gpt2.py"), f"--preset={preset}",
               f"--tokens={scratch}/tokens.bin", f"--batch={batch}", f"--length={length}", f"--steps={steps}",
               "--learning-rate=1e-4", "--device=cuda", "--dtype=bf16", *more]  # fmt: skip
    ran = started(command, "--python names an interpreter that has PyTorch, and --no-torch does without")
    if ran.returncode != 0:
        return None, (ran.stderr.strip() or "no message").splitlines()[-1]
    return steps_of(ran.stdout.splitlines(), steps, "benchmarks/torch_gpt2.py"), ""


def rows(options, preset, batch, scratch, peak, *more):
    """Prints the rows of a preset: shardlib's, and PyTorch's if it is installed."""
    work, left_out = (preset, batch, options.length), []
    write_tokens(scratch, batch, options.length)
    row(f"shardlib, {preset}", ours(options, *work, options.steps, scratch, "--dtype=bf16", *more), options, *work, peak)
    for name, flags in () if options.no_torch else (("PyTorch", ()), ("PyTorch, compiled", ("--compile",))):
        steps, reason = torch_steps(options, *work, options.steps, scratch, *flags)
        if steps is None:
            left_out.append(f"{name}, {preset}: left out ({reason})")
        else:
            row(f"{name}, {preset}", steps, options, *work, peak)
    return left_out


def write_tokens(scratch, batch, length):
    with open(os.path.join(scratch, "tokens.bin"), "wb") as file:
        array.array("H", random.Random(1).choices(range(50000), k=batch * length)).tofile(file)


def row(name, steps, options, preset, batch, length, peak):
    seconds = statistics.median(step["step_seconds"] for step in steps[options.warmup :])
    tokens = batch * length
    mfu = f"{model_flops(preset, tokens, length) / seconds / peak:.1%}" if peak else "-"
    print(f"| {name} | {batch} x {length} | {seconds * 1e3:.1f} | {tokens / seconds:,.0f} | {mfu} | "
          f"{steps[0]['loss']:.4f} .. {steps[-1]['loss']:.4f} |", flush=True)  # fmt: skip


def times_table(title, events, name, peak, bandwidth):
    """Sums of a trace's ops by their name(event): the 30 that take the most time. An op within another one counts in both."""
    sums = collections.defaultdict(collections.Counter)
    for event in events:
        told = event["args"]
        sums[name(event)].update(calls=1, seconds=event["dur"] / 1e6, bytes=told.get("touched", 0), flops=told.get("flops", 0))
    whole = sum(one["seconds"] for one in sums.values())

    def rate(amount, most):
        return f"{amount / 1e12:.2f} ({amount / most:.0%})" if most else f"{amount / 1e12:.2f}"

    print(f"\n| {title} | calls | ms | share | TB/s (of the peak) | TFLOP/s (of the peak) |\n|---|---|---|---|---|---|")
    for what, one in sorted(sums.items(), key=lambda item: -item[1]["seconds"])[:30]:
        seconds = max(one["seconds"], 1e-9)
        arithmetic = rate(one["flops"] / seconds, peak) if one["flops"] else ""
        print(f"| {what} | {one['calls']} | {one['seconds'] * 1e3:.2f} | {one['seconds'] / whole:.1%} | "
              f"{rate(one['bytes'] / seconds, bandwidth)} | {arithmetic} |")  # fmt: skip


def times(folder, peak, bandwidth):
    """The tables of a run's trace: families of kernels, and ops by their specs."""
    events = traced_ops(folder)
    times_table("family", events, lambda event: f"`{event['name']}`", peak, bandwidth)
    times_table("op", events, lambda event: f"`{event['name']}` of `{event['args'].get('spec', '')}`".replace(" of ``", ""), peak, bandwidth)


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
    parser.add_argument("--bandwidth", type=float, default=0, help="the bytes/s of the GPU's memory")
    parser.add_argument("--recompute", default="none", help="as examples/gpt2's (default %(default)s)")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--no-losses", action="store_true", help="no comparisons of losses, with the CPU's and those of two GPUs")
    parser.add_argument("--largest", action="store_true", help="a row for the largest preset that fits the GPU's memory, too")
    parser.add_argument("--times", action="store_true", help="the times of families of kernels and of ops")
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
    gpu, (peak, bandwidth) = gpus[0], sheet_of(gpus[0])
    peak, bandwidth = options.peak or peak, options.bandwidth or bandwidth
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
        print(f"\nbf16, on one {gpu}, peak {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'unknown: give --peak for the MFU'}\n")
        print("| program | batch | ms a step | tokens/s | MFU | loss |\n|---|---|---|---|---|---|")
        recompute = f"--recompute={options.recompute}"
        left_out = rows(options, options.preset, options.batch, scratch, peak, recompute)
        if options.largest and (fits := largest(options.build, float(megabytes) * 2**20, options.length)):
            left_out += rows(options, *fits, scratch, peak)
        print("\n".join(left_out and ["", *left_out]))
        if options.times:
            write_tokens(scratch, options.batch, options.length)
            ours(options, options.preset, options.batch, options.length, 8, scratch, "--dtype=bf16", recompute, "--trace", f"--run={scratch}/run", env={"CUDA_LAUNCH_BLOCKING": "1"})
            times(os.path.join(scratch, "run"), peak, bandwidth)


if __name__ == "__main__":
    main()
