#!/usr/bin/env python3
"""Runs shardlib-checkpoint average and prune on checkpoints that it makes: the means of numbers, the checkpoints that stay, and
the messages of mistakes.

checkpoint_tool.py --tool SHARDLIB_CHECKPOINT
"""
import json
import os
import shutil
import struct
import subprocess
import tempfile

from checks import arguments, check, contents, crc32c, finish, json_of, put, told, tree
from gpt2_oracle import read_all, write


def f32(*numbers):
    return "F32", [len(numbers)], struct.pack(f"<{len(numbers)}f", *numbers)


def bf16(*numbers):
    return "BF16", [len(numbers)], b"".join(struct.pack("<f", x)[2:] for x in numbers)


def numbers(tensor):
    return list(struct.unpack(f"<{len(tensor[2]) // 4}f", tensor[2]))


class Tool:
    def __init__(self, program, root):
        self.program, self.root = program, root

    def run(self, status, *words):
        return told(status, self.program, *words)

    def make(self, folder, step, tensors, **metadata):
        """A checkpoint of these tensors; returns its path."""
        file = os.path.join(self.root, "made.safetensors")
        write(file, tensors, metadata)
        self.run(0, "from-safetensors", file, os.path.join(self.root, folder), "--step", str(step))
        return os.path.join(self.root, folder, f"step-{step:08d}")

    def contents(self, checkpoint):
        file = os.path.join(self.root, "read.safetensors")
        self.run(0, "to-safetensors", checkpoint, file)
        return read_all(file)


def steps_in(folder):
    return [int(name[5:]) for name in sorted(os.listdir(folder)) if name.startswith("step-") and name[5:].isdigit()]


