"""A rank that is killed in the middle of collectives: the others end, with a message, and no shared memory stays behind.

The ranks are `mpirun ... shardlib_tests "[.endless]"`, which prints each rank's process and goes on until it is killed.
Once as mpirun would have it, which then ends the job itself; once with a launcher that leaves the others alone
(Open MPI 4's --enable-recovery), where they must notice by themselves. And ranks that are not allowed to share memory.
"""
import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time


def shared_memory():
    return set(os.listdir("/dev/shm"))


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def kill_one(mpiexec, tests, ranks, expected):
    """Kills rank 1 after its first collectives; returns what is wrong."""
    command, before = [*mpiexec, "-n", str(ranks), tests, "[.endless]"], shared_memory()
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pids, text = {}, ""
    while len(pids) < ranks:
        line = job.stdout.readline()
        if not line:
            return [f"{' '.join(command)}: ended too early:\n{text}"]
        text += line
        if found := re.search(r"rank (\d+) is process (\d+)", line):
            pids[int(found[1])] = int(found[2])
    time.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    try:
        text += job.communicate(timeout=20)[0]
    except subprocess.TimeoutExpired:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        job.kill()
        return [f"{ranks} ranks: the others still wait 20 s after one was killed"]
    wrong = []
    if not re.search(expected, text):
        wrong.append(f"{ranks} ranks: no message like /{expected}/ in:\n{text}")
    time.sleep(0.2)
    wrong += [f"{ranks} ranks: rank {rank} is still there" for rank, pid in pids.items() if running(pid)]
    wrong += [f"{ranks} ranks: {name} is left in /dev/shm" for name in shared_memory() - before]
    print(f"{ranks} ranks: over {time.monotonic() - began:.1f} s after the kill")
    return wrong


def cannot_share(mpiexec, tests):
    """Where the system forbids an arena the ranks say so, once, and communicate over MPI."""
    command = shlex.join([*mpiexec, "-n", "2", tests, "collectives and messages move the right blocks"])
    # A file of a gigabyte is more than MPI needs, and less than an arena.
    job = subprocess.run(["bash", "-c", f"ulimit -f 1000000; {command}"], capture_output=True, text=True, timeout=60)
    notes = re.findall(r"note: the ranks of this node cannot share memory \(files are limited to", job.stderr)
    if job.returncode == 0 and len(notes) == 1:
        return []
    return [f"without room for an arena: status {job.returncode}, {len(notes)} notes:\n{job.stdout}{job.stderr}"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", required=True)
    parser.add_argument("--mpiexec", required=True, help="mpirun and its flags")
    args = parser.parse_args()
    mpiexec = shlex.split(args.mpiexec)
    wrong = []
    for ranks in (2, 4):
        wrong += kill_one(mpiexec, args.tests, ranks, "[Kk]illed|signal 9|has died")
    version = subprocess.run([mpiexec[0], "--version"], capture_output=True, text=True).stdout
    if re.search(r"\(Open MPI\) 4\.", version):
        for ranks in (2, 4):
            wrong += kill_one([*mpiexec, "--enable-recovery"], args.tests, ranks,
                              rf"all_gather: device 1 \(rank 1 of {ranks}\) has died: .*; start again, from the last checkpoint")
    wrong += cannot_share(mpiexec, args.tests)
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
