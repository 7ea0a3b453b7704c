#!/usr/bin/env python3
"""Runs the tool `tokenize` as a user would, kills it, and reads what it writes independently.

tokenizer_tool.py --tool BUILD/examples/tokenize

Needs python3-zarr. Prints what failed; the exit status is 1 then.
"""
import base64
import gzip
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import tempfile

from checks import arguments, check, contents, finish, json_of, put, require_zarr, told, tree, wait_until, zstd

require_zarr()
import zarr  # noqa: E402

TIMEOUT = 60  # seconds for one run, against hangs
MARK = b"<|endoftext|>"

tool = ""


def run(*options):
    return subprocess.run([tool, *map(str, options)], capture_output=True, text=True, timeout=TIMEOUT)


def succeeds(*options):
    return told(0, tool, *options)


def fails(words, *options):
    said = told(2, tool, *options)
    check(words in said, f"{options} ends with {words!r}", said)


def flat_tokens(path):
    """The documents of both splits, as tuples of ids."""
    splits = []
    for split in ("train", "validation"):
        group = zarr.open_group(os.path.join(path, split), mode="r")
        tokens, starts = group["encoded_tokens"][:], group["seq_starts"][:]
        documents = [tokens[a:b] for a, b in zip(starts[:-1], starts[1:])]
        for document in documents:
            check([int(t) & 1 for t in document] == [1] + [0] * (len(document) - 1), f"{path}: marks of starts")
        check(group.attrs["max_token_id"] == max([0, *(int(t) >> 1 for t in tokens)]), f"{path}: max_token_id")
        splits.append([tuple(int(t) >> 1 for t in document) for document in documents])
    return splits


def bin_documents(path):
    data = contents(path)
    magic, version, count = struct.unpack_from("<3i", data)
    check((magic, version, len(data)) == (20240520, 1, 1024 + 2 * count), f"{path}: header")
    documents = []
    for token in struct.unpack_from(f"<{count}H", data, 1024):
        if token == 0:
            documents.append([])
        else:
            documents[-1].append(token)
    return [tuple(d) for d in documents]


def split_of(document, fraction):
    head = int.from_bytes(hashlib.sha256(document).digest()[:8], "big")
    return int(head < fraction * 2**64)


def expected(documents, fraction, end):
    splits = [[], []]
    for document in documents:
        splits[split_of(document, fraction)].append(tuple(document) + end)
    return splits


def some_documents(count, longest):
    """Documents of words and other bytes, from a generator of our own."""
    state, documents = 7, []
    words = [b"in ", b"the ", b"beginning ", "\u00e4\u6771 ".encode(), b"\xff ", b"<|endoftext", b"|>\n", b"word\n"]
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        document = b"x%d " % state
        while len(document) < state % longest:
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            document += words[(state >> 33) % len(words)] * (1 + (state >> 50) % 9)
        documents.append(document.replace(MARK, b""))
    return documents


