#!/usr/bin/env python3
"""Compiles every ```cpp block of README.md and docs/*.md, and checks the compile errors that they quote.

doc_snippets.py [--root DIR] [--compiler g++] [FILE...] [-- COMPILER FLAG...]

A comment right before a block, invisible to the reader, says how it is compiled:

    <!-- test                        as it is, behind shardlib/shapes.hpp and `using namespace shardlib;`
    <!-- test: must fail             it does not compile, and the block quote (> ...) that follows is what the compiler says
    <!-- test: must fail: REGEX      it does not compile, and the compiler says this
    <!-- test: part of FILE          its lines stand so in FILE, a path from the root, which the build compiles
    <!-- test: skip: REASON          not compiled

The lines that follow, up to `-->`, are code around the block. The block replaces a line `...` of them, or follows them. An
#include in them, or in the block, replaces shapes.hpp. A block without such a comment is a complete program with a main. The
test readme_example builds and runs the first one of the README, so it is skipped here.

Needs nothing but Python's standard library.
"""
import argparse
import collections
import concurrent.futures
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "compile_fail"))
sys.dont_write_bytecode = True
from run import join_lines, precompiled  # noqa: E402: clang before C++26 prints our messages as arrays of lines

BLOCK = re.compile(
    r"(?:^[ ]*<!--\s*test(?P<marker>(?:(?!-->).)*)-->\s*)?^(?P<indent>[ ]*)```cpp\n(?P<code>.*?)^[ ]*```\n(?P<rest>(?:\s*^[ ]*>[^\n]*\n)*)",
    re.S | re.M,
)
PREFIX = '#include "shardlib/shapes.hpp"\nusing namespace shardlib;\n'


class Block:
    def __init__(self, root, path, text, match):
        self.name = f"{path.name}:{text.count(chr(10), 0, match.start('code')) + 1}"
        self.skip, self.fails, self.mistake, self.quote = None, False, None, None
        code = "".join(line[len(match["indent"]):] or "\n" for line in match["code"].splitlines(True))
        around = ""
        if match["marker"] is None:
            if not re.search(r"\bint main\b", code):
                self.mistake = "no program, and no <!-- test --> comment before it says how to compile it"
            if path.name == "README.md":
                self.skip = "the test readme_example builds it"
        else:
            first, _, around = match["marker"].partition("\n")
            form = r"(?::\s*(?:(skip):\s*(\S.*)|(must fail)(?::\s*(\S.*))?|part of (\S+)))?"
            verb = re.fullmatch(form, first.strip())
            if not verb:
                self.mistake = f"`test{first}` is not among the forms that doc_snippets.py --help lists"
                return
            if verb[5]:
                if code not in (root / verb[5]).read_text():
                    self.mistake = f"its lines do not stand so in {verb[5]}"
                self.skip = f"the build compiles {verb[5]}"
                return
            self.skip, self.fails = verb[2], bool(verb[3])
            quoted = " ".join(line.strip()[1:].strip() for line in match["rest"].strip().splitlines())
            if self.fails and not (verb[4] or quoted):
                self.mistake = "must fail, but neither a pattern nor a quote says with which words"
            elif self.fails:
                # Typography differs: what is quoted within code has its quotes escaped by the compiler.
                self.quote = verb[4] or re.escape(quoted)
        whole = re.sub(r"^\s*\.\.\.[ ]*\n", lambda _: code, around, count=1, flags=re.M)
        if whole == around:
            whole += code
        self.source = whole if re.search(r"^\s*#\s*include", whole, re.M) else PREFIX + whole


def blocks_of(root, path):
    text = path.read_text()
    found = [Block(root, path, text, match) for match in BLOCK.finditer(text)]
    fences = len(re.findall(r"^[ ]*```cpp$", text, re.M))
    if fences != len(found):
        raise SystemExit(f"{path}: {fences} blocks of C++, but {len(found)} were understood")
    return found


def judge(command, block):
    """What is wrong with the block, or None."""
    if block.mistake or block.skip:
        return block.mistake
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "block.cpp"
        source.write_text(block.source)
        done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    shown = "\n".join("    | " + line[:400] for line in (block.source + done.stderr).splitlines()[:60])
    if not block.fails:
        return None if done.returncode == 0 else f"does not compile\n{shown}"
    if done.returncode == 0:
        return f"compiles, and should not\n{shown}"
    said = re.sub(r"\s+", " ", join_lines(done.stderr).replace('\\"', '"'))
    return None if re.search(block.quote, said) else f"the compiler does not say {block.quote}\n{shown}"


def main():
    arguments, _, flags = " \0".join(sys.argv[1:]).partition("-- \0")
    arguments, flags = [[word for word in part.split(" \0") if word] for part in (arguments, flags)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="default: README.md and docs/*.md")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    # Without the definitions in impl/: they cost most of the time, and no block depends on them.
    command = [options.compiler, "-std=c++20", "-fsyntax-only", "-fdiagnostics-color=never", "-DSHARDLIB_COMPILED", f"-I{root / 'include'}",
               f"-I{root}", *flags]
    files = options.files or [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    blocks = [block for path in files for block in blocks_of(root, path)]
    failed = 0
    # Of the headers that a block includes, the one that most blocks include comes precompiled.
    included = {block: re.findall(r'^\s*#\s*include\s+["<](shardlib/.+)[">]', block.source, re.M)
                for block in blocks if not (block.mistake or block.skip)}
    number = collections.Counter(header for headers in included.values() for header in headers)
    common = {block: max(headers, key=number.get) for block, headers in included.items() if headers}
    shared = sorted({header for header in common.values() if number[header] > 1})
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        flags_of = dict(zip(shared, pool.map(lambda header: precompiled(command, f"#include <{header}>\n", folder), shared)))

        def judged(block):
            return judge(command + flags_of.get(common.get(block), []), block)

        for block, wrong in zip(blocks, pool.map(judged, blocks)):
            if wrong:
                failed += 1
                print(f"FAILED {block.name}: {wrong}", flush=True)
    skipped = sum(1 for block in blocks if block.skip)
    print(f"{len(blocks)} blocks of C++ in {len(files)} files, {skipped} skipped, {failed} failed")
    return 1 if failed or len(blocks) == skipped else 0


if __name__ == "__main__":
    sys.exit(main())
