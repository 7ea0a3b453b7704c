#!/usr/bin/env python3
"""Pipelines against microbatched FSDP on two ranks, in one run: the comparison of JaxPP's tutorial.

The same GPT, global batch and number of microbatches in five layouts that take turns: fully sharded over d=2 (all
microbatches at once, and one after the other as a pipeline takes them), and p=2 under 1F1B, interleaved 1F1B and
ZeroBubble. Prints each one's median seconds a step and, for the pipelines, what the simulator makes of the last step's
mean task times beside what was measured.

  benchmarks/pipeline.py             the ranks share memory
  benchmarks/pipeline.py --rate 1    each rank in a network namespace, a veth pair of 1 Gbit/s between (root)
"""
import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LAYOUTS = {
    "FSDP, one batch": ["--mesh=p=1,d=2", "--microbatches=1"],
    "FSDP, microbatched": ["--mesh=p=1,d=2"],
    "1F1B": ["--mesh=p=2", "--schedule=1f1b"],
    "interleaved 1F1B": ["--mesh=p=2", "--schedule=interleaved-1f1b", "--stages=4"],
    "ZeroBubble": ["--mesh=p=2", "--schedule=zero-bubble"],
}

if os.geteuid() == 0:  # Open MPI refuses to run as root unless told twice
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def ran(command):
    """Its standard output; ends this program if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        program = os.path.basename(sys.argv[0])
        sys.exit(f"{program}: {shlex.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout


def built(folder, program):
    """Its path; ends this program if it has not been built."""
    path = os.path.join(folder, program)
    if not os.access(path, os.X_OK):
        sys.exit(f"{os.path.basename(sys.argv[0])}: there is no {path}: build it, or name the folder (see --help)")
    return path


def count(least=1):
    """A whole number of at least so much, for argparse."""
    def parsed(text):
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least {least}")
        return int(text)
    return parsed


def gbit(text):
    """A link's rate, for argparse."""
    if not re.fullmatch(r"\d*\.?\d+", text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no rate in Gbit/s")
    return float(text)


def no_links(reason):
    print(f"{os.path.basename(sys.argv[0])}: links take root, ip and tc (iproute2), and network namespaces: {reason}",
          file=sys.stderr)  # fmt: skip
    sys.exit(77)


def sh(command):
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        no_links(f"{command}: {ran.stderr.strip()}")


class Hosts:
    """Network namespaces, a rank in each, joined by a switch: each sends at a given rate, in Gbit/s. They are gone at the
    end. Where none can be, status 77. They have one name on a machine, so that what a killed run has left goes too."""

    def __init__(self, rate, count=2):
        if os.geteuid() != 0:
            no_links("not root")
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                no_links(f"no {tool}")
        self.rate, self.count = rate, count
        self.lock = open(os.path.join(tempfile.gettempdir(), "shardlib-links.lock"), "w")  # until this object goes
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{os.path.basename(sys.argv[0])}: another benchmark has the links")

    def __enter__(self):
        self.__exit__()
        try:
            return self.make()
        except BaseException:
            self.__exit__()
            raise

    def make(self):
        """The namespaces; returns the mpirun that starts a rank in each."""
        sh("ip netns add shardlib-switch && ip -n shardlib-switch link add sw type bridge")
        sh("ip -n shardlib-switch link set sw mtu 9000 up")
        hosts = []
        for i in range(self.count):
            hosts.append(f"10.77.0.{i + 1}")
            sh(f"ip netns add shardlib{i}")
            # Long frames: of the rate, headers take 1 % instead of 5.
            sh(f"ip link add sl0 netns shardlib{i} mtu 9000 type veth peer name port{i} netns shardlib-switch mtu 9000")
            sh(f"ip -n shardlib-switch link set port{i} master sw up")
            sh(f"ip -n shardlib{i} addr add {hosts[i]}/24 dev sl0")
            sh(f"ip -n shardlib{i} link set lo up && ip -n shardlib{i} link set sl0 up")
            # After a pause tbf lets a burst through at any speed; packets longer than that, and TCP's have up to 64 KB, it
            # cuts up, which takes the time of the ranks' cores.
            burst = max(66000, self.rate * 1e9 / 8 * 0.2e-3)
            sh(f"tc -n shardlib{i} qdisc add dev sl0 root tbf rate {self.rate:.3f}gbit burst {burst:.0f} latency 50ms")
        # What mpirun calls instead of ssh.
        self.agent = tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False)
        self.agent.write('#!/bin/sh\nhost=$1; shift\nexec ip netns exec shardlib$((${host##*.} - 1)) sh -c "$*"\n')
        self.agent.close()
        os.chmod(self.agent.name, 0o755)
        return (f"ip netns exec shardlib0 mpirun -n {self.count} --host {','.join(hosts)} "
                f"--mca plm_rsh_agent {self.agent.name} --bind-to none --mca pml ob1 --mca btl self,tcp -x SHARDLIB_SHM=0 "
                # More ranks than cores: who waits lets others run.
                f"--mca mpi_yield_when_idle {int(self.count > os.cpu_count())} "
                # Each takes itself for alone on its host: left to MPI all are bound to core 0.
                f"""sh -c 'exec taskset -c $((OMPI_COMM_WORLD_RANK % {os.cpu_count()})) "$@"' rank""")

    def __exit__(self, *_):
        for name in ["-switch", *range(self.count)]:
            subprocess.run(f"ip netns del shardlib{name}", shell=True, stderr=subprocess.DEVNULL, check=False)
        if hasattr(self, "agent") and os.path.exists(self.agent.name):
            os.unlink(self.agent.name)