def write(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    put(path, data)


def what_is_written(folder):
    """What is written is what an independent reader finds."""
    documents = some_documents(400, 3000)
    texts = os.path.join(folder, "texts")
    # Sorted by path, hidden names left out; empty and white documents vanish.
    write(texts + "/a.txt", MARK.join(documents[:100]))
    write(texts + "/b/c.txt", MARK + MARK.join(documents[100:250]) + MARK + MARK + b" \n" + MARK)
    write(texts + "/b/.hidden", b"not this")
    write(texts + "/.git/x", b"nor this")
    write(texts + "/d.txt", MARK.join(documents[250:]))
    write(texts + "/e.txt", b"")
    out = os.path.join(folder, "out")
    printed = succeeds(texts, "--out", out, "--validation-fraction", 0.2)
    train, validation = wanted = expected(documents, 0.2, (0,))
    check(len(train) > 250 and len(validation) > 40, "both splits have documents")
    check(flat_tokens(out) == wanted, "flat-tokens has the documents")
    check(f"train {len(train)} documents, {sum(map(len, train))} tokens" in printed, "the summary counts", printed)
    check(json_of(out + "/.zattrs") == {"tokenizer": "bytes", "tokenizer_fingerprint": "bytes"}, "it names its tokenizer")
    succeeds(texts, "--out", out + "1", "--validation-fraction", 0.2, "--jobs", 1)
    succeeds(texts, "--out", out + "7/", "--validation-fraction", 0.2, "--jobs", 7)
    check(tree(out) == tree(out + "1") == tree(out + "7"), "any number of threads writes the same bytes")
    succeeds(texts, "--out", out + "n", "--validation-fraction", 0, "--no-end-of-text")
    check(flat_tokens(out + "n") == [[tuple(d) for d in documents], []], "without validation, without ends of text")

    succeeds(texts, "--out", out + "b", "--validation-fraction", 0.2, "--to", "llmc")
    found = [bin_documents(f"{out}b/{name}.bin") for name in ("train", "val")]
    check(found == expected(documents, 0.2, ()), "llm.c's files have the documents")
    succeeds(texts + "/a.txt", "--out", out + "c", "--validation-fraction", 0, "--to", "llmc")
    names = ["tokens.json", "train.bin", "train.bin.crc32c"]
    check(sorted(os.listdir(out + "c")) == names, "no val.bin where no document is for validation")
    with open(out + "c/tokens.json") as file:
        note = {"format": "shardlib-tokens", "tokenizer": "bytes", "tokenizer_fingerprint": "bytes", "end_of_text": 0}
        check(json.load(file) == note, "llm.c's files have a note that names their tokenizer")

    succeeds(texts, "--out", out + "f", "--validation-fraction", 0, "--document-per-file")
    per_file = []
    for name in ("a.txt", "b/c.txt", "d.txt"):
        per_file.append(tuple(contents(f"{texts}/{name}")) + (0,))
    check(flat_tokens(out + "f") == [per_file, []], "a document a file")

    # A mark across the blocks in which a file is read, and a document of several blocks.
    for before in range(2**20 - 14, 2**20 + 2):
        write(folder + "/edge.txt", b"a" * before + MARK + b"b" * 5)
        succeeds(folder + "/edge.txt", "--out", f"{out}e{before}", "--validation-fraction", 0)
        lengths = [len(d) for d in flat_tokens(f"{out}e{before}")[0]]
        check(lengths == [before + 1, 6], f"a mark after {before} bytes", str(lengths))

    # The same with a vocabulary: ids are joined bytes, the end of text is the last.
    alphabet = [bytes([b]) for b in range(256)] + [b"th", b"the", b"in"]
    with open(folder + "/small.tiktoken", "w") as file:
        file.writelines(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(alphabet))
    write(folder + "/small.txt", b"the in" + MARK + b"x")
    succeeds(folder + "/small.txt", "--tokenizer", folder + "/small.tiktoken", "--out", out + "s",
             "--validation-fraction", 0)
    check(flat_tokens(out + "s")[0] == [(257, 32, 258, 259), (120, 259)], "a vocabulary's ids")


def line(document, **more):
    return json.dumps({**more, "text": document}).encode() + b"\n"


def other_inputs(folder):
    """JSON lines, gzip and zstd have the same documents as a text, wherever the blocks of reading end."""
    documents = [d for d in some_documents(200, 1000) if b"\xff" not in d] + [b"in the \xc3\xa4" * 130000]
    strings = [d.decode() for d in documents]
    out = os.path.join(folder, "out")
    write(folder + "/a.txt", MARK.join(documents))
    succeeds(folder + "/a.txt", "--out", out, "--validation-fraction", 0.2)
    lines = b"".join(line(s, n=i, nested={"text": [1, {}]}) for i, s in enumerate(strings))
    write(folder + "/a.jsonl", b"\n" + lines + b" \n" + line(" \n "))
    # Members one behind another are one text, zeros may follow, and a last line may have no end.
    write(folder + "/a.jsonl.gz", gzip.compress(lines[:70000]) + gzip.compress(lines[70000:-1]))
    write(folder + "/a.gz", gzip.compress(MARK.join(documents)) + bytes(300000))
    for name, *options in ("a.jsonl", "--field", "text"), ("a.jsonl.gz", "--field", "text"), ("a.gz",):
        succeeds(folder + "/" + name, "--out", f"{out}-{name}", "--validation-fraction", 0.2, *options)
        check(tree(f"{out}-{name}") == tree(out), f"{name} gives the bytes of the text")
    succeeds(folder + "/a.gz", "--out", out + "f", "--validation-fraction", 0, "--document-per-file")
    check(zarr.open_array(out + "f/train/seq_starts", mode="r").shape == (2,), "a compressed file is one document")
    # A mark in a document of JSON is text.
    write(folder + "/mark.jsonl", json.dumps({"body": "a" + MARK.decode() + "\u00e9"}).encode())
    succeeds(folder + "/mark.jsonl", "--out", out + "m", "--validation-fraction", 0, "--field", "body")
    check(flat_tokens(out + "m")[0] == [tuple(b"a" + MARK + "\u00e9".encode()) + (0,)], "a mark within JSON is text")

    def refused(words, data, *options, name="bad.jsonl"):
        write(folder + "/" + name, data)
        fails(words, folder + "/" + name, "--out", out + "x", *(options or ["--field", "text"]))

    there = f"{folder}/bad.jsonl:2: the line "
    refused(there + "is not a JSON object (nothing): mend or remove it", b'{"text": "a"}\nnothing\n')
    refused(there + 'has no key "text", which --field names: mend or remove it', b'{"text": "a"}\n{"txt": "a"}\n')
    refused(there + 'has no text as "text": mend or remove it', b'{"text": "a"}\n{"text": 1}\n')
    long = b"".join(line("x" * 1000) for _ in range(3000))
    refused(f"{folder}/bad.jsonl:3001: the line is not", long + b"nothing\n" + long)
    refused(f"{folder}/bad.jsonl.gz:3001: the line is not", gzip.compress(long + b"nothing\n" + long), name="bad.jsonl.gz")
    refused(there + "has a text with a zero byte", b'{"text": "a"}\n{"text": "\\u0000"}\n')
    refused("is not a JSON object", b"[" * 100000)
    refused("holds JSON lines by its name: say with --field", b"{}", "--validation-fraction", 0)
    refused("leave one out", b"{}", "--field", "text", "--document-per-file")
    def damaged(library, whole, name):
        for broken in (whole[:-20], whole[:40] + b"xx" + whole[42:], whole + b"xx" + whole[2:], whole + whole[:9]):
            write(folder + "/" + name, broken)
            done = run(folder + "/" + name, "--out", out + "z")
            words = rf"{name}' is damaged or was cut short, says {library} \(.*, at byte \d+\): get it again"
            check(done.returncode == 1 and re.search(words, done.stderr), "broken " + library, done.stderr)
            check(not os.path.exists(out + "z"), f"broken {library} leaves no data set")

    some = " ".join(str(i * i) for i in range(1000)).encode()
    damaged("zlib", gzip.compress(some), "broken.gz")
    write(folder + "/a.jsonl.zst", zstd(lines[:70000]) + b"\x50\x2a\x4d\x18\x02\0\0\0ab" + zstd(lines[70000:-1]))
    done = run(folder + "/a.jsonl.zst", "--out", out + "-zst", "--validation-fraction", 0.2, "--field", "text")
    check(done.returncode == 0 and tree(out + "-zst") == tree(out), "zstd gives the bytes of the text", done.stderr)
    damaged("zstd", zstd(some), "broken.zst")


def tokenizers(folder):
    """A tokenizer.json, and what the data remembers of it."""
    style = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "tokenizers", "llama2.json")
    cases = json_of(os.path.dirname(style), "expected.json")["llama2"]
    picked = [i for i, t in enumerate(cases["texts"]) if t.strip() and "\0" not in t and MARK.decode() not in t]
    write(folder + "/t.txt", MARK.join(cases["texts"][i].encode() for i in picked))
    out = folder + "/out"
    printed = succeeds(folder + "/t.txt", "--out", out, "--tokenizer", style, "--validation-fraction", 0)
    check(flat_tokens(out)[0] == [(*cases["as_text"][i], 2) for i in picked], "a tokenizer.json's ids, and its end of text")
    attributes = json_of(out + "/.zattrs")
    check(attributes["tokenizer"].startswith("bpe-") and attributes["tokenizer"] in printed, "its name is recorded")
    check(", 1 file, " in printed, "one file is not '1 files'", printed)
    check(attributes["tokenizer"][4:] == attributes["tokenizer_fingerprint"][:12], "and its fingerprint")
    succeeds(folder + "/t.txt", "--out", out + "b", "--to", "llmc", "--tokenizer", style, "--validation-fraction", 0)
    note = json_of(out + "b/tokens.json")
    check((note["tokenizer_fingerprint"], note["end_of_text"]) == (attributes["tokenizer_fingerprint"], 2), "beside .bin too")


