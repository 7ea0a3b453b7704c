#!/usr/bin/env python3
"""Runs gpt_pipeline as a user would, on threads and under mpirun, and compares it with gpt_fsdp.

pipeline_programs.py --examples DIR [--mpiexec "mpirun --oversubscribe"]

Needs nothing but Python's standard library. Prints what failed; the exit status is 1 then.
"""
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as xml

import programs
from checks import check, contents, records, text_of, tree, wait_until
from programs import apart, floats, numbers, shortened_samples, shown_histograms

# Losses of two layouts: sums in another order differ in the last bits, which training magnifies.
CLOSE = 1e-5


def small(p):
    """A model of 8 layers, for up to 8 stages; the same options do for gpt_fsdp. Constant learning rate: runs of
    different lengths compare."""
    options = {"--batch": 16, "--seq": 16, "--layers": 8, "--d-model": 16, "--n-kv": 2, "--d-head": 4, "--d-ff": 16}
    options |= {"--steps": 4, "--warmup": 0, "--final-learning-rate": 1, "--learning-rate": 0.01, "--max-tokens": 0,
                "--check-replicas": 1}
    options |= {"--microbatches": 8, "--data": p.text}
    return [f"{option}={value}" for option, value in options.items()]


def run(p, *options, ranks=0, program="gpt_pipeline"):
    return p.run(program, [*small(p), *options], ranks)


def curve(p, *options, ranks=0, program="gpt_pipeline"):
    path = os.path.join(p.folder, "curve.jsonl")
    if os.path.exists(path):
        os.remove(path)
    done = run(p, f"--metrics={path}", *options, ranks=ranks, program=program)
    return done, records(path) if done.succeeds() else []


def layouts(p):
    """Every schedule on every mesh trains as gpt_fsdp on one device; MPI gives the bits of threads."""
    for tied in [], ["--tied"]:
        one = curve(p, "--mesh=d=1,t=1", *tied, program="gpt_fsdp")[1]
        cases = [("p=2", "interleaved-1f1b"), ("p=2,r=2", "zero-bubble"), ("p=2,d=1,t=2", "dualpipe-v")]
        if not tied:  # 3 devices divide no dim: all are padded
            cases += [("p=1", "1f1b"), ("p=2", "gpipe"), ("p=4", "eager-1f1b"), ("p=2", "kimi-k2"), ("p=2", "interleaved-gpipe"), ("p=2,d=1,t=3", "1f1b"), ("d=2,t=2", "1f1b"), ("p=2,s=2", "zero-bubble")]
        for mesh, schedule in cases:
            options = [f"--mesh={mesh}", f"--schedule={schedule}", *tied]
            done, steps = curve(p, *options)
            if not done.check(len(steps) == len(one) == 4, "one object a step"):
                continue
            done.check(apart(steps, one) < CLOSE, f"losses as gpt_fsdp's ({apart(steps, one):.1e})")
            norms = max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in zip(steps, one))
            done.check(norms < CLOSE, f"gradient norms as gpt_fsdp's ({norms:.1e})")
            ranks = 1
            for size in re.findall(r"=(\d)", mesh):
                ranks *= int(size)
            if p.mpiexec and ranks in (2, 4):
                done, steps_of_mpi = curve(p, *options, ranks=ranks)
                done.check(numbers(steps_of_mpi) == numbers(steps), "the same bits as on threads")
    # Stages of different numbers of layers: 6 on 4, and as given.
    one = curve(p, "--mesh=d=1,t=1", "--layers=6", program="gpt_fsdp")[1]
    for more in [["--mesh=p=4"], ["--mesh=p=2", "--schedule=interleaved-1f1b"], ["--mesh=p=2", "--schedule=dualpipe-v"],
                 ["--mesh=p=3", "--stage-layers=1,3,2"], ["--mesh=p=2,d=2,t=1", "--stage-layers=4,2", "--schedule=zero-bubble"]]:
        done, steps = curve(p, "--layers=6", *more)
        done.check(len(steps) == 4 and apart(steps, one) < CLOSE, f"losses as gpt_fsdp's ({apart(steps, one):.1e})")
    # Masks of dropout are keyed by step, microbatch and layer of the model, so each layout draws them alike.
    one = curve(p, "--mesh=d=1,t=1", "--dropout=0.2", program="gpt_fsdp")[1]
    check(len(one) == 4 and apart(one, curve(p, "--mesh=d=1,t=1", program="gpt_fsdp")[1]) > CLOSE, "dropout changes losses")
    for more in [["--mesh=p=2,d=2,t=1", "--schedule=interleaved-1f1b", "--gather=per-step"],
                 ["--mesh=p=2,d=1,t=2", "--schedule=dualpipe-v"], ["--mesh=p=4", "--schedule=zero-bubble"]]:
        done, steps = curve(p, "--dropout=0.2", *more)
        done.check(len(steps) == 4 and apart(steps, one) < CLOSE, f"losses as gpt_fsdp's ({apart(steps, one):.1e})")

    def header_of(done):  # the choice of --gather stands before it
        return next((line for line in done.out.split("\n") if " parameters, " in line), done.out)

    header = header_of(run(p, "--mesh=p=2", "--steps=1"))
    parameters = header_of(run(p, "--mesh=d=1", "--steps=1", program="gpt_fsdp")).split(" ")[0]
    check(header.startswith(parameters + " parameters, mesh p=2,d=1,s=1,t=1,"), "all parameters are counted", header)


