"""What the Python tests share: expectations that are counted, and modules of Debian's Python."""
import os
import sys

failures = []


def check(ok, what, detail=""):
    """Counts an expectation that does not hold, and prints it with the end of `detail`. Returns whether it holds."""
    if not ok:
        failures.append(what)
        print(f"FAILED {what}\n{detail[-5000:]}".rstrip(), flush=True)
    return ok


def finish():
    """Ends the script: with status 1 if anything failed."""
    print(f"{os.path.basename(sys.argv[0])}: {len(failures)} failures")
    sys.exit(1 if failures else 0)


def require_zarr():
    """Returns if this Python has zarr. Debian's package belongs to Debian's Python, which need not be the first one in the
    path: it starts the script again."""
    try:
        import zarr  # noqa: F401
    except ImportError:
        if sys.executable != "/usr/bin/python3" and os.access("/usr/bin/python3", os.X_OK):
            os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
        sys.exit(f"{os.path.basename(sys.argv[0])}: this Python has no zarr module: apt-get install python3-zarr")
