#!/usr/bin/env python3
"""Compiles the gallery of wrong programs and checks what the compiler says about each.

A gallery file (*.cpp beside this script) begins with a right program, and then holds cases

    // expect: <regular expression>          (one or more lines)
    ...the wrong program, up to the next expectation...

Each case is compiled after the right program. It must fail, and each expectation must match within the first lines of the
compiler's output. The right program must compile alone, so the compiler rejects the mistake of the case.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

PLAIN_LINES = 10  # an error is read in its first lines or not at all

# clang before C++26 prints our message as lines of one width: says<lines<2>{{"a first line ", "a second   "}}>
LINES = re.compile(r"\bsays<((?:[\w:]*lines<\d+>\{\{.*?\}\}(?:, )?)+)>::holds")
STRING = re.compile(r'"((?:\\.|[^"\\])*)"')


def join_lines(text):
    """`says<lines<2>{{"a first  ", "line    "}}>::holds` -> `says<a first line>`; a line that ends in a space is a whole one."""

    def join(match):
        strings = [re.sub(r"\\(.)", r"\1", s) for s in STRING.findall(match.group(1))]
        return "says<" + "".join(s.rstrip() + " " * s.endswith(" ") for s in strings).rstrip() + ">"

    return LINES.sub(join, text)


def parse(path):
    """The right program of a file; its cases, [(line, [regex], wrong program)]; and the mistakes in its layout."""
    right, cases, mistakes = [], [], []
    program, in_expectation = right, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        expected = re.match(r"\s*//\s*expect:\s*(.*\S)\s*$", line)
        if expected:
            try:
                re.compile(expected.group(1))
            except re.error as error:
                mistakes.append(f"line {number}: not a regular expression: {error}")
            if not in_expectation:
                program = []
                cases.append((number, [], program))
            cases[-1][1].append(expected.group(1))
        elif re.match(r"\s*//.*\bexpect:", line):
            mistakes.append(f"line {number}: `expect:` does not begin the comment")
        program.append(line)
        in_expectation = bool(expected)
    if not cases:
        mistakes.append("no case")
    return "\n".join(right), [(line, regexes, "\n".join(program)) for line, regexes, program in cases], mistakes


def compile_one(command, path, right, line, wrong):
    """Compiles the right program and behind it the wrong one, which begins at this line of the file."""
    source = f'#line 1 "{path}"\n{right}\n#line {line} "{path}"\n{wrong}\n'
    environment = dict(os.environ, LC_ALL="C")
    done = subprocess.run([*command, "-x", "c++", "-"], input=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace", env=environment, check=False)
    return done.returncode, done.stdout


def precompiled(command, includes, folder):
    """The flags that bring these includes as a precompiled header: most of the time of a short program is there."""
    header = os.path.join(tempfile.mkdtemp(dir=folder), "includes.hpp")
    with open(header, "w") as file:
        file.write(includes)
    clang = "clang" in os.path.basename(command[0])
    output = header + (".pch" if clang else ".gch")
    once = ["-fpch-instantiate-templates"] if clang else []  # what the includes instantiate, not again with each program
    subprocess.run([*(word for word in command if word != "-fsyntax-only"), *once, "-x", "c++-header", header, "-o", output], check=True)
    return ["-include-pch", output] if clang else ["-include", header]


def judge(command, path, right, line, regexes, wrong):
    """(name, what is wrong or None, the compiler's output)"""
    status, output = compile_one(command, path, right, line, wrong)
    name = f"{path.name}:{line}"
    if not regexes:
        return f"{path.name} (the right program)", "does not compile" if status else None, output
    if status == 0:
        return name, "compiles, and should not", output
    text = join_lines(output)
    # g++ 16 shows the source below each line of its context; nobody reads it to find the error.
    top = "\n".join([line for line in text.splitlines() if not re.match(r"\s*\d* \|", line)][:PLAIN_LINES])
    missing = [regex for regex in regexes if not re.search(regex, top)]
    if missing:
        return name, f"not in the first {PLAIN_LINES} lines: {' AND '.join(missing)}", output
    # The sentence stands once. The source that compilers show below it ("   12 | ...") may have it too, and clang's notes
    # have the beginning of it.
    beside = re.compile(r"\s*\d* \||.* in instantiation of template class |.* declared here")
    said = "\n".join(line for line in text.splitlines() if not beside.match(line))
    if "tensor spec `?`" in said:
        return name, "a second error, of the result's spec", output
    again = [regex for regex in regexes if len(re.findall(regex, said)) > 1]
    return name, f"more than once: {' AND '.join(again)}" if again else None, output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--std", default="c++20")
    parser.add_argument("--include", default=str(pathlib.Path(__file__).resolve().parents[2] / "include"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="count the cases and compile nothing")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of each file the first case and every Nth after it")
    parser.add_argument("--show", action="store_true", help="print the top of every output, also of what passes")
    parser.add_argument("--runtime", action="append", default=[],
                        help="a flag for files that say `needs: runtime`; none: they are left out, or an error if named")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: all *.cpp beside this script")
    options = parser.parse_args()

    files = options.files or sorted(pathlib.Path(__file__).resolve().parent.glob("*.cpp"))
    needy = {path for path in files if "// needs: runtime" in path.read_text()}
    if options.files and needy and not options.runtime and not options.list:
        parser.error(f"{min(needy).name} needs --runtime flags, as in --runtime=-DSHARDLIB_COMPILED")
    if not options.runtime and not options.list:
        files = [path for path in files if path not in needy]
    parsed = [(path, *parse(path)) for path in files]
    if options.list:
        for path, _, cases, _ in parsed:
            print(f"{path.name}: {len(cases)} cases")
        print(f"{sum(len(cases) for _, _, cases, _ in parsed)} cases in {len(parsed)} files")
        return 0

    command = [options.compiler, f"-std={options.std}", "-fsyntax-only", "-fdiagnostics-color=never",
               "-I", options.include]
    passed = failed = 0
    for path, _, _, mistakes in parsed:
        for mistake in mistakes:
            print(f"FAILED {path.name}: {mistake}")
            failed += 1
    flags = {path: command + (options.runtime if path in needy else []) for path in files}
    jobs = [(path, right, *job)
            for path, right, cases, _ in parsed for job in [(0, [], "")] + cases[:: options.every]]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        # Most files have the same includes, and share their header. A right program has no others than its header's.
        kinds = {path: (path in needy, "".join(re.findall(r"^#include .*\n", path.read_text(), re.M))) for path in files}
        commands = {kind: flags[path] for path, kind in kinds.items()}
        headers = dict(zip(commands, pool.map(lambda kind: precompiled(commands[kind], kind[1], folder), commands)))

        def judged(job):
            path = job[0]
            return judge(flags[path] + headers[kinds[path]], *job)

        for name, wrong, output in pool.map(judged, jobs):
            lines = output.splitlines()
            if wrong:
                failed += 1
                print(f"FAILED {name}: {wrong}", *("    | " + line[:600] for line in lines[:30]), sep="\n")
            else:
                passed += 1
                if options.show:
                    print(f"passed {name}", *("    | " + line for line in lines[:PLAIN_LINES]), sep="\n")
            sys.stdout.flush()
    print(f"{options.compiler} -std={options.std}: {failed or 'none'} of {passed + failed} compilations went wrong")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
