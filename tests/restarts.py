"""scripts/train.sh: a run whose ranks are killed and stopped at random ends with the curve of an undisturbed one.

restarts.py --trainer GPT_FSDP --mpiexec "mpirun FLAGS" [--kills N]   N kills for each backend (default 6)
The same mesh has the same bits, and fewer ranks have the same losses to rounding. Also tests the options that the script
refuses, when it gives up, and that a signal makes the run save and stop.
"""
import os
import random
import shlex
import signal
import subprocess
import tempfile
import time

from checks import arguments, check, children, contents, finish, put, ran, records, text_of


class Trainer:
    def __init__(self, trainer, mpiexec, folder):
        self.trainer, self.mpiexec, self.folder = trainer, mpiexec, folder
        self.text = os.path.join(folder, "text.txt")
        put(self.text, "".join(f"{i} is the number of {i * i % 97}. " for i in range(3000)))

    def command(self, run, *options):
        return [self.trainer, "--batch=8", "--seq=16", "--layers=2", "--d-model=16", "--n-kv=2", "--d-head=4",
                "--d-ff=16", "--steps=1500", "--save-every=40", "--max-tokens=0", "--collective-timeout=2",
                "--check-replicas=10", f"--data={self.text}", f"--run={self.folder}/{run}", *options]

    def script(self, *options):
        """train.sh with these of its options."""
        here = os.path.dirname(os.path.abspath(__file__))
        return [os.path.join(here, "..", "scripts", "train.sh"), "--mpirun", shlex.join(self.mpiexec), *options, "--"]

    def newest_checkpoint(self, run):
        """What its LATEST says; "" before there is one."""
        try:
            return text_of(f"{self.folder}/{run}/checkpoints/LATEST")
        except OSError:
            return ""

    def curve(self, run):
        path = f"{self.folder}/{run}/metrics.jsonl"
        return [(s["step"], s["loss"], s["grad_norm"]) for s in records(path)] if os.path.exists(path) else []


def is_rank(pid):
    try:
        return b"OMPI_COMM_WORLD_RANK=" in contents(f"/proc/{pid}/environ")
    except OSError:
        return False


def ranks_of(script):
    """The processes that the script's mpirun has started."""
    found = [script]
    for _ in range(2):  # the script, mpirun, ranks
        found = [child for pid in found for child in children(pid)]
    return [pid for pid in found if is_rank(pid)]