def average(tool):
    def state(a, b, mu, count):
        return {"weights.layers.0.w": f32(*a), "weights.h": bf16(*b), "mu.layers.0.w": f32(*mu),
                "weights.count": ("I32", [1], struct.pack("<i", count))}

    # In f32, 2^24 + 1 is 2^24: three sums of f32 would lose the ones.
    big = 2.0**24
    one = tool.make("runs", 10, state((1, big, -0.1), (1, 2), (7, 7, 7), 1), **{"setting.learning_rate": "0.1"})
    two = tool.make("runs", 30, state((2, 1, 0.3), (2, 2), (8, 8, 8), 3), **{"setting.learning_rate": "0.3", "who": "newest"})
    three = tool.make("runs", 20, state((6, 1, 0.3), (6, 5), (9, 9, 9), 2), **{"setting.learning_rate": "0.3"})
    target = os.path.join(tool.root, "averaged")
    said = tool.run(0, "average", target, one, two, three)
    check("step-00000030: the mean of 2 leaves of 3 checkpoints; 2 other leaves from " + two in said, "average: " + said)
    check(f"note: learning_rate is 0.1 in '{one}', but 0.3 in '{two}'" in said, "average notes settings: " + said)
    about, made = tool.contents(os.path.join(target, "step-00000030"))
    single = lambda x: struct.unpack("<f", struct.pack("<f", x))[0]
    expected = [3.0, single((big + 2) / 3), single((single(-0.1) + 2 * single(0.3)) / 3)]
    check(numbers(made["weights.layers.0.w"]) == expected, f"average of f32: {numbers(made['weights.layers.0.w'])}, not {expected}")
    check(made["weights.h"] == bf16(3, 3), f"average of bf16: {made['weights.h']}")
    check(made["mu.layers.0.w"] == f32(8, 8, 8) and made["weights.count"][2] == struct.pack("<i", 3), "the rest is the newest's")
    check(about["step"] == "30" and about["who"] == "newest" and about["average_of"] ==
          "step-00000010, step-00000030, step-00000020", f"average: metadata {about}")
    tool.run(0, "verify", os.path.join(target, "step-00000030"))
    check("already exists" in tool.run(2, "average", target, one, two), "no checkpoint is replaced")
    tool.run(0, "average", target, one, two, "--step", "31", "--prefix", "mu.")
    moments = tool.contents(os.path.join(target, "step-00000031"))[1]
    check(numbers(moments["mu.layers.0.w"]) == [7.5] * 3 and moments["weights.h"] == bf16(2, 2), "average --prefix")

    file = os.path.join(tool.root, "mean.safetensors")
    tool.run(0, "average", file, two, one)
    about, made = read_all(file)
    check(set(made) == {"layers.0.w", "h", "count"} and numbers(made["layers.0.w"])[0] == 1.5 and about["step"] == "30",
          f"average into a file: {sorted(made)}, {about}")

    def fails(status, words, *parts):
        before = sorted(os.listdir(tool.root)), sorted(os.listdir(target))
        said = tool.run(status, "average", *words)
        for part in parts:
            check(part in said, f"average {words}: {part!r} is not in {said}")
        check(before == (sorted(os.listdir(tool.root)), sorted(os.listdir(target))), f"average {words} leaves nothing")

    none = os.path.join(target, "none")
    fails(2, (none,), "CKPT is required")
    fails(2, (none, one), "1 checkpoint is given", "two or more")
    fails(2, (none, one, two, one + "/"), "is given twice")
    fails(2, (none, one, two, "--prefix", "wieghts."), "no floating-point leaf whose name begins with 'wieghts.'")
    whole = "--prefix 'weights.h' is the whole name of a leaf"
    fails(2, (none + ".safetensors", one, two, "--prefix", "weights.h"), whole)
    check(whole in tool.run(2, "to-safetensors", one, none + ".safetensors", "--prefix", "weights.h"), "to-safetensors")
    manifest = os.path.join(one, "manifest.json")
    before = contents(manifest)
    said = tool.run(2, "to-safetensors", one, manifest)
    check("is not a safetensors file" in said and contents(manifest) == before, f"to-safetensors onto another file: {said}")
    fails(2, (one, two, three), f"'{one}' is a checkpoint", "the first argument")
    run = os.path.join(tool.root, "run")
    os.makedirs(run)
    put(os.path.join(run, "config.toml"), b"")
    fails(2, (run, one, two), f"'{run}' is the folder of a run: give '{run}/checkpoints'")
    fails(2, (os.path.join(tool.root, "step-00000030"), one, two), "has the name of a checkpoint")
    for place, why in (run, "is the folder of a run"), (one, "is a checkpoint"), (file, "is a file"):
        said = tool.run(2, "from-safetensors", file, place, "--step", "99")
        check(f"'{place}' {why}" in said, f"from-safetensors into {place}: {said}")
    fails(2, (target, one, two, "--step", "12"), "has step-00000031", "the earlier step-00000012")
    tool.make("late", 10**8, {"w": f32(1)})  # nine digits
    fails(2, (os.path.join(tool.root, "late"), one, two), "has step-100000000", "the earlier step-00000030")
    fails(2, (file, one, two), f"'{file}' already exists")
    fails(2, (none, one, tool.root), "is not a checkpoint")
    state_of = state((1, 2, 3), (1, 2), (1, 2, 3), 1)
    lacks = tool.make("other", 1, {name: x for name, x in state_of.items() if name != "weights.h"})
    before_fails = tool.make("other", 2, {**state_of, "weights.layers.0.w": f32(1, 2)})
    more = tool.make("other", 3, {**state_of, "weights.layers.1.w": f32(1, 2, 3)})
    wide = tool.make("other", 4, {**state_of, "weights.h": f32(1, 2)})
    fails(2, (none, one, lacks), "the leaf 'weights.h' is in", f"not in '{lacks}'")
    fails(2, (none, one, before_fails), "'weights.layers.0.w'", "f32 [3]", "f32 [2]")
    fails(2, (none, one, more), "'weights.layers.1.w' is in", f"not in '{one}'")
    fails(2, (none, one, wide), "'weights.h'", "bf16 [2]", "f32 [2]")
    file = os.path.join(tool.root, "made.safetensors")
    write(file, {**state_of, "weights.h": bf16(float("nan"), 2)}, {})
    subprocess.run([tool.program, "from-safetensors", file, os.path.join(tool.root, "other"), "--step", "5"], check=True,
                   capture_output=True)
    diverged = os.path.join(tool.root, "other", "step-00000005")
    fails(1, (none, one, diverged), f"'{diverged}'", "'weights.h' has 1 value that is not finite", "leave it out")
    chunk = os.path.join(three, "weights.h", "0")
    with open(chunk, "r+b") as damaged:
        damaged.write(b"\xff")
    fails(1, (none, one, three), "is damaged", "'weights.h/0'")


