#!/usr/bin/env python3
"""Compares the library's zarr files with python3-zarr: each reads what the other has written. Reads a checkpoint as
docs/checkpoints.md specifies it, and runs the checkpoint tool.

zarr_oracle.py --tests BINARY [--dataset DIR] [--tool BINARY]

--tests is shardlib_tests, whose hidden tests it runs; --dataset a zarr group of another program, which is optional; --tool the
program shardlib-checkpoint. Needs Debian's python3-zarr.
"""
import json
import os
import shutil
import struct
import subprocess
import tempfile

from checks import arguments, check, contents, crc32c, finish, put, ran, require_zarr, told, tree, zarr_array, zarr_group, zstd
from gpt2_oracle import read, read_all, write

require_zarr()
import numcodecs  # noqa: E402
import numpy  # noqa: E402
import zarr  # noqa: E402


def write_foreign(root, dataset):
    """Arrays in every dtype and codec, each with its elements' bytes (little-endian) beside it."""
    blosc = numcodecs.Blosc
    codecs = {
        "none": {"compressor": None},
        "lz4bit": {"compressor": blosc("lz4", 5, blosc.BITSHUFFLE)},
        "blosczstd": {"compressor": blosc("zstd", 3, blosc.SHUFFLE)},
        "noshuffle": {"compressor": blosc("lz4hc", 9, blosc.NOSHUFFLE)},
        "zlib": {"compressor": numcodecs.Zlib(6)},
        "gzip": {"compressor": numcodecs.GZip(6)},
        "zstd": {"compressor": numcodecs.Zstd(3)},
        "nested": {"compressor": None, "dimension_separator": "/"},
        "sum": {"compressor": numcodecs.CRC32()},
        "sumblosc": {"compressor": numcodecs.CRC32(), "filters": [blosc("lz4", 5, blosc.BITSHUFFLE)]},
        "sumzstd": {"compressor": numcodecs.CRC32(), "filters": [numcodecs.Zstd(3)]},
    }
    zarr_group(root)
    for dtype in ("<f4", "<f8", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "|b1", ">f4", ">i8", ">u2"):
        for name, options in codecs.items():
            values = (numpy.arange(23 * 17) % 91).reshape(23, 17).astype(dtype)
            zarr_array(root, f"{dtype[1:]}{'be' if dtype[0] == '>' else ''}_{name}", values=values, chunks=(10, 5), **options)
    for dtype, astype in (("<i8", "<i8"), ("<u4", "<u4"), ("<i4", "|i1"), ("|u1", "|u1"), (">i4", ">i4")):
        values = (numpy.cumsum(numpy.arange(200) % 5) % 100).astype(dtype)  # numpy 2 refuses a first element beyond i1
        for name, compressor in (("none", None), ("blosc", blosc("lz4", 5, blosc.BITSHUFFLE))):
            zarr_array(root, f"delta_{dtype[1:]}{'be' if dtype[0] == '>' else ''}_{astype[1:]}_{name}", values=values,
                       chunks=(64,), compressor=compressor, filters=[numcodecs.Delta(dtype, astype)])
            zarr_array(root, f"delta_sum_{dtype[1:]}{'be' if dtype[0] == '>' else ''}_{astype[1:]}_{name}",
                       values=values, chunks=(64,), compressor=numcodecs.CRC32(),
                       filters=[numcodecs.Delta(dtype, astype), *([compressor] if compressor else [])])
    # As seqax writes its datasets: u8 under a delta of i8.
    starts = numpy.cumsum(numpy.arange(100)).astype("<u8")
    zarr_array(root, "seq_starts", values=starts, chunks=(65536,), filters=[numcodecs.Delta("<i8")],
               compressor=blosc("lz4", 5, blosc.BITSHUFFLE))
    holes = zarr_array(root, "holes", shape=(10, 10), chunks=(3, 3), dtype="<f4", fill_value=float("nan"))
    holes[4:8, 1:9] = 3
    zarr_array(root, "scalar", values=numpy.array(42, "<i4"))
    zarr_array(root, "empty", shape=(0, 3), chunks=(2, 3), dtype="<f4")
    if dataset and os.path.isdir(dataset):
        shutil.copytree(dataset, os.path.join(root, "dataset"))

    for folder, _, files in os.walk(root):
        if ".zarray" in files:
            values = numpy.asarray(zarr.open_array(folder, mode="r")[...])
            values.astype(values.dtype.newbyteorder("<")).tofile(os.path.join(folder, "expected.raw"))


