"""Ranks that are killed or stopped in the middle of collectives: the others end, with a message, and nothing is left.

rank_faults.py --tests BINARY --mpiexec "mpirun FLAGS" [--trainer GPT_FSDP]      without --trainer no rank is stopped

The killed ranks are those of `mpirun ... shardlib_tests "[.endless]"`, which prints each rank's process and runs until it is
killed. It runs with mpirun's defaults, which end the job, and with a launcher that does not end the other ranks (Open MPI 4's
--enable-recovery). Then these have to notice the fault themselves, in shared memory and over MPI alone. The stopped ranks are
those of a trainer. Ranks that may not share memory are tested, too.
"""
import glob
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time

from checks import arguments, check, finish, json_of, put, ran, text_of


def shared_memory():
    return set(os.listdir("/dev/shm"))


def fields(pid):
    """The process's /proc/PID/stat from the state on; nothing if it is gone."""
    try:
        return text_of(f"/proc/{pid}/stat").rsplit(")", 1)[1].split()
    except OSError:
        return []


def running(pid):
    return bool(fields(pid)) and fields(pid)[0] not in "ZX"


def cpu_seconds(pid):
    return sum(map(int, fields(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


class Job:
    """A command under mpirun."""

    def __init__(self, name, mpiexec, ranks, command, variables):
        self.name = f"{name}, {ranks} ranks" + "".join(f", {k}={v}" for k, v in variables.items())
        self.before = shared_memory()
        self.pids = {}
        self.text = ""
        self.process = subprocess.Popen([*mpiexec, "-n", str(ranks), *command], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, env=os.environ | variables)

    def check(self, ok, what):
        return check(ok, f"{self.name}: {what}", self.text)

    def ends(self, seconds, expected, has_status=True):
        """Waits for the end, which must come with a status and with texts that match the expressions."""
        began = time.monotonic()
        try:
            self.text += self.process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            self.check(False, f"ends within {seconds} s")
            for pid in self.pids.values():
                if running(pid):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.text += self.process.communicate()[0]
        self.check(not has_status or self.process.returncode != 0, "its status is not 0")
        for expression in expected:
            self.check(re.search(expression, self.text), f"a message like /{expression}/")
        time.sleep(0.2)
        for rank, pid in self.pids.items():
            self.check(not running(pid), f"rank {rank} has ended")
        left = shared_memory() - self.before
        self.check(not left, f"nothing is left in /dev/shm ({left})")
        print(f"{self.name}: over {time.monotonic() - began:.1f} s later", flush=True)


def kill_one(mpiexec, tests, ranks, expected, variables, has_status=True, case="endless"):
    """Kills rank 1 after its first collectives."""
    job = Job(f"killed, {case}", mpiexec, ranks, [tests, f"[.{case}]"], variables)
    while len(job.pids) < ranks:
        line = job.process.stdout.readline()
        if not job.check(line, "all ranks come to their collectives"):
            break
        job.text += line
        if found := re.search(r"rank (\d+) is process (\d+)", line):
            job.pids[int(found[1])] = int(found[2])
    time.sleep(0.5)
    if 1 in job.pids:
        os.kill(job.pids[1], signal.SIGKILL)
    job.ends(20, [expected], has_status)


def rank_processes(job):
    """By rank, the processes that mpirun has started."""
    found = {}
    for stat in glob.glob("/proc/[0-9]*/stat"):
        pid = int(stat.split("/")[2])
        try:
            rank = re.search(r"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)", text_of(f"/proc/{pid}/environ"))
        except OSError:
            continue
        if rank and fields(pid)[1:2] == [str(job.process.pid)]:
            found[int(rank[1])] = pid
    return found


def stop_one(mpiexec, trainer, ranks, variables):
    """Stops rank 1 of a run: rank 0 names it after the timeout, and its last call where memory is shared."""
    timeout = 2
    with tempfile.TemporaryDirectory() as folder:
        run, text = os.path.join(folder, "run"), os.path.join(folder, "text.txt")
        put(text, "In the beginning was the word. " * 400)
        options = ["--batch=8", "--seq=16", "--layers=2", "--d-model=16", "--n-kv=2", "--d-head=4", "--d-ff=16",
                   "--steps=10000000", "--max-tokens=0", f"--data={text}", f"--run={run}", f"--mesh=d={ranks},t=1",
                   f"--collective-timeout={timeout}"]
        job = Job("stopped", mpiexec, ranks, [trainer, *options], variables)
        end = time.monotonic() + 30
        while len(job.pids) < ranks or not os.path.exists(os.path.join(run, "metrics.jsonl")):
            if not job.check(time.monotonic() < end and job.process.poll() is None, "a step within 30 s"):
                break
            job.pids = rank_processes(job)
            time.sleep(0.1)
        time.sleep(0.5)
        if 1 in job.pids:
            os.kill(job.pids[1], signal.SIGSTOP)
            time.sleep(0.2)
            before = cpu_seconds(job.pids[0])
            time.sleep(timeout - 0.4)
            job.check(cpu_seconds(job.pids[0]) - before <= timeout / 2, "a waiting rank does not keep its core busy")
        call = r"(all_gather|all_reduce|reduce_scatter|all_to_all|barrier) of \d+ bytes"
        last = rf"; \d+\.\d s ago it began {call}" if variables["SHARDLIB_SHM"] == "1" else ""
        job.ends(15, [rf"rank 0: device 0 has waited \d\.\d s over d for device 1 in collective \d+, {call}",
                      rf"longer than the collective timeout of {timeout}\.0 s",
                      r"device 1 does not answer: it is stopped, dead or busy outside of communication" + last,
                      rf"the last communications of the devices: {run}/flight_recorder/rank_\*\.json"])
        written = {0, *range(1 if last else 2, ranks)}
        for rank in written:
            try:
                recording = json_of(run, "flight_recorder", f"rank_{rank}.json")
                whole = recording["device"] == rank and len(recording["last"]) >= 10
                job.check(whole, f"the recording of rank {rank} is whole: {recording}")
            except (OSError, ValueError, KeyError) as error:
                job.check(False, f"the recording of rank {rank}: {error}")


def stop_at_start(mpiexec, tests):
    """Stops rank 1 before it starts MPI: rank 0 gives up."""
    stopped = 'test "$OMPI_COMM_WORLD_RANK" = 1 && kill -STOP $$; exec "$@"'
    job = Job("stopped at the start", mpiexec, 2, ["sh", "-c", stopped, "sh", tests, "[.endless]"],
              {"SHARDLIB_START_TIMEOUT": "3"})
    job.ends(20, [r"error: rank 0: the start of MPI has lasted longer than 3 s \(SHARDLIB_START_TIMEOUT\): another rank has not come so far"])


def stop_at_end(mpiexec, tests, variables):
    """Rank 1 stops itself after the last collective: rank 0 gives up."""
    job = Job("stopped at the end", mpiexec, 2, [tests, "[.stopped]"], variables | {"SHARDLIB_START_TIMEOUT": "3"})
    job.ends(20, [r"error: rank 0: the end of the program has lasted longer than 3 s"])


def cannot_share(mpiexec, tests):
    """Where the system forbids an arena the ranks say so, once, and communicate over MPI."""
    command = shlex.join([*mpiexec, "-n", "2", tests, "collectives and messages move the right blocks"])
    # A file of a gigabyte is more than MPI needs, and less than an arena.
    said = ran(0, "bash", "-c", f"ulimit -f 1000000; {command}", timeout=60).stderr
    check(said.count("note: the ranks of this node cannot share memory (files are limited to") == 1, "without room for an arena: one note", said)


def main():
    args = arguments("tests", "mpiexec", trainer=None)
    mpiexec = shlex.split(args.mpiexec)
    for ranks in (2, 4):
        kill_one(mpiexec, args.tests, ranks, "[Kk]illed|signal 9|has died", {"SHARDLIB_SHM": "1"})
    # With --enable-recovery mpirun returns 0 whatever the ranks do.
    version = subprocess.run([mpiexec[0], "--version"], capture_output=True, text=True).stdout
    if re.search(r"\(Open MPI\) 4\.", version):
        for ranks, shared in ((2, "1"), (4, "1"), (2, "0"), (4, "0")):
            last = ", after it began all_gather of 200000 bytes at .*comm_shm_test.cpp:[0-9]+" if shared == "1" else ""
            kill_one([*mpiexec, "--enable-recovery"], args.tests, ranks,
                     rf"all_gather: device 1 \(rank 1 of {ranks}\) has died{last}: .*; start again, from the last checkpoint",
                     {"SHARDLIB_SHM": shared}, has_status=False)  # fmt: skip
        for shared in ("1", "0"):
            last = ", after it began all_gather of 16 bytes at .*comm_nccl_test.cpp:[0-9]+" if shared == "1" else ""
            kill_one([*mpiexec, "--enable-recovery"], args.tests, 2,
                     rf"a collective: device 1 \(rank 1 of 2\) has died{last}: .*; start again, from the last checkpoint",
                     {"SHARDLIB_SHM": shared}, has_status=False, case="connecting")  # fmt: skip
    if args.trainer:
        for ranks, shared in ((2, "1"), (4, "1"), (2, "0")):
            stop_one(mpiexec, args.trainer, ranks, {"SHARDLIB_SHM": shared})
    stop_at_start(mpiexec, args.tests)
    for shared in ("1", "0"):
        stop_at_end(mpiexec, args.tests, {"SHARDLIB_SHM": shared})
    cannot_share(mpiexec, args.tests)
    finish()


if __name__ == "__main__":
    main()
