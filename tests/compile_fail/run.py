#!/usr/bin/env python3
"""Compiles the gallery of wrong programs and checks what the compiler says about each.

A gallery file (*.cpp beside this script) holds sections

    // expect: <regular expression>          (one or more lines)
    #if SECTION == 3
    ...the wrong program...
    #endif

Each section is compiled alone with -DSECTION=n. It must fail, and each expectation must match within the first lines
of the compiler's output. Without SECTION the file must compile: so it is the section's mistake that is rejected.
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
    """The sections of a file, [(number, line, [regex])], and the mistakes in its layout."""
    sections, mistakes, pending, seen = [], [], [], set()
    depth = 0  # of preprocessor conditions inside a section
    for number, line in enumerate(path.read_text().splitlines(), 1):
        start = re.match(r"\s*#\s*if\s+SECTION\s*==\s*(\d+)\s*$", line)
        expected = re.match(r"\s*//\s*expect:\s*(.*\S)\s*$", line)
        if expected:
            try:
                re.compile(expected.group(1))
            except re.error as error:
                mistakes.append(f"line {number}: not a regular expression: {error}")
            (sections[-1][2] if depth else pending).append(expected.group(1))
        elif start:
            index = int(start.group(1))
            if depth:
                mistakes.append(f"line {number}: section {index} begins inside another one")
            if index == 0 or index in seen:
                mistakes.append(f"line {number}: section {index} is zero or there twice")
            seen.add(index)
            sections.append((index, number, pending))
            pending = []
            depth += 1
        elif depth and re.match(r"\s*#\s*if", line):
            depth += 1
        elif depth and re.match(r"\s*#\s*endif", line):
            depth -= 1
    mistakes += [f"line {line}: section {index} expects nothing" for index, line, regexes in sections if not regexes]
    if pending:
        mistakes.append("an expectation at the end belongs to no section")
    if not sections:
        mistakes.append("no section")
    return sections, mistakes


def compile_one(command, section, path):
    define = [] if section is None else [f"-DSECTION={section}"]
    environment = dict(os.environ, LC_ALL="C")
    done = subprocess.run(command + define + [str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", env=environment, check=False)
    return done.returncode, done.stdout


def precompiled(command, path, folder):
    """The flags that bring what the file includes as a precompiled header: most of a section's time is there."""
    text = "".join(re.findall(r"^#include .*\n", path.read_text(), re.M))
    header = os.path.join(folder, path.stem + ".hpp")
    with open(header, "w") as file:
        file.write(text)
    clang = "clang" in os.path.basename(command[0])
    output = header + (".pch" if clang else ".gch")
    subprocess.run([*(word for word in command if word != "-fsyntax-only"), "-x", "c++-header", header, "-o", output], check=True)
    return ["-include-pch", output] if clang else ["-include", header]


def judge(command, path, section, line, regexes):
    """(name, what is wrong or None, the compiler's output)"""
    status, output = compile_one(command, section, path)
    if section is None:
        return f"{path.name} (no section)", "does not compile" if status else None, output
    name = f"{path.name}:{line} (section {section})"
    if status == 0:
        return name, "compiles, and should not", output
    text = join_lines(output)
    top = "\n".join(text.splitlines()[:PLAIN_LINES])
    missing = [regex for regex in regexes if not re.search(regex, top)]
    if missing:
        return name, f"not in the first {PLAIN_LINES} lines: {' AND '.join(missing)}", output
    # The sentence stands once. The source that compilers show below it ("   12 | ...") may have it too, and clang's notes
    # have the beginning of it.
    beside = re.compile(r"\s*\d* \||.* in instantiation of template class |.* declared here")
    said = "\n".join(line for line in text.splitlines() if not beside.match(line))
    again = [regex for regex in regexes if len(re.findall(regex, said)) > 1]
    return name, f"more than once: {' AND '.join(again)}" if again else None, output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--std", default="c++20")
    parser.add_argument("--include", default=str(pathlib.Path(__file__).resolve().parents[2] / "include"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="count the sections and compile nothing")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of each file the first section and every Nth after it")
    parser.add_argument("--show", action="store_true", help="print the top of every output, also of what passes")
    parser.add_argument("--runtime", default="", help="flags for files that say `needs: runtime`; none: left out")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: all *.cpp beside this script")
    options = parser.parse_args()

    files = options.files or sorted(pathlib.Path(__file__).resolve().parent.glob("*.cpp"))
    needy = {path for path in files if "// needs: runtime" in path.read_text()}
    if not options.runtime and not options.list:
        files = [path for path in files if path not in needy]
    parsed = [(path, *parse(path)) for path in files]
    if options.list:
        for path, sections, _ in parsed:
            print(f"{path.name}: {len(sections)} sections")
        print(f"{sum(len(sections) for _, sections, _ in parsed)} sections in {len(parsed)} files")
        return 0

    command = [options.compiler, f"-std={options.std}", "-fsyntax-only", "-fdiagnostics-color=never",
               "-I", options.include]
    passed = failed = 0
    for path, _, mistakes in parsed:
        for mistake in mistakes:
            print(f"FAILED {path.name}: {mistake}")
            failed += 1
    flags = {path: command + (options.runtime.split() if path in needy else []) for path in files}
    jobs = [(path, *job) for path, sections, _ in parsed for job in [(None, 0, [])] + sections[:: options.every]]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        headers = dict(zip(files, pool.map(lambda path: precompiled(flags[path], path, folder), files)))

        def judged(job):  # without a section the file compiles as a user's does
            path, section, *_ = job
            return judge(flags[path] + (headers[path] if section else []), *job)

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
