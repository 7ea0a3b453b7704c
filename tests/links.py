"""Several nodes: ranks in network namespaces, over a link that is slow, loses packets, or is cut.

links.py --trainer GPT_FSDP
A slow link, one that drops packets, and one that is cut for a while change no bit. A link that stays cut ends the run with
a table after --collective-timeout, and scripts/train.sh resumes it on the node that is left. Needs root, ip and tc. The status
is 77 if network namespaces cannot be made.
"""
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "benchmarks"))
import restarts  # noqa: E402
from checks import arguments, check, finish, put, text_of, wait_until  # noqa: E402
from common import Hosts, must  # noqa: E402

STEPS = 120


class Trainer(restarts.Trainer):
    def command(self, run, *options):
        return [self.trainer, "--batch=8", "--seq=16", "--layers=2", "--d-model=32", "--n-kv=2", "--d-head=8",
                "--d-ff=32", f"--steps={STEPS}", "--save-every=20", "--max-tokens=0", f"--data={self.text}",
                f"--run={self.folder}/{run}", *options]

    def wait_for_step(self, run, step, process):
        """Until the run has made so many steps."""
        path = f"{self.folder}/{run}/metrics.jsonl"
        wait_until(lambda: os.path.exists(path) and text_of(path).count("\n") > step, process)


def link(state):
    must(f"ip -n shardlib1 link set sl0 {state}")


