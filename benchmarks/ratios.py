#!/usr/bin/env python3
"""Prints the table of ratios: the aims, and the figures that one run of benchmarks/run.sh reached, with their spread.

The figure that counts, "reached", is a median, or the worst of several with the name of its row. The spread is that of the
part of the run that prints the figure. If it prints none, the spread of a ratio of two times is the widest possible one: from
the fastest of the peer's middle 80 % over the slowest of ours to the slowest over the fastest. The spread of a share of the peak
is made in the same way with the spread of the peak. That of memory is the least and the most of the policies. If the aim lies
within the spread, the last column says so. A part that was not run, or failed, gives rows "not measured". A part with unexpected
output ends this program with status 1. A missed aim does not.

  benchmarks/ratios.py                                  reads benchmarks/results.md
  benchmarks/ratios.py build/benchmarks/results.md      reads the results of a run in which a part failed
"""
import argparse
import os
import re
import sys

NUMBER, SPREAD = r"(\d+(?:\.\d+)?)", r"\((\d+(?:\.\d+)?) \.\. (\d+(?:\.\d+)?)\)"
ONE, TWO, LLMC = "shardlib, 1 process", "shardlib, 2 ranks", "shardlib, 1 process, llm.c's AdamW"
NARROW = f"{ONE}, bf16"


class Part:
    """The output of a command."""

    def __init__(self, path, command, text):
        self.path, self.command, self.text = path, command, text
        stopped = re.search(r"^(?:not measured: .*|failed with status \d+)$", text, re.M)
        self.stopped = stopped and stopped[0].removeprefix("not measured: ")

    def expected(self, what):
        what = what.replace(SPREAD, "(N .. N)").replace(NUMBER, "N")
        sys.exit(f"ratios.py: {self.path}, the section by `{self.command}`: expected {what}")

    def table(self, header, row):
        """The matches of the header's groups, and those of the row's groups in each line up to an empty one. Texts of numbers
        become numbers."""
        found = re.search(rf"^{header}.*\n((?:.+\n)+)", self.text, re.M) or self.expected(f"a table under '{header}'")
        lines = found[found.re.groups].splitlines()
        matches = [found] + [re.match(row, line) or self.expected(f"a row '{row}', not '{line}'") for line in lines]
        return [[float(group) if re.fullmatch(NUMBER, group or "") else group for group in match.groups()]
                for match in matches]  # fmt: skip

    def rows(self, header, row, names):
        found = {name: figures for name, *figures in self.table(header, row)[1:]}
        return [found[name] if name in found else self.expected(f"a row '{name}'") for name in names]


def parts(file):
    pieces = re.split(r"^(?:.* )?[Bb]y `([^`\n]+)`:\n\n```\n", file.read(), flags=re.M)
    for command, rest in zip(pieces[1::2], pieces[2::2]):
        text, fence, _ = ("\n" + rest).partition("\n```")
        part = Part(file.name, command, text + "\n")
        yield part if fence else part.expected("a line ``` at its end")


# Each function below reads a part. For each of its goals it returns a value, the least and the most, and a name for the value, or
# None if the part does not have it.
def systems(part, batch):
    """Returns one process's share of the peak, and for each system the median, the fastest and the slowest milliseconds of a
    step, and its share."""
    header = rf"{batch}: {NUMBER} GFLOP a step; .*FMA peak {NUMBER}(?: {SPREAD})? GFLOP/s.*\n +ms a step .* of the peak"
    row = rf"(?:losses of|.* did not run:|(\S.*?) +(\d+)  {SPREAD} +\d+ +{NUMBER} %)"
    (flop, peak, least, most, _), *rows = part.table(header, row)
    found = {name: figures for name, *figures in rows if name}
    _, fastest, slowest, share = found[ONE] if ONE in found else part.expected(f"a row '{ONE}' of {batch}")
    return (share / 100, 1e3 * flop / slowest / (most or peak), 1e3 * flop / fastest / (least or peak)), found