def prune(tool):
    run = os.path.join(tool.root, "run")
    folder = os.path.join(run, "checkpoints")

    def fresh(steps):
        shutil.rmtree(run, ignore_errors=True)
        for step in steps:
            tool.make("run/checkpoints", step, {"w": f32(*range(step))})

    def size(step):
        return sum(map(len, tree(os.path.join(folder, f"step-{step:08d}")).values()))

    fresh([10, 20, 30, 40])
    bytes_of = {step: size(step) for step in (10, 20)}
    said = tool.run(0, "prune", run, "--keep", "2", "--dry-run")
    check(steps_in(folder) == [10, 20, 30, 40], "--dry-run removes nothing")
    for step, total in bytes_of.items():
        shown = f"{total} B" if total < 1024 else f"{total / 1024:.1f} KiB"
        check(f"would remove step-{step:08d}, {shown}\n" in said, f"prune names {step} and {shown}: {said}")
    check("would remove 2 of 4 checkpoints" in said and "resumes from step-00000040" in said, "prune: " + said)
    said = tool.run(0, "prune", folder, "--keep", "2")
    check(steps_in(folder) == [30, 40] and "removes step-00000010, " in said and "removed 2 of 4" in said, "prune: " + said)
    check(sorted(os.listdir(folder)) == ["LATEST", "step-00000030", "step-00000040"], "prune leaves nothing else")
    check("removed 0 of 2 checkpoints and 0 B" in tool.run(0, "prune", run, "--keep=2"), "nothing to prune")
    for path in folder, run:
        check("resumes from step-00000040" in tool.run(0, "list", path), "the newest stays")
        said = tool.run(2, "verify", path)
        check(f"such as '{folder}/step-00000040'" in said, "verify names a checkpoint of the folder: " + said)
    shown = tool.run(0, "average", "--help")
    check(max(map(len, shown.splitlines())) <= 100, "--help is wrapped: " + shown)

    fresh([10, 15, 20, 25, 30, 35])
    tool.run(0, "prune", run, "--keep", "1", "--every", "20")
    check(steps_in(folder) == [20, 35], f"--every: {steps_in(folder)}")

    # The checkpoint of the best validation loss stays, unless --best 0 says otherwise.
    for best, expected in ((["--best", "0"], [40]), ([], [20, 40])):
        fresh([10, 20, 30, 40])
        for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.25)):
            set_loss(os.path.join(folder, f"step-{step:08d}"), loss)
        tool.run(0, "prune", run, "--keep", "1", *best)
        check(steps_in(folder) == expected, f"--best {best}: {steps_in(folder)}")

    # Damaged checkpoints neither count nor go; if the newest is one, the whole one before it stays.
    fresh([10, 20, 30, 40])
    with open(os.path.join(folder, "step-00000040", "w", "0"), "r+b") as damaged:
        damaged.write(b"\xff")
    os.truncate(os.path.join(folder, "step-00000020", "w", "0"), 3)
    said = tool.run(0, "prune", run, "--keep", "1")
    check(steps_in(folder) == [20, 30, 40] and "resumes from step-00000030" in said, f"damaged: {steps_in(folder)}: {said}")
    check(said.count("stays: ") == 2 and "'w/0'" in said, "prune names the damaged ones: " + said)
    os.remove(os.path.join(folder, "step-00000030", "manifest.json"))
    said = tool.run(1, "prune", run, "--keep", "1")
    check("none of the 3 checkpoints" in said and steps_in(folder) == [20, 30, 40], "without a whole one: " + said)

    # A run that went back to step 20: later steps stay.
    fresh([10, 20, 30])
    put(os.path.join(folder, "LATEST"), "step-00000020\n")
    tool.run(0, "prune", run, "--keep", "1")
    check(steps_in(folder) == [20, 30], f"steps after LATEST stay: {steps_in(folder)}")

    # What a prune has left that was killed: gone with the next one, and never a checkpoint.
    fresh([10, 20])
    os.rename(os.path.join(folder, "step-00000010"), os.path.join(folder, "step-00000010.old-pruned"))
    os.remove(os.path.join(folder, "step-00000010.old-pruned", "manifest.json"))
    check("DAMAGED" not in tool.run(0, "list", folder), "what is half removed is no checkpoint")
    said = tool.run(0, "prune", run, "--keep", "5", "--dry-run")
    check("would remove step-00000010.old-pruned (left by a process that ended)" in said, "prune: " + said)
    tool.run(0, "prune", run, "--keep", "5")
    check(sorted(os.listdir(folder)) == ["LATEST", "step-00000020"], f"leftovers go: {os.listdir(folder)}")
    killed_midway(tool, run, folder, fresh)

    check("--keep is required" in tool.run(2, "prune", run), "--keep is required")
    check("--keep" in tool.run(2, "prune", run, "--keep", "0"), "--keep 0")
    check("no folder" in tool.run(2, "prune", run + "/no", "--keep", "1"), "no folder")
    check("has no checkpoints" in tool.run(2, "prune", tool.root, "--keep", "1"), "no checkpoints")
    file = os.path.join(folder, "LATEST")
    for words in (["list", file], ["prune", file, "--keep", "1"]):
        check(f"'{file}' is a file: give the folder of a run" in tool.run(2, *words), f"{words}: not a folder")
    check("'b' is one argument too many: give CKPT alone" in tool.run(2, "verify", "a", "b"), "too many arguments")