def simulated(p):
    """On the simulated device, stages train as on the CPU, on threads and under mpirun."""
    for mesh, schedule, ranks in [("p=2", "zero-bubble", 2), ("p=2,d=1,t=2", "dualpipe-v", 4)]:
        options = [f"--mesh={mesh}", f"--schedule={schedule}"]
        cpu = curve(p, *options)[1]
        for started in [0, ranks] if p.mpiexec else [0]:
            done, steps = curve(p, *options, "--device=simulated", ranks=started)
            done.check(len(steps) == len(cpu) == 4 and apart(steps, cpu) < CLOSE, "the CPU's losses")


def dtypes(p):
    """bf16: near f32 in both models; the same bits on threads and MPI, and in two parts as at once."""
    bf16 = ["--dtype=bf16", "--mesh=p=2", "--steps=6"]
    wide = curve(p, "--mesh=p=2", "--steps=6")[1]
    done, steps = curve(p, *bf16)
    if done.check(len(steps) == len(wide) == 6, "one object a step"):
        done.check(steps[-1]["loss"] < steps[0]["loss"] - 0.1, "the loss falls")
        done.check(0 < apart(steps, wide) < 0.01, f"losses near those of f32 ({apart(steps, wide):.1e})")
    if p.mpiexec:
        done, steps_of_mpi = curve(p, *bf16, ranks=2)
        done.check(numbers(steps_of_mpi) == numbers(steps), "the same bits as on threads")
    run(p, *bf16, "--steps=3", f"--run={p.folder}/bf16").succeeds()
    run(p, *bf16, f"--run={p.folder}/bf16").succeeds()
    check(numbers(records(f"{p.folder}/bf16/metrics.jsonl")) == numbers(steps), "the second part goes on")
    alone = ["--dtype=bf16", "--mesh=d=2,t=2", "--steps=6"]
    done, unstaged = curve(p, *alone, program="gpt_fsdp")
    done.check(len(unstaged) == 6 and apart(unstaged, steps) < 0.01, "losses near gpt_fsdp's")
    for name in "muon", "adafactor":
        unstaged = curve(p, *alone, f"--optimizer={name}", program="gpt_fsdp")[1]
        done, staged = curve(p, *bf16, f"--optimizer={name}")
        near = len(unstaged) == len(staged) == 6 and apart(unstaged, staged) < 0.01
        done.check(near and staged[-1]["loss"] < staged[0]["loss"] - 0.05, f"{name}: losses near gpt_fsdp's, which fall")
    sizes = ["--preset=jaxpp-tutorial", "--seq=8", "--d-model=16", "--d-ff=32", "--d-head=4", "--mesh=p=2"]
    path = f"{p.folder}/tutorial_bf16.jsonl"
    losses = {}
    for dtype in "f32", "bf16":
        p.run("gpt_pipeline", [*sizes, f"--dtype={dtype}", f"--metrics={path}"]).succeeds()
        losses[dtype] = records(path)
    difference = apart(losses["bf16"][:1], losses["f32"][:1])
    check(0 < difference < 0.01 and losses["bf16"][-1]["loss"] < losses["bf16"][0]["loss"],
          f"the tutorial's model: near f32 at first ({difference:.1e}), and the loss falls")


