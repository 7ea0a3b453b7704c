"""Checks that the benchmarks' scripts start, and that they can read the programs' present output. A run of all benchmarks takes
too long for a test."""
import argparse
import contextlib
import glob
import io
import os
import re
import shutil
import sys
import tempfile

from checks import arguments, check, finish, put, ran, text_of

BENCHMARKS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "benchmarks")
sys.path.insert(0, BENCHMARKS)
import bf16_plans  # noqa: E402
import common  # noqa: E402
import gpt2_gpu  # noqa: E402
import memory  # noqa: E402
import node_links  # noqa: E402
import overlap  # noqa: E402
import prediction  # noqa: E402


def gpu_script():
    """What scripts/gpu.sh says before it compiles anything, with stand-ins for nvcc and nvidia-smi."""
    script = os.path.join(os.path.dirname(BENCHMARKS), "scripts/gpu.sh")

    def expect(status, text, *options, capability="9.0", libraries="the system's"):
        with tempfile.TemporaryDirectory() as folder:
            where = []
            if libraries == "copied":
                said = ran(0, script, "--libraries", f"{folder}/libraries").stdout
                check("CMAKE_PREFIX_PATH=DIR scripts/gpu.sh" in said, "gpu.sh --libraries says what to do with them", said)
                for part in ("include/catch2", "lib/cmake/Catch2"):
                    shutil.rmtree(f"{folder}/libraries/{part}")
                where.append(f"CMAKE_PREFIX_PATH={folder}/libraries")
            if libraries != "the system's":  # CMake looks for them in a folder that has no others
                toolchain = os.path.join(folder, "nothing.cmake")
                only = "".join(f"set(CMAKE_FIND_ROOT_PATH_MODE_{kind} ONLY)\n" for kind in ("PACKAGE", "INCLUDE", "LIBRARY"))
                put(toolchain, f"set(CMAKE_FIND_ROOT_PATH {folder})\n{only}")
                where.append(f"CMAKE_TOOLCHAIN_FILE={toolchain}")
            stand_ins = {"nvcc": "exit 1", "nvidia-smi": f"case $1 in *compute_cap*) echo {capability} ;; esac" if capability else "exit 9"}
            for name, body in stand_ins.items():
                put(os.path.join(folder, name), f"#!/bin/sh\n{body}\n")
                os.chmod(os.path.join(folder, name), 0o755)
            done = ran(status, "env", *where, f"PATH={folder}:{os.environ['PATH']}", script, *options)
        check(text in done.stdout + done.stderr, f"gpu.sh {' '.join(options)} says '{text}'", done.stdout + done.stderr)

    expect(0, "scripts/gpu.sh --no-tests ", "--help")
    expect(2, "unknown option '--tests'", "--tests")
    expect(2, "invalid choice: 'gpt3'", "--", "--preset", "gpt3")
    expect(1, "nvidia-smi shows no GPU", capability="")
    expect(1, "compute capability 75, but the kernels need 80", capability="7.5")
    expect(1, "names no compute capability ('[N/A]')", capability="[N/A]")
    expect(1, "gpu.sh: not found: Eigen 3 (libeigen3-dev), fmt (libfmt-dev), Random123/philox.h (librandom123-dev), "
              "toml++/toml.h (libtomlplusplus-dev), nlohmann/json.hpp (nlohmann-json3-dev), utf8proc.h (libutf8proc-dev), "
              "blosc.h (libblosc-dev), zlib.h (zlib1g-dev), zstd.h (libzstd-dev): install them", libraries="none")  # fmt: skip
    expect(1, "gpu.sh: not found: Catch2, which the tests need", libraries="copied")  # the only one that is gone
    expect(2, "--libraries takes the folder", "--libraries")


