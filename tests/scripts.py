#!/usr/bin/env python3
"""Each script refuses an option that it does not have at once, with one line and status 2, before it installs, builds or downloads
anything.

test-newer.sh gives its options to ctest, and restarts.py tests train.sh.
"""
import os
import signal
import subprocess

from checks import check, finish

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts")
SECONDS = 20  # it takes less than one


def what_is_wrong(script):
    """How a script does not refuse an unknown option; empty if it does."""
    command = [os.path.join(SCRIPTS, script), "--nope"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as started:  # fmt: skip
        try:
            error = started.communicate(timeout=SECONDS)[1]
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)  # with the compilers that it has started
            return "it goes on"
    right = error.startswith(f"{script}: unknown ") and "'--nope'" in error and error.count("\n") == 1
    return "" if started.returncode == 2 and right else f"status {started.returncode}, {error!r}"


def main():
    for script in sorted(os.listdir(SCRIPTS)):
        if script.endswith(".sh") and script not in ("common.sh", "system.sh", "test-newer.sh", "train.sh"):
            wrong = what_is_wrong(script)
            check(not wrong, f"{script} --nope: {wrong}")
    finish()


if __name__ == "__main__":
    main()
