"""Functions that the Python tests share: expectations that are counted, whole files, and modules of Debian's Python."""
import argparse
import ctypes
import glob
import json
import os
import subprocess
import sys
import time

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


def arguments(*required, **others):
    """The values of the script's options: those that must be given, and others with their defaults; False is a flag."""
    about = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in required:
        parser.add_argument(f"--{name}", required=True)
    for name, default in others.items():
        how = {"action": "store_true"} if default is False else {"default": default, "type": str if default is None else type(default)}
        parser.add_argument(f"--{name}", **how)
    return parser.parse_args()


def oracle(program, compare, update):
    """Runs a comparison with numbers in tests/data: --PROGRAM FILE compares, --update makes the numbers."""
    options = arguments(**{program: None, "update": False})
    if options.update:
        update()
    if file := getattr(options, program):
        compare(file)
        finish()


def contents(*path):
    """The bytes of a file."""
    with open(os.path.join(*path), "rb") as file:
        return file.read()


def text_of(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def json_of(*path):
    return json.loads(text_of(*path))


def records(*path):
    """The objects of a file of JSON lines."""
    with open(os.path.join(*path), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def put(path, data):
    """Makes a file of a text or of bytes."""
    with open(path, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def tree(folder):
    """All files below a folder with their contents, by their paths in it."""
    paths = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in sorted(names)]
    return {os.path.relpath(path, folder): contents(path) for path in paths}


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def zstd(data):
    """Compressed by the library itself, with a checksum."""
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress2.restype = library.ZSTD_compressBound.restype = library.ZSTD_isError.restype = ctypes.c_size_t
    library.ZSTD_createCCtx.restype = ctypes.c_void_p
    context, size = ctypes.c_void_p(library.ZSTD_createCCtx()), ctypes.c_size_t
    library.ZSTD_CCtx_setParameter(context, 201, 1)  # ZSTD_c_checksumFlag
    packed = ctypes.create_string_buffer(library.ZSTD_compressBound(size(len(data))))
    length = library.ZSTD_compress2(context, packed, size(len(packed)), data, size(len(data)))
    library.ZSTD_freeCCtx(context)
    assert not library.ZSTD_isError(ctypes.c_size_t(length))
    return packed.raw[:length]


def wait_until(ready, process, seconds=60):
    """Until ready() or the end of the process, so many seconds at most."""
    limit = time.monotonic() + seconds
    while not ready() and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.001)


def children(pid):
    """The processes that a process has started, from any of its threads; none if it has ended."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            found += map(int, text_of(path).split())
        except OSError:
            pass
    return found


def shown(command):
    return " ".join([os.path.basename(command[0]), *map(str, command[1:])])


def ran(status, *command, timeout=None):
    """A finished command, which must end with this status."""
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    check(done.returncode == status, f"{shown(command)}: status {done.returncode} instead of {status}", done.stdout + done.stderr)
    return done


def told(status, *command, stderr=""):
    """What a tool prints. With status 0 it prints `stderr` there, with another an error of one line."""
    done = ran(status, *command, timeout=60)
    one_error = done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    check(one_error if status else done.stderr == stderr, f"{shown(command)}: stderr {done.stderr!r}")
    return done.stdout + done.stderr


def require_zarr():
    """Returns if this Python has zarr. Debian's package belongs to Debian's Python, which need not be the first one in the
    path: it starts the script again."""
    try:
        import zarr  # noqa: F401
    except ImportError:
        if sys.executable != "/usr/bin/python3" and os.access("/usr/bin/python3", os.X_OK):
            os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
        sys.exit(f"{os.path.basename(sys.argv[0])}: this Python has no zarr module: apt-get install python3-zarr")


def _zarr_v2():
    """zarr-python 3 writes the format v3, if it is not told otherwise; 2 has no such option."""
    import zarr
    return {} if zarr.__version__.startswith("2.") else {"zarr_format": 2}


def zarr_group(path, mode="w"):
    """A new group of zarr v2, by zarr-python 2 or 3."""
    import zarr
    return zarr.open_group(path, mode=mode, **_zarr_v2())


def zarr_array(root, name, **options):
    """A new array of zarr v2 in the group at `root`, by zarr-python 2 or 3 and with the compressor that 2 takes by itself;
    `values` fills it."""
    import numcodecs
    import zarr
    options = {"compressor": numcodecs.Blosc(), **options}
    values = options.pop("values", None)
    if values is not None:
        options |= {"shape": values.shape, "dtype": values.dtype}
    array = zarr.create(store=root, path=name, **options, **_zarr_v2())
    if values is not None:
        array[...] = values
    return array