def ended(process, log):
    """The status of a script, and what it has written to its log."""
    try:
        status = process.wait(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        status = "none: it hangs"
    log.seek(0)
    return status, log.read()


def disturbed(trainer, name, kills, shared, undisturbed):
    """Kills or stops a rank of each start that has saved, and compares the curve with that of a run in peace."""
    luck = random.Random(17)
    log = open(os.path.join(trainer.folder, name + ".log"), "w+")
    process = subprocess.Popen([*trainer.script("--ranks", "2"), *trainer.command(name, "--mesh=d={ranks},t=1")],
                               stdout=log, stderr=log, env=os.environ | {"SHARDLIB_SHM": shared, "SHARDLIB_START_TIMEOUT": "5"})
    done, before = 0, ""
    while done < kills and process.poll() is None:
        ranks, newest = ranks_of(process.pid), trainer.newest_checkpoint(name)
        if len(ranks) != 2 or newest == before:
            time.sleep(0.01)
            continue  # between two starts, or a start that has saved nothing yet
        time.sleep(luck.uniform(0, 0.1))  # fast machines take 1 ms for a step: the run must not end before the last kill
        # A stopped rank is noticed after --collective-timeout, and takes as long.
        try:
            os.kill(luck.choice(ranks), signal.SIGSTOP if done % 3 == 1 else signal.SIGKILL)
        except ProcessLookupError:
            continue  # the run has ended
        done, before = done + 1, newest
    status, text = ended(process, log)
    check(status == 0, f"{name}: ends with status 0, not {status}", text)
    check(done == kills, f"{name}: {done} of {kills} kills before the end")
    restarts = text.count("starting again from step-")
    check(restarts == done, f"{name}: {restarts} restarts from a checkpoint", text)
    curve = trainer.curve(name)
    check(curve == undisturbed, f"{name}: {len(curve)} steps with the same bits as {len(undisturbed)} undisturbed ones")
    print(f"{name}: {done} kills, {restarts} restarts from a checkpoint, {len(curve)} steps of the same bits", flush=True)


def fewer_ranks(trainer, undisturbed):
    """A host that goes away for good: the run goes on with one rank."""
    down, probe = os.path.join(trainer.folder, "down"), os.path.join(trainer.folder, "probe.sh")
    put(probe, f'test "$1" = localhost || test ! -e {down}\n')
    log = open(os.path.join(trainer.folder, "fewer.log"), "w+")
    process = subprocess.Popen(
        [*trainer.script("--ranks", "2,1", "--hosts", "localhost:1,127.0.0.1:1"),
         *trainer.command("fewer", "--mesh=d={ranks},t=1")],
        stdout=log, stderr=log, env=os.environ | {"TRAIN_PROBE": f"sh {probe}"})
    while process.poll() is None and not trainer.newest_checkpoint("fewer"):
        time.sleep(0.01)
    open(down, "w").close()
    ranks = ranks_of(process.pid)
    if check(len(ranks) == 2, f"fewer: {len(ranks)} ranks run"):
        os.kill(ranks[1], signal.SIGKILL)
    status, text = ended(process, log)
    check(status == 0, f"fewer: ends with status 0, not {status}", text)
    check("host 127.0.0.1 does not answer: it is left out" in text, "fewer: the host is named", text)
    curve = trainer.curve("fewer")
    check([s[0] for s in curve] == [s[0] for s in undisturbed], "fewer: every step once")
    # Sums in another order: training magnifies the difference of the last bits.
    apart = max(abs(a[1] - b[1]) / b[1] for a, b in zip(curve[:500], undisturbed))
    check(apart < 1e-3, f"fewer: losses stay within rounding ({apart:.1e})")
    print(f"fewer: 500 losses within {apart:.1e}", flush=True)


def refusals(trainer):
    plain = trainer.script()
    for command, words in [(plain, "no program follows --"), ([*plain, trainer.trainer], "no --run DIR"),
                           (trainer.script("--ranks", "two"), "--ranks: 'two'"),
                           (trainer.script("--hosts", "a"), "--hosts: 'a' is not HOST:SLOTS"),
                           (trainer.script("--what", "1"), "unknown option '--what'")]:
        done = ran(2, *command, timeout=200)
        check(words in done.stderr, f"refused with {words!r}", done.stderr)
    done = ran(2, *plain, *trainer.command("refused", "--data=/nowhere"), timeout=200)
    check("train.sh: " not in done.stderr, "a wrong option ends it at once", done.stderr)
    done = ran(1, *trainer.script("--restarts", "1"), *trainer.command("diverged", "--learning-rate=1e30", "--weight-decay=0"), timeout=200)
    check("2 starts in a row made no new checkpoint: giving up" in done.stderr, "it gives up", done.stderr)


def slurm(folder):
    """scripts/train.sbatch with stand-ins for srun and scontrol: when a job is queued again."""
    here, tools = os.path.dirname(os.path.abspath(__file__)), os.path.join(folder, "tools")
    os.makedirs(tools)
    for name, body in [("srun", 'shift; exec "$@"'), ("scontrol", f'echo "$@" >> {folder}/requeued')]:
        put(os.path.join(tools, name), f"#!/bin/sh\n{body}\n")
        os.chmod(os.path.join(tools, name), 0o755)

    count = f"{folder}/train-7.failures"

    # Sourced by bash: it waits before the commands that match $SLOW, so that the signal comes between two of them.
    slowly = os.path.join(folder, "slowly")
    put(slowly, "trap '[[ $BASH_COMMAND != $SLOW ]] || sleep 0.3' DEBUG\n")

    def slow_at(pattern):
        return {"BASH_ENV": slowly, "SLOW": pattern}

    def job(program, failures=0, usr1=False, env=None):
        if failures:
            put(count, f"{failures}\n")
        process = subprocess.Popen(["bash", os.path.join(here, "..", "scripts", "train.sbatch"), "sh", "-c", program],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
                                                     "SLURM_SUBMIT_DIR": folder} | (env or {}))
        if usr1:
            process.stdout.readline()
            process.send_signal(signal.SIGUSR1)
        text = process.communicate(timeout=200)[0]
        queued = os.path.exists(f"{folder}/requeued")
        if queued:
            check(text_of(f"{folder}/requeued") == "requeue 7\n", "slurm: scontrol requeue 7")
            os.remove(f"{folder}/requeued")
        return process.returncode, queued, text

    until_usr1 = "trap 'exit 0' USR1; echo x; while :; do sleep 0.1; done"
    one_usr1 = "n=0; trap 'n=$((n+1))' USR1; echo x; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; done; [ $n = 1 ] || exit 2"
    for what, case, expected in [("the end", job("exit 0"), (0, False)), ("a wrong option", job("exit 2"), (2, False)),
                                 ("a fault", job("exit 1"), (0, True)), ("a fault more", job("exit 1"), (0, True)),
                                 ("the tenth fault", job("exit 1", 9), (0, True)),
                                 ("too many faults", job("exit 1", 10), (1, False)),
                                 ("the time limit", job(until_usr1, 10, True), (0, True)),
                                 ("the time limit at the start", job(until_usr1, 10, True, slow_at("child=?*")),
                                  (0, True)),
                                 ("the time limit just after it",
                                  job(one_usr1, 10, True, slow_at("@(*limit_is_near = yes*|pass_on)")), (0, True))]:
        check(case[:2] == expected, f"slurm: {what} gives {case[:2]}, not {expected}", case[2])
    check(not os.path.exists(count), "slurm: faults are counted from the last time limit on")


