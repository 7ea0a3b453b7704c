#!/usr/bin/env python3
"""Compares the bytes that cross the link between two nodes with those that the types say. gpt_fsdp runs in two network
namespaces (root) with two ranks each, which share memory.

  d=4       weights are sharded over all ranks. A gather sends a shard to the other node once, and a scatter sends the sum of
            the node. So for n ranks, k in a node, a rank alone would send (n-1)/k times the bytes that cross the link for it.
  r=2,d=2   hybrid sharding: weights are sharded inside a node and replicated between nodes. Only bytes over `r` cross the link.
  without shared memory, d=4: each rank sends its shards to every other one, two of three over the link.

For each mesh it prints the bytes that a node sends in a step: those of --plan, those of the counters of its link, without the
headers of Ethernet, IP and TCP, and the second over the first. The first few steps do not count, because a run also sends when
it starts and ends.

  benchmarks/node_links.py --examples build/benchmarks/examples
"""
import re
import shlex

from common import PAYLOAD, Hosts, built, parser_of, ran

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
FEW = 2  # steps of the run that is subtracted


def sent_over(program, mesh):
    """Bytes that a rank sends in a step over each set of axes, by --plan."""
    rows = re.findall(r"^  all +([a-z](?: [a-z])*) +\d+ +([\d.]+) (\w*B)$", ran([*program, f"--mesh={mesh}", "--plan"]), re.M)
    return {axes: float(number) * UNITS[unit] for axes, number, unit in rows}


def over_link(mpirun, program, steps):
    """Bytes that the first host sends in a step."""
    sent = []
    for n in (FEW, FEW + steps):
        before = Hosts.sent(0)
        ran([*shlex.split(mpirun), *program, f"--steps={n}"])
        sent.append(Hosts.sent(0) - before)
    return (sent[1] - sent[0]) / steps * PAYLOAD


def main():
    options = parser_of(__doc__, "gpt_fsdp", steps=6, batch=8, seq=64, layers=4, d_model=256).parse_args()
    program = [built(options.examples, "gpt_fsdp"), f"--data={options.data}", f"--batch={options.batch}", f"--seq={options.seq}",
               f"--layers={options.layers}", f"--d-model={options.d_model}", "--n-kv=4", f"--d-head={options.d_model // 8}",
               f"--d-ff={3 * options.d_model}", "--max-tokens=0"]  # fmt: skip
    print(f"{options.layers} layers, d_model {options.d_model}; 2 nodes of 2 ranks; MB that a node sends over the link in a step")
    print(f"{'mesh':<10}{'shared memory':<15}{'by the types':>12}{'measured':>10}{'over':>7}")
    with Hosts(count=2, ranks=2) as mpirun:
        for mesh, shared in (("d=4", True), ("r=2,d=2", True), ("d=4", False)):
            ranks = {axes: size for axes, size in sent_over(program, mesh).items() if "r" in axes.split() or "r" not in mesh}
            crossing = sum(ranks.values()) * (2 if "r" in mesh else 2 / 3 if shared else 4 / 3)
            how = mpirun.replace(" mpirun ", f" mpirun -x SHARDLIB_SHM={int(shared)} ", 1)
            found = over_link(how, [*program, f"--mesh={mesh}"], options.steps)
            print(f"{mesh:<10}{'yes' if shared else 'no':<15}{crossing / 1e6:>12.3f}{found / 1e6:>10.3f}{found / crossing:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