def write_v3(path, values, chunk, codec="none", shard=None, at_start=False, sums=True, holes=(), **metadata):
    """An array of zarr v3, with codec "none", "blosc", "gzip", "zlib" or "zstd", and `sums` for crc32c; chunks of `holes` are
    left out. Chunks of one `shard` share a file. By the specification alone: Debian's zarr has no v3."""
    little = values.dtype.newbyteorder("<")
    endian = "big" if values.dtype.byteorder == ">" else "little"
    sum_codecs = [{"name": "crc32c"}] if sums else []
    compressors = {"none": [], "gzip": [{"name": "gzip", "configuration": {"level": 5}}],
                   "zlib": [{"name": "numcodecs.zlib", "configuration": {"level": 5}}],
                   "zstd": [{"name": "zstd", "configuration": {"level": 0, "checksum": True}}],
                   "blosc": [{"name": "blosc", "configuration": {"cname": "zstd", "clevel": 5, "shuffle": "bitshuffle",
                                                                 "typesize": little.itemsize, "blocksize": 0}}]}
    names = {"f": "float", "i": "int", "u": "uint"}
    bits = "bool" if little.kind == "b" else f"{names[little.kind]}{8 * little.itemsize}"
    order = {"configuration": {"endian": endian}} if little.itemsize > 1 else {}
    codecs = [{"name": "bytes", **order}, *compressors[codec], *sum_codecs]

    def sealed(data):
        return data + struct.pack("<I", crc32c(data)) if sums else data

    def encoded(place):
        block = numpy.full(chunk, values.dtype.type(7), values.dtype)
        inside = tuple(slice(p * c, min((p + 1) * c, n)) for p, c, n in zip(place, chunk, values.shape))
        block[tuple(slice(0, s.stop - s.start) for s in inside)] = values[inside]
        data = block.tobytes()
        if codec == "gzip":
            data = numcodecs.GZip(5).encode(data)
        elif codec == "zlib":
            data = numcodecs.Zlib(5).encode(data)
        elif codec == "zstd":
            data = zstd(data)
        elif codec == "blosc":
            data = numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE).encode(block)
        return sealed(bytes(data))

    outer = shard or chunk
    each = [o // c for o, c in zip(outer, chunk)]
    os.makedirs(path)
    for place in numpy.ndindex(*[-(-n // o) for n, o in zip(values.shape, outer)]):
        chunks = []
        for inner in numpy.ndindex(*each):
            at = tuple(p * e + i for p, e, i in zip(place, each, inner))
            there = all(a * c < n for a, c, n in zip(at, chunk, values.shape)) and at not in holes
            chunks.append(encoded(at) if there else None)
        file = os.path.join(path, "c", *map(str, place))
        os.makedirs(os.path.dirname(file), exist_ok=True)
        if shard:
            length = 16 * len(chunks) + (4 if sums else 0)
            index, data, written = {}, b"", list(range(len(chunks)))
            for i in reversed(written):  # in any order
                begin = len(data) + (length if at_start else 0)
                index[i] = (2**64 - 1, 2**64 - 1) if chunks[i] is None else (begin, len(chunks[i]))
                data += chunks[i] or b""
            packed = sealed(b"".join(struct.pack("<QQ", *index[i]) for i in written))
            data = packed + data if at_start else data + packed
            if all(c is None for c in chunks):
                continue
        elif chunks[0] is None:
            continue
        else:
            data = chunks[0]
        put(file, data)
    if shard:
        codecs = [{"name": "sharding_indexed",
                   "configuration": {"chunk_shape": list(chunk), "codecs": codecs,
                                     "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *sum_codecs],
                                     "index_location": "start" if at_start else "end"}}]
    fill = True if little.kind == "b" else 7
    with open(os.path.join(path, "zarr.json"), "w") as out:
        json.dump({"zarr_format": 3, "node_type": "array", "shape": list(values.shape), "data_type": bits,
                   "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(outer)}},
                   "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "fill_value": fill,
                   "codecs": codecs, "attributes": {"unit": "m"}, "storage_transformers": [], **metadata}, out)
    expected = values.copy()
    for hole in holes:
        expected[tuple(slice(p * c, (p + 1) * c) for p, c in zip(hole, chunk))] = 1 if little.kind == "b" else 7
    expected.astype(little).tofile(os.path.join(path, "expected.raw"))


def write_foreign_v3(root):
    with_names = {"dimension_names": ["a", "b"], "extra": {"must_understand": False}}
    for dtype in ("<f4", "<f8", "|i1", "<i2", "<i8", "|u1", "<u4", "|b1", ">f4", ">u2"):
        values = (numpy.arange(23 * 17) % 91).reshape(23, 17).astype(dtype)
        for codec in ("none", "blosc", "gzip", "zlib", "zstd"):
            for sums in (True, False):
                name = os.path.join(root, f"v3_{dtype[1:]}{'be' if dtype[0] == '>' else ''}_{codec}{'_sum' * sums}")
                write_v3(name, values, (10, 5), codec, sums=sums)
                write_v3(name + "_end", values, (5, 4), codec, shard=(10, 12), sums=sums, holes={(0, 1), (3, 3)})
                write_v3(name + "_start", values, (5, 17), codec, shard=(25, 17), sums=sums, at_start=True, **with_names)
    line = (numpy.arange(1000) * 7).astype("<u4")
    for codec in ("none", "blosc", "gzip"):
        write_v3(os.path.join(root, "v3_line_" + codec), line, (100,), codec, shard=(300,), holes={(4,), (6,), (7,), (8,)})
    if zarr.__version__[0] > "2":  # what it writes by itself, which has zstd
        for name, shards in ("v3_own", None), ("v3_own_shards", (300,)):
            path = os.path.join(root, name)
            zarr.create_array(path, data=line, chunks=(100,), shards=shards, attributes={"unit": "m"})
            line.tofile(os.path.join(path, "expected.raw"))
    write_v3(os.path.join(root, "v3_scalar"), numpy.array(42, "<i4"), ())
    write_v3(os.path.join(root, "v3_empty"), numpy.zeros((0, 3), "<f4"), (2, 3))


def read_ours(root):
    group = zarr.open_group(root, mode="r")
    check(dict(group.attrs) == {"who": "shardlib", "list": [1, 2]}, "the attributes of a group")
    expected = (numpy.arange(37 * 11) % 100).reshape(37, 11)
    for name in ("f4", "f8", "i1", "i2", "i8", "u2", "u4", "u8", "nested"):
        dtype = "f4" if name == "nested" else name
        array = group[name]
        check(array.dtype == numpy.dtype(dtype) and array.chunks == (10, 4), f"the metadata of {name}")
        check(numpy.array_equal(array[:], expected.astype(dtype)), f"the values of {name}")
    check(group["holes"][:].tolist() == [7, 7, 1, 2, 7, 7], "missing chunks")
    for name in ("raw_sum", "blosc_sum", "zstd_sum"):
        check(numpy.array_equal(group[name][:], expected.astype("u2")), f"the values of {name}")
        path = os.path.join(root, name, "1.1")
        damaged = bytearray(contents(path))
        damaged[-1] ^= 1
        put(path, damaged)
        try:
            group[name][:]
            check(False, f"{name}: a flipped bit is read")
        except RuntimeError:
            pass


def read_checkpoint(root):
    """The checkpoint that the tests have saved on a mesh of 2 x 2, their arrays' bytes beside it."""
    check(contents(root, "checkpoint", "LATEST") == b"step-00000012\n", "LATEST")
    folder = os.path.join(root, "checkpoint", "step-00000012")
    manifest = contents(folder, "manifest.json")
    first, rest = manifest.split(b"\n", 1)
    parsed = json.loads(manifest)
    check(first == f'{{"crc32c": "{crc32c(rest):08x}",'.encode(), "the manifest's own checksum")
    check(parsed["format"] == "shardlib-checkpoint" and parsed["version"] == 2, "the manifest's format and version")
    found = tree(folder)
    check(set(found) == {*parsed["files"], "manifest.json"}, "the manifest lists every file")
    for name, expected in parsed["files"].items():
        data = found[name]
        check(expected == {"bytes": len(data), "crc32c": f"{crc32c(data):08x}"}, f"the manifest's entry for {name}")
    group = zarr.open_group(folder, mode="r")
    attributes = dict(group.attrs)
    check(attributes["step"] == 12 and attributes["data_hash"] == "abc", "step and data hash")
    check(attributes["user"] == {"config": 'd_model = 13\n"quoted"', "": "empty key"}, "the user's metadata")
    names = {name[:-4] for name in os.listdir(root) if name.endswith(".raw")}
    leaves = {}
    for name, array in group.arrays():
        pattern = array.attrs.get("leaves")
        if pattern:
            check(name == pattern.replace("*.", "", 1) and len(array.shape) == len(array.attrs["_ARRAY_DIMENSIONS"]),
                  f"the name and the dims of {name}")
        leaves.update({pattern.replace("*", str(i)): array[i] for i in range(array.shape[0])} if pattern else {name: array[...]})
    check(set(leaves) == names and len(names) == 13, "the leaves' names")
    for name, values in leaves.items():
        check(values.tobytes() == contents(root, name + ".raw"), f"the values of {name}")
    check(set(group.array_keys()) == {n for n in names if not n.startswith("layers.")} | {"layers.w", "layers.bias"},
          "the arrays' names")
    # Of four devices, each of the small arrays is one chunk, if it has elements, and two files about it.
    check(len(found) == 8 + 2 * 9 + 3, f"few files: {len(found)}")
    check(group["embed"].shape == (10, 13) and group["embed"].dtype == "<f4", "the shape of embed")
    check(group["embed"].attrs["_ARRAY_DIMENSIONS"] == ["V", "M"], "the dims of embed")
    bias = group["layers.bias"]
    check(bias.shape == (3, 7) and bias.attrs["_ARRAY_DIMENSIONS"] == ["layers", "F"], "the shape of the layers' biases")
    check(bias.dtype == "<u2" and bias.attrs["dtype"] == "bfloat16", "bf16")
    return folder


def not_finite(run, root):
    """Weights that are not finite are named when they are imported, and verify does not call them whole."""
    weights = {"a": struct.pack("<4f", 1, float("inf"), float("nan"), 2), "b": struct.pack("<4f", 1, 2, 3, 4)}
    file, made = os.path.join(root, "diverged.safetensors"), os.path.join(root, "diverged")
    write(file, {name: ("F32", [2, 2], data) for name, data in weights.items()})
    warned = f"warning: the leaf 'a' has 2 values that are not finite in '{file}'\n"
    run(0, "from-safetensors", file, made, stderr=warned)
    shown = run(1, "verify", os.path.join(made, "step-00000000"))
    check("the leaf 'a' has 2 values that are not finite\n" in shown and "'b'" not in shown and "has 1 of 2 leaves" in shown,
          "verify names the leaf that is not finite:\n" + shown)


def run_tool(tool, root, folder):
    def run(status, *arguments, stderr=""):
        return told(status, tool, *arguments, stderr=stderr)

    help_text = run(0, "--help")
    for command in ("list", "inspect", "verify", "to-safetensors", "from-safetensors"):
        check(command in help_text, f"--help names {command}")
        check(f"usage: shardlib-checkpoint {command} " in run(0, command, "--help"), f"{command} --help")
    shown = run(0, "list", os.path.dirname(folder))
    check("resumes from step-00000012" in shown and "13 leaves" in shown, "list:\n" + shown)
    shown = run(0, "inspect", folder)
    check("embed" in shown and "10 x 13" in shown and "bf16" in shown and "13 leaves" in shown, "inspect:\n" + shown)
    check("all checksums agree" in run(0, "verify", folder), "verify")
    not_finite(run, root)

    file = os.path.join(root, "out.safetensors")
    run(0, "to-safetensors", folder, file)
    metadata, tensors = read_all(file)
    check(metadata["step"] == "12" and len(tensors) == 13, "to-safetensors: metadata and number of tensors")
    for name, (_, _, data) in tensors.items():
        check(data == contents(root, name + ".raw"), f"to-safetensors: {name}")
    check(tensors["layers.1.bias"][:2] == ("BF16", [7]) and tensors["mask"][0] == "BOOL", "to-safetensors: dtypes")
    run(0, "to-safetensors", folder, file, "--prefix", "layers.0.")
    check(set(read(file)) == {"w", "bias"}, "to-safetensors --prefix")

    # A file of Python's making, back through a checkpoint.
    values = {"a": numpy.arange(6, dtype="<f4").reshape(2, 3), "h": numpy.array([1, -2, 0.5], "<f2"),
              "i": numpy.array(7, "<i4")}
    codes = {"a": "F32", "h": "F16", "i": "I32"}
    write(file, {name: (codes[name], list(value.shape), value.tobytes()) for name, value in values.items()}, {"who": "python"})
    target = os.path.join(root, "imported")
    run(0, "from-safetensors", file, target, "--step", "5")
    group = zarr.open_group(os.path.join(target, "step-00000005"), mode="r")
    for name, value in values.items():
        check(numpy.array_equal(group[name][...], value), f"from-safetensors: {name}")
    check(group["h"].dtype == "<f4" and group.attrs["user"] == {"who": "python"}, "from-safetensors: dtype, metadata")

    check("already exists" in run(2, "from-safetensors", file, target, "--step", "5"), "no checkpoint is replaced")
    check("did you mean verify?" in run(2, "verifi", folder), "an unknown command names the nearest")
    check("CKPT is required" in run(2, "verify"), "what is missing is named")
    check("not a regular file" in run(2, "to-safetensors", folder, root), "to-safetensors onto a folder")
    for wrong in ((), ("frobnicate",), ("verify",), ("verify", folder, "more"), ("verify", root), ("list", root + "/no"),
                  ("from-safetensors", root + "/no", target), ("from-safetensors", file, target, "--step", "-1"),
                  ("to-safetensors", folder, file, "--prefix", "nothing.")):
        run(2, *wrong)
    chunk = os.path.join(folder, "embed", "0.0")
    damaged = bytearray(contents(chunk))
    damaged[3] ^= 1
    put(chunk, damaged)
    check("embed/0.0" in run(1, "verify", folder), "verify names the damaged file")
    run(1, "to-safetensors", folder, file)
    with open(file, "ab") as out:
        out.write(b"x")
    run(1, "from-safetensors", file, target)
    os.truncate(chunk, 5)
    listed = subprocess.run([tool, "list", os.path.dirname(folder)], capture_output=True, text=True).stdout
    check("DAMAGED: 'embed/0.0'" in listed and "resumes" not in listed, "list sees a wrong size:\n" + listed)
    os.remove(os.path.join(folder, "manifest.json"))
    check("DAMAGED" in subprocess.run([tool, "list", os.path.dirname(folder)], capture_output=True, text=True).stdout,
          "list marks a damaged checkpoint")


def main():
    args = arguments("tests", dataset=None, tool=None)
    with tempfile.TemporaryDirectory(prefix="shardlib_zarr_") as root:
        write_foreign(os.path.join(root, "foreign"), args.dataset)
        write_foreign_v3(os.path.join(root, "foreign"))
        if ran(0, "env", f"SHARDLIB_ZARR_ORACLE={root}", args.tests, "[.zarr_oracle]", timeout=300).returncode == 0:
            read_ours(os.path.join(root, "ours"))
            folder = read_checkpoint(root)
            if args.tool:
                run_tool(args.tool, root, folder)
    finish()


if __name__ == "__main__":
    main()
