"""Functions that the benchmarks share: running programs, arguments, and links between network namespaces."""
import argparse
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PAYLOAD = 8948 / 9014  # the share of TCP's data, with time stamps, in a frame of 9000 bytes and its header
PACKET = 65536  # the default number of bytes that TCP hands to a link at once

if os.geteuid() == 0:  # Open MPI runs as root only if both variables are set
    os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")


def ran(command):
    """Returns the command's standard output. Ends this program if the command fails."""
    program = os.path.basename(sys.argv[0])
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        sys.exit(f"{program}: {command[0]} does not start: {error.strerror}: install it (scripts/setup.sh)")
    if result.returncode != 0:
        sys.exit(f"{program}: {shlex.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout


def built(folder, program):
    """Returns the program's path. Ends this program if it has not been built."""
    path = os.path.join(folder, program)
    if not os.access(path, os.X_OK):
        sys.exit(f"{os.path.basename(sys.argv[0])}: there is no {path}: build it, or name the folder (see --help)")
    return path


def readable(path):
    """A file's path, for argparse."""
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"cannot read '{path}': make it by scripts/text.sh, or name another")
    return path


def percent(text):
    """A part of a whole, for argparse."""
    if not re.fullmatch(r"\d*\.?\d+", text) or float(text) > 100:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 100")
    return float(text)


def count(least=1):
    """A whole number of at least `least`, for argparse."""
    def parsed(text):
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
        return int(text)
    return parsed


def parser_of(description, examples=None, data=True, **numbers):
    """A parser of --build or, for these examples alone, --examples; of --data where the benchmark trains; and of whole numbers of
    at least 1, by their names: their defaults, or the least ones and these."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = os.path.join(ROOT, "build/benchmarks")
    if examples:
        parser.add_argument("--examples", default=os.path.join(build, "examples"), help=f"folder of {examples}")
    else:
        parser.add_argument("--build", default=build, help="folder of the build (default: %(default)s)")
    if data:
        parser.add_argument("--data", type=readable, default=os.path.join(ROOT, "build/data/kjv.txt"),
                            help="text to train on (default: what scripts/text.sh makes)")
    for name, default in numbers.items():
        least, value = default if isinstance(default, tuple) else (1, default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=count(least), default=value, help=f"(default {value})")
    return parser


def gbit(text):
    """A link's rate, for argparse."""
    if not re.fullmatch(r"\d*\.?\d+", text) or float(text) < 0.001:
        raise argparse.ArgumentTypeError(f"'{text}' is not a rate in Gbit/s, of at least 0.001")
    return float(text)


def seconds(text):
    """A length of time, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return value


def no_links(reason):
    print(f"{os.path.basename(sys.argv[0])}: links take root, ip and tc (iproute2), and network namespaces: {reason}",
          file=sys.stderr)  # fmt: skip
    sys.exit(77)


def sh(command):
    """Returns whether the shell's command succeeded, and its standard error."""
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return ran.returncode == 0, ran.stderr.strip()


def must(command):
    done, error = sh(command)
    if not done:
        sys.exit(f"{os.path.basename(sys.argv[0])}: {command}: {error}")