def stopping(trainer):
    """A signal to the script: the run saves and stops."""
    early = subprocess.Popen([*trainer.script("--ranks", "2"), *trainer.command("stopped_early", "--steps=1000000")],
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(0.3)
    early.send_signal(signal.SIGTERM)
    text = early.communicate(timeout=200)[0]
    check(early.returncode in (0, 143), f"a signal right after the start ends the run ({early.returncode})", text)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        name = f"stopped_{int(number)}"
        process = subprocess.Popen([*trainer.script("--ranks", "2"), *trainer.command(name, "--steps=1000000")],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            if line.startswith("step   100/"):
                break
        process.send_signal(number)
        text = process.stdout.read()
        status = process.wait(timeout=200)
        check(status == 0 and "stopped by a signal" in text, f"{name}: saves and stops ({status})", text)
        last = trainer.curve(name)[-1][0] + 1
        check(f"step-{last:08}" in os.listdir(f"{trainer.folder}/{name}/checkpoints"), f"{name}: step {last} is saved")


def main():
    args = arguments("trainer", "mpiexec", kills=6)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(args.trainer, shlex.split(args.mpiexec), folder)
        ran(0, *trainer.mpiexec, "-n", "2", *trainer.command("peace", "--mesh=d=2,t=1"), timeout=400)
        undisturbed = trainer.curve("peace")
        disturbed(trainer, "shared_memory", args.kills, "1", undisturbed)
        disturbed(trainer, "mpi_alone", args.kills, "0", undisturbed)
        fewer_ranks(trainer, undisturbed)
        stopping(trainer)
        refusals(trainer)
        slurm(folder)
    finish()


if __name__ == "__main__":
    main()
