#!/usr/bin/env python3
"""What compiling costs: seconds and peak memory of the compiler, medians of several runs with the least and the most.

examples/gpt_fsdp.cpp, and README's program of 30 lines if the folder has the tests, as the build folder compiles them,
by ninja's command and without ccache, but for their objects, which go to a folder of their own; README's also as a
program that links shardlib::compiled. With the flags of gpt_fsdp.cpp also the training program of examples/template, as
a project that uses an installed shardlib compiles it. And a source that includes shardlib/shapes.hpp alone, as far as g++'s front end
goes.

  benchmarks/compile_cost_run.py --build build/benchmarks
"""
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

from common import ROOT, count, parser_of, ran

OBJECT = "examples/CMakeFiles/gpt_fsdp.dir/gpt_fsdp.cpp.o"
README = "tests/CMakeFiles/readme_example.dir/readme_example.cpp.o"


def cost(command, source=""):
    """Seconds, and GB of the largest of its processes; it runs in a folder that has the object's."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as text:
        for made in (OBJECT, README):
            os.makedirs(os.path.join(folder, os.path.dirname(made)))
        text.write(source)
        text.seek(0)
        begin = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=dict(os.environ, CCACHE_DISABLE="1"), stdin=text)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"compile_cost_run.py: {shlex.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e9


def main():
    parser = parser_of(__doc__, data=False)
    parser.add_argument("--runs", type=count(), default=3, help="of gpt_fsdp.cpp (default %(default)s)")
    parser.add_argument("--header-runs", type=count(), default=15, help="of the header (default %(default)s)")
    options = parser.parse_args()
    if not os.path.exists(os.path.join(options.build, "build.ninja")):
        parser.error(f"--build: '{options.build}' has no build.ninja: configure it, by ninja")
    command = ran(["ninja", "-C", options.build, "-t", "commands", OBJECT]).splitlines()[-1]
    level = re.findall(r" (-O\S*)", command)
    header = ["g++", "-std=c++20", "-I", os.path.join(ROOT, "include"), "-fsyntax-only", "-x", "c++", "-"]
    print(ran(["g++", "--version"]).splitlines()[0])
    print(f"{'':<46}{'runs':>4} {'median':>8}  (least .. most)")
    optimized = level[-1] if level else "not optimized"
    readme = []
    if os.path.exists(os.path.join(options.build, "tests/readme_example.cpp")):
        one = shlex.split(ran(["ninja", "-C", options.build, "-t", "commands", README]).splitlines()[-1])
        readme = [("README's 30 lines, shardlib::compiled", options.runs, ([*one, "-DSHARDLIB_COMPILED"],)),
                  ("README's 30 lines, header-only", options.runs, (one,))]  # fmt: skip
    source = os.path.join(ROOT, "examples/template/src/train.cpp")
    template = [source if part.endswith("/gpt_fsdp.cpp") else part for part in shlex.split(command)]
    alone = [part for part in template if part not in ("-DSHARDLIB_COMPILED", "-DSHARDLIB_HAS_COMMIT")]
    for name, runs, arguments in (
        (f"gpt_fsdp.cpp, {optimized}", options.runs, (shlex.split(command),)),
        *readme,
        (f"the template, {optimized}, shardlib::compiled", options.runs, (template,)),
        (f"the template, {optimized}, header-only", options.runs, (alone,)),
        ("shapes.hpp, front end", options.header_runs, (header, "#include <shardlib/shapes.hpp>\n")),
    ):
        columns = zip(*(cost(*arguments) for _ in range(runs)))
        for unit, values in zip(("seconds", "peak GB"), columns):
            spread = f"({min(values):.3f} .. {max(values):.3f})"
            print(f"{f'{name}: {unit}':<46}{runs:>4} {statistics.median(values):>8.3f}  {spread}", flush=True)


if __name__ == "__main__":
    main()