def gathers(p):
    """--gather: a rank trains alike by both choices, and auto is per-step for several microbatches."""
    cases = [
        ["--mesh=p=2,d=2,t=1", "--schedule=interleaved-1f1b"],
        ["--mesh=p=2,s=2", "--schedule=zero-bubble", "--tied"],
        ["--mesh=p=2,r=2", "--schedule=dualpipe-v", "--dtype=bf16"],
    ]
    for options in cases:
        often = curve(p, *options, "--gather=per-microbatch")[1]
        done, once = curve(p, *options, "--gather=per-step")
        close = 0.01 if "--dtype=bf16" in options else CLOSE
        done.check(len(once) == 4 and apart(once, often) < close, f"trains as per-microbatch ({apart(once, often):.1e})")
        done, default = curve(p, *options)
        done.check("--gather auto is per-step: " in done.out and numbers(default) == numbers(once), "auto is per-step")
        if p.mpiexec:
            done, ranks = curve(p, *options, ranks=4)
            done.check(numbers(ranks) == numbers(once), "the same bits on threads and ranks")

    def planned(*options):
        done = run(p, *cases[0], "--plan", *options).succeeded()
        return done.out

    def moved(text):
        return re.findall(r"^  (?:all_gather|reduce_scatter) .* d s +\d+ .*$", text, re.M)

    plans = [planned("--gather=per-step", f"--microbatches={count}") for count in (4, 8)]
    check(moved(plans[0]) == moved(plans[1]) != [], "per-step sends the same bytes with 4 and 8 microbatches", plans[1])
    check(re.search(r"^  per-step .*this plan$", plans[1], re.M), "the plan has both choices", plans[1])
    check(re.search(r"^  per-microbatch .*this plan$", planned(), re.M), "and auto is per-microbatch of unknown devices")


def histograms(p):
    """--histogram-every: the weights and gradients of all stages, by the names in gpt_fsdp."""
    for i, model in enumerate([["--tied", "--d-model=10"], ["--dtype=bf16", "--optimizer=muon"]]):
        names = []
        for program, options in [
            ("gpt_fsdp", ["--mesh=d=1"]),
            ("gpt_pipeline", ["--mesh=p=2,d=2,t=1"]),
            ("gpt_pipeline", ["--mesh=p=2,d=1,t=2", "--schedule=dualpipe-v", "--gather=per-step"]),
            ("gpt_pipeline", ["--mesh=p=4", "--schedule=interleaved-1f1b"]),
        ]:
            folder = f"{p.folder}/histograms-{i}-{len(names)}"
            every = ["--tensorboard", "--histogram-every=2", f"--run={folder}"]
            names.append(shown_histograms(run(p, *model, *options, *every, program=program), folder, [1, 3]))
        check("layers/7/w_q" in names[0] and names.count(names[0]) == 4, f"the names in the model {names}")