def killed_midway(tool, run, folder, fresh):
    """Killed at any moment, it leaves complete checkpoints and folders that are none."""
    for delay in range(6):
        fresh(range(1, 9))
        process = subprocess.Popen([tool.program, "prune", run, "--keep", "1"], stdout=subprocess.PIPE)
        for _ in range(delay):
            process.stdout.readline()  # announced before it goes
        process.kill()
        process.wait()
        process.stdout.close()
        for step in steps_in(folder):
            tool.run(0, "verify", os.path.join(folder, f"step-{step:08d}"))
        check(8 in steps_in(folder), "killed midway: the newest is gone")
        tool.run(0, "prune", run, "--keep", "1")
        check(sorted(os.listdir(folder)) == ["LATEST", "step-00000008"], f"after a kill: {os.listdir(folder)}")


def set_loss(checkpoint, loss):
    """Stores a validation loss, as a run does, with the checksums."""
    path, manifest = os.path.join(checkpoint, ".zattrs"), os.path.join(checkpoint, "manifest.json")
    attributes = json_of(path)
    text = json.dumps({**attributes, "validation_loss": loss}).encode()
    put(path, text)
    listed = json_of(manifest)
    del listed["crc32c"]
    listed["files"][".zattrs"] = {"bytes": len(text), "crc32c": f"{crc32c(text):08x}"}
    rest = json.dumps(listed)[1:].encode()
    put(manifest, f'{{"crc32c": "{crc32c(rest):08x}",\n'.encode() + rest)


def main():
    args = arguments("tool")
    for part in (average, prune):
        with tempfile.TemporaryDirectory(prefix="shardlib_checkpoint_tool_") as root:
            part(Tool(args.tool, root))
    finish()


main()