def errors(folder):
    text, out = folder + "/text.txt", folder + "/new"
    write(text, b"some text")
    os.makedirs(folder + "/empty")
    fails("INPUT is required", "--out", out)
    fails("--out is required", text)
    fails("see --help", text, "--out", out, "--to", "csv")
    fails("see --help", text, "--out", out, "--jobs", 0)
    fails("see --help", text, "--out", out, "--validation-fraction", 2)
    fails(f"'{folder}/none'", folder + "/none", "--out", out)
    fails(f"the folder '{folder}/empty' holds no files", folder + "/empty", "--out", out)
    fails("is given twice: give each file once", text, folder + "/./" + os.path.basename(text), "--out", out)
    fails("--out is given an empty value: give DIR", text, "--out=")
    fails("no tokenizer 'nothing'", text, "--out", out, "--tokenizer", "nothing")
    write(folder + "/zero.txt", b"a\0")
    fails(f"'{folder}/zero.txt' is not a text file: byte 1 is zero", folder + "/zero.txt", "--out", out)
    check(not os.path.exists(out), "an error leaves no data set")
    write(folder + "/white.txt", b" \n")
    fails("no document", folder + "/white.txt", "--out", out + "w")
    fails(f"'{text}': no document for training has tokens", text, "--out", out + "v", "--validation-fraction", 1)
    fails("no document", text, "--out", out + "l", "--validation-fraction", 1, "--to", "llmc")
    for kind in ("flat-tokens", "llmc"):
        succeeds(text, "--out", out + kind, "--to", kind, "--validation-fraction", 0)
        fails("already exists", text, "--out", out + kind, "--to", kind)
    os.makedirs(out + "x.partial")
    write(out + "x.partial/mine", b"precious")
    fails("--commit-seconds has no effect with --to llmc", text, "--out", out + "v", "--to", "llmc", "--commit-seconds", 5)
    fails("remove it, or write elsewhere", text, "--out", out + "x", "--to", "llmc")
    fails("remove it, or write elsewhere", text, "--out", out + "x")
    check(os.listdir(out + "x.partial") == ["mine"], "a folder of somebody else is left alone")