def checkpoints(p):
    """One run goes through layouts, unpipelined ones too, as if it had never stopped."""
    whole = curve(p, "--mesh=d=1,t=1", "--steps=20", program="gpt_fsdp")[1]
    folder = f"{p.folder}/moving"
    legs = [
        (4, "gpt_pipeline", ["--mesh=p=2,d=2,t=1", "--schedule=zero-bubble"], 0),
        (8, "gpt_pipeline", ["--mesh=p=2", "--schedule=interleaved-1f1b"], 2),
        (12, "gpt_fsdp", ["--mesh=d=2,s=2"], 0),
        (16, "gpt_pipeline", ["--mesh=p=2,d=1,t=2", "--schedule=dualpipe-v"], 0),
        (20, "gpt_pipeline", ["--mesh=p=1"], 0),
    ]
    for steps, program, options, ranks in legs:
        done = run(p, f"--run={folder}", f"--steps={steps}", *options, ranks=ranks if p.mpiexec else 0, program=program).succeeded()
        done.check(steps == 4 or f"resuming from step {steps - 4} of {steps}" in done.out, "goes on from the checkpoint")
    steps = records(f"{folder}/metrics.jsonl")
    if check(len(steps) == len(whole) == 20, "moving between layouts: a record for each step"):
        check(apart(steps, whole) < CLOSE, f"moving between layouts changes nothing ({apart(steps, whole):.1e})")
    run(p, f"--run={folder}", "--mesh=p=2", "--layers=4").fails(2, "does not fit this program")
    sampled = [p.run("shardlib-sample", [folder, "--max-tokens=8", "--temperature=0", *more]) for more in ([], ["--mesh=d=1,t=2"])]
    for done in sampled:
        done.succeeds()
        done.check("A sample after 20 steps" in done.out, "gpt_fsdp samples from the run of a pipeline")
    check(sampled[0].out.split("A sample")[-1] == sampled[1].out.split("A sample")[-1], "the same sample on another mesh")

    # Samples of a run that trains: the stages' weights, or their average, with all devices together.
    for mesh, ranks, options in [("p=2,d=2,t=1", 0, []), ("p=2", 2, ["--tied", "--dtype=bf16"]), ("p=2,r=2,t=2", 0, ["--ema=0.5"])]:
        if ranks and not p.mpiexec:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        done = run(p, f"--run={folder}", f"--mesh={mesh}", "--sample-every=2", "--max-tokens=8", "--prompt=In the", "--temperature=0",
                   *options, ranks=ranks)  # fmt: skip
        if not done.succeeds():
            continue
        drawn = records(f"{folder}/samples.jsonl")
        done.check([s["step"] for s in drawn] == [-1, 1, 3], f"samples before and after each two steps ({drawn})")
        again = p.run("shardlib-sample", [folder, "--max-tokens=8"]).succeeded()
        again.check(drawn[-1]["text"] in again.out, f"gpt_fsdp draws the last one, too: {drawn[-1]['text']!r}")
    shortened_samples(p, folder)

    run(p, f"--run={p.folder}/validated", "--mesh=p=2", f"--validation-data={p.text}", "--validate-every=4").succeeds()
    run(p, f"--run={p.folder}/validated_alone", "--mesh=d=1", f"--validation-data={p.text}", "--validate-every=4",
        program="gpt_fsdp").succeeds()
    two = [records(f"{p.folder}/{name}/metrics.jsonl")[-1]["validation_loss"] for name in ("validated", "validated_alone")]
    check(abs(two[0] - two[1]) < CLOSE * two[1], f"validation losses {two}")


def leaves(folder):
    """The files of each array of the newest checkpoint."""
    steps, found = programs.checkpoints(folder), {}
    for path, data in tree(steps[max(steps)]).items():
        found.setdefault(os.path.dirname(path).split("/")[0], []).append(data)
    return found


def optimizers(p):
    """--optimizer, --ema and groups of leaves train as in gpt_fsdp, with the same arrays in checkpoints."""
    averaged = ["--ema=0.5", f"--validation-data={p.text}", "--validate-every=4"]
    for options in [["--optimizer=lion", "--learning-rate=0.003", *averaged], ["--optimizer=muon", "--freeze=layers/7/*", "--freeze=final_norm"],
                    ["--optimizer=adafactor", "--tied", "--lr-mult=layers/*/w_up=0.1", "--clip=0.5"]]:
        one = curve(p, "--mesh=d=1,t=1", *options, program="gpt_fsdp")[1]
        folder = f"{p.folder}/by-{options[0][12:]}"
        done, steps = curve(p, "--mesh=p=2,d=2,t=1", *options)
        if not done.check(len(steps) == len(one) == 4, "one object a step"):
            continue
        done.check(apart(steps, one) < CLOSE, f"losses as gpt_fsdp's ({apart(steps, one):.1e})")
        done.check(abs(steps[-1]["grad_norm"] / one[-1]["grad_norm"] - 1) < 1e-4, "gradient norms as gpt_fsdp's")
        if "--ema=0.5" in options:
            losses = [run[-1]["validation_loss"] for run in (steps, one)]
            done.check(abs(losses[0] - losses[1]) < CLOSE * losses[1], f"validation by the average {losses}")
        run(p, "--mesh=p=2,d=2,t=1", *options, f"--run={folder}", "--steps=2").succeeds()
        early = leaves(folder)
        run(p, "--mesh=p=2,d=2,t=1", *options, f"--run={folder}").succeeds()
        late, resumed = leaves(folder), records(f"{folder}/metrics.jsonl")
        done.check(numbers(resumed) == numbers(steps), "the second part goes on")
        if "--freeze=layers/7/*" in options:
            moved = {name for name in late if late[name] != early[name]}
            still = {"weights.final_norm", "mu.final_norm", "nu.final_norm"}
            done.check(still < late.keys() and not still & moved and "weights.layers.w_up" in moved, f"a frozen leaf stays {sorted(moved)}")
        p.run("shardlib-sample", [folder, "--max-tokens=4"]).succeeds()
        exports = [f"--export={folder}-model", "--prompt=And", "--max-tokens=0", f"--logits={folder}-a"]
        done, rest = run(p, "--mesh=d=2,t=1", *options, f"--run={folder}", "--steps=5", *exports, program="gpt_fsdp"), records(f"{folder}/metrics.jsonl")
        done.check("resuming from step 4 of 5" in done.out and len(rest) == 5, "gpt_fsdp goes on")
        loaded = p.run("gpt_fsdp", [f"--load={folder}-model", "--steps=0", "--prompt=And", "--max-tokens=0", f"--logits={folder}-b"]).succeeded()
        a, b = (floats(f"{folder}-{end}") for end in "ab")
        done.check(len(a) == len(b) > 0 and max(abs(x - y) for x, y in zip(a, b)) < 1e-5, "the export has what the run samples from")
    run(p, "--mesh=p=2", "--freeze=layers/8/*").fails(2, "--freeze 'layers/8/*' matches no leaf", "layers/*/w_up", "final_norm")