def main():
    examples = arguments("examples").examples
    for script in sorted(glob.glob(os.path.join(BENCHMARKS, "*.py"))):
        if os.path.basename(script) in ("common.py", "layers.py", "torch_gpt2.py", "torch_moe.py"):  # no programs; need PyTorch
            continue
        shown = ran(0, script, "--help").stdout
        check(os.path.basename(script) in shown, f"{script} --help names it", shown)
        if "--data" in shown:
            said = ran(2, script, "--data=/nowhere").stderr
            check("cannot read '/nowhere': make it by scripts/text.sh" in said, f"{script} --data=/nowhere", said)
    scripts = glob.glob(os.path.join(os.path.dirname(BENCHMARKS), "scripts/*.sh"))
    for script in sorted([*scripts, os.path.join(BENCHMARKS, "run.sh")]):
        if os.path.basename(script) in ("common.sh", "system.sh"):  # parts of the others
            continue
        shown = ran(0, script, "--help").stdout
        check(os.path.basename(script) in shown, f"{script} --help names it", shown)
    gpu_script()
    table = ran(0, os.path.join(BENCHMARKS, "ratios.py")).stdout
    results = text_of(BENCHMARKS, "results.md")
    check(table in results, "results.md has the table that ratios.py makes of it", table)
    with tempfile.TemporaryDirectory() as folder:
        for fast in ("", ", fast bf16"):
            put(f"{folder}/results.md", re.sub("(GB/s read and written)(, fast bf16)?", rf"\1{fast}", results))
            table = ran(0, os.path.join(BENCHMARKS, "ratios.py"), f"{folder}/results.md").stdout
            met = re.search(r"CPU with fast bf16 .* \| (.*) \|\n", table)[1]
            check(("not applicable" in met) != bool(fast), f"the step in bf16 on a CPU{fast or ' without'} is judged '{met}'")

    gpt2 = [os.path.join(examples, "gpt2"), "--vocabulary=512", "--d-model=64", "--heads=2", "--layers=2", "--batch=2",
            "--seq=16", "--mesh=d=2,t=1", "--max-tokens=0"]  # fmt: skip
    alone, ranks = memory.planned(gpt2, 1), memory.planned(gpt2, 2)
    check(100_000 < alone < ranks, f"memory.py reads from --plan that a device takes {alone} bytes, and two ranks {ranks}")
    for flag in overlap.FLAGS:
        ran(0, *gpt2, flag, "--plan")
    with tempfile.TemporaryDirectory() as folder:
        put(f"{folder}/text.txt", "In the beginning was the word. " * 40)
        ran(0, *gpt2[:-2], "--mesh=d=1,t=1", "--max-tokens=0", "--steps=2", "--recompute=none", "--trace",
            f"--data={folder}/text.txt", f"--run={folder}/run")  # fmt: skip
        ops = common.traced_ops(f"{folder}/run")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            gpt2_gpu.times(f"{folder}/run", 1e12, 1e10)
    families = re.findall(r"\| (`.*) \| (\d+) \| ([\d.]+) \| [\d.]+% \| [\d.]+ \(\d+%\) \| (.*) \|", said.getvalue())
    check(any(name == "`einsum_unreduced`" and re.fullmatch(r"[\d.]+ \(\d+%\)", arithmetic) for name, *_, arithmetic in families)
          and any(name.startswith("`layer_norm` of `") and arithmetic == "" for name, *_, arithmetic in families),
          "gpt2_gpu.py shows the families of a trace and their share of peak and bandwidth", said.getvalue())
    span, busy = ops[-1]["ts"] + ops[-1]["dur"] - ops[0]["ts"], sum(op["dur"] for op in ops)
    check(0 < busy <= 1.01 * span and any(op["args"].get("flops") for op in ops), f"of {span} us of a trace, ops take {busy}")
    fits = [gpt2_gpu.largest(os.path.dirname(examples), size, 1024) for size in (1e9, 40e9, 1e12)]
    check(fits[0] is None and fits[1] not in (None, fits[2]) and fits[2] == ("gpt2-1558m", 32),
          f"gpt2_gpu.py finds that {fits} fit 1 GB, 40 GB and 1 TB")

    with tempfile.TemporaryDirectory() as folder:  # on CPUs in place of GPUs
        small = ["--layers=1", "--d-model=16", "--heads=2", "--d-ff=16"]
        options = argparse.Namespace(build=os.path.dirname(examples), preset="gpt2-124m")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            gpt2_gpu.on_two(options, folder, {"threads": gpt2_gpu.ways_to_start(options.build)["threads"]}, *small, device="cpu")
    check(said.getvalue().count(" on two threads, apart ") == 4, "gpt2_gpu.py compares two devices with one", said.getvalue())

    layers, width, ff, vocabulary = 2, 64, 96, 512
    fsdp = [os.path.join(examples, "gpt_fsdp"), "--batch=2", "--seq=16", f"--layers={layers}", f"--d-model={width}", "--n-kv=1",
            "--n-q-per-kv=1", "--d-head=64", f"--d-ff={ff}", f"--vocabulary={vocabulary}", "--max-tokens=0",
            "--mesh=d=2,t=1"]  # fmt: skip
    # Half of each tensor: gathered in both passes and its gradient scattered, but the embeddings gathered once.
    tables, blocks = 2 * vocabulary * width, layers * (4 * width * width + 3 * width * ff)
    least = 4 * (2 * tables + 3 * blocks) / 2
    sent = overlap.sent(fsdp)
    check(least <= sent <= 1.05 * least, f"overlap.py reads from --plan that a rank sends {sent} bytes of {least}")
    stages = [os.path.join(examples, "gpt_pipeline"), *fsdp[1:-1], "--mesh=p=2", "--batch=32"]
    first, highest = memory.planned(stages, 1), bf16_plans.peak(stages)  # the second stage has the logits
    check(100_000 < first < highest, f"bf16_plans.py reads from --plan that a stage takes {highest} bytes, and the first one {first}")
    # Half of each tensor is summed over r.
    replicas, least = node_links.sent_over([*fsdp[:-1], "--batch=4"], "r=2,d=2,t=1").get("r", 0), 4 * (tables + blocks) / 2
    check(least <= replicas <= 1.05 * least, f"node_links.py reads from --plan that a rank sends {replicas} bytes over r of {least}")
    slow, fast = (prediction.step_by_plan(fsdp, 1e9, 1, bandwidth, 0) for bandwidth in (1e3, 1e15))
    check(abs((slow - fast) * 1e3 / sent - 1) < 0.05, f"prediction.py reads from --plan {slow} s over a link of 1 kB/s, and {fast} s without")
    finish()


if __name__ == "__main__":
    main()