def interrupted(folder):
    """Killed again and again, it ends with the same bytes as a run that was not."""
    text, out = folder + "/long.txt", folder + "/killed"
    some = MARK.join(some_documents(200, 40000)) + MARK
    with open(text, "wb") as file:
        for i in range(12):
            file.write(b"%d " % i + some)
    options = ["--out", out, "--validation-fraction", "0.1"]
    succeeds(text, "--out", folder + "/whole", "--validation-fraction", 0.1)

    def note(path=out):
        try:
            return json_of(path + ".partial/.progress")["note"]
        except FileNotFoundError:
            return ""

    killed = resumed = 0
    for attempt in range(4):
        before = note()
        with subprocess.Popen([tool, text, *options, "--commit-seconds", "0"], stdout=subprocess.PIPE) as process:
            wait_until(lambda: note() != before, process)
            process.send_signal(signal.SIGKILL)
            resumed += b"resuming after" in process.stdout.read()
        killed += process.returncode == -signal.SIGKILL
        if not check(not os.path.exists(out), "a killed run leaves no data set by its name"):
            return
    check(killed == 4, "it was killed at each attempt", str(killed))
    record = json_of(out + ".partial/.progress")
    put(out + ".partial/.progress", json.dumps({**record, "note": ""}))  # as of a program that commits without one
    fails("was begun with other files or options", text, *options)
    put(out + ".partial/.progress", json.dumps(record))
    fails("was begun with other files or options", text, *options, "--no-end-of-text")
    fails("was begun with other files or options", text, "--out", out, "--validation-fraction", 0.2)
    printed = succeeds(text, *options)
    check("resuming after" in printed, "the last run went on", printed)
    check(tree(out) == tree(folder + "/whole"), "the same bytes as without interruptions")
    check(not os.path.exists(out + ".partial"), "nothing unfinished is left")

    # A compressed file goes on from a place of its contents.
    with gzip.open(folder + "/long.gz", "wb", compresslevel=1) as packed:
        packed.write(contents(text))
    options = ["--out", out + "gz", "--validation-fraction", "0.1"]
    with subprocess.Popen([tool, folder + "/long.gz", *options, "--commit-seconds", "0"]) as process:
        wait_until(lambda: note(out + "gz"), process)
        process.send_signal(signal.SIGKILL)
    printed = succeeds(folder + "/long.gz", *options)
    check("resuming after" in printed, "a compressed input goes on", printed)
    check(tree(out + "gz") == tree(folder + "/whole"), "the same bytes from a compressed input")

    bins = ["--out", out + "b", "--to", "llmc", "--validation-fraction", "0.1"]
    with subprocess.Popen([tool, text, *bins]) as process:
        wait_until(lambda: os.path.exists(out + "b.partial/train.bin.partial"), process)
        process.send_signal(signal.SIGKILL)
    check(process.returncode == -signal.SIGKILL and not os.path.exists(out + "b"), "llm.c's files: killed")
    fails("is not an unfinished data set", text, "--out", out + "b")
    succeeds(text, *bins)
    succeeds(text, "--out", folder + "/wholeb", "--to", "llmc", "--validation-fraction", 0.1)
    check(tree(out + "b") == tree(folder + "/wholeb"), "llm.c's files: begun anew")


def main():
    global tool
    tool = os.path.abspath(arguments("tool").tool)
    for part in (what_is_written, other_inputs, tokenizers, errors, interrupted):
        with tempfile.TemporaryDirectory() as folder:
            part(folder)
    finish()


if __name__ == "__main__":
    main()