def pictures(p):
    shown = run(p, "--mesh=p=2", "--microbatches=4", "--schedule=interleaved-1f1b", "--stages=4", "--show-schedule").succeeded()
    shown.check(shown.out.startswith("rank 0: fwd_0__0 fwd_0__1 fwd_2__0 "), "--show-schedule prints the tasks")
    shown.check("makespan 13.5, bubble 11.11 %" in shown.out, "and what the simulator says")
    # A microbatch is 4 rows of 16 tokens of 16 numbers of 4 bytes; 3 of the 4 stages send forward, and 3 backward.
    shown.check(re.search(r"transfers of a step: 4.096 kB a message of one device\n.*\n +0 +1 +8 +4 +49.15 kB\n +1 +0 +4 +8 +49.15 kB\n", shown.out),
                "--show-schedule counts the transfers")
    for schedule, pair in ("interleaved-1f1b", "fwd_0__2, bwd_2__0"), ("kimi-k2", "fwd_0__3, bwd_2__0"):
        fused = run(p, "--mesh=p=2", "--microbatches=4", f"--schedule={schedule}", "--show-schedule", "--fuse-steady-state").succeeded()
        fused.check(f"FusedTask({pair})" in fused.out.splitlines()[0], f"--fuse-steady-state fuses pairs of {schedule}")
    uneven = run(p, "--mesh=p=2", "--stage-layers=2,6", "--schedule=gpipe", "--show-schedule").succeeded()
    uneven.check("layers of each stage: 2 6\n" in uneven.out, "--show-schedule has the layers of each stage")
    # The first stage takes 0.5 and 1, the last one 1.5 and 3: 0.5 + 8 * 1.5 + 8 * 3 + 1.
    uneven.check("makespan 37.5, " in uneven.out, "and stages take as long as their layers")
    held = run(p, "--mesh=p=2,d=2", "--show-placement", "--tied", "--schedule=interleaved-1f1b").succeeded()
    held.check("rank 0: stages 0 2, layers 0 1 4 5\n" in held.out and "rank 1: stages 1 3, layers 2 3 6 7\n" in held.out,
               "--show-placement has the stages and layers of each rank")
    held.check(len(re.findall(r"^  embed +f32\[V/t M/d/s\] +256 16 +8.192 kB$", held.out, re.M)) == 2, "a tied embedding lies on both")
    held.check(len(re.findall(r"^  layers/\*/w_up +f32\[M/d/s F/t\] +16 16 +2.048 kB$", held.out, re.M)) == 2,
               "and each has the shards of 4 layers")
    held.check("final_norm" in held.out.split("rank 1:")[1] and "final_norm" not in held.out.split("rank 1:")[0],
               "the last rank has the final norm")
    drawn = run(p, "--mesh=p=2", "--show-placement", f"--graph={p.folder}/shown.svg").succeeded()
    drawn.check("rank 1: stage 1" in drawn.out and "plan for" not in drawn.out and os.path.exists(p.folder + "/shown.svg"),
                "--show-placement and --graph together do both, without a plan")
    path = os.path.join(p.folder, "new", "drawn.svg")  # in the folder of a new run
    run(p, "--mesh=p=2", "--schedule=zero-bubble", f"--run={p.folder}/new", f"--timeline={path}").succeeds()
    svg = text_of(path)
    xml.fromstring(svg)
    check("planned: " in svg and "measured: " in svg, "--timeline draws planned and measured")
    boxes = svg.count('<rect class="task') + svg.count('class="task ')
    check(boxes == 2 * 2 * 3 * 8, f"a box for each of 48 tasks, planned and measured ({boxes})")
    check(os.path.exists(f"{p.folder}/moving/timeline.svg"), "a run has its timeline in its folder")
    plan = run(p, "--mesh=p=4,d=2", "--plan").succeeded()
    plan.check(re.search(r"^  send +p +8 ", plan.out, re.M), "--plan counts the sends of 8 microbatches")
    rows = re.findall(r"^ +(\d)((?: +[\d.]+ k?B){8}) +[\d.]+ [kMG]FLOP$", plan.out, re.M)
    plan.check([rank for rank, _ in rows] == ["0", "1", "2", "3"], "--plan has the memory of each rank")
    columns = [[float(n) for n in re.findall(r"([\d.]+) k?B", row)] for _, row in rows]
    plan.check(columns and columns[0][0] > columns[1][0] == columns[2][0] < columns[3][0] and columns[1][3] > columns[2][3],
               "the ends hold the embeddings; 1F1B keeps more on the earlier of two like ranks")


