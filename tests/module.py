#!/usr/bin/env python3
"""Checks that include/shardlib/shapes.cppm exports what shapes.hpp declares, and that clang compiles it and a program that
imports it.

module.py [--root DIR] [--clang PATH] [--write]: fails on a public name or a rule that the module does not export, and on a
name that is gone. --write writes the module. With clang 19 or newer it also compiles the module, a right program and a
wrong one, whose sentence it reads; without clang it says that it left this out.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

from checks import arguments

HEAD = """// The module of shapes.hpp: `import shardlib.shapes;`. For clang 19 and newer; docs/platforms.md shows how to compile it.
// tests/module.py --write writes this file.
module;
#include "shardlib/shapes.hpp"
export module shardlib.shapes;
"""
RIGHT = """import shardlib.shapes;
using namespace shardlib;
Tensor<f32, "B/d F/t"> layer(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M/d F/t">& w) {
  return relu(einsum_unreduced<"B/d M, M F/t -> B/d F/t">(x, all_gather<"M/d F/t -> M F/t">(w)) * 2.0 + 1.0);
}
static_assert(!legal<rules::all_gather, OpSpec("M/t/d -> M/d"), Spec("M/t/d")>);
static_assert(has_dim<"B/d M", "M"> && without_axis<"M/t/d", "d"> == Spec("M/t"));
"""
WRONG = """import shardlib.shapes;
using namespace shardlib;
auto layer(const Tensor<f32, "B/d M">& x, const Tensor<f32, "M/d F">& w) {
  return einsum_unreduced<"B/d M, M/d F -> B/d F">(x, w);
}
"""


def reachable(include):
    """The headers that shapes.hpp includes, without the definitions in impl/."""
    found, left = set(), [include / "shardlib/shapes.hpp"]
    while left:
        header = left.pop()
        if header in found:
            continue
        found.add(header)
        text = re.sub(r"#if defined\(SHARDLIB_TYPED_KERNELS\).*?#endif", "", header.read_text(), flags=re.S)
        left += [include / name for name in re.findall(r'^#include "(shardlib/[^"]+)"', text, re.M) if "/impl/" not in name]
    return found


def using(namespace, names):
    declared = ", ".join(f"{namespace}::{name}" for name in sorted(names))
    return textwrap.fill(f"using {declared};", 120, subsequent_indent="  ")


def module_text(root):
    sys.path.insert(0, str(root / "scripts/docs"))
    import headers

    shapes = reachable(root / "include")
    names = {n.name for n in headers.public_names(root) if not n.namespace and any(d.path in shapes for d in n.declarations)}
    rules = set()
    for header in shapes:
        text = re.sub(r"^namespace detail_ \{.*?^\}  // namespace detail_$", "", header.read_text(), flags=re.S | re.M)
        rules |= set(re.findall(r"^constexpr Verdict (\w+)\(", text, re.M))
    lines = ["export namespace shardlib {", using("shardlib", names), "namespace rules {", using("shardlib::rules", rules)]
    return HEAD + "\n".join([*lines, "}", "}"]) + "\n"


def compile_with(clang, root):
    flags = ["-std=c++20", f"-I{root / 'include'}", "-Wall", "-Wextra", "-Werror", "-fno-color-diagnostics"]
    with tempfile.TemporaryDirectory() as folder:
        built, program = pathlib.Path(folder, "shapes.pcm"), pathlib.Path(folder, "program.cpp")

        def run(*arguments):
            return subprocess.run([clang, *flags, *map(str, arguments)], capture_output=True, text=True)

        made = run("--precompile", root / "include/shardlib/shapes.cppm", "-o", built)
        if made.returncode != 0:
            return [f"the module does not compile:\n{made.stderr}"]
        use = [f"-fmodule-file=shardlib.shapes={built}", "-fsyntax-only", program]
        program.write_text(RIGHT)
        right = run(*use)
        program.write_text(WRONG)
        wrong = run(*use)
    failures = []
    if right.returncode != 0:
        failures.append(f"a right program is refused:\n{right.stderr}")
    said = re.sub(r'["{},\s]+', " ", wrong.stderr)
    if wrong.returncode == 0 or "so only diagonal shards would be computed" not in said:
        failures.append(f"a wrong program compiles, or its sentence is not there:\n{wrong.stderr}")
    return failures


def main():
    options = arguments(root=pathlib.Path(__file__).resolve().parents[1], clang=shutil.which("clang++-19") or "", write=False)
    root = options.root.resolve()
    module, text = root / "include/shardlib/shapes.cppm", module_text(root)
    if options.write:
        module.write_text(text)
    failures = []
    if module.read_text() != text:
        failures.append("include/shardlib/shapes.cppm does not export what shapes.hpp declares: tests/module.py --write")
    if options.clang:
        failures += compile_with(options.clang, root)
    else:
        print("module.py: left out compiling, as this machine has no clang++-19")
    for failure in failures:
        print(f"module.py: {failure}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