class Hosts:
    """Network namespaces that a switch joins. Each has one rank, or `ranks` that share memory, and sends at a given rate, in
    Gbit/s, or as fast as the cores move bytes. They are gone at the end. Where the machine allows none, status 77. Their names
    are always the same, so that those of a killed run go too.

    Such a link has no network card, so each packet costs a timer and a turn of the kernel, on the cores that compute. Longer
    packets are fewer; but after a pause a link lets one packet through at any speed."""

    def __init__(self, rate=None, count=2, packet=PACKET, ranks=1):
        if os.geteuid() != 0:
            no_links("not root")
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                no_links(f"no {tool}")
        self.rate, self.count, self.packet, self.ranks = rate, count, packet, ranks
        self.lock = self.folder = None

    def __enter__(self):
        self.lock = open(os.path.join(tempfile.gettempdir(), "shardlib-links.lock"), "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{os.path.basename(sys.argv[0])}: another benchmark has the links")
        # SIGTERM alone would end Python without a call of __exit__.
        self.on_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            delete_namespaces()
            return self.make()
        except BaseException:
            self.__exit__()
            raise

    def make(self):
        """Makes the namespaces, and returns the mpirun that starts a rank in each."""
        made, error = sh("ip netns add shardlib-switch && ip -n shardlib-switch link add sw type bridge")
        if not made:
            no_links(error)
        must("ip -n shardlib-switch link set sw mtu 9000 up")
        hosts = []
        for i in range(self.count):
            hosts.append(f"10.77.0.{i + 1}")
            must(f"ip netns add shardlib{i}")
            # With long frames, headers take 1 % of the rate instead of 5 %.
            must(f"ip link add sl0 netns shardlib{i} mtu 9000 type veth peer name port{i} netns shardlib-switch mtu 9000")
            must(f"ip -n shardlib-switch link set port{i} master sw up")
            if self.packet != PACKET:
                for namespace, device in (("shardlib-switch", f"port{i}"), (f"shardlib{i}", "sl0")):
                    must(f"ip netns exec {namespace} {sys.executable} {shlex.quote(ROOT)}/benchmarks/long_packets.py {device} "
                         f"{self.packet}")
            must(f"ip -n shardlib{i} addr add {hosts[i]}/24 dev sl0")
            must(f"ip -n shardlib{i} link set lo up && ip -n shardlib{i} link set sl0 up")
            # Nothing else uses the link, so any congestion control is good enough, except bbr. It paces the data by its own
            # measurements, which include the ops that send nothing: on the same links a step took 5 to 8 % longer.
            must(f"ip netns exec shardlib{i} sysctl -qw net.ipv4.tcp_congestion_control=reno")
            if self.rate:
                # tbf lets a burst pass at any speed after a pause. It cuts up packets longer than that, which takes time.
                burst = max(1.05 * self.packet, self.rate * 1e9 / 8 * 0.2e-3)
                must(f"tc -n shardlib{i} qdisc add dev sl0 root tbf rate {1e6 * self.rate:.0f}kbit burst {burst:.0f} latency 50ms")
        # mpirun calls this script instead of ssh. Each host has a name of its own, so that only its ranks share memory, and a
        # folder of its own for temporary files, because Open MPI's daemons disturb each other while they make theirs.
        self.folder = tempfile.mkdtemp(prefix="shardlib-hosts-")
        agent = os.path.join(self.folder, "agent.sh")
        with open(agent, "w") as file:
            file.write(f'#!/bin/sh\nhost=$1; shift\nmkdir -p {self.folder}/$host\n'
                       f'exec {named("$host")} ip netns exec shardlib$((${{host##*.}} - 1)) env TMPDIR={self.folder}/$host sh -c "$*"\n')
        os.chmod(agent, 0o755)
        everyone = self.count * self.ranks
        return (f"{named(hosts[0])} ip netns exec shardlib0 mpirun -n {everyone} "
                f"--host {','.join(f'{host}:{self.ranks}' for host in hosts)} --mca plm_rsh_agent {agent} --bind-to none "
                f"--mca pml ob1 --mca btl self,tcp {'-x SHARDLIB_SHM=0 ' if self.ranks == 1 else ''}"
                # If there are more ranks than cores, a rank that waits yields its core.
                f"--mca mpi_yield_when_idle {int(everyone > os.cpu_count())} "
                # Each rank seems to be alone on its host, so MPI would bind all of them to core 0.
                f"""sh -c 'exec taskset -c $((OMPI_COMM_WORLD_RANK % {os.cpu_count()})) "$@"' rank""")

    @staticmethod
    def sent(host):
        """Bytes that a host has sent over its link."""
        return int(ran(["ip", "netns", "exec", f"shardlib{host}", "cat", "/sys/class/net/sl0/statistics/tx_bytes"]))

    def __exit__(self, *_):
        delete_namespaces()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()
        signal.signal(signal.SIGTERM, self.on_sigterm)


def named(host):
    """The beginning of a shell command that runs on a host of this name."""
    return f"""unshare --uts sh -c 'hostname "$0" && exec "$@"' {host}"""


def delete_namespaces():
    """Deletes the namespaces of this run, or of one that was killed."""
    for line in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.splitlines():
        name = line.split()[0]
        if re.fullmatch(r"shardlib(\d+|-switch)", name):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def traced_ops(folder):
    """The ops of a run's trace, in order. Passes and layers have events too, around those of their ops."""
    with open(os.path.join(folder, "trace.json")) as file:
        events = json.load(file)["traceEvents"]
    return sorted((event for event in events if event.get("cat") in ("ops", "collectives")), key=lambda event: event["ts"])
