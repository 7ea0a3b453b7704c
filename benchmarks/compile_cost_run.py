#!/usr/bin/env python3
"""Measures the CPU seconds and the peak memory of the compiler. Prints medians of several runs, with the least and the most.

It compiles examples/gpt_fsdp.cpp with the command of the build folder, but without ccache and into another folder. With the
same flags it compiles README's program and the training program of examples/template in three ways: linked to
shardlib::compiled, header-only, and by the front end alone. Then g++'s front end compiles a source that includes only
shardlib/shapes.hpp.

  benchmarks/compile_cost_run.py --build build/benchmarks
"""
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

from common import ROOT, count, parser_of, ran

OBJECT = "examples/CMakeFiles/gpt_fsdp.dir/gpt_fsdp.cpp.o"


def cost(command, source=""):
    """Returns the CPU seconds of a command, and the GB of its largest process. It runs in a folder with that of the object."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as text:
        os.makedirs(os.path.join(folder, os.path.dirname(OBJECT)))
        text.write(source)
        text.seek(0)
        process = subprocess.Popen(command, cwd=folder, env=dict(os.environ, CCACHE_DISABLE="1"), stdin=text)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"compile_cost_run.py: {shlex.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def of_standard_input(command):
    """The command for a source from standard input, which may include the template's headers."""
    source = ["-I" + os.path.join(ROOT, "examples/template/src"), "-xc++", "-"]
    return [part for given in command for part in (source if given.endswith("/gpt_fsdp.cpp") else [given])]


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
    print(f"{'':<58}{'runs':>4} {'median':>8}  (least .. most)")
    optimized = level[-1] if level else "not optimized"
    with open(os.path.join(ROOT, "README.md")) as text:
        readme = re.search(r"```cpp\n([^`]*int main[^`]*)```", text.read()).group(1)
    with open(os.path.join(ROOT, "examples/template/src/train.cpp")) as text:
        template = text.read()
    rows = [(f"gpt_fsdp.cpp, {optimized}", options.runs, (shlex.split(command),))]
    for name, source in (("README's program", readme), ("the template", template)):
        linked = of_standard_input(shlex.split(command))
        alone = [part for part in linked if part not in ("-DSHARDLIB_COMPILED", "-DSHARDLIB_HAS_COMMIT")]
        rows += [(f"{name}, {optimized}, shardlib::compiled", options.runs, (linked, source)),
                 (f"{name}, {optimized}, header-only", options.runs, (alone, source)),
                 (f"{name}, front end, shardlib::compiled", options.runs, ([*linked, "-fsyntax-only"], source))]  # fmt: skip
    rows.append(("shapes.hpp, front end", options.header_runs, (header, "#include <shardlib/shapes.hpp>\n")))
    for name, runs, arguments in rows:
        columns = zip(*(cost(*arguments) for _ in range(runs)))
        for unit, values in zip(("seconds", "peak GB"), columns):
            spread = f"({min(values):.3f} .. {max(values):.3f})"
            print(f"{f'{name}: {unit}':<58}{runs:>4} {statistics.median(values):>8.3f}  {spread}", flush=True)


if __name__ == "__main__":
    main()