def over(found, peer, ours=ONE):
    """Returns how many times as fast as the peer ours is. Of several peers it takes the newest PyTorch, or else the fastest."""
    names = [name for name in found if re.fullmatch(peer, name)]
    if not names or ours not in found:
        return None
    versions = {name: [*map(int, re.findall(r"(?<=PyTorch )\d+|(?<=\d\.)\d+", name))] for name in names}
    name = max(names, key=lambda name: (versions[name], -found[name][0]))
    (time, fastest, slowest, _), (our_time, our_fastest, our_slowest, _) = found[name], found[ours]
    return time / our_time, fastest / our_slowest, slowest / our_fastest, "over " + name.removeprefix("shardlib, ")


def step(part):
    """The ratios of gpt2_step.py. That of bf16 over f32 applies only if the line says that the CPU has fast bf16."""
    fast = re.search(r"^B=4 T=64: .*, fast bf16$", part.text, re.M)
    (share, short), (long_share, long) = (systems(part, batch) for batch in ("B=4 T=64", "B=1 T=1024"))
    narrow = over(short, ONE, NARROW)
    if narrow and not fast:
        narrow += ("not applicable: no fast bf16",)
    return [share, long_share, over(short, r"PyTorch \S+, 1 process"), over(long, r"PyTorch \S+, 1 process"),
            over(short, r"llm\.c", LLMC), over(short, "PyTorch .*, FSDP2", TWO), narrow,
            over(short, r"PyTorch \S+, 1 process, bf16", NARROW)]  # fmt: skip


def collectives(part, chosen):
    """The least ratios of the collectives whose names match and that have at least the given bytes."""
    _, *rows = part.table(" +bytes +collective", rf" *(\d+)  (\S.*?) {3 * ' +[0-9.]+'}  {NUMBER} {SPREAD} +{NUMBER} {SPREAD}$")
    for pattern, size, peer in chosen:
        found = [row[:2] + row[2 + 3 * peer:][:3] for row in rows if re.fullmatch(pattern, row[1]) and row[0] >= size]
        size, name, *ratio = min(found, key=lambda row: row[2]) if found else part.expected(f"rows of '{pattern}'")
        yield *ratio, f"{name}, {size / 2**20:g} MB" if size >= 2**20 else f"{name}, {size / 2**10:g} KB"


def memory(part):
    row = rf"(\d) \w+ +(\w+) +\d+ +{NUMBER} +[0-9.]+ +\d+ +{NUMBER} +-?\d+ +\d+ +\d+ +{NUMBER} +{SPREAD}$"
    _, *rows = part.table("devices +recompute +planned MB", row)
    one, two = ([row for row in rows if row[0] == devices] for devices in (1, 2))
    full = ([row for row in some if row[1] == "everything"] for some in (one, two))
    for some, column in zip((rows, one, two, *full), (2, 3, 3, 4, 4)):
        values = [row[column] for row in some] or part.expected("1 process and 2 ranks, both with 'everything'")
        worst = max(values, key=lambda value: abs(value - 1) if column == 2 else value)
        of = some[values.index(worst)]
        yield worst, *((min(values), max(values)) if column < 4 else of[5:]), of[1]


STEP, WIRE, RATES = r"gpt2_step\.py(?!.* --only)", (0.25, 0.5, 1), (1, 2, 4, 8)
OPEN_MPI, MEMCPY = 0, 1
COLLECTIVES = [("all_gather, view", 2**20, OPEN_MPI), ("all_gather", 2**20, OPEN_MPI), ("reduce_scatter", 2**20, OPEN_MPI),
               ("all_gather|reduce_scatter", 2**20, MEMCPY), (".*", 2**12, OPEN_MPI)]  # fmt: skip
