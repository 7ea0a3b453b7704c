#!/usr/bin/env python3
"""Reads and batches flat-tokens data independently, with python3-zarr and numpy as seqax's loader does, and compares.

flat_tokens_oracle.py --tests BINARY [--dataset DIR]

BINARY is shardlib_tests, whose hidden test it runs. DIR is seqax's sample data set, which is optional. Needs Debian's
python3-zarr.
"""
import os
import tempfile

from checks import arguments, check, finish, ran, require_zarr, zarr_array, zarr_group

require_zarr()
import numcodecs  # noqa: E402
import numpy  # noqa: E402
import zarr  # noqa: E402


def write_split(root, split, documents):
    """One split as seqax's writer leaves it: blosc with bit shuffling, starts under a delta; empty documents stay."""
    tokens = numpy.concatenate(documents).astype("<u4") * 2
    starts = numpy.concatenate([[0], numpy.cumsum([len(d) for d in documents])]).astype("<u8")
    tokens[[int(s) for s, d in zip(starts, documents) if len(d)]] |= 1
    blosc = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE)
    group = zarr_group(os.path.join(root, split))
    zarr_array(root, f"{split}/encoded_tokens", values=tokens, chunks=(1000,), compressor=blosc, fill_value=None)
    zarr_array(root, f"{split}/seq_starts", values=starts, chunks=(64,), compressor=blosc, filters=[numcodecs.Delta("<i8")])
    group.attrs["max_token_id"] = int(tokens.max() >> 1)


def make_dataset(path):
    random = numpy.random.default_rng(0)
    zarr_group(path)
    for split, count in (("train", 300), ("validation", 40)):
        lengths = random.integers(0, 90, count) * (random.random(count) > 0.1)
        write_split(path, split, [random.integers(0, 1200, n) for n in lengths])


def batches(group, rows, batch, length, repeat, steps):
    """Inputs, targets, segments and weights of the first steps, in the order of the data."""
    encoded = group["encoded_tokens"][:].astype(numpy.int64)
    count = steps * batch * length
    if rows == "packed":
        weights = numpy.ones(count)
        if repeat:
            encoded = numpy.resize(encoded, count)
        else:
            weights[len(encoded):] = 0
            encoded = numpy.concatenate([encoded, numpy.ones(count, numpy.int64)])[:count]
        weights = weights.reshape(-1, length)
    else:
        ends = group["seq_starts"][:].astype(numpy.int64)
        spans = [(a, b) for a, b in zip(ends[:-1], ends[1:]) if b > a]
        padded = numpy.ones((steps * batch, length), numpy.int64)  # a 1 is id 0 and a start, as seqax pads
        weights = numpy.zeros((steps * batch, length))
        for row in range(steps * batch):
            a, b = spans[row % len(spans)]
            n = min(b - a, length)
            padded[row, :n] = encoded[a:a + n]
            weights[row, :n] = 1
        encoded = padded
    encoded = encoded.reshape(-1, length)
    targets, is_start = encoded >> 1, (encoded & 1) == 1
    inputs = numpy.pad(targets[:, :-1], ((0, 0), (1, 0)))
    inputs = numpy.where(is_start, 0, inputs)
    segments = numpy.cumsum(is_start, axis=1)
    segments -= segments[:, :1]
    # All filling of a row is one segment of ours, and one each of seqax's.
    filling = weights == 0
    first = numpy.where(filling.any(axis=1), filling.argmax(axis=1), 0)
    segments = numpy.where(filling, segments[numpy.arange(len(segments)), first][:, None], segments)
    return inputs, targets, segments, weights


def main():
    args = arguments("tests", dataset=None)
    with tempfile.TemporaryDirectory(prefix="shardlib_flat_tokens_") as root:
        made = os.path.join(root, "made.zarr")
        make_dataset(made)
        datasets = [made]
        if args.dataset and os.path.isdir(args.dataset):
            datasets.append(args.dataset)
        with open(os.path.join(root, "cases"), "w") as cases:
            for dataset in datasets:
                for split in ("train", "validation"):
                    group = zarr.open_group(dataset, mode="r")[split]
                    for rows, batch, length, repeat in (("packed", 64, 64, 1), ("packed", 3, 1000, 1),
                                                        ("packed", 4, 128, 0), ("padded", 8, 64, 1),
                                                        ("padded", 5, 40, 1)):
                        tokens = group["encoded_tokens"].shape[0]
                        steps = -(-tokens // (batch * length)) + (3 if repeat else 0) if rows == "packed" else 80
                        steps = min(steps, 500)
                        name = f"expected_{os.path.basename(dataset)}_{split}_{rows}_{batch}_{length}_{repeat}"
                        with open(os.path.join(root, name), "wb") as file:
                            for array in batches(group, rows, batch, length, repeat, steps):
                                file.write(array.astype("<i4").tobytes())
                        print(dataset, split, rows, batch, length, repeat, steps, name, file=cases)
        if ran(0, "env", f"SHARDLIB_FLAT_TOKENS_ORACLE={root}", args.tests, "[.flat_tokens_oracle]", timeout=300).returncode == 0:
            # What the library has written again reads as what it came from.
            for split in ("train", "validation"):
                theirs, ours = (zarr.open_group(p, mode="r")[split] for p in (made, os.path.join(root, "ours.zarr")))
                check(numpy.array_equal(theirs["encoded_tokens"][:], ours["encoded_tokens"][:]), f"{split}: the tokens")
                check(numpy.array_equal(numpy.unique(theirs["seq_starts"][:]), ours["seq_starts"][:]),
                      f"{split}: the starts")
                check(dict(theirs.attrs) == dict(ours.attrs), f"{split}: the attributes")
                check(ours["encoded_tokens"].compressor.codec_id == "crc32", f"{split}: checksums, which zarr checks")
            data = open(os.path.join(root, "ours.bin"), "rb").read()
            header, ids = numpy.frombuffer(data[:1024], "<i4"), numpy.frombuffer(data[1024:], "<u2")
            encoded = zarr.open_group(made, mode="r")["train/encoded_tokens"][:]
            check(header[:3].tolist() == [20240520, 1, len(ids)] and not header[3:].any(), "llm.c's header")
            check(numpy.array_equal(ids[ids != 50256], encoded >> 1), "llm.c's tokens")
            check(numpy.array_equal((ids == 50256).nonzero()[0] - numpy.arange((ids == 50256).sum()),
                                    (encoded & 1).nonzero()[0]), "llm.c's ends of text")
    finish()


if __name__ == "__main__":
    main()