def mistakes(p):
    shown = p.run("gpt_pipeline", ["--help"]).succeeded()
    for word in "--model --schedule --stages --show-schedule --fuse-steady-state --show-placement --dropout --timeline --microbatches --mesh --tied --run".split():
        shown.check(len(re.findall(rf"^ +{word.replace('--', '--(?:.no-.)?')} ", shown.out, re.M)) == 1, f"--help explains {word} once")
    wrong = [
        (["--mesh=p=2", "--schedule=foo"], ["no schedule `foo`", "zero-bubble"]),
        (["--mesh=p=2", "--schedule=/nowhere/x.csv"], ["cannot read the schedule '/nowhere/x.csv': No such file"]),
        (["--mesh=p=3", "--layers=2"], ["2 layers", "3 stages", "fewer stages"]),
        (["--mesh=p=2", "--stage-layers=3,4"], ["--stage-layers 3,4", "7 layers", "--layers is 8"]),
        (["--mesh=p=2", "--stage-layers=3,2,3"], ["--stage-layers 3,2,3: 3 numbers of layers", "2 stages"]),
        (["--mesh=p=2", "--stage-layers=8,0"], ["--stage-layers 8,0: stage 1", "0 layers"]),
        (["--mesh=p=2", "--stage-layers=4,4,"], ["--stage-layers 4,4,: '' is not a number"]),
        (["--mesh=p=2", "--layers=1"], ["--layers 1: 1 layer is too few for the 2 stages"]),
        (["--mesh=p=2", "--stage-layers=4,x"], ["'x' is not a number"]),
        (["--mesh=p=2", "--schedule=1f1b", "--stages=4"], ["--schedule 1f1b, --stages 4, --mesh p=2", "`1f1b` has 4 stages on 4 ranks", "4 on 2"]),
        (["--mesh=p=2", "--schedule=interleaved-1f1b", "--stages=3"], ["mpmd_dim does not divide num_stages"]),
        (["--mesh=p=2", "--schedule=interleaved-1f1b", "--stages=10000000"], ["8 layers are too few", "10000000 stages"]),
        (["--mesh=p=2", "--microbatches=3"], ["--batch 16", "--microbatches 3", "multiple of 3"]),
        (["--mesh=p=2,d=4", "--microbatches=8"], ["--microbatches 8", "d = 4", "--batch that is a multiple of 32"]),
        (["--mesh=p=8", "--microbatches=4", "--schedule=zero-bubble"], ["ZeroBubble", "microbatches", "4"]),
        (["--mesh=p=2", "--show-schedule", "--microbatches=9999999"], ["--batch 16", "--microbatches 9999999"]),
        (["--mesh=p=2", "--show-schedule", "--batch=2048", "--microbatches=2048"], ["--show-schedule", "at most 1024", "--microbatches is 2048"]),
        (["--mesh=p=2", "--schedule=interleaved-1f1b", "--fuse-steady-state"], ["--fuse-steady-state has no effect", "--show-schedule"]),
        (["--mesh=p=2", "--schedule=1f1b", "--show-schedule", "--fuse-steady-state"], ["--fuse-steady-state has no effect", "--schedule 1f1b"]),
        (["--mesh=p=2", "--timeline=x.svg", "--show-schedule"], ["--timeline has no effect", "does not train"]),
        (["--mesh=p=2", "--chat"], ["--chat has no effect", "shardlib-sample RUN"]),
        (["--mesh=p=2", "--evaluate=x.jsonl"], ["--evaluate has no effect", "shardlib-sample RUN"]),
        (["--mesh=p=2", "--model=jaxpp-tutorial", "--temperature=0"], ["--temperature has no effect", "no text"]),
        (["--mesh=d=2,p=2"], ["--mesh", "p r d s t", "in this order"]),
        (["--mesh=p=2", "--timeline=/nowhere/x.svg"], ["/nowhere/x.svg", "--timeline"]),
        (["--mesh=p=2", "--timeline=x.png"], ["--timeline", "'x.png'", "ends in .svg"]),
    ]
    for options, words in wrong:
        run(p, *options).fails(2, *words)
    if p.mpiexec:  # a file, options, a mesh, a picture; a job that fails takes mpirun a second more
        for options, words in wrong[1], wrong[3], wrong[-3], wrong[-2]:
            run(p, *options, ranks=2).fails(2, *words)
    for graph, why in [("/nowhere/a.svg", "No such file"), (p.folder + "/folder.svg", "not a regular file")]:
        os.makedirs(p.folder + "/folder.svg", exist_ok=True)
        run(p, "--mesh=p=2", f"--graph={graph}").fails(2, "--graph: cannot write", why, "nothing has been computed yet")
    run(p, "--mesh=p=2", "--learning-rate=1e30", "--weight-decay=0", "--steps=20").fails(1, "step ", "not finite", "--learning-rate")
    if p.mpiexec:
        run(p, "--mesh=p=4", ranks=2).fails(2, "mesh", "4 devices", "mpirun started 2 ranks")
        os.makedirs(p.folder + "/first/drawn")  # a folder that the other rank's machine does not have
        command = [os.path.join(p.examples, "gpt_pipeline"), *small(p), "--mesh=p=2", "--timeline=drawn/x.svg"]
        one, other = (["-n", "1", "sh", "-c", f'cd "{place}" && exec "$@"', "sh", *command] for place in (p.folder + "/first", p.folder))
        programs.Run([*p.mpiexec, *one, ":", *other], "--timeline with a folder of rank 0 alone").succeeds()
        check(os.path.exists(p.folder + "/first/drawn/x.svg"), "rank 0 alone draws --timeline")
        killed_rank(p)


