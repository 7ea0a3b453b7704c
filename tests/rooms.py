#!/usr/bin/env python3
"""Lists the rooms of include/shardlib, and checks that includes between them point one way, that any header can be included
first, that few headers know of dry runs, and that gpt_fsdp stays short.

rooms.py [--root DIR]: fails on an include of a room further down the list, on a folder that is not in the list, on a
header at the top that is not an umbrella, on a header that, if it is included first, has the definitions of another one
included before that one's declarations, on definitions that two sources of shardlib::compiled include, on a file that asks
whether a run is dry without a reason in the list, and on a gpt_fsdp of more than 500 lines. Needs nothing but Python's standard
library.
"""
import pathlib
import re
import sys

from checks import arguments

# Each room may include the rooms above it.
ROOMS = {
    "support": "errors, small helpers without a concept of the library",
    "spec": "the spec language, dtypes, compile errors as sentences",
    "rules": "what each op allows, as pure functions of specs",
    "types": "Tensor, Mesh, trees, the types of gradients",
    "ops": "every op: rule, result type, derivative; the standard library is enough",
    "memory": "regions, pools, buffers",
    "comm": "the erased communicator and its backends: threads, shared memory, MPI",
    "device": "one device of a mesh, its cores, and launching a program on all of them",
    "kernels": "local math, erased of specs; body/ has the kernels that a device can run, too",
    "runtime": "what a tensor holds, names and sizes, padding, observers",
    "autodiff": "tape, backward pass, value_and_grad, recompute, overlap",
    "compute": "what each op does with a device's shards, without specs",
    "optim": "optimizers, learning rates, initialization",
    "interop": "host arrays, shard_map, gradient checks, Eigen, Kokkos, formatting",
    "pipeline": "pipeline parallelism: stages, schedules, execution",
    "io": "text, tokens, checkpoints, file formats, trees from one layout to another",
    "run": "what the trainers share: options, loop, plan, reports",
}
# In a dry run, the pool, the communicators and Exec of these rooms do nothing. Others need not ask whether it is one,
# except these headers.
DRY_ROOMS = {"memory", "comm", "device"}
ASKS_IF_DRY = {
    "runtime/tensor.hpp": "span: zeros in place of the elements would take the memory that a plan does without",
    "compute/impl/attention.hpp": "the one device stands for the mean of all, which do different amounts of work",
    "autodiff/impl/tape.hpp": "plans show a collective also if nothing reads its result",
    "pipeline/impl/prepare.hpp": "no other rank can say what it runs",
    "pipeline/impl/execute.hpp": "no other rank has times to collect",
    "io/impl/agree.hpp": "what all devices do together through host memory is an error there",
    "run/impl/check_replicas.hpp": "a step that compares replicas can be planned",
    "run/impl/leaf_histograms.hpp": "a step that makes histograms can be planned",
    "run/impl/training_loop.hpp": "`train` counts one step instead of training",
}
GPT_FSDP = ["gpt_model.hpp", "gpt_setup.hpp", "gpt_fsdp.hpp", "gpt_fsdp.cpp"]
UMBRELLAS = {"shardlib.hpp", "shapes.hpp", "pipeline.hpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]shardlib/([^">]+)[">]', re.M)
CODE = re.compile(r"^(?!\s*#|\s*//|\s*$)", re.M)


def mistakes(include):
    order = list(ROOMS)
    for folder in sorted(path for path in include.iterdir() if path.is_dir()):
        if folder.name not in ROOMS:
            yield f"{folder}: a room that {pathlib.Path(__file__).name} does not list"
    for path in sorted(include.rglob("*.hpp")):
        name = path.relative_to(include)
        if len(name.parts) == 1:
            if name.name not in UMBRELLAS:
                yield f"{path}: only umbrellas stand at the top; put it into a room"
            continue
        text = path.read_text()
        for match in INCLUDE.finditer(text):
            there = pathlib.PurePosixPath(match[1]).parts
            line = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
            if len(there) == 1:
                yield f"{line}: includes the umbrella {match[1]}; include what it uses"
            elif there[0] in ROOMS and order.index(there[0]) > order.index(name.parts[0]):
                yield f"{line}: {name.parts[0]}/ includes {match[1]}, of a room further down the list"


def read_too_early(include):
    """The headers of impl/ that are read while the header they include is only begun, with each header read first."""
    texts = {path.relative_to(include).as_posix(): path.read_text() for path in include.rglob("*.hpp")}

    def read(name, begun, finished):
        if name in begun:
            return
        begun.append(name)
        for match in INCLUDE.finditer(texts[name]):
            if not CODE.search(texts[name], match.start()):
                finished.add(name)  # only its definitions are left
            unfinished = match[1] in begun and match[1] not in finished
            if unfinished and "/impl/" in name and "/impl/" not in match[1]:
                yield f"{include / begun[0]}: read first, {name} is read before {match[1]} is"
            if match[1] in texts:
                yield from read(match[1], begun, finished)
        finished.add(name)

    for name in sorted(texts):
        if "/impl/" not in name:
            yield from read(name, [], set())


def defined_twice(include):
    """Inclusions that bring the definitions of one impl/ header into another source of shardlib::compiled, too."""
    headers = {path.relative_to(include).as_posix(): path.read_text() for path in include.rglob("*.hpp")}
    definition = re.compile(r"^SHARDLIB_INLINE\b[^;]*?\{\n", re.M)
    own = {name for name, text in headers.items() if "/impl/" in name and definition.search(text)}
    for name, text in headers.items():
        compiled = re.sub(r"#ifndef SHARDLIB_COMPILED\n.*?#endif", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
        for match in INCLUDE.finditer(compiled):
            if match[1] in own:
                line = compiled.count(chr(10), 0, match.start()) + 1
                yield f"{include / name}:{line}: {match[1]} has definitions, which shardlib::compiled would have twice"


def asks_if_dry(include, examples):
    """The headers and examples that ask whether a run is dry, and should not; and those of the list that no longer do."""
    asks = re.compile(r"(?:\.|->)(?:is_dry|is_meta)\(\)")
    known = set()
    for path in sorted([*include.rglob("*.hpp"), *examples.rglob("*.[ch]pp")]):
        name = path.relative_to(include).as_posix() if include in path.parents else path.name
        if name.split("/")[0] in DRY_ROOMS or not asks.search(path.read_text()):
            continue
        known.add(name)
        if name not in ASKS_IF_DRY:
            yield f"{path}: asks whether the run is dry; leave that to device/, memory/ and comm/, as by Exec::run and item(x, planned)"
    yield from (f"{name} no longer asks whether a run is dry: take it off the list" for name in sorted(ASKS_IF_DRY.keys() - known))


def too_long(examples, most=500):
    """gpt_fsdp's model, setup and trainer, if a reader has more lines to read than promised."""
    lines = sum(len((examples / name).read_text().splitlines()) for name in GPT_FSDP)
    if lines > most:
        yield f"{examples}: {', '.join(GPT_FSDP)} have {lines} lines together; README promises at most {most}"


def main():
    root = arguments(root=pathlib.Path(__file__).resolve().parents[1]).root
    include = root / "include" / "shardlib"
    examples = root / "examples"
    found = [*mistakes(include), *read_too_early(include), *defined_twice(include), *asks_if_dry(include, examples),
             *too_long(examples)]  # fmt: skip
    print("\n".join(found))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
