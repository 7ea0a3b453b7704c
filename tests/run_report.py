#!/usr/bin/env python3
"""Reads the files of a run as others do: the report as HTML, the trace as JSON, TensorBoard's event files as TFRecords.

run_report.py --tests BINARY [--tool PROGRAM]

BINARY is shardlib_tests, of which it runs a hidden test that writes the files; PROGRAM is shardlib-report, run too where
it is given. Nothing but Python's standard library is needed: the parsers here know nothing of ours.
"""
import argparse
import glob
import html.parser
import json
import os
import re
import struct
import subprocess
import sys
import tempfile

failures = []


def check(ok, what):
    if not ok:
        failures.append(what)
        print(f"FAILED: {what}")


# ---- HTML ----------------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "img", "hr", "link", "input"}
SVG_EMPTY = {"line", "path", "circle"}  # written <.../> within SVG


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and collects text, attributes and the scripts that hold data."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.problems, self.texts, self.attributes, self.data, self.ids = [], [], [], [], [], []
        self.count = {}
        self.feed(text)
        self.close()
        if self.open:
            self.problems.append(f"never closed: {self.open}")

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in SVG_EMPTY:
            self.problems.append(f"<{tag}/> closes itself")
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} while {self.open[-3:]} are open")
        else:
            self.open.pop()

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            self.data.append(text)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(text)


