#!/usr/bin/env python3
"""Runs the example programs as a user would, on threads and under mpirun, with right and with wrong options.

programs.py --examples DIR [--mpiexec "mpirun --oversubscribe"]      without --mpiexec: threads only

Needs nothing but Python's standard library. Prints what failed; the exit status is 1 then.
"""
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import event_files
import gpt2_oracle
from checks import arguments, check, children, contents, failures, put, records, text_of, tree, wait_until

TIMEOUT = 60  # seconds for one program, against hangs
DOCS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "docs")
CURVE = 50  # steps over which the meshes' losses are compared

runs = 0


class Run:
    """One finished run of a program."""

    def __init__(self, command, name):
        global runs
        runs += 1
        self.name = name
        try:
            done = subprocess.run(command, capture_output=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
            self.status = done.returncode
            out, err = done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            self.status = "none: it hangs"
            out, err = late.stdout or b"", late.stderr or b""
        self.out, self.err = out.decode(errors="replace"), err.decode(errors="replace")
        self.errors = [line for line in self.err.splitlines() if line.startswith("error:")]

    def show(self):
        return f"  status {self.status}\n  stdout: {self.out[-1500:]}\n  stderr: {self.err[-1500:]}"

    def check(self, ok, what):
        return check(ok, f"{self.name}: {what}", self.show())

    def succeeds(self):
        return self.check(self.status == 0 and not self.errors, "succeeds")

    def succeeded(self):
        """The run itself, which must succeed."""
        self.succeeds()
        return self

    def fails(self, status, *words):
        """Ends with the status and one line that begins with "error:" and has the words."""
        if self.check(self.status == status, f"ends with status {status}") and self.check(
            len(self.errors) == 1, "prints exactly one error line"
        ):
            for word in words:
                self.check(word in self.errors[0], f"the error names {word!r}")


class Programs:
    def __init__(self, examples, mpiexec, folder):
        self.examples, self.mpiexec, self.folder = examples, mpiexec, folder
        self.text = os.path.join(folder, "text.txt")
        put(self.text, sample_text())

    def run(self, program, options, ranks=0, limits=()):
        command = [*limits, os.path.join(self.examples, program), *options]
        if ranks:
            command = [*self.mpiexec, "-n", str(ranks), *command]
        shown = " ".join(shlex.quote(o.replace(self.folder + "/", "")) for o in options)
        return Run(command, (f"mpirun -n {ranks} " if ranks else "") + f"{program} {shown}")

    def gpt_command(self, *options):
        return [os.path.join(self.examples, "gpt_fsdp"), *self.small(), *options]

    def small(self, data=True):
        small = {"--batch": 8, "--seq": 16, "--layers": 2, "--d-model": 16, "--n-kv": 2, "--d-head": 4, "--d-ff": 16}
        small |= {"--steps": 2, "--warmup": 2, "--max-tokens": 0, "--check-replicas": 1}
        small |= {"--data": self.text} if data else {}
        return [f"{option}={value}" for option, value in small.items()]

    def gpt(self, *options, ranks=0, limits=(), data=True):
        """gpt_fsdp with small sizes; later options win over these."""
        return self.run("gpt_fsdp", [*self.small(data), *options], ranks, limits)

    def metrics(self, *options, ranks=0):
        """gpt_fsdp with small sizes, and what --metrics writes of it."""
        return self.measured("gpt_fsdp", [*self.small(), *options], ranks)

    def measured(self, program, options, ranks=0, first=0):
        """The objects that --metrics writes, one a step from the first on, after checks of their form."""
        path = os.path.join(self.folder, "metrics.jsonl")
        if os.path.exists(path):
            os.remove(path)
        run = self.run(program, [*options, f"--metrics={path}"], ranks)
        if not run.succeeds():
            return run, []
        keys = ["step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_seconds"]
        try:
            steps = records(path)
        except ValueError as error:
            run.check(False, f"--metrics holds JSON ({error})")
            return run, []
        run.check(all(list(s)[: len(keys)] == keys for s in steps), f"--metrics has the keys {keys}")
        numbered = list(range(first, first + len(steps)))
        run.check([s["step"] for s in steps] == numbered, f"--metrics counts the steps from {first}")
        run.check(all(s["tokens_per_second"] > 0 and s["step_seconds"] > 0 for s in steps), "--metrics has speeds")
        parts = ["data", "forward", "backward", "optimizer", "communication"]
        run.check(all(list(s["seconds"])[: len(parts)] == parts for s in steps), f"--metrics has the parts {parts}")
        # Which steps a checkpoint falls on is not told here; a run without a folder has none.
        ignored = ["checkpoint"] if any(option.startswith("--run=") for option in options) else []
        on_top = [[part for part in s["seconds"] if part not in parts + ignored] for s in steps]
        validated = [["validation"] if "validation_loss" in s else [] for s in steps]
        run.check(on_top == validated, "validation is on top, where there is some")
        ends = all(abs(sum(s["seconds"][part] for part in parts) - s["step_seconds"]) < 1e-6 for s in steps)
        run.check(ends, "the parts add up to the step")
        return run, steps


def sample_text():
    """Documents of words from a small vocabulary, the same at every call: a text that a small model learns fast."""
    words = "in the beginning was a word and the word was with all who read it and none knew what it meant".split()
    state, documents = 1, []
    for _ in range(120):
        state = (state * 1103515245 + 12345) % 2**31
        length, document = 2 + state // 65536 % 40, []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % 2**31
            document.append(words[state // 65536 % len(words)])
        documents.append(" ".join(document) + ".\n")
    return "<|endoftext|>".join(documents)


def numbers(steps):
    """What must repeat bit for bit. JSON has the shortest text that reads back as the same number."""
    return [(s["loss"], s["grad_norm"], s["learning_rate"]) for s in steps]


def apart(a, b):
    """The largest relative difference of two loss curves."""
    return max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in zip(a, b))


def with_s(mesh):
    """A mesh "d=2,t=2" as gpt_fsdp prints it: axis s, which is left out, has size 1."""
    return mesh if "s=" in mesh else mesh.replace(",t=", ",s=1,t=")


def training(p):
    """The whole training, AdamW and all, is the same on every mesh, and a mesh repeats itself bit for bit."""
    length = [f"--steps={CURVE}", "--warmup=5", "--learning-rate=0.01"]
    curves = {}
    lengths = ["d=1,s=2,t=1", "d=1,s=4,t=1", "d=2,s=2,t=1", "d=1,s=2,t=2", "d=2,s=2,t=2", "r=2,d=2,s=1,t=1"]
    for mesh in ["d=1,t=1", "d=2,t=1", "d=1,t=2", "d=2,t=2", "d=4,t=2", *lengths]:
        run, steps = p.metrics(f"--mesh={mesh}", *length)
        if not run.check(len(steps) == CURVE, "one object a step"):
            return
        curves[mesh] = steps
        # Bytes that are all alike would cost ln 256 = 5.5; the words' letters alone about 2.8.
        run.check(steps[0]["loss"] > 5.0 and steps[-1]["loss"] < 3.0, "the loss falls")
        one = curves["d=1,t=1"]
        # Sums in another order differ in the last bits, 6e-8, which training may magnify; 2e-7 was seen at the end.
        run.check(apart(steps, one) < 1e-5, f"{CURVE} losses stay with one device's ({apart(steps, one):.1e})")
        header = re.match(r"(\d+) parameters, mesh (\S+), 128 tokens a step, (\d+) tokens of data, ", run.out.split("\n")[0])
        run.check(header and header[2] == with_s(mesh), "the first line names sizes and mesh")
        progress = re.findall(
            r"^step +(\d+)/50 +loss \d+\.\d{4} +lr \d\.\d\de-\d\d +grad norm +\d+\.\d{3} +\d+ tokens/s +MFU +\d+ % +\d+ s left$",
            run.out,
            re.M,
        )
        run.check(progress == ["0", "10", "20", "30", "40", "49"], "progress lines")
    rates = [s["learning_rate"] for s in one]
    check(abs(rates[0] - 0.002) < 1e-9 and abs(max(rates) - 0.01) < 1e-9 and abs(rates[-1] - 0.001) < 1e-9,
          "learning rates: warmup, peak, a tenth at the end", str(rates))

    run, short = p.metrics("--mesh=d=2", *length)
    run.check(numbers(short) == numbers(curves["d=2,t=1"]), "an axis that is left out has size 1")
    run, again = p.metrics("--mesh=d=2,t=2", *length)
    run.check(numbers(again) == numbers(curves["d=2,t=2"]), "the same bits twice")
    run, other = p.metrics("--mesh=d=2,t=2", *length, "--seed=1")
    run.check(numbers(other)[:1] != numbers(again)[:1], "another seed, another training")
    if p.mpiexec:
        for mesh, ranks in [("d=2,t=1", 2), ("d=1,t=2", 2), ("d=2,t=2", 4), ("d=1,s=2,t=1", 2), ("d=2,s=2,t=1", 4), ("d=1,s=4,t=1", 4)]:
            run, steps = p.metrics(f"--mesh={mesh}", *length, ranks=ranks)
            run.check(numbers(steps) == numbers(curves[mesh]), "the same bits as on threads")
            run.check(len(re.findall("^step ", run.out, re.M)) == 6, "one rank speaks")
        run, steps = p.metrics(*length, ranks=2)
        run.check(numbers(steps) == numbers(curves["d=2,t=1"]), "all ranks are on d where --mesh is not given")

    # Three devices divide no dim: neither 256 bytes nor width, heads and feed-forward.
    uneven = ["--d-model=16", "--n-kv=2", "--d-ff=14", "--steps=20", "--batch=6"]
    one = p.metrics("--mesh=d=1,t=1", *uneven)[1]
    for mesh in ["d=1,t=3", "d=3,t=1", "d=3,t=2", "d=3,s=2,t=1"]:
        run, padded = p.metrics(f"--mesh={mesh}", *uneven)
        run.check(padded and apart(padded, one) < 1e-5, "padding changes nothing")
        note = f"note: padded with zeros, to sizes that mesh {with_s(mesh)} divides: "
        run.check(note in run.out and "--d-model 16 -> 18" in run.out, "padding is said")

    run, tied = p.metrics("--mesh=d=2,t=1", *length, "--tied")
    run.check(tied and tied[-1]["loss"] < 3.0, "the loss falls")

    seqax = ["--init=seqax", f"--run={p.folder}/seqax", f"--export={p.folder}/seqax-model"]
    p.run("gpt_fsdp", seqax).fails(2, "--init seqax", "--export", "depth-scaled")
    p.gpt("--init=seqax", "--tied").fails(2, "--tied", "depth-scaled")
    p.gpt("--init=seqax", "--qkv-bias").fails(2, "--qkv-bias", "depth-scaled")
    # The folder knows how its model scales the scores, also where no step is left.
    short = ["--mesh=d=2,t=1", "--steps=2", f"--run={p.folder}/seqax", "--max-tokens=2"]
    p.gpt(*short, "--init=seqax").succeeds()
    p.gpt(*short, "--init=seqax").succeeds()
    p.gpt(*short, f"--export={p.folder}/seqax-model").fails(2, 'init is "seqax" in the checkpoint, but "depth-scaled" now')
    p.run("shardlib-sample", [f"{p.folder}/seqax", "--init=depth-scaled"]).fails(2, 'init is "seqax"', "--allow-change init")
    p.run("shardlib-sample", [f"{p.folder}/seqax"]).succeeds()
    small = [option for option in p.small() if not option.startswith("--steps")]
    run, steps = p.measured("gpt_fsdp", [*small, "--mesh=d=2,t=1", "--epochs=1", "--shuffle=no", "--batch=64", "--seq=64"])
    tokens = int(re.search(r"(\d+) tokens of data, seen 1\.\d\d times", run.out)[1])
    run.check(len(steps) == -(-tokens // (64 * 64)), f"an epoch of {tokens} tokens has {len(steps)} steps")


def simulated(p):
    """On the simulated device, programs compute the same to rounding, on threads and under mpirun."""
    gpt2_sizes = "--batch=8 --seq=16 --layers=1 --d-model=16 --heads=2 --d-ff=16 --context=16 --max-tokens=0 --warmup=2".split()
    for program, sizes in [("gpt_fsdp", p.small()), ("gpt2", [*gpt2_sizes, f"--data={p.text}"])]:
        for mesh, ranks in [("d=1,t=1", 0), ("d=2,t=2", 0)] + ([("d=2,t=1", 2)] if p.mpiexec else []):
            both = [*sizes, f"--mesh={mesh}", "--steps=4"]
            run, cpu = p.measured(program, both, ranks)
            run, steps = p.measured(program, [*both, "--device=simulated"], ranks)
            # Not the CPU's bits: a device computes attention in other steps.
            run.check(len(steps) == 4 and apart(steps, cpu) < 1e-5, f"{mesh}: the CPU's losses")
    shown = p.run("gpt_fsdp", ["--help"])
    shown.check(re.search(r"the launcher of this one is (host|CUDA|HIP|Kokkos::\w+)\)", " ".join(shown.out.split())), "--help names the launcher")
    p.gpt("--device=tpu").fails(2, "--device", "'tpu'", "cpu, gpu, simulated")
    p.gpt("--sums=ring").fails(2, "--sums", "'ring'", "tree, nccl")
    for device in ("cpu", "simulated"):
        p.gpt("--sums=nccl", f"--device={device}").fails(2, "--sums nccl: only GPUs have NCCL", "--device gpu")
    gpu = p.gpt("--device=gpu", "--steps=1")
    if "CUDA runs the kernels" not in p.run("gpt_fsdp", ["--version"]).out:
        gpu.fails(2, "--device gpu", "built without a launcher for GPUs", "SHARDLIB_LAUNCHER=cuda")
    elif shutil.which("nvidia-smi"):
        gpu.succeeds()
    else:
        gpu.fails(2, "--device gpu", "no driver for NVIDIA GPUs", "--device cpu")


def checkpoints(folder):
    """The steps of a run's whole checkpoints, from the oldest on, and the paths of their folders."""
    path = os.path.join(folder, "checkpoints")
    names = os.listdir(path) if os.path.isdir(path) else []
    return {int(name[5:]): os.path.join(path, name) for name in sorted(names) if name.startswith("step-") and name[5:].isdigit()}


def resuming(p):
    """A run that is killed goes on with the same bits; one that is asked to stop keeps a checkpoint; meshes change."""
    common = ["--steps=60", "--warmup=5", "--save-every=7", "--mesh=d=2,t=2", "--keep=9"]

    def kept_by(name):
        return numbers(records(p.folder, name, "metrics.jsonl"))

    def interrupted(name, signal, after):
        """Starts the run, and signals it once `after` checkpoints are there."""
        folder = os.path.join(p.folder, name)
        command = p.gpt_command(*common, f"--run={folder}", "--steps=100000")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: len(checkpoints(folder)) >= after, process)
        process.send_signal(signal)
        return process.wait(timeout=TIMEOUT)

    run = p.gpt(*common, f"--run={p.folder}/whole", "--step-graph").succeeded()
    drawn = text_of(f"{p.folder}/whole/step.svg")
    run.check("layers/0/w_q" in drawn and "layers/1/w_q" in drawn, "--step-graph draws all layers")
    run.check(re.search(f"^drawing {p.folder}/whole/step.svg from [0-9]+ lines", run.out, re.M), "and says so before")
    run.check(">update<" in drawn and "adamw" in drawn, "--step-graph draws the update")
    run.check(re.search(r"^--steps +60  \(command line\)$", run.out, re.M), "the settings that were given are printed")
    check('mesh = "d=2,s=1,t=2"' in text_of(f"{p.folder}/whole/config.toml"), "the run's configuration names the mesh")
    sampling_is_stopped(p)
    sample_of_the_stop(p)
    second_interrupt(p)
    status = interrupted("killed", 9, 3)
    check(status == -9, f"SIGKILL ends the run ({status})")
    done = max(checkpoints(f"{p.folder}/killed"))
    check(done < 60, f"killed in the middle, after step {done}")
    status = interrupted("other", 15, 3)
    check(status == 0, f"SIGTERM ends the run with status 0 ({status})")
    kept = kept_by("other")
    saved = max(checkpoints(f"{p.folder}/other"))
    check(saved == len(kept), f"SIGTERM: a checkpoint after the last step ({saved}, {len(kept)} records)")
    status = interrupted("killed", 15, 8)
    check(status == 0, f"the killed run goes on ({status})")
    both = min(len(kept), len(kept_by("killed")))
    check(both > done and kept_by("killed")[:both] == kept[:both], f"the same bits as the uninterrupted run ({both} steps)")
    common_step = f"step-{7 * (min(both, saved) // 7):08d}"
    check(tree(f"{p.folder}/killed/checkpoints/{common_step}") == tree(f"{p.folder}/other/checkpoints/{common_step}"),
          f"{common_step}: the same files")

    run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=70", f"--run={p.folder}/whole").succeeded()
    run.check("resuming from step 60 of 70" in run.out, "another mesh takes the checkpoint")
    run.check(len(kept_by("whole")) == 70, "one record a step")
    run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=70", f"--run={p.folder}/whole", "--max-tokens=5")
    run.check("all 70 steps are done" in run.out and "And God said" in run.out, "a finished run samples")
    for changed, name in [("--learning-rate=0.5", "learning_rate"), ("--seed=3", "seed"), ("--batch=16", "batch")]:
        run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=72", f"--run={p.folder}/whole", changed)
        run.fails(2, f"{name} is", "in the checkpoint", f"--allow-change {name}")
    run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=71", f"--run={p.folder}/whole", "--seed=3", "--allow-change=seed").succeeded()
    run.check("allowed by --allow-change: seed is 0 in the checkpoint, but 3 now" in run.out, "an allowed change is said")
    p.gpt(*common, f"--run={p.folder}/whole", "--no-resume").fails(2, "whole", "resume")
    run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=70", f"--run={p.folder}/whole", "--d-model=32")
    run.check(run.status == 2 and "weights.embed' is [256, 16] in the checkpoint, but [256, 32]" in run.err, "all that differs is listed")
    run.check(f"--config {p.folder}/whole/config.toml" in run.err, "the last line says where the settings of the run are")
    wider = [*common, "--mesh=d=1,t=1", "--steps=72", f"--run={p.folder}/whole", "--seed=3", "--d-model=32"]
    p.gpt(*wider, "--seed=4").fails(2, "d_model is 16 in the checkpoint, but 32 now", "--allow-change seed, but not that of d_model")
    p.gpt(*wider, "--vocabulary=400").fails(2, "give the checkpoint's values, or choose another --run")
    run = p.gpt(*wider, "--allow-change=d_model")
    run.check(run.status == 2 and "[256, 16] in the checkpoint" in run.err and "--allow-change makes no checkpoint fit: d_model is 16" in run.err,
              "a change that decides the leaves fits nothing")
    kept = text_of(f"{p.folder}/whole/config.toml")
    run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=60", f"--run={p.folder}/whole", "--keep-every=3").succeeded()
    run.check("the checkpoint of step 71 is used: --steps 60 leaves nothing to train" in run.out and "resuming" not in run.out,
              "a run of more steps is not cut")
    run.check(text_of(f"{p.folder}/whole/config.toml") == kept, "config.toml stays that of the steps that were trained")

    newest = checkpoints(f"{p.folder}/whole")[71]
    largest = max((os.path.join(at, name) for at, _, names in os.walk(newest) for name in names), key=os.path.getsize)
    os.truncate(largest, os.path.getsize(largest) // 2)
    run = p.gpt(*common, "--mesh=d=1,t=1", "--steps=72", f"--run={p.folder}/whole", "--seed=3", "--allow-change=seed").succeeded()
    warning = "is damaged: "
    run.check(warning in run.err and "going back to an older one" in run.err, "a damaged checkpoint is not used")
    run.check(warning in text_of(f"{p.folder}/whole/console.log"), "console.log has the warning")


def sampling_is_stopped(p):
    """A signal ends the sample after the last step; by then the last checkpoint is whole."""
    folder = os.path.join(p.folder, "sampled")
    # The likeliest byte is none that ends the text: left alone, the sample would take hours.
    endless = ["--max-tokens=10000000", "--temperature=0", "--learning-rate=0.01", "--steps=20"]
    command = p.gpt_command(f"--run={folder}", "--mesh=d=2,t=1", *endless)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = []
    while not lines or (lines[-1] and "A sample after 20 steps" not in lines[-1]):
        lines.append(process.stdout.readline())
    kept = os.listdir(f"{folder}/checkpoints")
    process.send_signal(15)
    try:
        rest = process.communicate(timeout=TIMEOUT)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        rest = process.communicate()[0] + "it hangs"
    check("step-00000020" in kept, f"the checkpoint is whole before the sample ({kept})")
    check(process.returncode == 0 and "stopped by a signal" in rest, f"SIGTERM stops the sample ({process.returncode})", rest[-500:])


def in_terminal(command, first, second):
    """Runs the command in a terminal of its own. Types Ctrl-C once `first(shown)` holds, and again once `second(pid)` holds.
    Its wait status, and what the terminal has shown."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], command)
    shown, typed, limit = b"", 0, time.time() + TIMEOUT
    while time.time() < limit:
        if select.select([terminal], [], [], 0.001)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the last process of the terminal has ended
                break
        if typed < 2 and (second(pid) if typed else first(shown)):
            os.write(terminal, b"\x03")
            os.kill(pid, signal.SIGCONT)  # which `second` may have stopped
            typed += 1
    else:
        os.kill(pid, signal.SIGKILL)
        shown += b"it hangs"
    os.close(terminal)
    return os.waitpid(pid, 0)[1], shown.decode(errors="replace")


def second_interrupt(p):
    """Ctrl-C saves and stops. A second one while the run saves ends it at once, and the checkpoint before stays whole."""
    folder = f"{p.folder}/twice"
    options = ["--d-model=128", "--vocabulary=2048", "--mesh=d=2", "--save-every=0", f"--run={folder}"]
    command = p.gpt_command(*options, "--steps=100000")
    p.gpt(*options, "--steps=4").succeeds()

    def trains(shown):
        return b"tokens/s" in shown

    def saving():
        return any(name.startswith("step-") and ".tmp-" in name for name in os.listdir(f"{folder}/checkpoints"))

    def stopped_while_saving(pid):
        if saving():
            os.kill(pid, signal.SIGSTOP)
            if saving():
                return True
            os.kill(pid, signal.SIGCONT)
        return False

    def ranks_left():
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if f"--run={folder}".encode() in file.read().split(b"\0"):
                        yield int(pid)
            except OSError:
                continue

    for _ in range(5):  # a try may miss the moment: then the run saves and ends well
        newest = max(checkpoints(folder))
        kept = tree(f"{folder}/checkpoints")
        status, shown = in_terminal(command, trains, stopped_while_saving)
        if status != 0:
            break
    saved = f"{folder}/checkpoints/step-{newest:08d}"
    check(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT, f"the second Ctrl-C ends the run ({status})", shown[-800:])
    check("stopping after this step; a second Ctrl-C ends at once" in shown, "the first Ctrl-C is answered", shown[-800:])
    check(f"ended at once by a second signal; the newest checkpoint is {saved}: the same command resumes from there" in shown,
          "the end names the checkpoint", shown[-800:])  # fmt: skip
    check(kept.items() <= tree(f"{folder}/checkpoints").items(), "the checkpoints before are whole")
    check(saving() and max(checkpoints(folder)) == newest, "it was saving")
    if p.mpiexec:  # which asks its ranks to end, and kills them a second later
        status, shown = in_terminal([*p.mpiexec, "-n", "2", *command], trains, lambda _: True)
        check(status != 0, f"Ctrl-C twice ends mpirun ({status})", shown[-800:])
        limit = time.time() + 10
        while list(ranks_left()) and time.time() < limit:
            time.sleep(0.05)
        check(not list(ranks_left()), "no rank is left")
    newest = max(checkpoints(folder))
    run = p.gpt(*options, f"--steps={newest + 1}")
    run.succeeds()
    run.check(f"resuming from step {newest} of {newest + 1}" in run.out and not saving(), "the run goes on from its checkpoint")


def sample_of_the_stop(p):
    """A signal stops a run before the sample of its last step. The run that goes on draws it, once."""
    common = ["--mesh=d=2,t=1", "--final-learning-rate=1", "--sample-every=1", "--max-tokens=3"]

    def samples(name):
        path = f"{p.folder}/{name}/samples.jsonl"
        if not os.path.exists(path):
            return []
        with open(path) as file:
            whole = [json.loads(line) for line in file if line.endswith("\n")]
        return [(sample["step"], sample["text"]) for sample in whole]

    folder = f"{p.folder}/stopped"
    command = p.gpt_command(*common, f"--run={folder}", "--steps=100000")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(samples("stopped")) >= 4, process)
    process.send_signal(signal.SIGTERM)
    status = process.wait(timeout=TIMEOUT)
    if not check(status == 0 and checkpoints(folder), f"a run that samples is stopped ({status})"):
        return
    stop = max(checkpoints(folder))
    check(stop - 1 not in dict(samples("stopped")), f"it is stopped before the sample of step {stop - 1}")
    for steps in stop + 1, stop + 2:
        p.gpt(*common, f"--run={folder}", f"--steps={steps}").succeeds()
    p.gpt(*common, f"--run={p.folder}/undisturbed", f"--steps={stop + 2}").succeeds()
    drawn, expected = samples("stopped"), samples("undisturbed")
    check(drawn[-3:] == expected[-3:] and expected[-3][0] == stop - 1, "the samples from the stop on are those of an undisturbed run",
          f"{drawn[-5:]}\n{expected[-3:]}")  # fmt: skip


def other_options(p):
    for program, options, words in [
        (
            "gpt_fsdp",
            ["--help"],
            "--data --mesh --steps --epochs --shuffle --init --batch --seq --layers --d-model --n-q-per-kv --n-kv --d-head --d-ff --tied "
            "--learning-rate --lr-schedule --warmup --warmup-from --decay-steps --decay-fraction --final-learning-rate --adam-epsilon --weight-decay --clip --seed --metrics --max-tokens --prompt --temperature "
            "--run --tokenizer --preset --config --load --export --logits --rope-factor --norm-epsilon",
        ),
    ]:
        for ranks in [0, 2] if p.mpiexec else [0]:
            run = p.run(program, options, ranks).succeeded()
            run.check(program in run.out.split("\n")[0], "--help begins with the program, not with Kokkos' options")
            for word in words.split():
                run.check(len(re.findall(rf"^ +--(?:\[no-\])?{word[2:]} ", run.out, re.M)) == 1, f"--help explains {word} once")

    # The presets of gpt_fsdp have a test of their own (tests/run_options_test.cpp).
    folder = os.path.join(p.folder, "minigpt")
    p.run("gpt2", ["--preset=minigpt", "--steps=0", "--max-tokens=0", f"--run={folder}"]).succeeds()
    stored = text_of(f"{folder}/config.toml")
    for line in ["layers = 4", "d_model = 256", "heads = 8", "d_ff = 256", "context = 256", 'norm = "post"', 'activation = "relu"', "tied = false",
                 "norm_epsilon = 1e-06", 'rows = "stories"', 'shuffle = "no"', "batch = 256", "seq = 256", "learning_rate = 0.001", "warmup = 0",
                 "final_learning_rate = 1.0", "weight_decay = 0.0", "beta2 = 0.999", "clip = 0.0", "sample_every = 200", "dropout = 0.0",
                 'prompt = "Once upon a time"', "top_k = 10", "temperature = 1.0"]:  # fmt: skip
        check(f"\n{line}\n" in stored, f"--preset minigpt has {line}", stored)

    # What is sampled: one character per byte, since bytes that are not UTF-8 are replaced one by one or in runs.
    for options in [["--prompt="], ["--prompt=" + "long " * 20], ["--seq=1", "--batch=4"], ["--temperature=0"]]:
        for mesh in ["d=1,t=1", "d=2,t=2"]:
            run = p.gpt("--max-tokens=20", f"--mesh={mesh}", *options).succeeded()
            prompt = options[0][9:] if options[0].startswith("--prompt=") else "And God said"
            run.check(f"\n\n{prompt}" in run.out, "the sample begins with the prompt")
    # The model has more ids than the tokenizer, and an untrained one draws them all alike.
    run = p.gpt("--steps=0", "--max-tokens=60", "--vocabulary=1280", "--temperature=5").succeeded()
    one, four = (p.gpt("--max-tokens=20", f"--mesh={mesh}").out.split("A sample")[-1] for mesh in ["d=1,t=1", "d=2,t=2"])
    check(one == four, "the sample is the same on every mesh", one + four)


GPT2_SMALL = ("--batch=8 --seq=16 --layers=1 --d-model=16 --heads=2 --d-ff=16 --max-tokens=0 --warmup=2").split()


def gpt2(p):
    """Sampling needs no data; loaded weights need a prompt, since nothing stands before the first token there."""
    small = "--batch=2 --seq=16 --layers=1 --d-model=16 --heads=2 --d-ff=16 --context=16 --steps=0 --max-tokens=5".split()
    weights = os.path.join(p.folder, "gpt2-exported")
    run = p.run("gpt2", [*small, f"--run={p.folder}/gpt2", f"--export={weights}", "--prompt="]).succeeded()
    new = os.path.join(p.folder, "gpt2-new")
    run = p.run("gpt2", [*small, f"--load={weights}", "--prompt=Once upon", f"--run={new}", f"--logits={new}/logits"]).succeeded()
    run.check(os.path.exists(f"{new}/logits"), "--logits into the folder of a new run")
    run.check("no data" in run.out and "\n\nOnce upon" in run.out, "loaded weights sample without data")
    p.run("gpt2", [*small, f"--load={weights}", "--prompt="]).fails(2, "--prompt is empty")
    larger = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tokenizers", "gpt2.json")
    p.run("gpt2", [*small, f"--load={weights}", f"--tokenizer={larger}"]).fails(2, "ends at 255: give another prompt, the model's --tokenizer")
    short = p.run("gpt2", [f"--load={weights}", "--steps=0", "--max-tokens=2", "--prompt=On", f"--run={p.folder}/gpt2-short"]).succeeded()
    short.check("--seq                  16  (--context 16)" in short.out, "rows of a short model are short by default")
    os.mkdir(f"{p.folder}/notes")
    shutil.copy(p.text, f"{p.folder}/notes/model.safetensors")
    shutil.copy(f"{weights}/model.safetensors", f"{p.folder}/a-model")
    for option, path in [("--export", f"{p.text}/model"), ("--export", f"{p.folder}/notes"), ("--logits", f"{p.folder}/nowhere/file"),
                         ("--export", f"{p.folder}/gpt2/checkpoints"),
                         ("--logits", p.text), ("--logits", f"{p.folder}/a-model"), ("--logits", f"{p.folder}/model.safetensors")]:  # fmt: skip
        for ranks in [0, 2] if p.mpiexec else [0]:
            for program, sizes in [("gpt2", small), ("gpt_fsdp", ["--batch=2", "--seq=16", "--d-model=16", "--d-head=8"])]:
                steps = [*sizes, "--steps=3", f"--data={p.text}", f"--run={p.folder}/unwritable", "--prompt=Once"]
                run = p.run(program, [*steps, f"{option}={path}"], ranks)
                run.fails(2, option, path)
                run.check("loss" not in run.out, "before the first step")
    p.run("gpt2", [*small, "--steps=1"]).fails(2, "--data", "--help")
    p.run("gpt2", [*small, "--prefetch", "--gather=per-step"]).fails(2, "--prefetch", "per-microbatch")
    p.run("gpt2", [*small, "--prefetch", "--recompute=none"]).fails(2, "--prefetch", "--recompute none", "choose marked")

    train = [*small, "--batch=8", "--steps=6", "--warmup=0", "--final-learning-rate=1", "--mesh=d=2,t=2", "--max-tokens=0",
             f"--data={p.text}", f"--validation-data={p.text}", "--validate-every=2", "--validation-batches=1"]  # fmt: skip

    def steps(*options, first=0):
        return p.measured("gpt2", [*train, *options], first=first)

    for options, planned in [
        (["--dtype=f32"], {"weights": 497.9, "gradients": 497.9}),
        (["--dtype=bf16"], {"weights": 497.9, "their copies for computation": 249.0, "gradients": 249.0}),
        (["--dtype=bf16", "--microbatches=2"], {"their copies for computation": 249.0, "gradients": 497.9}),
    ]:
        run = p.run("gpt2", ["--preset=gpt2-124m", "--mesh=d=1,t=1", "--vocabulary=50304", "--plan", *options]).succeeded()
        found = {what: float(mb) for what, mb in re.findall(r"^  (\S.*?) +(\S+) MB$", run.out, re.M)}
        run.check(all(found.get(what) == mb for what, mb in planned.items()), f"the plan has {planned}")
        run.check(("their copies for computation" in found) == ("--dtype=bf16" in options), "copies where there are some")

    for dtype in ["--dtype=f32", "--dtype=bf16"]:
        run, whole = steps(dtype)
        run.check(len(whole) == 6 and whole[-1]["loss"] < whole[0]["loss"] - 0.1, "the loss falls")
        run, ahead = steps(dtype, "--prefetch")
        run.check(numbers(ahead) == numbers(whole), "--prefetch changes no bit")
        run, parts = steps(dtype, "--microbatches=2", "--gather=per-microbatch")
        run.check(apart(parts, whole) < 1e-2, "two microbatches train as one batch")
        run, once = steps(dtype, "--microbatches=2", "--gather=per-step")
        run.check(apart(once, parts) < (1e-2 if "bf16" in dtype else 1e-4), f"as per-microbatch ({apart(once, parts):.1e})")
        # In two parts as at once: what is resumed makes its copies of the weights in the checkpoint.
        folder = os.path.join(p.folder, "gpt2" + dtype)
        steps(dtype, f"--run={folder}", "--steps=3")
        run, rest = steps(dtype, f"--run={folder}", first=3)
        run.check(numbers(rest) == numbers(whole)[3:], "the second part goes on")
        losses = [s["validation_loss"] for s in whole[3:] if "validation_loss" in s]
        run.check(losses == [s["validation_loss"] for s in rest if "validation_loss" in s], "and validates alike")


def lora(p):
    """Adapters train while the weights stay; merged, they are the same model; another base is refused."""
    sizes = "--layers=2 --d-model=16 --heads=2 --d-ff=16 --context=16".split()
    base, tuned, run_folder = (os.path.join(p.folder, name) for name in ["base", "tuned", "lora"])
    p.run("gpt2", [*sizes, "--batch=2", "--seq=16", "--steps=0", "--max-tokens=0", f"--run={p.folder}/lora-base",
                   f"--export={base}"]).succeeds()
    train = [f"--load={base}", "--batch=8", "--seq=16", "--steps=6", "--warmup=0", "--final-learning-rate=1",
             "--learning-rate=0.05", "--max-tokens=0", "--lora=4", f"--data={p.text}"]
    for dtype, tolerance in [("f32", 1e-5), ("bf16", 0.01)]:
        run, one = p.measured("gpt2", [*train, f"--dtype={dtype}", "--mesh=d=1,t=1"])
        run.check(len(one) == 6 and one[-1]["loss"] < one[0]["loss"] - 0.02, "the loss falls")
        for more in [["--mesh=d=2,t=2"], ["--mesh=d=3,t=2", "--batch=6"], ["--mesh=d=1,t=1", "--microbatches=2"]]:
            if "--batch=6" in more:
                one_of_six = p.measured("gpt2", [*train, f"--dtype={dtype}", "--mesh=d=1,t=1", "--batch=6"])[1]
            run, other = p.measured("gpt2", [*train, f"--dtype={dtype}", *more])
            same = one_of_six if "--batch=6" in more else one
            run.check(other and apart(other, same) < tolerance, f"as on one device ({apart(other, same):.1e})")
    logits = [os.path.join(p.folder, name) for name in ["adapted.safetensors", "merged.safetensors"]]
    run = p.run("gpt2", [*train, f"--run={run_folder}", f"--export={tuned}", f"--logits={logits[0]}", "--prompt=And",
                         "--tensorboard", "--histogram-every=6"]).succeeded()  # fmt: skip
    shown = {tag for tag, _ in event_files.histograms(f"{run_folder}/tensorboard")}
    adapters = {f"{kind}/layers/{i}/{w}" for kind in ("weights", "gradients") for i in (0, 1) for w in ("a", "b_q", "b_k", "b_v")}
    run.check(shown == adapters, f"histograms of the adapters alone: {shown}")
    p.run("gpt2", [f"--load={tuned}", "--seq=16", "--steps=0", "--max-tokens=0", "--prompt=And", f"--logits={logits[1]}"]).succeeds()
    adapted, merged = (floats(path) for path in logits)
    check(len(adapted) == len(merged) > 0 and max(abs(a - b) for a, b in zip(adapted, merged)) < 1e-4,
          "a merged model has the logits of the adapted one")
    moved = p.run("gpt2", [f"--load={base}", "--seq=16", "--steps=0", "--max-tokens=0", "--prompt=And", f"--logits={logits[1]}"])
    moved.check(max(abs(a - b) for a, b in zip(adapted, floats(logits[1]))) > 1e-3, "and not those of its base")
    run, factored = p.measured("gpt2", [*train, "--optimizer=adafactor", "--mesh=d=2,t=2"])
    run.check(len(factored) == 6 and factored[-1]["loss"] < factored[0]["loss"] - 0.02, "adafactor trains adapters too")
    run, rest = p.measured("gpt2", [*train, f"--run={run_folder}", "--steps=8"], first=6)
    run.check(len(rest) == 2 and rest[0]["loss"] < one[0]["loss"], "the run goes on")
    beside = os.path.join(p.folder, "beside")
    p.run("gpt2", [*train, f"--load={os.path.relpath(base)}", f"--run={beside}", "--steps=1"]).succeeds()
    for folder in [run_folder, beside]:
        there = subprocess.run([os.path.join(p.examples, "shardlib-sample"), folder, "--prompt=And", "--max-tokens=3"],
                               capture_output=True, text=True, errors="replace", cwd="/")  # fmt: skip
        check(there.returncode == 0 and "And" in there.stdout, f"the folder is enough anywhere: {there.stderr}")
    os.rename(base, base + "-away")
    p.run("shardlib-sample", [run_folder, "--max-tokens=3"]).fails(2, base, "--load PATH")
    p.run("shardlib-sample", [run_folder, "--max-tokens=3", f"--load={base}-away"]).succeeds()
    os.rename(base + "-away", base)
    p.run("gpt2", [*train, f"--run={run_folder}", "--steps=9", f"--load={tuned}"]).fails(2, "frozen_weights", "--allow-change")
    p.run("gpt2", [*train, "--gather=per-step"]).fails(2, "--lora", "--gather per-microbatch")
    p.run("gpt2", [*train, "--lora=17"]).fails(2, "--lora 17", "--d-model 16")
    p.run("gpt2", [*train, "--optimizer=muon"]).fails(2, "muon", "--lora")
    p.run("gpt2", [*train, "--lora=0", "--lora-alpha=4"]).fails(2, "--lora-alpha has no effect without --lora R")
    p.run("gpt2", [*train, "--weight-decay=1"]).fails(2, "--weight-decay has no effect with --lora", "--decay-mult")
    plan = p.run("gpt2", ["--preset=gpt2-124m", "--mesh=d=1,t=1", "--lora=8", "--plan"])
    plan.check(re.search(r"optimizer[^\n]* 2\.359 MB", plan.out), "the moments are the adapters'")


def collective_matmul(p):
    """--collective-matmul: the same training except for rounding, the same bits on threads and ranks, and what is sent."""
    train = [*p.small(), "--steps=6", "--learning-rate=0.01", f"--data={p.text}"]
    for options in [["--mesh=d=2,t=2"], ["--mesh=t=4", "--microbatches=2"], ["--mesh=s=2,t=2", "--recompute=none"], ["--mesh=d=2,t=2", "--dtype=bf16"]]:
        _, separate = p.measured("gpt_fsdp", [*train, *options])
        run, hidden = p.measured("gpt_fsdp", [*train, *options, "--collective-matmul"])
        close = 0.01 if "--dtype=bf16" in options else 1e-5
        run.check(len(hidden) == 6 and apart(hidden, separate) < close, f"trains as without it ({apart(hidden, separate):.1e})")
        if p.mpiexec:
            run, ranks = p.measured("gpt_fsdp", [*train, *options, "--collective-matmul"], ranks=4)
            run.check(numbers(ranks) == numbers(hidden), "the same bits on threads and ranks")
    planned = p.run("gpt_fsdp", [*train, "--mesh=d=2,t=2", "--collective-matmul", "--plan"])
    planned.check("einsum_scatter" in planned.out and "F/t" in planned.out, "the plan has the products that communicate")


def shown_histograms(run, folder, steps):
    """The names of the weights in the histograms of a run with --histogram-every, which have all parameters once, also in
    gradients, whose norm is that of the record."""
    if not run.succeeds():
        return set()
    parameters = int(re.search(r"^(\d+) parameters", run.out, re.M)[1])
    found = event_files.histograms(f"{folder}/tensorboard")
    norms = {record["step"]: record["grad_norm"] for record in records(f"{folder}/metrics.jsonl")}
    run.check(sorted({step for _, step in found}) == steps, f"histograms of the steps {steps}")
    names = {}
    for step in steps:
        for kind in ("weights/", "gradients/"):
            of = {tag[len(kind) :]: h for (tag, at), h in found.items() if at == step and tag.startswith(kind)}
            names[kind, step] = set(of)
            count = sum(h[3] for h in of.values())
            run.check(count == parameters, f"step {step}: {count} {kind} of {parameters} parameters")
            run.check(all(sum(c for _, _, c in event_files.bars(h)) == h[3] for h in of.values()), "buckets have them")
        norm, clipped = sum(h[5] for h in of.values()) ** 0.5, min(norms[step], 1)
        run.check(abs(norm - clipped) < 1e-4 * clipped, f"step {step}: gradients of the norm {norm}, not {clipped}")
    run.check(len(set(map(frozenset, names.values()))) == 1, f"weights and gradients have the same names: {names}")
    return names["weights/", steps[-1]]


def histograms(p):
    """--histogram-every: each parameter counts once on every mesh, without padding, in weights and in gradients."""
    moe = [*p.small(), "--experts=4", "--d-head=8"]
    gpt2 = [*GPT2_SMALL, f"--data={p.text}"]
    cases = [
        ("gpt_fsdp", p.small(), ["d=1", "d=2,t=2", "r=2,d=2", "d=2,s=2"]),
        ("gpt_fsdp", [*p.small(), "--d-model=10", "--tied", "--microbatches=2"], ["d=1", "d=4,t=2"]),
        ("gpt_fsdp", [*p.small(), "--dtype=bf16", "--optimizer=adafactor"], ["d=1", "d=2,t=2"]),
        ("gpt2", gpt2, ["d=1", "d=2,t=2"]),
        ("moe", moe, ["d=1", "d=2,e=2"]),
    ]
    for i, (program, options, meshes) in enumerate(cases):
        names = []
        for mesh in meshes:
            folder = f"{p.folder}/histograms-{i}-{mesh}"
            words = [*options, f"--mesh={mesh}", "--steps=5", "--tensorboard", "--histogram-every=2", f"--run={folder}"]
            names.append(shown_histograms(p.run(program, words), folder, [1, 3]))
        check(len(names[0]) > 4 and names.count(names[0]) == len(names), f"{program}: the same names on every mesh {names}")
    p.gpt("--histogram-every=1", "--tensorboard").fails(2, "--tensorboard", "--run DIR")
    folder = os.path.join(p.folder, "shown-texts")
    run = p.gpt("--tensorboard", f"--run={folder}", "--steps=4", "--sample-every=2", "--max-tokens=3", "--samples=2", "--prompt=And").succeeded()
    texts = event_files.texts(f"{folder}/tensorboard")
    run.check("    d_model = 16\n" in texts.pop(("configuration", 0), ""), "TensorBoard has the configuration")
    due = {(tag, step) for tag in ("sample", "sample/2") for step in (0, 1, 3)}
    run.check(set(texts) == due, f"and each sample {sorted(texts)}")
    run.check(all(text.startswith("    And") for text in texts.values()), f"which begins with the prompt {texts}")


def traced(p):
    """--trace-from and --trace-steps choose the steps of a trace."""
    for more, due in [([], [1, 2, 3, 4, 5]), (["--trace-from=2", "--trace-steps=3"], [2, 3, 4]), (["--trace-from=5"], [5, 6])]:
        folder = os.path.join(p.folder, "traced")
        shutil.rmtree(folder, ignore_errors=True)
        run = p.gpt("--trace", "--steps=7", f"--run={folder}", "--mesh=d=2", *more).succeeded()
        with open(f"{folder}/trace.json", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        steps = [(event["pid"], event["name"]) for event in events if event.get("cat") == "steps"]
        run.check(sorted(steps) == [(rank, f"step {i}") for rank in (0, 1) for i in due], f"the traced steps are {steps}")


def data_and_runs(p):
    """Data for validation, streams that go on, and a run's own files."""
    tokens, lines = os.path.join(p.folder, "tokens"), os.path.join(p.folder, "lines.jsonl")
    p.run("tokenize", [p.text, f"--out={tokens}", "--validation-fraction=0.2"]).succeeds()
    validated = [f"--data={tokens}", "--validate-every=2", "--validation-batches=100"]
    own, named, train = (p.metrics(*validated, *more)[1][-1]["validation_loss"]
                         for more in ([], [f"--validation-data={tokens}"], [f"--validation-data={tokens}/train"]))  # fmt: skip
    check(own == named != train, f"--validation-data reads the validation split ({own}, {named}, {train})")
    put(lines, json.dumps({"text": sample_text()}) + "\n")
    p.gpt(f"--data={lines}").fails(2, "lines.jsonl", "tokenize --field")
    texts = os.path.join(p.folder, "texts")
    os.mkdir(texts)
    shutil.copy(p.text, texts)
    frozen = [*p.small(data=False), f"--stream={texts}", f"--run={p.folder}/streamed", "--learning-rate=1e-12", "--weight-decay=0"]
    first = p.measured("gpt_fsdp", [*frozen, "--steps=3"])[1]
    run, second = p.measured("gpt_fsdp", [*frozen, "--steps=6"], first=3)
    run.check(len(second) == 3 and not {s["loss"] for s in first} & {s["loss"] for s in second}, "a resumed stream has other texts")
    shutil.copy(lines, texts)
    p.run("gpt_fsdp", [*frozen, "--steps=8"]).fails(2, "lines.jsonl", "tokenize --field")
    os.symlink("nowhere", os.path.join(texts, "gone.txt"))
    for program, options in [("gpt_fsdp", [*frozen, "--steps=9"]), ("tokenize", [texts, f"--out={tokens}2"])]:
        p.run(program, options).fails(2, "gone.txt", "symbolic link to nothing")
    os.mkdir(os.path.join(p.folder, "bins"))
    wide, bare = (os.path.join(p.folder, "bins", name) for name in ("llama.bin", "bare.bin"))
    # llm.c's header for ids of 4 bytes
    put(wide, b"".join(number.to_bytes(4, "little") for number in [20240801, 7, 400] + 253 * [0] + 400 * [1]))
    p.gpt(f"--data={wide}").fails(2, "llama.bin", "4 bytes")
    odd = os.path.join(p.folder, "odd")
    os.mkdir(odd)
    # no UTF-8, and "val" inside a word
    put(os.fsencode(odd) + b"/medieval-b\xfccher_train.bin", bytes(byte for i in range(4000) for byte in (i * 7 % 256, 0)))
    p.gpt(f"--data={odd}", f"--run={p.folder}/odd-run").succeeds()
    p.gpt(f"--data={odd}", "--validate-every=1").fails(2, "*val*.bin")

    folder = os.path.join(p.folder, "own-files")
    p.gpt(f"--run={folder}", "--steps=4", "--save-every=2").succeeds()
    for option in "--jsonl", "--csv", "-o":
        for file in "metrics.jsonl", "config.toml", "checkpoints/LATEST", "checkpoints/new.html":
            p.run("shardlib-report", [folder, option, f"{folder}/{file}"]).fails(2, file, "choose another name or folder")
    p.gpt(f"--run={folder}", "--steps=5").succeeds()  # its records are whole
    weights = os.path.join(p.folder, "own.safetensors")
    p.run("shardlib-checkpoint", ["to-safetensors", f"{folder}/checkpoints/step-00000005", weights]).succeeds()
    p.run("shardlib-checkpoint", ["from-safetensors", weights, f"{folder}/checkpoints"]).fails(2, "step-00000000", "earlier")
    p.gpt(f"--run={p.folder}/converted", "--steps=0").succeeds()
    p.run("shardlib-sample", [f"{p.folder}/converted", "--max-tokens=3"]).succeeds()

    named = [f"--tokenizer={os.path.dirname(os.path.abspath(__file__))}/data/tokenizers/gpt2.json", "--vocabulary=512"]
    put(bare, bytes(byte for i in range(4000) for byte in (i * 7 % 256, i % 2)))  # 2-byte ids of an unknown tokenizer
    prepared = [f"--data={bare}", "--vocabulary=512", f"--run={p.folder}/prepared"]
    p.gpt(*prepared, *named).succeeds()
    p.gpt(*prepared, "--steps=4").fails(2, "tokenizer is", "bytes now", "--allow-change tokenizer")
    p.gpt(*prepared, "--steps=4", *named).succeeds()


def shortened_samples(p, folder):
    """--stop ends a sample of a run, and --top-k 1 and a tiny --top-p leave the likeliest token, whatever the temperature."""
    def sample(*options):
        run = p.run("shardlib-sample", [folder, "--prompt=In the", "--max-tokens=24", *options]).succeeded()
        return run, run.out.split("):\n\n", 1)[-1].removesuffix("\n\n")

    likeliest = sample("--temperature=0")[1]
    drawn = likeliest[len("In the"):]
    stop = re.search("[ -~]{1,2}", drawn[2:])
    if not check(stop, f"{folder}: a sample has letters {likeliest!r}"):
        return
    run, text = sample("--temperature=0", f"--stop={stop[0]}", "--stop=never there")
    run.check(text == "In the" + drawn[: drawn.find(stop[0])], f"{text!r} ends before {stop[0]!r}")
    run, text = sample("--temperature=9")
    run.check(text != likeliest, "a high temperature draws other tokens")
    for option in ["--top-k=1", "--top-p=0.0001"]:
        run, text = sample("--temperature=9", option)
        run.check(text == likeliest, f"{text!r} is the likeliest, {likeliest!r}")


def sampling_from_a_run(p):
    """shardlib-sample needs the folder alone, on one device, and writes nothing."""
    folder = os.path.join(p.folder, "to-sample")
    for program, sizes in [("gpt_fsdp", p.small()), ("gpt2", [*GPT2_SMALL, "--context=32", f"--data={p.text}"])]:
        shutil.rmtree(folder, ignore_errors=True)
        run = p.run(program, [*sizes, "--mesh=d=2,t=2", "--steps=3", f"--run={folder}", "--find-nan", "--max-tokens=12",
                              "--prompt=And God", "--temperature=0"]).succeeded()
        text = run.out.split("A sample")[-1]
        with open(f"{folder}/console.log", errors="replace", newline="") as file:
            mark, log = file.readline(), file.read()
        run.check(re.fullmatch(r"==== \S{20}, from step 0\n", mark) and log == run.out, "console.log is what it prints")
        before = tree(folder)
        run = p.run("shardlib-sample", [folder, "--samples=2"]).succeeded()
        run.check(run.out.split("A sample")[1].split() == text.split("\nreport:")[0].split(), "the run's own sample")
        run.check(run.out.count("A sample after 3 steps") == 2, "two samples")
        run = p.run("shardlib-sample", [folder, "--prompt=a\a\x1b[2J\u009b\x7f\t.", "--max-tokens=1"]).succeeded()
        run.check("\n\na\u2407\u241b[2J\ufffd\u2421\t." in run.out, "no control character reaches the terminal")
        shortened_samples(p, folder)
        launchers = [[]] + ([[*p.mpiexec, "-n", "2"]] if p.mpiexec and program == "gpt2" else [])
        for launcher in launchers:
            mesh = ["--mesh=d=2,t=1"] if launcher else []
            piped = subprocess.run([*launcher, os.path.join(p.examples, "shardlib-sample"), folder, "--prompt=-", "--max-tokens=2", *mesh],
                                   input="In the\nbeginning\n", capture_output=True, text=True, errors="replace", timeout=60)  # fmt: skip
            check(piped.returncode == 0 and "In the\nbeginning" in piped.stdout, f"{program} --prompt -", piped.stdout + piped.stderr)
        for mesh in ("d=1,t=1", "d=2,t=2"):
            chat = subprocess.run([os.path.join(p.examples, "shardlib-sample"), folder, "--chat", f"--mesh={mesh}", "--max-tokens=4",
                                   "--temperature=0", "--turns={}:"], input="a\n\n/reset\r\na\n/what\n" + "m" * 99 + "\n/quit\nb\n",
                                  capture_output=True, text=True, errors="replace", timeout=60)  # fmt: skip
            check(chat.returncode == 0 and "/what" in chat.stderr and "shorten it" in chat.stderr and
                  chat.stderr.count("\n") == 2, f"{program} --chat complains and goes on", chat.stderr)  # fmt: skip
        # No batch of 8 and no row of 16 has to divide.
        for mesh in ["d=1,t=2", "d=3,t=1"] + (["d=1,s=3"] if program == "gpt_fsdp" else []):
            run = p.run("shardlib-sample", [folder, "--prompt=In the", f"--mesh={mesh}"])
            run.check("In the" in run.out and run.succeeds(), "another prompt on another mesh")
        check(tree(folder) == before, f"{program}: the folder is as before")
        p.run(program, [f"--run={folder}", "--prompt=And"]).fails(2, "no data to train on", f"; shardlib-sample {folder} prints samples")
    plain = p.run("gpt2", [f"--run={folder}-not-there"])
    plain.check("no data to train on" in plain.err and "shardlib-sample" not in plain.err, "nothing to sample from")
    for tool in ["shardlib-sample", "shardlib-checkpoint"]:
        run = p.run(tool, ["--version"]).succeeded()
        run.check(run.out.startswith(f"{tool}: shardlib ") and "runs the kernels" in run.out, "--version")
    for setting, value in [("norm_epsilon", "0.1"), ("activation", "relu")]:  # the same shapes, another model
        option = setting.replace("_", "-")
        p.run("shardlib-sample", [folder, f"--{option}={value}"]).fails(2, f"{setting} is", f"--allow-change {setting}")
    questions = os.path.join(p.folder, "questions.jsonl")
    with open(questions, "w") as file:
        for right, wrong in [("the LORD said", "qx zzkw vvq"), ("and the earth was", "0#~ }{ |^")] * 2:
            endings = [right, wrong] if file.tell() % 2 else [wrong, right]
            file.write(json.dumps({"ctx": "And", "endings": endings, "label": endings.index(right)}) + "\n")
    scores = []
    for mesh, ranks in [("d=1,t=1", 0), ("d=2,t=2", 0)] + ([("d=2,t=1", 2)] if p.mpiexec else []):
        run = p.run("gpt2", [*GPT2_SMALL, "--context=32", "--seq=24", f"--data={p.text}", "--steps=30", f"--mesh={mesh}",
                             "--learning-rate=0.01", f"--evaluate={questions}"], ranks).succeeded()
        scores.append(re.findall(r"^evaluated 4 questions of \S+: acc (\S+), acc_norm (\S+) \(chance 0.5000\)$", run.out, re.M))
    check(scores[0] == [("1.0000", "1.0000")] and scores.count(scores[0]) == len(scores), f"the questions are answered {scores}")
    run = p.run("shardlib-sample", [folder, f"--evaluate={questions}", "--max-tokens=0", "--seq=24"])
    run.check("evaluated 4 questions" in run.out and run.succeeds(), "a run is evaluated without being trained")
    with open(questions, "a") as file:
        file.write("{}\n")
    p.run("gpt2", [*GPT2_SMALL, f"--data={p.text}", f"--evaluate={questions}"]).fails(2, "questions.jsonl:5", '"ctx"')
    by_tokens = os.path.join(p.folder, "tokens-to-sample")
    tokenizers = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tokenizers")
    p.run("gpt_fsdp", [*p.small(), "--steps=1", f"--run={by_tokens}", "--vocabulary=4000", "--max-tokens=0",
                       f"--tokenizer={tokenizers}/gpt2.json", f"--export={by_tokens}/model"]).succeeds()
    check(contents(by_tokens + "/model/tokenizer.json") == contents(tokenizers, "gpt2.json"), "an export has the run's tokenizer")
    p.run("shardlib-sample", [by_tokens, "--max-tokens=3"]).succeeds()
    # The folder of a run is enough: also after a move, and without the files that it has read.
    away, moved = [os.path.join(p.folder, name) for name in ["away", "moved"]]
    os.mkdir(away)
    shutil.copy(f"{tokenizers}/gpt2.json", f"{away}/vocabulary.json")
    shutil.copy(p.text, f"{away}/text.txt")
    train = [*p.small(), "--vocabulary=4000", f"--data={away}/text.txt", f"--tokenizer={away}/vocabulary.json", f"--run={away}/run"]
    p.run("gpt_fsdp", [*train, "--steps=1"]).succeeds()
    copied = os.stat(f"{away}/run/tokenizer").st_ino
    p.run("gpt_fsdp", [*train, "--steps=2"]).succeeds()
    check(os.stat(f"{away}/run/tokenizer").st_ino == copied, "a run that goes on does not copy its tokenizer again")
    os.truncate(f"{away}/run/tokenizer/tokenizer.json", 100)  # what follows needs a whole one
    p.run("gpt_fsdp", [*train, "--steps=3"]).succeeds()
    os.rename(f"{away}/run", moved)
    shutil.rmtree(away)
    p.run("shardlib-sample", [moved, "--max-tokens=3"]).succeeds()
    p.run("shardlib-sample", [moved, "--max-tokens=3", f"--tokenizer={away}/other.json"]).fails(2, "--tokenizer", "other.json")
    other = [by_tokens, "--max-tokens=3", f"--tokenizer={tokenizers}/llama3.json"]
    p.run("shardlib-sample", other).fails(2, "tokenizer", "fingerprint", "--allow-change tokenizer")
    p.run("shardlib-sample", [*other, "--allow-change=tokenizer"]).succeeds()
    p.run("shardlib-sample", [by_tokens, "--max-tokens=3", "--tokenizer=bytes"]).fails(2, "tokenizer", "fingerprint bytes")
    p.run("shardlib-sample", [p.folder]).fails(2, "config.toml", "give the folder that --run made")
    # A trainer that is not beside the tool is looked for from the folder in which it was called.
    called, apart_from_it = os.path.join(p.folder, "called"), shutil.copy(os.path.join(p.examples, "shardlib-sample"), p.folder)
    subprocess.run(["./gpt_fsdp", *p.small(), "--steps=1", f"--run={called}"], cwd=p.examples, check=True, capture_output=True)
    there = subprocess.run([apart_from_it, called, "--max-tokens=3"], capture_output=True, text=True, errors="replace", cwd="/")
    check(there.returncode == 0 and "And" in there.stdout, f"the trainer is found: {there.stderr}")
    for text, why in [("{", "it is not the run.json of a run"), ("[]", "it lists no start"), ("{}", "it lists no start"),
                      ("[3]", "it is not the run.json of a run"), ('[{"command": []}]', "the command has no words")]:
        put(f"{moved}/run.json", text)
        p.run("shardlib-sample", [moved]).fails(2, "run.json", f"names no command that has trained the run ({why})", "--sample-only")
    p.run("shardlib-sample", []).fails(2, "shardlib-sample RUN")
    p.run("shardlib-sample", [folder, "--max-tokens=0"]).fails(2, "--max-tokens 0 leaves nothing to do")
    p.run("shardlib-sample", [folder, "--chat", "--prompt=And"]).fails(2, "--chat", "leave --prompt out")
    p.gpt("--sample-only", "--chat", "--prompt=-", f"--run={folder}").fails(2, "--prompt -", "--chat")
    p.run("shardlib-sample", [folder, "--chat", "--turns=User:"]).fails(2, "--turns 'User:'", "write it once")
    p.run("shardlib-sample", [folder, "--d-model=32"]).fails(2, "checkpoint")
    for vain in (["--data", "x"], ["--steps=3"], ["--no-resume"]):
        p.run("shardlib-sample", [folder, *vain]).fails(2, f"{vain[0].split('=')[0]} has no effect on samples of a run")
    p.gpt("--sample-only").fails(2, "--sample-only", "--run DIR")
    p.gpt("--sample-only", "--max-tokens=5", f"--run={p.folder}/nowhere").fails(2, "no checkpoint")


def tokenizers_of_exports(p):
    """--export writes GPT-2's own files under Hugging Face's names, and --load of gpt2 takes them."""
    files, out = [os.path.join(p.folder, name) for name in ["gpt2-files", "gpt2-export"]]
    os.mkdir(files)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    bytes_ = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    put(f"{files}/encoder.json", json.dumps({token: i for i, token in enumerate([*bytes_, "th", "<|endoftext|>"])}))
    put(f"{files}/vocab.bpe", "#version: 0.2\nt h\n")
    for option in ["--ema=0.5", "--ema=0"]:  # the weights of a checkpoint, and others
        shutil.rmtree(out, ignore_errors=True)
        p.run("gpt2", [*GPT2_SMALL, "--context=32", "--steps=1", f"--data={p.text}", f"--tokenizer={files}", option, "--max-tokens=0",
                       f"--run={out}-run{option}", f"--export={out}"]).succeeds()  # fmt: skip
        check(contents(out, "vocab.json") == contents(files, "encoder.json"), f"{option}: the ids are exported")
        check(contents(out, "merges.txt") == contents(files, "vocab.bpe"), f"{option}: and the merges")
    run = p.run("gpt2", [f"--load={out}", "--steps=0", "--seq=16", "--prompt=the", f"--run={out}-again", "--max-tokens=2"]).succeeded()
    run.check(f'"{out}"  (the folder of --load)' in run.out, "they are the tokenizer of a loaded model")
    run.check("note: --tokenizer" not in run.out, "which has its number of ids")


def averaged(p):
    """--ema: validation and exports are the average's; the training itself is not."""
    train = [*GPT2_SMALL, "--context=16", "--steps=8", f"--data={p.text}", f"--validation-data={p.text}",
             "--validate-every=4", "--learning-rate=0.01", "--prompt=And"]
    folder, logits = os.path.join(p.folder, "averaged"), [os.path.join(p.folder, name) for name in ["ema-a", "ema-b"]]
    run, plain = p.measured("gpt2", train)
    for dtype in ["f32", "bf16"]:
        run, steps = p.measured("gpt2", [*train, "--ema=0.9", f"--dtype={dtype}"])
        one = p.measured("gpt2", [*train, "--ema=0.9", f"--dtype={dtype}", "--mesh=d=2,t=2"])[1]
        run.check(apart(steps, one) < (1e-4 if dtype == "f32" else 1e-2), "as on other meshes")
        if dtype == "f32":
            run.check(numbers(steps) == numbers(plain), "the steps are those without averages")
            gap = steps[-1]["validation_loss"] - plain[-1]["validation_loss"]
            run.check(gap > 0.01, f"the average is behind ({gap})")
    run = p.run("gpt2", [*train, "--ema=0.9", f"--run={folder}", f"--export={folder}-model", f"--logits={logits[0]}"]).succeeded()
    p.run("gpt2", [f"--load={folder}-model", "--seq=16", "--steps=0", "--max-tokens=0", "--prompt=And",
                   f"--logits={logits[1]}"]).succeeds()
    a, b = (floats(path) for path in logits)
    run.check(len(a) == len(b) > 0 and max(abs(x - y) for x, y in zip(a, b)) < 1e-5, "the average is exported")
    run, rest = p.measured("gpt2", [*train, "--ema=0.9", f"--run={folder}", "--steps=12"], first=8)
    run.check(len(rest) == 4, "the run goes on")


def files(model):
    """The safetensors files of a folder."""
    return [os.path.join(model, name) for name in sorted(os.listdir(model)) if name.endswith(".safetensors")] if os.path.isdir(model) else []


def leaf_groups(p):
    """--freeze, --lr-mult and --decay-mult: by patterns of leaves; the tests of optimizers freeze leaves with each."""
    train = [*GPT2_SMALL, "--layers=2", "--steps=3", f"--data={p.text}", "--mesh=d=2,t=1"]
    folder = os.path.join(p.folder, "leaf-groups")
    groups = ["--ema=0.5", "--freeze=layers/0/*", "--freeze=embed"]
    models = []
    for options in [groups, ["--steps=0"]]:
        models.append(f"{folder}-model-{len(models)}")
        p.run("gpt2", [*train, *options, f"--run={folder}{len(models)}", f"--export={models[-1]}"]).succeeds()
    last, first = ({name: data for file in files(model) for name, data in gpt2_oracle.read(file).items()} for model in models)
    for name, still in [("wte.weight", True), ("h.0.mlp.c_fc.weight", True), ("h.1.mlp.c_fc.weight", False), ("wpe.weight", False)]:
        found = [one for one in first if one.endswith(name)]
        check(len(found) == 1 and (first[found[0]] == last[found[0]]) == still, f"{name} {'stays' if still else 'changes'}", found)
    p.run("gpt2", [*train, "--freeze=layers/1/w_up", f"--graph={folder}.svg"]).succeeds()  # which draws layer 0 alone
    train += [f"--run={folder}1", "--steps=4"]
    p.run("gpt2", [*train, *groups[:2]]).fails(2, 'freeze is ["layers/0/*", "embed"] in the checkpoint', "--allow-change freeze")
    p.run("gpt2", [*train, *groups, "--lr-mult=*=0.5"]).fails(2, 'lr_mult is [] in the checkpoint, but ["*=0.5"] now')
    def losses(*options):
        run, steps = p.measured("gpt2", [*GPT2_SMALL, "--steps=5", f"--data={p.text}", "--mesh=d=2,t=1", "--learning-rate=0.02", *options])
        return [step["loss"] for step in steps]

    for groups, same in [(["--lr-mult=*=0.5"], ["--learning-rate=0.01"]), (["--lr-mult=*=9", "--lr-mult=*=1"], []),
                         (["--decay-mult=*=0", "--weight-decay=9"], ["--weight-decay=0"])]:
        one, other, plain = losses(*groups), losses(*same), losses()
        close = all(abs(a - b) < 1e-5 * b for a, b in zip(one, other))
        check(len(one) == 5 and close and (plain == one) == (not same), f"{groups} is {same}: {one} {other}, without {plain}")
    for group, words in [("--freeze=blocks.0.*", ["--freeze 'blocks.0.*' matches no leaf", "embed", "layers/*/w_up"]),
                         ("--lr-mult=embed", ["--lr-mult 'embed' has no factor", "'embed=0.1'"]),
                         ("--decay-mult=embed=-1", ["--decay-mult 'embed=-1' has no factor of at least 0"]),
                         ("--freeze=*", ["--freeze", "nothing to train"])]:
        p.run("gpt2", [*GPT2_SMALL, "--steps=1", f"--data={p.text}", group]).fails(2, *words)


def optimizers(p):
    """Each optimizer trains, on a mesh as on one device, goes on from its checkpoint, and has its own moments."""
    train = [*GPT2_SMALL, "--steps=8", "--final-learning-rate=1", f"--data={p.text}"]
    rates = {"adamw": 0.01, "adafactor": 0.01, "lion": 0.003, "muon": 0.02, "sgd": 0.5}
    for name, rate in rates.items():
        options = [*train, f"--optimizer={name}", f"--learning-rate={rate}"]
        run, one = p.measured("gpt2", [*options, "--mesh=d=1,t=1"])
        run.check(len(one) == 8 and one[-1]["loss"] < one[0]["loss"] - 0.2, "the loss falls")
        run, mesh = p.measured("gpt2", [*options, "--mesh=d=2,t=2"])
        run.check(mesh and apart(mesh, one) < 1e-4, f"as on one device ({apart(mesh, one):.1e})")
        folder = os.path.join(p.folder, "optimizer-" + name)
        p.measured("gpt2", [*options, f"--run={folder}", "--steps=5", "--mesh=d=1,t=1"])
        run, rest = p.measured("gpt2", [*options, f"--run={folder}", "--mesh=d=1,t=1"], first=5)
        run.check(numbers(rest) == numbers(one)[5:], "the second part goes on")
        moments = {leaf.split(".")[0] for leaf in os.listdir(os.path.join(folder, "checkpoints", "step-00000008"))}
        check(("nu" in moments) == (name in ("adamw", "muon")), f"{name}: a second moment where there is one", str(moments))
        check(("rows" in moments) == ("cols" in moments) == (name == "adafactor") != ("mu" in moments),
              f"{name}: rows and columns in place of moments", str(moments))
    averaged(p)
    leaf_groups(p)
    for optimizer in "lion", "adafactor":  # the second has other leaves
        p.run("gpt2", [*options, f"--run={folder}", f"--optimizer={optimizer}", "--steps=9"]).fails(2, "optimizer is", "--allow-change")
    p.run("gpt2", [*options, f"--run={folder}", "--ema=0.5", "--steps=9"]).fails(2, "ema is 0.0", "--allow-change ema")
    p.run("gpt2", [*options, "--beta2=0.9"]).fails(2, "--beta2 has no effect with --optimizer sgd")
    plans = {}
    for name in rates:
        plan = p.run("gpt2", ["--preset=gpt2-124m", "--mesh=d=1,t=1", "--plan", f"--optimizer={name}"])
        plans[name] = re.findall(r"optimizer.*? ([0-9.]+) MB", plan.out)
    check(plans["adamw"] == plans["muon"] != plans["lion"] == plans["sgd"] != [], f"the plans know the moments {plans}")
    check(0 < float(plans["adafactor"][0]) < 0.02 * float(plans["sgd"][0]), f"rows and columns are small {plans}")
    # Gradients in bf16 and summed microbatches go the same way.
    options = [*train, "--optimizer=adafactor", "--learning-rate=0.01"]
    run, one = p.measured("gpt2", [*options, "--microbatches=2", "--gather=per-step", "--dtype=bf16", "--mesh=d=2,t=1"])
    run.check(len(one) == 8 and one[-1]["loss"] < one[0]["loss"] - 0.2, "adafactor: the loss falls in bf16")


def floats(path):
    """What --logits has written."""
    return gpt2_oracle.floats(gpt2_oracle.read(path)["logits"]) if os.path.exists(path) else []


def dtypes(p):
    """gpt_fsdp in bf16: near f32, on every mesh, and in two parts as at once."""
    length = ["--steps=12", "--warmup=2", "--final-learning-rate=1", "--learning-rate=0.01", "--dtype=bf16"]
    for parts in [[], ["--microbatches=2"]]:
        _, wide = p.metrics(*length, "--dtype=f32", *parts)
        for mesh in ["d=1,t=1", "d=1,s=2,t=2", "d=2,t=2"]:  # what follows goes on from the last one
            run, steps = p.metrics(*length, f"--mesh={mesh}", *parts)
            if run.check(len(steps) == len(wide) == 12, "a record for each step"):
                run.check(steps[-1]["loss"] < steps[0]["loss"] - 0.3, "the loss falls")
                run.check(0 < apart(steps, wide) < 0.01, f"losses near those of f32 ({apart(steps, wide):.1e})")
    folder = os.path.join(p.folder, "bf16")
    p.metrics(*length, "--mesh=d=2,t=2", *parts, f"--run={folder}", "--steps=5")
    more = [*p.small(), *length, "--mesh=d=2,t=2", *parts, f"--run={folder}"]
    run, rest = p.measured("gpt_fsdp", more, first=5)
    run.check(numbers(rest) == numbers(steps)[5:], "the second part goes on")
    for name, rate in [("muon", 0.02), ("adafactor", 0.01)]:
        by = [*length, f"--optimizer={name}", f"--learning-rate={rate}", "--mesh=d=2,t=1"]
        wide, (run, steps) = p.metrics(*by, "--dtype=f32")[1], p.metrics(*by)
        if run.check(len(steps) == len(wide) == 12, "a record for each step"):
            run.check(steps[-1]["loss"] < steps[0]["loss"] - 0.2, "the loss falls")
            run.check(0 < apart(steps, wide) < 0.02, f"{name}: losses near those of f32 ({apart(steps, wide):.1e})")
    run = p.run("gpt_fsdp", ["--preset=84m", "--mesh=d=1,t=1", "--plan", "--dtype=bf16"])
    found = {what: float(mb) for what, mb in re.findall(r"^  (\S.*?) +(\S+) MB$", run.out, re.M)}
    planned = {"weights": 402.7, "their copies for computation": 201.3, "gradients": 201.3}
    run.check(all(found.get(what) == mb for what, mb in planned.items()), f"the plan has {planned}")


def sharded_lengths(p):
    """gpt_fsdp with a part of each sequence on the devices of s: variants of the model, a run that moves between meshes,
    texts, and the memory of long sequences."""
    train = ["--steps=8", "--warmup=2", "--final-learning-rate=1", "--learning-rate=0.01"]
    for variant in [["--microbatches=2"], ["--tied", "--qk-norm"], ["--qkv-bias"], ["--rows=stories"], ["--recompute=none"]]:
        one = p.metrics("--mesh=d=1", *train, *variant)[1]
        run, steps = p.metrics("--mesh=d=2,s=2", *train, *variant)
        run.check(len(steps) == len(one) == 8 and apart(steps, one) < 1e-5, f"one device's losses ({apart(steps, one):.1e})")
    whole = p.metrics("--mesh=d=1", *train, "--steps=20", f"--validation-data={p.text}", "--validate-every=4")[1]
    folder = os.path.join(p.folder, "lengths")
    for steps, mesh, ranks in [(4, "d=2,t=2", 0), (8, "s=4", 0), (12, "r=2,s=2", 4), (16, "d=1", 0), (20, "s=2,t=2", 0)]:
        run = p.gpt(*train, f"--steps={steps}", f"--mesh={mesh}", f"--run={folder}", f"--validation-data={p.text}",
                    "--validate-every=4", ranks=ranks if p.mpiexec else 0).succeeded()
        run.check(steps == 4 or f"resuming from step {steps - 4} of {steps}" in run.out, "goes on from another mesh's checkpoint")
    moved = records(f"{folder}/metrics.jsonl")
    if check(len(moved) == len(whole) == 20, "a record for each step"):
        check(apart(moved, whole) < 1e-5, f"moving between meshes changes nothing ({apart(moved, whole):.1e})")
        losses = [[s["validation_loss"] for s in steps if "validation_loss" in s] for steps in (moved, whole)]
        apart_by = max((abs(a - b) / b for a, b in zip(*losses)), default=1)
        check(len(losses[0]) == len(losses[1]) == 5 and apart_by < 1e-5, f"validation losses {losses}")
    texts = [p.gpt(*train, "--steps=20", f"--mesh={mesh}", f"--run={folder}", "--sample-only", "--temperature=0",
                   "--max-tokens=30", f"--validation-data={p.text}", "--validate-every=4").out
             for mesh in ["d=1", "s=2", "r=2,s=2,t=2", "s=4"]]  # fmt: skip
    check("And God said" in texts[0] and texts.count(texts[0]) == len(texts), "the text is the same on every mesh", str(texts))

    peaks = []
    for parts in (1, 2, 4):
        run = p.run("gpt_fsdp", ["--preset=84m", f"--mesh=s={parts}", "--batch=1", "--seq=32768", "--plan"]).succeeded()
        peaks += [int(n) for n in re.findall(r"most at once, with buffers .* (\d+) bytes", run.out)]
        attention = re.findall(r"^  causal_attention(?:_backward)? +\S+ +(\S+) ", run.out, re.M)
        run.check(attention == (["s", "s"] if parts > 1 else []), "keys and values move over s, where it has several devices")
    check(len(peaks) == 3 and peaks[1] < 0.55 * peaks[0] and peaks[2] < 0.55 * peaks[1], f"memory by the parts of a length {peaks}")


def gathers(p):
    """--gather: the same training by both choices, the bytes of one microbatch for any number of them, what auto is."""
    short = ["--steps=6", "--learning-rate=0.01", "--check-replicas=1", f"--data={p.text}"]
    small = {"gpt2": [*GPT2_SMALL, *short], "gpt_fsdp": [*p.small(), *short]}
    cases = [
        ("gpt2", ["--mesh=d=2,t=2"]),
        ("gpt2", ["--mesh=d=2,t=2", "--microbatches=4"]),
        ("gpt2", ["--mesh=d=2,t=2", "--microbatches=2", "--dtype=bf16"]),
        ("gpt_fsdp", ["--mesh=d=2,s=2,t=1"]),
        ("gpt_fsdp", ["--mesh=d=2,t=2", "--microbatches=4", "--tied", "--qk-norm"]),
        ("gpt_fsdp", ["--mesh=r=2,d=2,t=1", "--microbatches=2", "--qkv-bias"]),
        ("gpt_fsdp", ["--mesh=s=2,t=2", "--microbatches=2", "--dtype=bf16"]),
    ]
    for program, options in cases:
        train = [*small[program], *options]
        _, often = p.measured(program, [*train, "--gather=per-microbatch"])
        run, once = p.measured(program, [*train, "--gather=per-step"])
        close = 0.01 if "--dtype=bf16" in options else 1e-5
        run.check(len(once) == 6 and apart(once, often) < close, f"trains as per-microbatch ({apart(once, often):.1e})")
        run.check("--gather auto" not in run.out, "says nothing of auto")
        run, default = p.measured(program, train)
        several = any("--microbatches" in option for option in options)
        run.check(numbers(default) == numbers(once if several else often), "auto: once if there are several microbatches")
        run.check(("--gather auto is per-step: " in run.out) == several, "and says so")
        if several:
            run = p.run(program, [*train, "--plan", "--plan-device=h100"])
            rows = re.findall(r"^  (per-\w+) +(\S+ .?B) +(\S+ .?B)(   this plan)?$", run.out, re.M)
            run.check([(row[0], row[3] != "") for row in rows] == [("per-microbatch", False), ("per-step", True)],
                      "the plan has both choices, and is that of the run")
            plan = p.run(program, [*train, "--plan", "--plan-device=h100", "--gather=per-microbatch"])
            plan.check(all(" ".join(row[:3]) in " ".join(plan.out.split()) for row in rows), "the same rows in both plans")
        if p.mpiexec:
            run, ranks = p.measured(program, train, ranks=4)
            run.check(numbers(ranks) == numbers(default), "the same bits on threads and ranks")

    def planned(*options):
        run = p.run("gpt2", ["--preset=gpt2-124m", "--mesh=d=8,t=1", "--batch=64", "--plan", *options]).succeeded()
        return run.out

    def sent(*options):
        return re.findall(r"^  (?:all_gather|reduce_scatter) .* d +\d+ .*$", planned(*options), re.M)

    plans = [sent("--gather=per-step", f"--microbatches={k}") for k in (1, 8)]
    check(plans[0] == plans[1] and len(plans[0]) > 8, "--gather per-step sends the same bytes with 1 and 8 microbatches")
    check(sent("--microbatches=8") != plans[1], "and fewer than per-microbatch, which is auto of unknown devices")
    large = ["--microbatches=8", "--plan-device=a100", "--d-model=6400", "--layers=48", "--heads=50", "--d-ff=25600"]
    text = planned(*large)
    check(re.search(r"^  per-microbatch .*this plan$", text, re.M), "auto is per-microbatch where the other does not fit", text)


def recompute(p):
    """--recompute: the same bits under each policy; the plan has the memory of each, which in bf16 is not more than in f32."""
    names = ["none", "dots", "marked", "attention", "everything"]
    train = ["--steps=4", "--learning-rate=0.01", "--mesh=d=2,t=2", "--microbatches=2"]
    losses = [numbers(p.metrics(*train, f"--recompute={name}")[1]) for name in [*names, "rms_norm,all_gather"]]
    check(len(losses[0]) == 4 and all(each == losses[0] for each in losses), "the same bits under each policy")

    def saved(program, *options):
        run = p.run(program, ["--mesh=d=1,t=1", "--vocabulary=50304", "--plan", *options]).succeeded()
        table = re.findall(r"^  (\w+) +(\S+) ([kMG]?B) +(\S+) ([kMG]?B)(   this plan)?$", run.out, re.M)
        run.check([row[0] for row in table] == names and [row[0] for row in table if row[5]] == ["marked"], "a line for each")
        in_bytes = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
        peaks[program, options] = [float(row[3]) * in_bytes[row[4]] for row in table]
        return [float(row[1]) * in_bytes[row[2]] for row in table]

    peaks = {}

    for program, size in [("gpt_fsdp", "--preset=84m"), ("gpt2", "--preset=gpt2-124m")]:
        f32, bf16 = saved(program, size, "--batch=4"), saved(program, size, "--batch=4", "--dtype=bf16")
        check(f32 == sorted(f32, reverse=True) and f32[0] > 1.3 * f32[-1], f"{program}: each keeps less than the one before {f32}")
        check(all(a <= b for a, b in zip(bf16, f32)), f"{program}: and no more in bf16: {bf16}")
    # The most at once, too, where logits are made piece by piece.
    rows = ["--preset=gpt2-124m", "--mesh=d=8,t=1", "--batch=32"]
    saved("gpt2", *rows), saved("gpt2", *rows, "--dtype=bf16")
    f32, bf16 = peaks["gpt2", (*rows,)], peaks["gpt2", (*rows, "--dtype=bf16")]
    check(all(a < 0.95 * b for a, b in zip(bf16, f32)), f"a step in bf16 takes less memory: {bf16} and {f32}")
    p.run("gpt_fsdp", [*p.small(), "--steps=1", "--recompute=einsun"]).fails(2, "--recompute 'einsun'", "`einsun`", "no such op", "`einsum_unreduced`")
    p.run("gpt2", ["--recompute=rope", "--plan", "--mesh=d=1,t=1"]).fails(2, "--recompute 'rope'", "`rope`")
    for wrong in ["dots,", "rms_norm,,all_gather", "rms_norm, all_gather"]:
        p.run("gpt_fsdp", [*p.small(), "--steps=1", "--recompute=" + wrong]).fails(2, f"--recompute '{wrong}': one of its ops has no name")


def plans(p):
    """Meshes of thousands that are not there, whatever their sizes: what does not divide is padded, and said."""
    for program, preset, mesh, devices, notes in [
        ("gpt_fsdp", "84m", "d=1024,t=1", 1024, ["note: padded", "--d-model 512 -> 1024"]),
        ("gpt_fsdp", "2b", "d=512,t=8", 4096, []),
        ("gpt2", "gpt2-124m", "d=128,t=1", 128, []),
        ("gpt2", "gpt2-1558m", "d=512,t=8", 4096, ["note: padded", "--d-model 1600 -> 4096", "--heads 25 -> 64"]),
    ]:
        options = [f"--preset={preset}", f"--mesh={mesh}", "--batch=1024", "--vocabulary=50257", "--plan"]
        run = p.run(program, options).succeeded()
        printed = with_s(mesh) if program == "gpt_fsdp" else mesh
        run.check(f"plan for {devices} devices, mesh {printed}" in run.out and "most at once" in run.out, "a plan")
        run.check(all(note in run.out for note in notes) and ("note:" in run.out) == bool(notes), "padding is said")
    run = p.run("gpt_fsdp", ["--preset=84m", "--mesh=r=2,d=4,t=1", "--plan"]).succeeded()
    run.check(re.search(r"all_reduce +M/d/s F/t \+r -> M/d/s F/t +r +24 ", run.out) is not None, "one sum over r for each weight")
    run.check(re.search(r"^  all +d s +\d+ .*\n  all +r +\d+ ", run.out, re.M) is not None, "bytes inside a node and between nodes")
    machine = ["--plan-flops=1e12", "--plan-memory=1e11", "--plan-bandwidth=d=1e9,t=1e10", "--plan-latency=1e-5"]
    run = p.run("gpt_fsdp", ["--preset=84m", "--mesh=d=64,t=4", "--plan", *machine]).succeeded()
    run.check(re.search(r"over t d s +\S+ \S+ +256 devices(.|\n)*all overlapping.*MFU", run.out) is not None, "a prediction")
    p.run("gpt_fsdp", ["--preset=84m", "--mesh=d=64,t=4", "--plan", *machine[1:]]).fails(2, "give --plan-flops or --plan-device too")
    run = p.run("gpt2", ["--preset=gpt2-124m", "--dtype=bf16", "--batch=32", "--mesh=d=1,t=1", "--plan", "--plan-device=h100"]).succeeded()
    run.check("of one h100: fits" in run.out and "MFU" in run.out, "a known device has a peak and a memory")
    run = p.run("gpt_fsdp", ["--preset=2b", "--mesh=d=2,t=1", "--plan", "--plan-device=h100"]).succeeded()
    run.check("of one h100: does not fit" in run.out and "MFU" not in run.out, "a memory that is too small")
    run = p.run("gpt_fsdp", ["--preset=2b", "--mesh=d=2,t=1", "--plan", "--plan-capacity=900e9"]).succeeded()
    run.check("of the 900.0 GB of one device: fits" in run.out, "a memory by option")
    p.gpt("--plan-capacity=80e9").fails(2, "--plan-capacity", "give --plan too")
    p.gpt("--plan-device=h100").fails(2, "--plan-device", "give --plan too")
    flat = ["--preset=84m", "--mesh=d=8,t=1", "--plan", "--plan-flops=1e12"]
    run = p.run("gpt_fsdp", [*flat, "--plan-bandwidth=d=600e9", "--plan-latency=d=5e-6"]).succeeded()
    run.check("a step, all overlapping" in run.out, "an axis of one device needs no link")
    p.run("gpt_fsdp", flat).fails(2, "--plan-bandwidth d=25e9")
    p.run("gpt_fsdp", [*flat, "--plan-bandwidth=1e-300"]).fails(2, "--plan-bandwidth 1e-300", "at least 1", "300e9")
    p.run("gpt2", ["--preset=gpt2-124m", "--mesh=d=1024,t=1", "--plan"]).fails(2, "--batch 16", "or a mesh of d = 16")


def mlp(p):
    threads = p.run("mlp_fsdp", []).succeeded()
    losses = [float(x) for x in re.findall(r"^step +\d+  loss (\d+\.\d+)$", threads.out, re.M)]
    threads.check(len(losses) == 6 and losses[-1] < 0.1 * losses[0], "the loss falls")
    threads.check("f32[in hidden1/d] on mesh d=8" in threads.out, "the sharding is drawn")
    run = p.run("mlp_fsdp", ["--mesh", "d=2"]).succeeded()
    run.check("on mesh d=2" in run.out, "--mesh chooses the mesh")
    run = p.run("mlp_fsdp", ["--help"]).succeeded()
    run.check(run.out.startswith("mlp_fsdp: ") and "--mesh d=N" in run.out, "--help prints the usage")
    for option in ["--foo", "--mesh", "stray"]:
        p.run("mlp_fsdp", [option]).fails(2, option, "--help")
    p.run("mlp_fsdp", ["--mesh=t=2"]).fails(2, "--mesh t=2: this program's mesh has the axes d,", "as in --mesh d=4")
    p.run("mlp_fsdp", ["--run=" + p.text]).fails(2, "--run: cannot make the folder", "Not a directory")
    # In two parts, on two meshes, as at once.
    for part in [["--mesh=d=4", "--steps=21"], ["--mesh=d=8", "--steps=51"]]:
        run = p.run("mlp_fsdp", [f"--run={p.folder}/mlp", *part]).succeeded()
    run.check([float(x) for x in re.findall(r"loss (\d+\.\d+)", run.out)] == losses[3:], "the second part goes on")
    check(os.listdir(f"{p.folder}/mlp") == ["checkpoints"], "checkpoints, and nothing else")
    run = p.run("mlp_fsdp", [f"--run={p.folder}/mlp", "--steps=10"]).succeeded()
    run.check(run.out.startswith("--steps 10 leaves nothing to train\n"), "says that there is nothing to do")
    output_errors(p)
    if p.mpiexec:
        run = p.run("mlp_fsdp", [], ranks=2).succeeded()
        run.check([float(x) for x in re.findall(r"loss (\d+\.\d+)", run.out)] == losses, "the losses as on threads")
        p.run("mlp_fsdp", [], ranks=3).fails(2, "--mesh d=3", "8 hidden units", "choose 1, 2, 4 or 8")
        # All ranks fail alike except for their own place in the mesh: one line.
        p.run("tutorial", ["--mesh=d=3,t=1"], ranks=3).fails(1, "`H/t/d`", "does not divide evenly into 3 shards", "device 0")


def context_parallel(p):
    """Attention over a sharded length. The program itself fails where one of the ways differs from attention to all."""
    for options, ranks in [([], 0), (["--mesh=s=3", "--length=12", "--heads=6"], 0), ([], 2)]:
        if ranks and not p.mpiexec:
            continue
        run = p.run("context_parallel", ["--length=64", *options], ranks=ranks).succeeded()
        names = ["ring", "fused ring", "ulysses", "fused ulysses", "ring zigzag", "fused ring zigzag"]
        run.check(re.findall(r"^(\w.*?) +differs by", run.out, re.M) == names, "all are compared")
    p.run("context_parallel", ["--mesh=s=4", "--length=20"]).fails(2, "--length 20", "--mesh s=4", "choose a multiple of 8")
    p.run("context_parallel", ["--mesh=d=3"]).fails(2, "--mesh d=3: this program's mesh has the axes s", "as in --mesh s=4")
    p.run("context_parallel", ["--mesh=s=x"]).fails(2, "--mesh: mesh", "'x' is not a size")
    p.run("context_parallel", ["--mesh=s=4", "--heads=2"]).fails(2, "--heads 2", "--mesh s=4", "choose a multiple of 4")


def patch_embedding(p):
    """A convolution of patches. The program itself fails where an einsum over split patches differs, or its gradients."""
    one = None
    for mesh, ranks in [("d=1,t=1", 0), ("d=2,t=1", 0), ("d=2,t=2", 0), ("d=1,t=2", 2)]:
        if ranks and not p.mpiexec:
            continue
        run = p.run("patch_embedding", ["--mesh=" + mesh], ranks=ranks).succeeded()
        losses = [float(x) for x in re.findall(r"^step +\d+  loss (\d+\.\d+)$", run.out, re.M)]
        if not run.check(len(losses) == 6 and losses[-1] < 0.05 * losses[0], "the loss falls"):
            return
        one = one or losses
        difference = max(abs(a - b) for a, b in zip(losses, one))
        run.check(difference < 2e-3, f"the losses of one device ({difference:.1e})")


def moe(p):
    """Mixtures of experts: the same curve on each mesh where nothing is dropped, and the numbers of the balance."""
    small = {"--batch": 8, "--seq": 16, "--layers": 2, "--d-model": 16, "--n-kv": 2, "--d-head": 8, "--d-ff": 16}
    small |= {"--experts": 8, "--steps": 12, "--warmup": 2, "--max-tokens": 0, "--check-replicas": 4, "--data": p.text}

    def measured(*options, ranks=0, first=0):
        return p.measured("moe", [*(f"{option}={value}" for option, value in small.items()), *options], ranks, first)

    run, alone = measured("--mesh=d=1")
    if not run.check(len(alone) == 12 and alone[-1]["loss"] < alone[0]["loss"] - 0.5, "the loss falls"):
        return
    run.check("expert_load " in run.out, "the progress line has the load")
    for step in alone:
        own = step["numbers"]
        run.check(1 <= own["expert_load"] <= 4 and own["dropped"] == 0, "the balance is there")
    # Rounding differs, and a choice that is nearly even may fall the other way: a few steps are compared.
    meshes = [(["--mesh=e=2"], 0), (["--mesh=d=2,e=2"], 0), (["--mesh=e=4", "--capacity=4"], 0), (["--mesh=e=2"], 2)]
    meshes += [(["--mesh=d=2,s=2"], 0), (["--mesh=e=2,s=2", "--capacity=4"], 0), (["--mesh=e=2,s=2,t=2"], 0), (["--mesh=e=2,s=2"], 4)]
    for options, ranks in meshes:
        if ranks and not p.mpiexec:
            continue
        run, steps = measured(*options, ranks=ranks)
        close = [abs(a["loss"] - b["loss"]) < 1e-4 * b["loss"] for a, b in zip(steps[:4], alone)]
        run.check(len(steps) == 12 and all(close), "the losses are those of one device")
    for options, ranks in [(["--mesh=d=2,e=2", "--shared=8", "--microbatches=2"], 0), (["--mesh=e=2", "--capacity=4"], 2 if p.mpiexec else 0)]:
        runs = [measured(*options, "--steps=4", f"--device={device}", ranks=ranks) for device in ("cpu", "simulated")]
        (_, cpu), (run, steps) = runs
        run.check(len(steps) == 4 and apart(steps, cpu) < 1e-5, "the CPU's losses on the simulated device")
    for mesh in ["--mesh=d=2,e=2", "--mesh=e=2,t=2", "--mesh=e=2,s=2"]:
        both = []
        for gather in ["per-microbatch", "per-step"]:
            run, steps = measured(mesh, "--shared=8", "--microbatches=2", f"--gather={gather}")
            both.append([step["loss"] for step in steps])
        close = [abs(a - b) < 1e-4 * b for a, b in zip(*(losses[:4] for losses in both))]
        run.check(len(both[1]) == len(both[0]) == 12 and all(close), "the losses are those of --gather per-microbatch")
        run, steps = measured(mesh, "--shared=8", "--microbatches=2", ranks=4 if p.mpiexec else 0)
        run.check([step["loss"] for step in steps] == both[1], "--gather auto is per-step")
        run.check("--gather auto is per-step: " in run.out, "and says so")
    for options in [["--shared=8", "--microbatches=2"], ["--capacity=4"]]:
        both = [measured(f"--dtype={dtype}", "--mesh=d=2,e=2", *options) for dtype in ("f32", "bf16")]
        wide, near = (steps for _, steps in both)
        if both[1][0].check(len(near) == len(wide) == 12, "a record for each step"):
            both[1][0].check(0 < apart(near, wide) < 0.02, f"losses near those of f32 ({apart(near, wide):.1e})")
    for name, rate in [("muon", 0.02), ("adafactor", 0.01)]:
        options = [f"--optimizer={name}", f"--learning-rate={rate}", "--ema=0.9", "--shared=8"]
        options += ["--validate-every=12", f"--validation-data={p.text}"]
        run, one = measured("--mesh=d=1", *options)
        run.check(len(one) == 12 and one[-1]["loss"] < one[0]["loss"] - 0.2, "the loss falls")
        run.check(one[-1]["validation_loss"] > one[-1]["loss"] + 0.05, "the average is behind")
        run, steps = measured("--mesh=d=2,e=2", *options)
        close = [abs(a["loss"] - b["loss"]) < 1e-4 * b["loss"] for a, b in zip(steps[:4], one)]
        run.check(len(steps) == 12 and all(close), "the losses are those of one device")
        halves, moved = (os.path.join(p.folder, f"moe-{name}{end}") for end in ("", "-moved"))
        parts = [*options, "--decay-steps=12", f"--run={halves}"]
        measured("--mesh=d=2,e=2", *parts, "--steps=6")
        shutil.copytree(halves, moved)
        run, rest = measured("--mesh=d=2,e=2", *parts, first=6)
        run.check(len(rest) == 6 and numbers(rest) == numbers(steps)[6:], "the second part goes on")
        run, rest = measured("--mesh=e=2,s=2", *parts[:-1], f"--run={moved}", first=6)
        close = [abs(a["loss"] - b["loss"]) < 1e-4 * b["loss"] for a, b in zip(rest[:4], steps[6:])]
        run.check(len(rest) == 6 and all(close), "weights and moments move to a mesh with s")
    run, steps = measured("--mesh=e=2", "--capacity=1", "--shared=8", "--experts-per-token=1", "--microbatches=2", "--validate-every=6", f"--validation-data={p.text}")
    run.check(any(s["numbers"]["dropped"] > 0 for s in steps), "rows are dropped where slots are few")
    run.check(all(s["numbers"]["dropped"] < 0.8 for s in steps), "most rows are not dropped")
    bad = [f"{option}={value}" for option, value in small.items()]
    p.run("moe", [*bad, "--mesh=e=3", "--batch=9"]).fails(2, "--experts 8", "axis e", "3")
    p.run("moe", [*bad, "--experts-per-token=9"]).fails(2, "--experts-per-token 9", "8 experts")
    padded = p.run("moe", [*bad, "--mesh=t=3", "--steps=1"])
    padded.check("note: padded with zeros" in padded.out and "--d-ff 16 -> 18" in padded.out, "moe says what is padded")
    folder = os.path.join(p.folder, "moe-to-sample")
    sampled = p.run("moe", [*bad, "--shared=8", "--capacity=1.5", f"--run={folder}", "--max-tokens=12", "--prompt=And God", "--temperature=0"])
    sampled.check("\n\nAnd God" in sampled.out, "the run ends with a sample")
    short = p.run("moe", [*bad, "--dtype=bf16", "--steps=1", "--max-tokens=4", "--prompt=And God", "--temperature=0"])
    short.check("\n\nAnd God" in short.out, "a sample in bf16")
    for mesh in ["d=1", "d=1,e=2,t=2", "e=2,s=2"]:
        again = p.run("shardlib-sample", [folder, f"--mesh={mesh}"])
        texts = [run.out.split("A sample")[-1].split("\nreport:")[0].split() for run in (again, sampled)]
        again.check(texts[0] == texts[1], f"the same sample, by {mesh}")
    shortened_samples(p, folder)
    p.run("shardlib-sample", [folder, "--experts-per-token=1"]).fails(2, "experts_per_token is", "--allow-change experts_per_token")
    resumed = [*bad, "--shared=8", "--capacity=1.5", f"--run={folder}", "--steps=14"]
    p.run("moe", [*resumed, "--microbatches=2"]).fails(2, "microbatches is", "--allow-change")
    p.run("moe", [*resumed, "--mesh=e=2"]).fails(2, "mesh is", "--allow-change")
    p.run("moe", [*resumed, "--mesh=d=1,s=1"]).succeeds()  # the same mesh
    planned = p.run("moe", [*bad, "--plan", "--mesh=d=2,e=4"]).succeeded()
    planned.check("ragged_all_to_all" in planned.out, "the plan names what travels to the experts")
    both = [p.run("moe", [*bad, "--plan", "--mesh=d=2", f"--dtype={dtype}"]).out for dtype in ("f32", "bf16")]
    rows = [re.findall(r"^  (weights|gradients) +(.*)$", out, re.M) for out in both]
    planned.check(len(rows[0]) == 2 and rows[0] == rows[1], f"weights and sums of gradients are f32: {rows}")
    planned = p.run("moe", [*bad, "--plan", "--mesh=e=2,s=2"]).succeeded()
    moved = dict(re.findall(r"^  (causal_attention|ragged_all_to_all) .*? +([des]) +\d+ ", planned.out, re.M))
    planned.check(moved == {"causal_attention": "s", "ragged_all_to_all": "e"}, "keys and values move over s, rows over e")


def tutorial(p):
    """The program of docs/tutorial.md: the same losses on each mesh, and those that the page shows."""
    line = r"^step +(\d+)  loss (\d+\.\d+)  accuracy +\d+ %$"
    page = [float(x) for _, x in re.findall(line, text_of(DOCS, "tutorial.md"), re.M)]
    one = None
    for mesh in ["d=1,t=1", "d=2,t=2", "d=4,t=2"]:
        run = p.run("tutorial", ["--mesh=" + mesh]).succeeded()
        steps = re.findall(line, run.out, re.M)
        losses = [float(x) for _, x in steps]
        if not run.check([int(n) for n, _ in steps] == [0, 100, 200, 300, 400, 500], "a line each 100 steps"):
            return
        run.check(losses[-1] < 0.25 * losses[0], "the loss falls")
        # Sums in another order differ in the last bits, which was seen to make 6e-8; four digits are printed.
        one = one or losses
        difference = max(abs(a - b) for a, b in zip(losses, one))
        run.check(difference < 5e-4, f"the losses of one device ({difference:.1e})")
    # Another processor's instructions round differently, from the first step on.
    check(len(page) == len(one) and max(abs(a - b) for a, b in zip(page, one)) < 0.02, "tutorial.md shows these losses")
    p.run("tutorial", ["--mesh=d=3,t=1"]).fails(1, "does not divide evenly into 3 shards")
    p.run("tutorial", ["--mesh=t=2,d=1"]).fails(2, "--mesh t=2,d=1: this program's mesh has the axes d t, in this order")
    for program in ["tutorial", "patch_embedding"]:
        p.run(program, ["d=2", "t=2"]).fails(2, "'d=2'", "needs its option's name")
        p.run(program, ["--help"]).check("--mesh AXES" in p.run(program, ["--help"]).out, "--help lists --mesh")
    check(p.run("tutorial", ["--mesh=d=2"]).out == p.run("tutorial", ["--mesh=d=2,t=1"]).out, "an axis that a mesh lacks has size 1")
    if p.mpiexec:
        run = p.run("tutorial", ["--mesh=d=1,t=2"], ranks=2).succeeded()
        threads = p.run("tutorial", ["--mesh=d=1,t=2"])
        run.check(run.out == threads.out, "prints the same as on threads")


def output_errors(p):
    """Output that goes nowhere is an error, and no file takes the place of a closed stream."""
    def through(redirection):
        return ["sh", "-c", f'exec "$@" {redirection}', "sh"]

    p.run("mlp_fsdp", [], limits=through(">/dev/full")).fails(1, "cannot write", "No space left on device")
    p.run("mlp_fsdp", [], limits=through(">&-")).fails(1, "cannot write", "Bad file descriptor")
    p.run("mlp_fsdp", [], limits=through("<&-")).succeeds()
    metrics = os.path.join(p.folder, "closed.jsonl")
    run = p.gpt(f"--metrics={metrics}", limits=through("<&- >&- 2>&-"))
    run.check(run.status == 1, "closed streams: output is lost, status 1")
    lines = text_of(metrics).splitlines()
    run.check(len(lines) == 2 and all(line.startswith("{") for line in lines), "--metrics holds JSON alone")


def full_disk(p):
    """Saves that a full disk refuses are tried again; a run that cannot save ends, and goes on when there is room."""
    disk = os.path.join(p.folder, "disk")
    os.makedirs(disk)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", disk], capture_output=True).returncode:
        print("full_disk: left out, as no file system can be mounted here")
        return
    filler = os.path.join(disk, "filler")

    def fill(spare):
        with open(filler, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(file.tell() - spare)

    def steps(folder):
        return [record["step"] for record in records(folder, "metrics.jsonl")]

    def room_again(folder, ranks):
        """The disk is full for a while in the middle of a run. Its status, and what it has printed."""
        command = p.gpt_command("--mesh=d=2,t=1", "--save-every=150", "--steps=100000", f"--run={folder}")
        command = [*p.mpiexec, "-n", str(ranks), *command] if ranks else command
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            said = []
            for line in process.stdout:
                said.append(line)
                if len(said) == 25:
                    fill(0)
                if "the next save tries again" in line:
                    os.remove(filler)
                    break
            for line in process.stdout:
                said.append(line)
                if checkpoints(folder):
                    break
            os.kill(children(process.pid)[0] if ranks else process.pid, signal.SIGTERM)
            said.append(process.stdout.read())
            return process.wait(timeout=TIMEOUT), "".join(said)[-2000:]

    try:
        for ranks in (0, 2) if p.mpiexec else (0,):
            folder = os.path.join(disk, str(ranks))
            options = ["--mesh=d=2,t=1", "--save-every=3", "--steps=12", f"--run={folder}"]
            fill(40960)
            run = p.gpt(*options, ranks=ranks)
            run.fails(1, "3 checkpoints in a row could not be saved", "No space left on device", "make room")
            run.check((run.out + run.err).count("the next save tries again (") == 2, "two warnings before")
            os.remove(filler)
            run = p.gpt(*options, ranks=ranks).succeeded()
            run.check(steps(folder) == list(range(12)), "a record of each step")
            shutil.rmtree(folder)

            status, shown = room_again(folder, ranks)
            check(status == 0, f"full disk, {ranks} ranks: the run goes on when there is room ({status})", shown)
            done = steps(folder)
            check(done == list(range(len(done))), f"full disk, {ranks} ranks: no record is lost", shown)
            check(max(checkpoints(folder)) == len(done), f"full disk, {ranks} ranks: the last step is saved", shown)
            shutil.rmtree(folder)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def options_of_others(p):
    """An option that only other trainers have is an error that names them. Each option is in a page of docs/."""
    def options_in(program, *words):
        return set(re.findall(r"^  (?:--\[no-\]|--)([\w-]+)", p.run(program, [*words, "--help"]).out, re.M))

    trainers = ["gpt2", "gpt_fsdp", "gpt_pipeline", "moe"]
    has = {t: options_in(t) for t in trainers}
    for t in trainers:
        sections = dict(re.findall(r"^(\w+):\n((?: .*\n)+)", p.run(t, ["--help"]).out, re.M))
        of_optimizer = re.findall(r"^  --([\w-]+)", sections.get("optimizer", ""), re.M)
        check(of_optimizer == ["optimizer", "ema", "lr-mult", "decay-mult", "freeze"], f"{t}: the optimizer's section is {of_optimizer}")
        check("  --gather " in sections["training"], f"{t}: --gather is of the training")
    tools = [options_in("shardlib-checkpoint", command) for command in ("to-safetensors", "average", "prune")]
    pages = "".join(text_of(DOCS, page) for page in os.listdir(DOCS))
    for option in sorted(set.union(*has.values(), *tools, options_in("tokenize"), options_in("shardlib-report"))):
        check(re.search(rf"--(no-)?{option}(?![\w-])", pages), f"no page of docs/ has the option --{option}")
    for option in sorted(set.union(*has.values())):
        knows, lacks = [t for t in trainers if option in has[t]], [t for t in trainers if option not in has[t]]
        if lacks:
            names = " and ".join(filter(None, [", ".join(knows[:-1]), knows[-1]]))
            p.run(lacks[0], [f"--{option}"]).fails(2, f"unknown option --{option}: {names} know", f"{lacks[0]} does not")


def mistakes(p):
    nowhere, loop = (os.path.join(p.folder, *parts) for parts in (["nowhere", "file"], ["loop"]))
    os.symlink("loop", loop)
    put(f"{p.folder}/one-token", "A")
    # Options, and what the one error line must say: the option at fault and what to do.
    wrong = [
        (["--color=red"], ["--color", "--help"]),
        (["stray"], ["stray", "--help"]),
        (["--steps=-1"], ["--steps", "--help"]),
        (["--steps=many"], ["--steps", "--help"]),
        (["--batch=-8"], ["--batch", "--help"]),
        (["--batch=99999999999999999999"], ["--batch", "--help"]),
        (["--seq=0"], ["--seq", "--help"]),
        (["--max-tokens=-1"], ["--max-tokens", "--help"]),
        (["--learning-rate=0"], ["--learning-rate", "--help"]),
        (["--learning-rate=nan"], ["--learning-rate", "finite"]),
        (["--lr-schedule=cosin"], ["--lr-schedule", "cosin", "constant", "wsd", "--help"]),
        (["--decay-steps=5", "--warmup=5"], ["--decay-steps 5", "--warmup 5", "choose more than 5"]),
        (["--adam-epsilon=0"], ["--adam-epsilon", "from 1e-30 to 1", "--help"]),
        (["--clip=nan"], ["--clip", "finite"]),
        (["--max-tokens=99999999999999999999"], ["--max-tokens", "--help"]),
        (["--temperature=inf"], ["--temperature", "finite"]),
        (["--weight-decay=nan"], ["--weight-decay", "finite"]),
        (["--seed=-1"], ["--seed", "--help"]),
        ([f"--data={nowhere}"], ["nowhere/file", "--data"]),
        ([f"--validation-data={nowhere}"], ["nowhere/file"]),
        ([f"--data={p.folder}"], [p.folder, "flat-tokens", "--stream"]),
        (["--data="], ["--data is given an empty value: give PATH"]),
        ([p.text], ["needs its option's name before it, as in --data", p.text]),
        (["--mesh="], ["--mesh is given an empty value: give AXES, or leave the option out"]),
        (["--run", ""], ["--run is given an empty value: give DIR, or leave the option out"]),
        (["--graph", ""], ["--graph is given an empty value: give FILE.svg"]),
        ([f"--load={nowhere}"], ["--load: ", "nowhere/file"]),
        ([f"--evaluate={nowhere}"], ["--evaluate: ", "nowhere/file"]),
        ([f"--evaluate={p.folder}"], ["--evaluate: ", "is a folder: give a file in HellaSwag's format"]),
        ([f"--config={p.folder}"], ["--config: ", "is a folder: give a file, as in", "config.toml"]),
        ([f"--data={loop}"], ["--data: ", "Too many levels of symbolic links"]),
        ([f"--graph={nowhere}.svg"], ["--graph: cannot write", "No such file", "nothing has been computed yet"]),
        ([f"--tokenizer={nowhere}"], ["--tokenizer: ", "nowhere/file"]),
        (["--graph=x.png"], ["--graph", "'x.png'", "ends in .svg"]),
        ([f"--metrics={nowhere}"], ["nowhere/file", "--metrics"]),
        (["--seq=1000000"], ["--data: '", "text.txt' has ", " tokens, fewer than a row of --seq 1000000", "longer text"]),
        ([f"--data={p.folder}/one-token"], ["--data: '", "one-token' has 1 token, fewer than a row of --seq 16"]),
        (["--seq=9223372036854775807"], ["--seq", "16777216", "--help"]),
        (["--plan", "--layers=1000000"], ["--layers", "4096", "--help"]),
        (["--plan", "--microbatches=16777216"], ["--batch 8", "--microbatches 16777216"]),
        (["--batch=16777216", "--seq=16777216"], ["--batch 16777216", "--seq 16777216", "host memory"]),
        (["--batch=6", "--mesh=d=4,t=1"], ["--batch 6", "d = 4", "choose a multiple of 4, or a mesh of d = 3"]),
        (["--batch=8", "--microbatches=3"], ["--batch 8", "--microbatches 3", "multiple of 3"]),
        (["--batch=8", "--microbatches=4", "--mesh=d=4,t=1"], ["--microbatches 4", "d = 4", "--batch that is a multiple of 16"]),
        (["--d-head=3"], ["--d-head 3", "choose a multiple of 2"]),
        (["--beta1=1"], ["--beta1", "from 0 to below 1", "--help"]),
        (["--beta2=1"], ["--beta2", "from 0 to below 1", "--help"]),
        (["--trace"], ["--trace", "--run DIR"]),
        (["--step-graph"], ["--step-graph", "--run DIR"]),
        (["--tensorboard"], ["--tensorboard", "--run DIR"]),
        (["--histogram-every=5"], ["--histogram-every", "give --tensorboard too"]),
        (["--turns={}"], ["--turns has no effect without --chat"]),
        ([f"--validation-data={p.text}"], ["--validation-data", "--validate-every"]),
        (["--stream=."], ["--data and --stream", "one of them"]),
        (["--sample-begin=4294967296"], ["--sample-begin", "--help"]),
        (["--sample-begin=300"], ["--sample-begin 300", "ends at 255"]),
        (["--rope-context=64"], ["--rope-context 64", "--rope-factor"]),
        (["--max-tokens=5", "--rows=stories", "--prompt="], ["--prompt is empty", "--max-tokens 0"]),
        (["--max-tokens=5", "--vocabulary=128", "--prompt=é"], ["--prompt", "195", "ends at 127", "--vocabulary"]),
        (["--epochs=1"], ["--steps has no effect", "--epochs 1", "one of them"]),
        (["--rope-low=2"], ["--rope-low has no effect", "--rope-context"]),
        (["--rope-low=2", "--rope-yarn", "--rope-context=9"], ["--rope-low has no effect with --rope-yarn", "--rope-beta-slow"]),
        (["--rope-yarn"], ["--rope-yarn has no effect", "--rope-context"]),
        (["--rope-beta-fast=2"], ["--rope-beta-fast has no effect", "--rope-yarn"]),
        (["--decay-fraction=0.5"], ["--decay-fraction has no effect", "--lr-schedule wsd"]),
        (["--lr-schedule=constant", "--decay-steps=9"], ["--decay-steps has no effect", "--lr-schedule constant"]),
        (["--spike-window=9"], ["--spike-window has no effect", "--on-spike"]),
        (["--validation-batches=2"], ["--validation-batches has no effect", "--validate-every"]),
        (["--keep=3"], ["--keep has no effect", "--run DIR"]),
        ([f"--run={nowhere}", "--keep-best=3"], ["--keep-best has no effect", "--validate-every N"]),
        (["--find-nan", "--plan"], ["--find-nan has no effect", "does not train"]),
        (["--temperature=0.5"], ["--temperature has no effect", "--max-tokens 0", "choose more tokens"]),
        (["--sample-every=1"], ["--sample-every has no effect", "--max-tokens 0"]),
        (["--max-tokens=5", "--sample-only", "--chat", "--samples=2"], ["--samples has no effect with --chat"]),
        (["--max-tokens=5", "--sample-only", "--chat", "--prompt=And"], ["--prompt has no effect with --chat"]),
        (["--max-tokens=5", "--temperature=0", "--top-k=3"], ["--top-k has no effect with --temperature 0"]),
        (["--collective-matmul", "--mesh=d=2"], ["--collective-matmul has no effect with t=1"]),
        (["--no-resume"], ["--no-resume has no effect", "--run DIR"]),
        (["--mesh=t=1,d=2"], ["--mesh", "d s t", "d=4,s=2,t=2"]),
        (["--mesh=d=2,t=1,p=1"], ["--mesh", "d=4,s=2,t=2"]),
        (["--mesh=s=3"], ["--seq 16", "s = 3", "choose a multiple of 3"]),
        (["--mesh=d=0,t=1"], ["mesh", "at least 1"]),
        (["--mesh=d=x,t=1"], ["mesh", "whole number"]),
        (["--mesh=d,t"], ["mesh", "name=size"]),
        (["--mesh=d=2,d=2"], ["mesh", "each axis once"]),
        (["--mesh=d=99999,t=99999"], ["mesh", "smaller"]),
        (["--mesh=d=1,t=16000000"], ["16000000 devices as threads", "of memory are left", "smaller mesh"]),
    ]
    for options, words in wrong:
        p.gpt(*options).fails(2, *words)
    core = str(min(os.sched_getaffinity(0)))
    run = p.gpt("--mesh=d=8", "--steps=1", limits=["taskset", "-c", core])
    run.succeeds()
    run.check("note: the 8 devices of mesh d=8,s=1,t=1 are threads, which take turns on 1 core:" in run.out, "a note on many threads")
    p.gpt(data=False).fails(2, "--data", "--help")
    streamed = os.path.join(p.folder, "no-stream")
    p.gpt(f"--stream={nowhere}", f"--run={streamed}", data=False).fails(2, "--stream: ", "nowhere/file")
    check(not os.path.exists(streamed), "a stream without text makes no folder of a run")
    p.gpt("--learning-rate=1e30", "--weight-decay=0", "--steps=20").fails(1, "step ", "not finite", "--learning-rate", "--find-nan")
    for ranks in (0, 2) if p.mpiexec else ():  # without MPI nobody reads it
        p.gpt(ranks=ranks, limits=["env", "SHARDLIB_SHM=2"]).fails(2, "SHARDLIB_SHM=2: write ", "0", "1")
        p.gpt(ranks=ranks, limits=["env", "SHARDLIB_NCCL=2"]).fails(2, "SHARDLIB_NCCL=2: write ", "0", "1")
        p.gpt(ranks=ranks, limits=["env", "SHARDLIB_START_TIMEOUT=x"]).fails(2, "SHARDLIB_START_TIMEOUT=x: write ", "0")
    if p.mpiexec:
        one, other = (["-n", "1", *p.gpt_command("--mesh=d=2", f"--learning-rate={rate}")] for rate in ("1e-3", "1e-1"))
        Run([*p.mpiexec, *one, ":", *other], "ranks with two learning rates").fails(2, "different programs", "learning_rate")
        one, other = (["-n", "1", *p.gpt_command("--mesh=d=2", f"--run={p.folder}/{run}")] for run in ("one", "other"))
        Run([*p.mpiexec, *one, ":", *other], "ranks with two folders").fails(2, "different programs", "--run", "/other")
        one, other = (["-n", "1", *p.gpt_command("--mesh=d=2", f"--run={p.folder}/one", *more)] for more in ([], ["--allow-change=seed"]))
        Run([*p.mpiexec, *one, ":", *other], "--allow-change of one rank").fails(2, "different programs", "has `--allow-change seed`")
    # A reader that leaves: the run goes on to its end.
    folder = os.path.join(p.folder, "unread")
    with subprocess.Popen(p.gpt_command("--steps=200", f"--run={folder}"), stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        status = process.wait(timeout=TIMEOUT)
    check(status == 0 and "step-00000200" in os.listdir(f"{folder}/checkpoints"), f"a reader that leaves ends no run ({status})")
    # Address space for some of the threads' stacks, not for all of them.
    limited = ["sh", "-c", 'ulimit -s 8192; ulimit -v 3000000; MALLOC_ARENA_MAX=1 exec "$@"', "sh"]
    many = ["--mesh=d=512,t=1", "--batch=512", "--d-model=512", "--seq=4"]
    p.gpt(*many, limits=limited).fails(2, "mesh d=512,s=1,t=1", "threads", "choose a smaller mesh")
    p.gpt("--metrics=/dev/full").fails(1, "cannot write", "/dev/full")
    short = ["sh", "-c", 'ulimit -f 2; exec "$@"', "sh"]
    p.run("tokenize", [f"--out={p.folder}/too-large", "--jobs=1", p.text], limits=short).fails(1, "cannot write", "File too large")
    blocked = os.path.join(p.folder, "blocked")
    p.gpt(f"--run={blocked}").succeeds()
    os.mkdir(os.path.join(blocked, "trace.json"))
    kept, metrics = os.path.join(p.folder, "kept"), os.path.join(p.folder, "kept.jsonl")
    for steps in (2, 4):
        p.gpt(f"--run={kept}", f"--metrics={metrics}", f"--steps={steps}").succeeds()
    check([record["step"] for record in records(metrics)] == [0, 1, 2, 3], "--metrics keeps what a resumed run has behind it")
    again = p.gpt(f"--metrics={metrics}").succeeded()
    again.check(f"replacing the records of an earlier run in '{metrics}'" in again.out, "a run of its own says that it replaces them")
    check([record["step"] for record in records(metrics)] == [0, 1], "--metrics has the records of one run")
    before = tree(kept)
    for run in kept, f"{p.folder}/not-yet":
        for file in "metrics.jsonl", "config.toml", "checkpoints/LATEST":
            owner = f"'{run}' is the folder of a run, which writes {file.split('/')[0]} itself"
            p.gpt(f"--run={run}", f"--metrics={run}/{file}").fails(2, f"--metrics '{run}/{file}'", owner)
            p.gpt(f"--run={run}", f"--logits={run}/{file}", "--steps=0", "--prompt=And").fails(2, f"--logits '{run}/{file}'", owner)
    p.gpt(f"--run={p.folder}/not-yet", f"--metrics={kept}/metrics.jsonl").fails(2, "--metrics", f"'{kept}' is the folder of a run")
    p.gpt(f"--graph={kept}/step.svg").fails(2, "--graph", f"'{kept}' is the folder of a run, which writes step.svg itself")
    p.gpt(f"--run={kept}", f"--export={kept}/tokenizer").fails(2, "--export", f"'{kept}' is the folder of a run, which writes tokenizer itself")
    check(tree(kept) == before and not os.path.exists(f"{p.folder}/not-yet"), "an option that names a run's file changes nothing")
    if p.mpiexec:
        p.gpt(f"--metrics={kept}/metrics.jsonl", ranks=2).fails(2, "--metrics", f"'{kept}' is the folder of a run")
    p.gpt(f"--run={kept}", f"--metrics={kept}/mine.jsonl", "--steps=5").succeeds()
    late = p.gpt(f"--run={blocked}", "--trace", "--steps=3")
    late.fails(2, "trace.json", "not a regular file")
    late.check("resuming from" not in late.out, "--trace fails before the run goes on")
    huge = ["--d-model=65536", "--d-ff=16777216"]  # weights of terabytes, one each
    p.gpt(*huge).fails(1, "out of memory: ", " left on this machine", "smaller sizes, or more machines")
    p.gpt(*huge, "--device=simulated").fails(1, "out of memory: ", "the plan of a step has ", " at most")
    if not p.mpiexec:
        return
    for options, words in wrong:
        if options[0] in ("--color=red", f"--data={nowhere}", f"--metrics={nowhere}", "--clip=nan", "--mesh=d=x,t=1"):
            p.gpt(*options, ranks=2).fails(2, *words)
    p.gpt("--batch=7", ranks=2).fails(2, "--batch 7", "d = 2", "choose a multiple of 2")
    p.gpt("--mesh=d=4,t=1", ranks=2).fails(2, "mesh", "4 devices", "mpirun started 2 ranks", "choose another mesh")
    p.gpt("--mesh=d=1,t=1", ranks=2).fails(2, "mesh", "1 device", "mpirun started 2 ranks", "choose another mesh")
    p.gpt("--learning-rate=1e30", "--weight-decay=0", "--steps=20", ranks=2).fails(1, "step ", "not finite", "--learning-rate")
    skipping = p.gpt("--learning-rate=1e30", "--weight-decay=0", "--steps=20", "--on-spike=skip", ranks=2)
    skipping.fails(1, "not finite", "10 steps in a row were skipped", "--on-spike rewind")
    p.gpt("--on-spike=rewind").fails(2, "--on-spike rewind", "--run")


def main(parts):
    """Calls each part with the programs; the exit status."""
    options = arguments("examples", mpiexec="")
    # Open MPI refuses root unless told otherwise (version 5: PRTE); ranks that wait must not keep cores from others.
    for prefix in ("OMPI", "PRTE"):
        for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM"):
            os.environ[f"{prefix}_{name}"] = "1"
    os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
    begin = time.time()
    with tempfile.TemporaryDirectory() as folder:
        p = Programs(options.examples, shlex.split(options.mpiexec), folder)
        for part in parts:
            started = time.time()
            part(p)
            print(f"{part.__name__}: {time.time() - started:.0f} s", flush=True)
    print(f"{runs} runs in {time.time() - begin:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main([training, simulated, dtypes, sharded_lengths, gathers, collective_matmul, recompute, histograms, traced, data_and_runs, resuming, other_options, plans, gpt2, optimizers, lora, sampling_from_a_run, tokenizers_of_exports, mlp, tutorial, context_parallel, patch_embedding, moe, full_disk, options_of_others, mistakes]))