def measure(options, mpirun, layout, folder):
    """Seconds of each step, and the timeline's caption."""
    metrics, timeline = os.path.join(folder, "metrics.jsonl"), os.path.join(folder, "timeline.svg")
    for file in (metrics, timeline):
        if os.path.exists(file):
            os.unlink(file)
    command = shlex.split(mpirun) + [os.path.join(options.examples, "gpt_pipeline"), f"--data={options.data}",
        f"--steps={options.steps}", f"--batch={options.batch}", f"--microbatches={options.microbatches}",
        f"--seq={options.seq}", f"--layers={options.layers}", f"--d-model={options.d_model}", "--n-kv=4",
        f"--d-head={options.d_model // 8}", f"--d-ff={3 * options.d_model}", f"--metrics={metrics}"] + LAYOUTS[layout]
    if "--mesh=p=2" in LAYOUTS[layout]:
        command.append(f"--timeline={timeline}")
    ran(command)
    with open(metrics) as lines:
        seconds = [json.loads(line)["step_seconds"] for line in lines][2:]
    captions = []
    if os.path.exists(timeline):
        with open(timeline) as file:
            captions = re.findall(r"(?:planned|measured): [^<]*", file.read())
    return seconds, captions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", default=os.path.join(ROOT, "build/benchmarks/examples"), help="folder of gpt_pipeline")
    parser.add_argument("--data", default=os.path.join(ROOT, "build/data/kjv.txt"), help="a text")
    parser.add_argument("--rate", type=gbit, help="bandwidth of a link between the ranks, in Gbit/s")
    for name, default in (("rounds", 2), ("steps", 8), ("batch", 16), ("microbatches", 8), ("seq", 128), ("layers", 8),
                          ("d-model", 256)):
        parser.add_argument(f"--{name}", type=count(3 if name == "steps" else 1), default=default, help=f"(default {default})")
    options = parser.parse_args()
    built(options.examples, "gpt_pipeline")
    seconds = {layout: [] for layout in LAYOUTS}
    captions = {}
    with tempfile.TemporaryDirectory() as folder:
        def all_rounds(mpirun):
            for _ in range(options.rounds):
                for layout in LAYOUTS:
                    times, captions[layout] = measure(options, mpirun, layout, folder)
                    seconds[layout] += times
        if options.rate:
            with Hosts(options.rate) as mpirun:
                all_rounds(mpirun)
        else:
            all_rounds("mpirun -n 2 --bind-to core")
    base = statistics.median(seconds["FSDP, microbatched"])
    print(f"{options.layers} layers, d_model {options.d_model}, batch {options.batch} x {options.seq} tokens, "
          f"{options.microbatches} microbatches, 2 ranks, "
          + (f"in network namespaces at {options.rate:g} Gbit/s" if options.rate else "sharing memory"))
    print(f"{'layout':<20} {'ms a step':>10}  {'(middle 80 %)':<18} {'microbatched FSDP over it':>26}")
    for layout, times in seconds.items():
        times.sort()
        low, high = times[len(times) // 10], times[-1 - len(times) // 10]
        median = statistics.median(times)
        print(f"{layout:<20} {1e3 * median:>10.0f}  ({1e3 * low:.0f} .. {1e3 * high:.0f})".ljust(53)
              + f"{base / median:>25.2f}")
    for layout, texts in captions.items():
        for text in texts:
            print(f"{layout}: {text.strip()}")


if __name__ == "__main__":
    main()