def read_page(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    page = Page(text)
    name = os.path.basename(path)
    check(not page.problems, f"{name} is well formed: {page.problems[:3]}")
    check(len(page.ids) == len(set(page.ids)), f"{name}: ids are unique")
    # Nothing is fetched: no address in any attribute, style or script.
    for word in ["http:", "https:", "//cdn", "url(", "@import", "src=", "<link", "fetch(", "XMLHttpRequest"]:
        check(word not in text, f"{name} has no '{word}'")
    for tag, attribute, value in page.attributes:
        check(attribute not in ("src", "href"), f"{name}: <{tag} {attribute}={value!r}>")
        check(not attribute.startswith("on"), f"{name}: <{tag} {attribute}>")
        numeric = attribute in ("d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy")
        check(not numeric or not re.search("nan|inf", value), f"{name}: <{tag} {attribute}={value!r}>")
    charts = {}
    for chart, data in zip([i for i in page.ids], page.data):
        charts[chart] = json.loads(data)["series"]
        for series in charts[chart]:
            check(len(series["x"]) == len(series["y"]) > 0, f"{name}: {chart} has points")
            check(series["x"] == sorted(set(series["x"])), f"{name}: {chart}'s steps ascend")
    return page, charts, " ".join(page.texts)


def reports(folder):
    page, charts, text = read_page(f"{folder}/first/report.html")
    curves = {"loss", "grad_norm", "learning_rate", "speed", "mfu", "memory", "breakdown0"}
    check(set(charts) == curves, f"the report's charts are {sorted(charts)}")
    check([s["name"] for s in charts["loss"]] == ["first", "first, validation"], "loss and validation are drawn")
    first = charts["loss"][0]
    check(first["y"][0] == 11 and first["smooth"][0] == 11, "the loss begins where it does")
    check(all(abs(y - (3 + 8 / (1 + 0.01 * x))) < 1e-3 for x, y in zip(first["x"], first["y"])), "the loss is the loss")
    check(len(first["x"]) == 300, "a short run is not thinned")
    parts = {s["name"]: s["y"][0] for s in charts["breakdown0"]}
    check(parts == {"forward": 0.2, "all_gather": 0.1, "other": 0.2}, f"the parts of a step are {parts}")
    check('And <b>' in text and "</script> &" in text, "the sample is shown, as text")
    check('"<b>&"' in text and "model.d" in text, "the configuration is shown")
    check(page.count.get("b", 0) == len(charts) + 1, "no tag comes from a run's texts")

    page, charts, text = read_page(f"{folder}/compared.html")
    check("first" in text and "second" in text, "both runs are named")
    names = [s["name"] for s in charts["loss"]]
    check(names == ["first", "second", "first, validation"], f"both runs are drawn: {names}")
    differing = [r for r in page.attributes if r == ("tr", "class", "differs")]
    check(len(differing) == 2, "steps and model.d differ, and nothing else")
    check("mfu" in charts and [s["name"] for s in charts["mfu"]][0] == "first", "what one run lacks the other shows")


# ---- the trace -----------------------------------------------------------------------------------------------------


def trace(path):
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    check(rows == {0: "rank 0  d=0,t=0", 1: "rank 1  d=1,t=0"}, f"the trace's rows are {rows}")
    spans = [e for e in events if e["ph"] == "X"]
    check(len(spans) == 6, "every event is there")
    for e in spans:
        check(isinstance(e["ts"], (int, float)) and e["dur"] > 0 and e["tid"] > 0, f"the event {e} has its times")
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    check(all(tracks[e["pid"], e["tid"]] == e["cat"] for e in spans), "each event is on its category's track")
    gathers = [e for e in spans if e["name"] == "all_gather"]
    check(all(e["args"] == {"spec": "M/d F -> M F", "bytes": 1 << 20} for e in gathers), "spec and bytes are there")


# ---- TensorBoard ---------------------------------------------------------------------------------------------------


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def fields(data):
    """The fields of a protobuf message: (number, value)."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind == 1:
            (value,), at = struct.unpack("<d", data[at : at + 8]), at + 8
        elif kind == 5:
            (value,), at = struct.unpack("<f", data[at : at + 4]), at + 4
        else:
            length, at = varint(data, at)
            value, at = data[at : at + length], at + length
        yield key >> 3, value


def events(path):
    with open(path, "rb") as file:
        data = file.read()
    at = 0
    while at < len(data):
        head = data[at : at + 8]
        (length,), (crc,) = struct.unpack("<Q", head), struct.unpack("<I", data[at + 8 : at + 12])
        check(crc == masked(head), "a length has its checksum")
        body = data[at + 12 : at + 12 + length]
        check(struct.unpack("<I", data[at + 12 + length : at + 16 + length])[0] == masked(body), "data have theirs")
        at += 16 + length
        yield dict(fields(body))


def tensorboard(folder):
    check(crc32c(b"123456789") == 0xE3069283, "this test's own checksum is CRC-32C")
    files = sorted(glob.glob(f"{folder}/events.out.tfevents.*"))
    check(len(files) == 2, "each start writes one event file")
    first, second = (list(events(path)) for path in files)
    for each in (first, second):
        check(each[0][3] == b"brain.Event:2", "the file's version comes first")
        check(all(1.6e9 < e[1] < 1e11 for e in each), "events have the time")
    scalars = {}
    for event in first[1:]:
        value = dict(fields(dict(fields(event[5]))[1]))
        scalars.setdefault(value[1].decode(), []).append((event[2], value[2]))
    tags = {
        "train/loss", "train/learning_rate", "train/grad_norm", "speed/tokens_per_second", "speed/step_seconds",
        "speed/mfu", "memory/bytes", "validation/loss", "time/forward", "time/all_gather",
    }  # fmt: skip
    check(set(scalars) == tags, f"the tags are {sorted(scalars)}")
    check([s for s, _ in scalars["train/loss"]] == list(range(300)), "every step is there")
    check(all(abs(v - (3 + 8 / (1 + 0.01 * s))) < 1e-5 for s, v in scalars["train/loss"]), "the loss is the loss")
    check([s for s, _ in scalars["validation/loss"]] == list(range(9, 300, 10)), "validations are there")
    check(second[1][2] == 250 and dict(fields(second[1][7])) == {1: 1}, "a restart is marked with its step")


def tool(program, folder):
    def run(*words):
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, cwd=folder)

    done = run("first", "second/", "-o", "by_tool.html")
    check(done.returncode == 0 and done.stdout == "wrote by_tool.html\n", f"shardlib-report compares: {done}")
    with open(f"{folder}/by_tool.html", encoding="utf-8") as a, open(f"{folder}/compared.html", encoding="utf-8") as b:
        check(a.read() == b.read(), "the tool writes the same report")
    done = run("second")
    check(done.returncode == 0 and os.path.exists(f"{folder}/second/report.html"), "a run's report goes into its folder")
    for words, text in [
        (["nothing"], "error: there is no run 'nothing'\n"),
        ([], "error: RUN is required (see --help)\n"),
        (["first", "--outptu=x"], "error: unknown option --outptu; did you mean --output? (see --help)\n"),
    ]:
        done = run(*words)
        check(done.returncode == 2 and done.stderr == text, f"shardlib-report {words}: {done}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", required=True)
    parser.add_argument("--tool")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [os.path.abspath(arguments.tests), "[.run_report]"],
            env={**os.environ, "SHARDLIB_RUN_REPORT": folder},
            capture_output=True,
            text=True,
            timeout=120,
        )
        check(done.returncode == 0, f"the files were written: {done.stdout}{done.stderr}")
        if not failures:
            reports(folder)
            trace(f"{folder}/trace.json")
            tensorboard(f"{folder}/tensorboard")
            if arguments.tool:
                tool(os.path.abspath(arguments.tool), folder)
    print("failed" if failures else "all is well")
    return 1 if failures else 0


sys.exit(main())
