#!/usr/bin/env python3
"""Counts what clang's front end makes of our headers. The counts are the same on every run, unlike its time.

compile_cost.py -- FLAG...            compares with tests/compile_cost.json; more than 3 % above it fails
compile_cost.py --update -- FLAG...   writes that file; look at its diff before you commit it

It counts types, declarations, class template specializations, functions, and statements with expressions, as
`clang -Xclang -print-stats` reports them. The cost of compiling comes from these instances of templates. Other versions of
clang and of the standard library give other counts: then the exit status is 77, skipped.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

BASELINE = pathlib.Path(__file__).with_suffix(".json")
MOST = 1.03
COUNTS = {
    "types": r"(\d+) types total",
    "declarations": r"(\d+) decls total",
    "class template specializations": r"(\d+) ClassTemplateSpecialization decls",
    "functions": r"(\d+) (?:Function|CXXMethod) decls",
    "statements and expressions": r"(\d+) stmts/exprs total",
}
# Flags are those of a program that links shardlib::compiled; the types need none.
PROGRAMS = ["examples/gpt_fsdp.cpp", "#include <shardlib/shardlib.hpp>"]
TYPES_ALONE = ["examples/shape_tests.cpp", "#include <shardlib/shapes.hpp>"]


def versions(command):
    """What the counts depend on besides our sources."""
    text = "#include <version>\nclang __clang_major__ __clang_minor__ library _GLIBCXX_RELEASE\n"
    done = subprocess.run([*command, "-E", "-P", "-x", "c++", "-"], input=text, capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split("\n")[-2].split())


def counts(command, root, what):
    with tempfile.TemporaryDirectory() as folder:
        source = root / what
        if what.startswith("#include"):
            source = pathlib.Path(folder) / "header.cpp"
            source.write_text(what + "\n")
        done = subprocess.run([*command, "-fsyntax-only", "-Xclang", "-print-stats", str(source)], capture_output=True,
                              text=True)  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"compile_cost.py: {what} does not compile:\n{done.stderr[:4000]}")
    return {name: sum(map(int, re.findall(pattern, done.stderr))) for name, pattern in COUNTS.items()}


def main():
    own, _, flags = "\0".join(sys.argv[1:]).partition("--\0")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="clang++-19")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--baseline", type=pathlib.Path, default=BASELINE)
    options = parser.parse_args([word for word in own.split("\0") if word])
    root = BASELINE.parent.parent
    plain = [options.compiler, "-std=c++20", f"-I{root / 'include'}"]
    full = plain + [flag for flag in flags.split("\0") if flag]
    here = versions(plain)
    if not options.update:
        baseline = json.loads(options.baseline.read_text())
        if baseline["versions"] != here:
            print(f"skipped: the baseline is of {baseline['versions']}, and here is {here}")
            return 77
    now = {what: counts(full if what in PROGRAMS else plain, root, what) for what in PROGRAMS + TYPES_ALONE}
    if options.update:
        options.baseline.write_text(json.dumps({"versions": here, "counts": now}, indent=2) + "\n")
        return 0
    failed = False
    for what, counted in now.items():
        for name, count in counted.items():
            before = baseline["counts"][what][name]
            if count > MOST * before:
                failed = True
                print(f"FAILED {what}: {name} {before} -> {count}, {100 * (count / before - 1):.1f} % more")
            elif count < before / MOST:
                print(f"note: {what}: {name} {before} -> {count}; renew the baseline, so that it stays so")
    if failed:
        print("Compiling has come to cost more. Where that is meant, renew the baseline and look at its diff:\n"
              "  tests/compile_cost.py --update -- the flags that `ctest -V -R compile_cost` shows\n"
              "What costs: clang++-19 -c -ftime-trace, and its InstantiateClass and InstantiateFunction.")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
