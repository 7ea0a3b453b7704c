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

PLAIN_LINES = 10  # an error is read in its first lines or not at all
PACK_LINES = 12  # clang before C++26 spells our message as a pack of characters, two lines further down

PACK = re.compile(r"<\s*((?:'(?:\\.|[^'\\])+',\s*)+'(?:\\.|[^'\\])+')\s*>")
CHARACTER = re.compile(r"'((?:\\.|[^'\\])+)'")


def decode_packs(text):
    """`says<'n', 'o'>` -> `says<no>`."""

    def decode(match):
        return "<" + "".join(re.sub(r"^\\(.)$", r"\1", c) for c in CHARACTER.findall(match.group(1))) + ">"

    return PACK.sub(decode, text)


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


def judge(command, lines_allowed, path, section, line, regexes):
    """(name, what is wrong or None, the compiler's output)"""
    status, output = compile_one(command, section, path)
    if section is None:
        return f"{path.name} (no section)", "does not compile" if status else None, output
    name = f"{path.name}:{line} (section {section})"
    if status == 0:
        return name, "compiles, and should not", output
    top = decode_packs("\n".join(output.splitlines()[:lines_allowed]))
    missing = [regex for regex in regexes if not re.search(regex, top)]
    return name, f"not in the first {lines_allowed} lines: {' AND '.join(missing)}" if missing else None, output


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--std", default="c++20")
    parser.add_argument("--include", default=str(pathlib.Path(__file__).resolve().parents[2] / "include"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="count the sections and compile nothing")
    parser.add_argument("--show", action="store_true", help="print the top of every output, also of what passes")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: all *.cpp beside this script")
    options = parser.parse_args()

    files = options.files or sorted(pathlib.Path(__file__).resolve().parent.glob("*.cpp"))
    parsed = [(path, *parse(path)) for path in files]
    if options.list:
        for path, sections, _ in parsed:
            print(f"{path.name}: {len(sections)} sections")
        print(f"{sum(len(sections) for _, sections, _ in parsed)} sections in {len(parsed)} files")
        return 0

    command = [options.compiler, f"-std={options.std}", "-fsyntax-only", "-fdiagnostics-color=never",
               "-I", options.include]
    packs = "clang" in os.path.basename(options.compiler) and options.std in ("c++20", "c++2a", "c++23", "c++2b")
    lines_allowed = PACK_LINES if packs else PLAIN_LINES
    passed = failed = 0
    for path, _, mistakes in parsed:
        for mistake in mistakes:
            print(f"FAILED {path.name}: {mistake}")
            failed += 1
    jobs = [(path, *job) for path, sections, _ in parsed for job in [(None, 0, [])] + sections]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for name, wrong, output in pool.map(lambda job: judge(command, lines_allowed, *job), jobs):
            lines = output.splitlines()
            if wrong:
                failed += 1
                print(f"FAILED {name}: {wrong}", *("    | " + line[:600] for line in lines[:30]), sep="\n")
            else:
                passed += 1
                if options.show:
                    print(f"passed {name}", *("    | " + line for line in lines[:lines_allowed]), sep="\n")
            sys.stdout.flush()
    print(f"{options.compiler} -std={options.std}: {failed or 'none'} of {passed + failed} compilations went wrong")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