GOALS = [  # patterns of commands, of which the first that was measured counts; what reads its output; its goals
    ([STEP], step, [
        "step of GPT-2 124M, of the FMA peak, B=4 T=64 | >= 0.65", "the same, B=1 T=1024 | >= 0.70",
        "step over PyTorch's, B=4 T=64 | >= 1.4", "the same, B=1 T=1024 | >= 1.4",
        "step over llm.c's, B=4 T=64 | >= 8", "two ranks over FSDP2 on gloo, B=4 T=64 | >= 4",
        "step in bf16 over f32, B=4 T=64, CPU with fast bf16 | >= 1.5",
        "step in bf16 over PyTorch's under bf16 autocast, B=4 T=64 | >= 1.4"]),
    ([r"gpt2_step\.py.* --only", STEP], lambda part: [over(systems(part, "B=4 T=64")[1], f"{ONE}(, [dt]=2)?", TWO)],
     ["two ranks over the fastest one process, B=4 T=64 | >= 0.92"]),
    ([r"^mpirun -n 2 .*figures$"], lambda part: collectives(part, COLLECTIVES), [
        "all_gather as a view over Open MPI's, two ranks, 1 to 64 MB, least | >= 1.5", "the same, as a copy | >= 1.5",
        "reduce_scatter over Open MPI's, two ranks, 1 to 64 MB, least | >= 6",
        "bus bandwidth of both over memcpy's by the same ranks, 1 to 64 MB, least | >= 0.7",
        "all collectives over Open MPI's, two ranks, 4 KB to 64 MB, least | >= 1"]),
    ([r"^mpirun -n 4 .*figures$"], lambda part: collectives(part, COLLECTIVES[4:]), ["the same, four ranks | >= 0.9"]),
    ([r"^\S*figures$"], lambda part: part.table("Typed op over", rf"typed .*, ratio {NUMBER} {SPREAD}$")[1:],
     ["typed op over the erased kernel | <= 1.02"]),
    ([r"memory\.py"], memory, [
        "pool over --plan, worst | 0.99 .. 1.01", "growth of the process over --plan, one device, worst | <= 1.05",
        "the same, two ranks | <= 1.05", "full recompute over none, one device | <= 1.36",
        "the same, two ranks | <= 1.36"]),
    ([r"overlap\.py"], lambda part: part.rows(
        "T_wire/T_compute ", rf"(?:.* no-prefetch |(\S+) +\d+ +\d+ +\S+ +prefetch +\d+ +{NUMBER} +{SPREAD} )", WIRE),
     [f"prefetching step over T_compute + T_copy + max(0, T_wire - T_compute), T_wire/T_compute {ratio} | <= 1.10" for ratio in WIRE]),
    ([r"prediction\.py"], lambda part: part.rows("link  ", rf"{NUMBER} Gbit/s .* {NUMBER} {SPREAD}$", RATES),
     [f"measured over predicted step, {rate} Gbit/s | 0.85 .. 1.15" for rate in RATES]),
    ([r"compile_cost_run\.py"], lambda part: part.rows(" +runs +median", rf"(\S.*?) +\d+ +{NUMBER} +{SPREAD}$", (
        "gpt_fsdp.cpp, -O3: seconds", "gpt_fsdp.cpp, -O3: peak GB", "shapes.hpp, front end: seconds")),
     ["gpt_fsdp.cpp at -O3, seconds | <= 25", "the same, peak GB | <= 1.5", "shardlib/shapes.hpp, seconds | <= 0.6"]),
]  # fmt: skip


def row(goal, value, least, most, of="", instead=None):
    aim = goal.split(" | ")[1]
    low, *high = map(float, re.findall(NUMBER, aim))
    met = low <= value <= high[0] if high else value >= low if aim[0] == ">" else value <= low
    within = not high and least < low < most and value not in (least, most)
    said = f"{'yes' if met else 'no'}{', by less than the spread' if within else ''}"
    return f"| {goal} | {value:.4g}{of and f' ({of})'} | {least:.4g} .. {most:.4g} | {instead or said} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.path.join(os.path.dirname(os.path.abspath(__file__)), "results.md")
    parser.add_argument("results", nargs="?", type=argparse.FileType(), default=default, metavar="RESULTS.md")
    file = parser.parse_args().results
    every = list(parts(file)) or sys.exit(f"ratios.py: {file.name}: expected sections, By `COMMAND`: and its output")
    lines = ["| what | aim | reached | spread | met |", "|---|---|---|---|---|"]
    for patterns, read, goals in GOALS:
        found = [part for pattern in patterns for part in every if re.search(pattern, part.command)]
        part = next((part for part in found if not part.stopped), None)
        missing = f"not measured: {found[0].stopped}" if found and not part else "not measured"
        for goal, said in zip(goals, read(part) if part else [None] * len(goals), strict=True):
            lines.append(row(goal, *said) if said else f"| {goal} | {missing} | | |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