def same_bits(trainer, mpirun, name, undisturbed, options=(), meanwhile=None):
    """A run whose link is as `meanwhile` makes it has the bits of an undisturbed one."""
    began = time.monotonic()
    process = subprocess.Popen([*mpirun, *trainer.command(name, *options)], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    if meanwhile:
        threading.Thread(target=meanwhile, args=(process,), daemon=True).start()
    try:
        text = process.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        text = "it hangs: " + process.communicate()[0]
    if check(process.returncode == 0, f"{name}: ends with status 0, not {process.returncode}", text):
        curve = trainer.curve(name)
        check(undisturbed is None or curve == undisturbed, f"{name}: {len(curve)} steps have the same bits")
        print(f"{name}: {len(curve)} steps of the same bits in {time.monotonic() - began:.1f} s", flush=True)
        return curve
    return []


def cut_for_good(trainer, mpirun):
    """The run ends with a table after the timeout; nothing of it is left."""
    name, timeout = "cut", 3
    process = subprocess.Popen([*mpirun, *trainer.command(name, f"--collective-timeout={timeout}", "--steps=1000000")],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    trainer.wait_for_step(name, 30, process)
    link("down")
    began = time.monotonic()
    text, table = "", 0
    for line in process.stdout:
        text += line
        if "does not answer: it is stopped, dead or busy outside of communication" in line:
            table = time.monotonic() - began
            break
    check(0 < table < 3 * timeout + 5, f"{name}: the table comes after {table:.1f} s", text)
    check(f"longer than the collective timeout of {timeout}.0 s" in text, f"{name}: the error names the timeout", text)
    check("device 1 does not answer" in text, f"{name}: the table names the device", text)
    # mpirun cannot reach the other node, and waits for it.
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    process.wait()
    link("up")
    for i in (0, 1):
        left = subprocess.run(["ip", "netns", "pids", f"shardlib{i}"], capture_output=True, text=True, check=True).stdout
        for pid in left.split():
            os.kill(int(pid), signal.SIGKILL)
    print(f"{name}: the table after {table:.1f} s", flush=True)


def node_is_lost(trainer, mpirun, undisturbed):
    """train.sh goes on with the node that answers."""
    name = "lost"
    probe = os.path.join(trainer.folder, "probe.sh")
    with open(probe, "w") as file:
        # A host that is there refuses the connection at once.
        file.write("exec ip netns exec shardlib0 python3 -c 'import socket, sys; socket.setdefaulttimeout(2)\n"
                   "sys.exit(socket.socket().connect_ex((sys.argv[1], 9)) != 111)' $1\n")
    words = list(mpirun)
    at = words.index("--host")
    del words[at:at + 2]
    count = words.index("-n")
    del words[count:count + 2]
    # What comes behind the ranks' number and hosts stays behind them.
    tail = words[words.index("mpirun") + 1:]
    launcher = words[:words.index("mpirun") + 1]
    wrapper = os.path.join(trainer.folder, "mpirun.sh")
    put(wrapper, "#!/bin/bash\n" + f'exec {shlex.join(launcher)} "${{@:1:4}}" {shlex.join(tail)} "${{@:5}}"\n')
    os.chmod(wrapper, 0o755)
    log = open(os.path.join(trainer.folder, "lost.log"), "w+")
    process = subprocess.Popen(
        [os.path.join(HERE, "..", "scripts", "train.sh"), "--ranks", "2,1", "--hosts", "10.77.0.1:1,10.77.0.2:1", "--mpirun",
         wrapper, "--", *trainer.command(name, "--mesh=d={ranks},t=1", "--collective-timeout=3")],
        stdout=log, stderr=log, env=os.environ | {"TRAIN_PROBE": f"sh {probe}"})
    trainer.wait_for_step(name, 50, process)
    link("down")
    began = time.monotonic()
    status, text = restarts.ended(process, log)
    link("up")
    check(status == 0, f"{name}: ends with status 0, not {status}", text)
    check("host 10.77.0.2 does not answer: it is left out" in text, f"{name}: the host is named", text)
    curve = trainer.curve(name)
    check([s[0] for s in curve] == list(range(STEPS)), f"{name}: every step once, not {len(curve)}", text)
    apart = max((abs(a[1] - b[1]) / b[1] for a, b in zip(curve, undisturbed)), default=1)
    check(apart < 1e-4, f"{name}: the losses stay within rounding ({apart:.1e})")
    print(f"{name}: {len(curve)} steps within {apart:.1e}, {time.monotonic() - began:.1f} s after the cut", flush=True)


def a_signal_leaves_nothing():
    """The namespaces go with a benchmark that SIGTERM or SIGINT ends."""
    code = "import time; from common import Hosts\nwith Hosts():\n print('there', flush=True)\n time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=os.path.join(HERE, "..", "benchmarks"),
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        check(process.stdout.readline() == "there\n", "the links are there")
        process.send_signal(number)
        process.communicate(timeout=60)
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        check(process.returncode != 0 and "shardlib" not in left, f"{signal.Signals(number).name} leaves no namespace", left)


def main():
    args = arguments("trainer")
    with tempfile.TemporaryDirectory() as folder, Hosts() as command:
        trainer, mpirun = Trainer(args.trainer, [], folder), shlex.split(command)
        undisturbed = same_bits(trainer, mpirun, "peace", None)
        check(len(undisturbed) == STEPS, "peace: all steps")
        # 15 Mbit/s, and a queue that overflows at every burst: what is in excess is lost.
        for i in (0, 1):
            must(f"tc -n shardlib{i} qdisc add dev sl0 root tbf rate 15mbit burst 10k limit 10k")
        same_bits(trainer, mpirun, "slow_and_lossy", undisturbed)
        for i in (0, 1):
            shown = subprocess.run(["tc", "-n", f"shardlib{i}", "-s", "qdisc", "show", "dev", "sl0"], capture_output=True,
                                   text=True, check=True).stdout
            check("dropped 0," not in shown, f"shardlib{i}: packets were lost", shown)
            must(f"tc -n shardlib{i} qdisc del dev sl0 root")

        def flap(process):
            trainer.wait_for_step("cut_for_a_while", 30, process)
            link("down")
            time.sleep(1.5)
            link("up")

        same_bits(trainer, mpirun, "cut_for_a_while", undisturbed, ["--collective-timeout=30"], flap)
        cut_for_good(trainer, mpirun)
        node_is_lost(trainer, mpirun, undisturbed)
    a_signal_leaves_nothing()
    finish()


if __name__ == "__main__":
    main()
