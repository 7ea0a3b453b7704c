#!/usr/bin/env python3
"""Makes the small tokenizer.json files of tests/data/tokenizers: one for each style that docs/tokenizer.md names.

tokenizer_styles.py [--out tests/data/tokenizers]

It learns their merges from the Bible (the program `bible`), so they look like those of real models. The files also have added
tokens, with all their options. Needs Python's standard library. If this program changes, the files change; then
`tokenizer_oracle.py --oracles --update` gets the ids that are expected of them.
"""
import collections
import json
import os
import re

from checks import arguments, put
from tokenizer_oracle import bible

HERE = os.path.dirname(os.path.abspath(__file__))
MERGES = 320
OTHER = """
Straße, Äpfel und Öl; naïve café, l'été à Noël. Ça va? Привет, мир! Как дела? Γειά σου Κόσμε. 日本語の文章です。東京は日本の首都です。
中文文本，北京是中国的首都。 한국어 문장입니다. def f(x):\n    return x + 1\n\n\tif x == 10:\r\n\t\tprint("hello", 12345)\n
don't we'll I'D they've CAN'T it's 1998 2024 100000 ... !!! ??? --- === 🙂🙂 👩‍👩‍👦 ½ ² ١٢٣ e\u0301 a\u0308
"""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")


def alphabet():
    """GPT-2's characters for bytes, in its order."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    rest = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


ALPHABET = alphabet()


def learn(pieces, count):
    """The merges that are most frequent one after another; of equal ones the first in the order of texts."""
    words, merges = {tuple(piece): n for piece, n in pieces.items()}, []
    while len(merges) < count:
        pairs = collections.Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        joined = {}
        for word, n in words.items():
            parts, i = [], 0
            while i < len(word):
                if word[i : i + 2] == (left, right):
                    parts.append(left + right)
                    i += 2
                else:
                    parts.append(word[i])
                    i += 1
            joined[tuple(parts)] = joined.get(tuple(parts), 0) + n
        words = joined
    return merges


def pieces(text, bytes_):
    """Roughly those of the regular expressions: what is learned from need not be exact."""
    found = collections.Counter(re.findall(r" ?[^\W\d_]+|\d{1,3}| ?[^\w\s]+|\s*[\r\n]+|\s+", text))
    if bytes_:
        return {"".join(ALPHABET[b] for b in piece.encode()): n for piece, n in found.items()}
    spaced = collections.Counter()
    for piece, n in found.items():
        spaced[piece.replace(" ", "\u2581")] += n
    return spaced


def token(content, ident, special=True, **options):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": not special}
    return {"id": ident, "content": content, **plain, "special": special, **options}


def bpe(vocab, merges, **options):
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **options, "vocab": vocab, "merges": merges}


def tokenizer(model, added, normalizer, pre_tokenizer, decoder, post_processor=None):
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": decoder, "model": model}


def sequence(name, *steps):
    return {"type": "Sequence", name: list(steps)}


def byte_level(prefix=False, regex=True):
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def metaspace(scheme, split_):
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split_}


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def styles():
    text = bible().decode()[:300000] + OTHER * 40
    learned = learn(pieces(text, True), MERGES)
    strings = [f"{a} {b}" for a, b in learned]
    bytes_ = {c: i for i, c in enumerate(ALPHABET.values())}
    vocab = dict(bytes_)
    for a, b in learned:
        vocab.setdefault(a + b, len(vocab))
    n = len(vocab)
    yield "gpt2", tokenizer(
        bpe({**vocab, "<|endoftext|>": n}, strings, continuing_subword_prefix="", end_of_word_suffix=""),
        [token("<|endoftext|>", n), token("<mask>", n + 1, lstrip=True), token("<r>", n + 2, False, rstrip=True),
         token("   ", n + 3, False), token("     ", n + 4, False, normalized=False)],
        None, byte_level(), byte_level(), byte_level())
    yield "roberta", tokenizer(
        bpe({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, **{t: i + 4 for t, i in vocab.items()}}, strings,
            unk_token="<unk>"),
        [token("<s>", 0), token("<pad>", 1), token("</s>", 2), token("<unk>", 3),
         token("<mask>", n + 4, lstrip=True, rstrip=True)],
        None, byte_level(True), byte_level(),
        {"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 0], "trim_offsets": True,
         "add_prefix_space": True})
    # Ids that are not in the order of the merges, tokens that no merge makes, a merge that counts twice.
    mixed = {t: (i * 7 + 3) % (n + 2) for t, i in {**vocab, "\u0120unmergeable": n, "qxz": n + 1}.items()}
    pairs = [list(p) for p in learned[:40] + learned[60:] + learned[40:60] + learned[3:4]]
    ends = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|eot_id|>"]
    template = [{"SpecialToken": {"id": ends[0], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    yield "llama3", tokenizer(
        bpe(mixed, pairs, ignore_merges=True), [token(t, n + 2 + i) for i, t in enumerate(ends)], None,
        sequence("pretokenizers", split(LLAMA3), byte_level(False, False)), byte_level(),
        sequence("processors", byte_level(), {
            "type": "TemplateProcessing", "single": template,
            "pair": template + [{"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {ends[0]: {"id": ends[0], "ids": [n + 2], "tokens": [ends[0]]}}}))
    yield "qwen2", tokenizer(
        bpe(mixed, pairs),
        [token("<|endoftext|>", n + 2), token("<|im_start|>", n + 3), token("<|im_end|>", n + 4),
         token("<think>", n + 5, False, normalized=False), token("</think>", n + 6, False, normalized=False),
         token("e\u0301t", n + 7, False)],
        {"type": "NFC"}, sequence("pretokenizers", split(QWEN2), byte_level(False, False)), byte_level(), byte_level())
    yield "digits", tokenizer(
        bpe({"<|endoftext|>": 0, **{t: i + 1 for t, i in vocab.items()}}, strings), [token("<|endoftext|>", 0)],
        sequence("normalizers", {"type": "NFKC"}, replace("``", '"')),
        sequence("pretokenizers", {"type": "Digits", "individual_digits": True},
                 {"type": "Split", "pattern": {"String": "--"}, "behavior": "MergedWithNext", "invert": False},
                 byte_level()),
        byte_level())

    learned = learn(pieces(text, False), MERGES)
    strings = [f"{a} {b}" for a, b in learned]
    frequent = collections.Counter(text.replace(" ", "\u2581"))
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    for a, b in learned:
        vocab.setdefault(a + b, len(vocab))
    for c in sorted({c for pair in learned for c in "".join(pair)} | {c for c in frequent if frequent[c] >= 100}):
        vocab.setdefault(c, len(vocab))
    usual = [token("<unk>", 0), token("<s>", 1), token("</s>", 2)]
    n = len(vocab)
    fallback = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    prepended = sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581"))
    spelled = sequence("decoders", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
                       {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    yield "llama2", tokenizer(bpe(vocab, strings, **fallback),
                              [token("<unk>", 0, normalized=True)] + usual[1:] + [token("<tool>", n, False), token("[x]", n + 1, False, normalized=False)],
                              prepended, None, spelled)
    yield "metaspace_first", tokenizer(bpe(vocab, strings, **fallback), usual, None, metaspace("first", False), spelled)
    yield "metaspace_always", tokenizer(
        bpe(vocab, strings, **fallback, ignore_merges=True), usual + [token("<extra>", n, rstrip=True)],
        {"type": "NFC"}, metaspace("always", True),
        sequence("decoders", {"type": "ByteFallback"}, metaspace("always", True)))
    runs = ["\n\n", "\n\n\n", "\u2581\u2581", "\t\t"]
    new = [t for t in runs if t not in vocab]
    yield "gemma", tokenizer(
        bpe({**vocab, **{t: n + i for i, t in enumerate(new)}}, [s.split(" ") for s in strings], **fallback),
        usual + [token(t, vocab.get(t, n + new.index(t) if t in new else 0), False, normalized=False) for t in runs],
        replace(" ", "\u2581"),
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        sequence("decoders", replace("\u2581", " "), {"type": "ByteFallback"}, {"type": "Fuse"}))


def main():
    out = arguments(out=os.path.join(HERE, "data", "tokenizers")).out
    os.makedirs(out, exist_ok=True)
    for name, made in styles():
        parts = ",\n".join(f"{json.dumps(k)}:{json.dumps(v, ensure_ascii=False, separators=(',', ':'))}" for k, v in made.items())
        put(os.path.join(out, name + ".json"), "{" + parts + "}\n")


if __name__ == "__main__":
    main()