def processes(p, name):
    """The processes of gpt_pipeline with this --run folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = contents(f"/proc/{pid}/cmdline").split(b"\0")
        except OSError:
            continue
        if command[0].endswith(b"/gpt_pipeline") and f"--run={p.folder}/{name}".encode() in command:
            yield int(pid)


def begun(p, name, ranks):
    """An endless run on two devices, once it has saved a checkpoint."""
    command = [*p.mpiexec, "-n", str(ranks)] if ranks else []
    command += [os.path.join(p.examples, "gpt_pipeline"), *small(p), "--mesh=p=2", f"--run={p.folder}/{name}"]
    command += ["--steps=1000000", "--save-every=2"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until(lambda: os.path.exists(f"{p.folder}/{name}/checkpoints/LATEST"), job)
    return job


def output_of(p, name, job):
    try:
        return job.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        for pid in processes(p, name):
            os.kill(pid, signal.SIGKILL)
        return job.communicate()[0] + "it hangs"


def killed_rank(p):
    """The other stage waits for a message that never comes: the job must end all the same."""
    job = begun(p, "killed", 2)
    ranks = sorted(processes(p, "killed"))
    if check(len(ranks) == 2, f"two ranks run ({ranks})"):
        os.kill(ranks[1], signal.SIGKILL)
    text = output_of(p, "killed", job)
    check(job.returncode not in (0, None) and "it hangs" not in text, f"a killed stage ends the job ({job.returncode})", text[-800:])
    check(not list(processes(p, "killed")), "no rank is left")


def stopped(p):
    """A signal to one rank stops all after their step, and the picture of that step is drawn."""
    for ranks in [0, 2] if p.mpiexec else [0]:
        name = f"stopped_{ranks}"
        job = begun(p, name, ranks)
        for pid in list(processes(p, name))[:1]:
            os.kill(pid, signal.SIGTERM)
        text = output_of(p, name, job)
        check(job.returncode == 0 and "stopped by a signal" in text, f"SIGTERM stops the run ({job.returncode})", text[-800:])
        path = f"{p.folder}/{name}/timeline.svg"
        if check(os.path.exists(path), f"{name}: a run that is stopped has its timeline"):
            check(text_of(path).count('class="task ') == 2 * 2 * 2 * 8, f"{name}: all tasks, planned and measured")


def tutorial(p):
    """The transformer of JaxPP's tutorial, small: the same losses in every layout; checkpoints go through layouts."""
    sizes = ["--preset=jaxpp-tutorial", "--seq=8", "--d-model=16", "--d-ff=32", "--d-head=4", "--microbatches=8"]

    def losses(*options, ranks=0):
        path = f"{p.folder}/tutorial.jsonl"
        done = p.run("gpt_pipeline", [*sizes, f"--metrics={path}", *options], ranks)
        return (done, records(path)) if done.succeeds() else (done, [])

    one = losses("--mesh=p=1")[1]
    check(len(one) == 6 and abs(one[0]["loss"] - 16) < 1e-3, "8 microbatches, each of loss 2 at first: outputs are normalized")
    for mesh, schedule in [("p=2", "gpipe"), ("p=4", "1f1b"), ("p=4", "eager-1f1b"), ("p=4", "interleaved-1f1b"),
                           ("p=2", "zero-bubble"), ("p=4", "dualpipe-v"), ("p=2,d=1,t=2", "1f1b")]:
        ranks = 2 if p.mpiexec and mesh == "p=2" else 0
        done, steps = losses(f"--mesh={mesh}", f"--schedule={schedule}", ranks=ranks)
        # The gradients of attention are noise here, as all inputs are alike, and AdamW makes steps of them.
        done.check(len(steps) == 6 and apart(steps[:1], one[:1]) < CLOSE and apart(steps, one) < 1e-3,
                   f"losses as without a pipeline ({apart(steps, one):.1e})")
    run = f"--run={p.folder}/tutorial"
    losses("--mesh=p=4", run)[0].succeeds()
    done, steps = losses("--mesh=p=2", "--schedule=interleaved-1f1b", "--stages=8", "--steps=8", run)
    done.check("resuming from step 6 of 8" in done.out and len(steps) == 8, "another layout goes on")
    whole = losses("--mesh=p=1", "--steps=8")[1]
    done.check(apart(steps, whole) < 1e-3, f"as one that never stopped ({apart(steps, whole):.1e})")
    done, steps = losses("--mesh=p=2,d=2,t=1", "--batch=16")
    done.check(len(steps) == 6 and apart(steps[:1], one[:1]) < CLOSE, "over d too")
    spread = ["--mesh=p=2,d=2,t=1", "--batch=16", "--schedule=interleaved-1f1b"]
    often = losses(*spread, "--gather=per-microbatch")[1]
    done, once = losses(*spread, "--gather=per-step")
    # All rows are alike, so a sum over d = 2 doubles, which is exact before and behind the sum over microbatches.
    done.check(len(once) == 6 and numbers(once) == numbers(often), "the bits of per-microbatch")
    done, default = losses(*spread, ranks=4 if p.mpiexec else 0)
    done.check("--gather auto is per-step: " in done.out and numbers(default) == numbers(once), "auto is per-step, on ranks too")

    def sent(*options):
        done = p.run("gpt_pipeline", [*sizes, *spread, "--plan", *options]).succeeded()
        return re.findall(r"^  (?:all_gather|reduce_scatter) .* d +\d+ .*$", done.out, re.M)

    plans = [sent("--gather=per-step", f"--microbatches={count}") for count in (4, 8)]
    check(plans[0] == plans[1] != [] and plans[1] != sent("--gather=per-microbatch"),
          "per-step sends the same bytes with 4 and 8 microbatches", plans)
    for option, word in [(f"--data={p.text}", "--data"), ("--tied", "--tied"), ("--vocabulary=5", "--vocabulary"),
                         ("--validate-every=2", "--validate-every")]:
        p.run("gpt_pipeline", [*sizes, "--mesh=p=2", option]).fails(2, word, "jaxpp-tutorial", "leave it out")
    p.run("gpt_pipeline", [*sizes, "--mesh=p=2", "--model=bert"]).fails(2, "bert", "jaxpp-tutorial")


if __name__ == "__main__":
    sys.exit(programs.main([layouts, simulated, dtypes, gathers, histograms, checkpoints, optimizers, pictures, mistakes, stopped, tutorial]))
