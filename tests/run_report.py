#!/usr/bin/env python3
"""Reads the files of a run as others do: the report as HTML, the trace as JSON, TensorBoard's event files as TFRecords.

run_report.py --tests BINARY [--tool PROGRAM]

BINARY is shardlib_tests, whose hidden test writes the files. PROGRAM is shardlib-report; it is optional. Needs nothing but
Python's standard library: the parsers here are independent of the library. If node is installed, report_script.js runs the
report's script, too.
"""
import csv
import fcntl
import glob
import html.parser
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import tempfile

from checks import arguments, check, crc32c, finish, json_of, put, ran, records, text_of
from event_files import bars, events, fields


# ---- HTML ----------------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and collects text, attributes and the scripts that hold data."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.problems, self.texts, self.attributes, self.ids = [], [], [], [], []
        self.data, self.owner = {}, None
        self.count = {}
        self.feed(text)
        self.close()
        if self.open:
            self.problems.append(f"never closed: {self.open}")

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag in ("figure", "script"):
            self.owner = dict(attrs).get("id", self.owner)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.problems.append(f"<{tag}/> closes itself")
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} while {self.open[-3:]} are open")
        else:
            self.open.pop()

    def handle_data(self, text):
        if self.open and self.open[-1] == "script":
            if "</script" not in text and text.startswith("{"):
                self.data[self.owner] = json.loads(text)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(text)


def read_page(path):
    text = text_of(path)
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
    charts = {}
    for chart, data in page.data.items():
        if chart == "page":
            continue
        charts[chart] = data["series"]
        for series in charts[chart]:
            series["x"] = list(itertools.accumulate(series["step"]))
            check(len(series["x"]) == len(series["y"]) > 0, f"{name}: {chart} has points")
            check(series["x"] == sorted(set(series["x"])), f"{name}: {chart}'s steps ascend")
    return page, charts, " ".join(page.texts)


def reports(folder):
    page, charts, text = read_page(f"{folder}/first/report.html")
    curves = {"loss", "grad_norm", "learning_rate", "speed", "mfu", "memory", "breakdown0"}
    check(set(charts) == curves, f"the report's charts are {sorted(charts)}")
    check([s["name"] for s in charts["loss"]] == ["first", "first, validation"], "loss and validation are drawn")
    first = charts["loss"][0]
    check(first["y"][0] == 11, "the loss begins where it does")
    check(all(abs(y - (3 + 8 / (1 + 0.01 * x))) < 1e-3 for x, y in zip(first["x"], first["y"])), "the loss is the loss")
    check(first["x"] == list(range(300)) and "low" not in first, "a short run is not thinned")
    run = page.data["page"]["runs"][0]
    check(run["tokens"][-1] == 150000 and run["seconds"][-1] == 150, "300 steps of 0.5 s and 500 tokens")
    check(page.data["page"]["every"] == 0, "a finished run's page is not loaded again")
    check(page.count.get("details", 0) == len(charts) + 1, "each chart has its values as text")
    check("275 – 299" in text and page.count["noscript"] == 2, "which need no script")
    parts = {s["name"]: s["y"][0] for s in charts["breakdown0"]}
    check(parts == {"forward": 0.2, "all_gather": 0.1, "other": 0.2}, f"the parts of a step are {parts}")
    check('And <b>' in text and "</script> &" in text, "the sample is shown, as text")
    shown = " ".join(text.split())
    check('"<b>&"' in shown and "model value d 1" in shown, "the configuration is shown by its sections")
    check(page.count.get("b", 0) == len(charts) + 1, "no tag comes from a run's texts")

    page, charts, text = read_page(f"{folder}/compared.html")
    check("first" in text and "second" in text, "both runs are named")
    names = [s["name"] for s in charts["loss"]]
    check(names == ["first", "second", "first, validation"], f"both runs are drawn: {names}")
    differing = [r for r in page.attributes if r == ("tr", "class", "differs")]
    check(len(differing) == 2, "steps and model.d differ, and nothing else")
    check([s["name"] for s in charts.get("mfu", [])] == ["first"], "what one run lacks the other shows")

    page, charts, text = read_page(f"{folder}/live.html")
    check(page.data["page"]["every"] == 30 and page.data["page"]["written"] > 1.6e9, "a run that goes on is shown as such")
    if shutil.which("node"):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report_script.js")
        pages = [f"{folder}/{name}.html" for name in ("first/report", "compared", "live")]
        ran(0, "node", script, *pages, timeout=60)  # the page's script does what it should
    else:
        print("there is no node: the report's script was not run")


# ---- colors ---------------------------------------------------------------------------------------------------------


def linear_rgb(color):
    color = color[1:] if len(color) == 7 else "".join(2 * c for c in color[1:])
    parts = [int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def contrast(a, b):
    """The contrast ratio of WCAG 2."""
    low, high = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear_rgb(x))) for x in (a, b))
    return (high + 0.05) / (low + 0.05)


# What people see who lack the receptors of green (Machado, Oliveira, Fernandes 2009).
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]


def oklab(color, seen):
    def times(matrix, v):
        return [sum(m * x for m, x in zip(row, v)) for row in matrix]

    rgb = [max(c, 0) for c in times(seen, linear_rgb(color))]
    lms = times([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                 [0.0883024619, 0.2817188376, 0.6299787005]], rgb)  # fmt: skip
    return times([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                  [0.0259040371, 0.7827717662, -0.8086757660]], [c ** (1 / 3) for c in lms])  # fmt: skip


def colors(path):
    style = text_of(path).split("<style>")[1].split("</style>")[0]
    light, dark = (dict(re.findall(r"--(\w+):(#\w+)", rules)) for rules in re.findall(r":root\{([^}]*)\}", style)[:2])
    check(set(light) == set(dark) and len(light) == 22, "both themes have all colors")
    same = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    for theme, color in (("light", light), ("dark", {**light, **dark})):
        for kind, number in itertools.product("cp", range(8)):
            name, following = f"{kind}{number}", f"{kind}{(number + 1) % 8}"
            for ground in ("card", "bg"):
                ratio = contrast(color[name], color[ground])
                check(ratio >= 3, f"{theme}: the contrast of {name} with {ground} is {ratio:.2f}")
            for seen in (same, DEUTERANOPIA):
                distance = math.dist(oklab(color[name], seen), oklab(color[following], seen))
                check(distance >= 0.1, f"{theme}: {name} and {following} differ by {distance:.3f}")
        for text, ground in itertools.product(("ink", "dim"), ("card", "bg")):
            check(contrast(color[text], color[ground]) >= 4.5, f"{theme}: {text} on {ground} is readable")
        check(contrast(color["ink"], color["mark"]) >= 4.5, f"{theme}: marked rows are readable")
        check(contrast(color["ink"], color["line"]) >= 4.5, f"{theme}: pressed buttons are readable")


# ---- the trace -----------------------------------------------------------------------------------------------------


def trace(path):
    events = json_of(path)["traceEvents"]
    rows = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    check(rows == {0: "rank 0  d=0,t=0", 1: "rank 1  d=1,t=0"}, f"the trace's rows are {rows}")
    spans = [e for e in events if e["ph"] == "X"]
    check(len(spans) == 6, "every event is there")
    for e in spans:
        check(isinstance(e["ts"], (int, float)) and e["dur"] > 0 and e["tid"] > 0, f"the event {e} has its times")
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    check(all(tracks[e["pid"], e["tid"]] == e["cat"] for e in spans), "each event is on its category's track")
    tids = [tid for _, tid in tracks]
    check(len(set(tids)) == len(tids) and all(pid != tid for pid, tid in tracks), f"each track has its own tid: {tids}")
    gathers = [e for e in spans if e["name"] == "all_gather"]
    check(all(e["args"] == {"spec": "M/d F -> M F", "bytes": 1 << 20} for e in gathers), "spec and bytes are there")


# ---- TensorBoard ---------------------------------------------------------------------------------------------------


def tensorboard(folder):
    check(crc32c(b"123456789") == 0xE3069283, "this test's own checksum is CRC-32C")
    files = sorted(glob.glob(f"{folder}/events.out.tfevents.*"))
    check(len(files) == 2, "each start writes one event file")
    first, second = (list(events(path)) for path in files)
    for each in (first, second):
        check(each[0][3] == b"brain.Event:2", "the file's version comes first")
        check(all(1.6e9 < e[1] < 1e11 for e in each), "events have the time")
    scalars = {}
    texts = {}
    histograms = {}
    for event in first[1:]:
        value = dict(fields(dict(fields(event[5]))[1]))
        if 8 in value:
            tensor, plugin = dict(fields(value[8])), dict(fields(dict(fields(value[9]))[1]))
            check(tensor[1] == 7 and plugin == {1: b"text"}, "a text is a tensor of strings for the plugin of texts")
            texts[value[1].decode()] = event[2], tensor[8].decode()
            continue
        if 5 in value:
            histograms[value[1].decode()] = event[2], dict(fields(value[5]))
            continue
        scalars.setdefault(value[1].decode(), []).append((event[2], value[2]))
    tags = {
        "train/loss", "train/learning_rate", "train/grad_norm", "speed/tokens_per_second", "speed/step_seconds",
        "speed/mfu", "memory/bytes", "validation/loss", "time/forward", "time/all_gather",
    }  # fmt: skip
    expected = {
        "configuration": (0, "    [model]\n    d = 64\n    "),
        "sample": (299, "    And *so* on\n    to the end"),
        "sample/2": (299, "    And"),
        "sample/3": (299, "    And then"),
    }
    check(texts == expected, f"texts are shown as they are: {texts}")
    check(scalars.pop("not_finite/weights/layers/0/w", None) == [(299, 2)], "values that are not finite are counted")
    check(set(histograms) == {"weights/layers/0/w", "weights/none"}, f"the histograms are {sorted(histograms)}")
    step, some = histograms["weights/layers/0/w"]
    numbers = [-3, 8, 6, -3 + 0.5 + 0.5 + 0.6 + 1e-20 + 8, 9 + 0.25 + 0.25 + 0.6**2 + 64]
    check(step == 299, "a histogram has its step")
    check(all(abs(some[i + 1] - x) < 1e-12 for i, x in enumerate(numbers)), f"min, max, num and sums: {some}")
    full = [bar for bar in bars(some) if bar[2] > 0]
    check(full == [(-3, -3, 1), (-(2**-40), 2**-40, 1), (0.5, 0.625, 3), (8, 8, 1)], f"the bars are {full}")
    none = histograms["weights/none"][1]
    check(none[3] == 0 and not none[6] and not none[7], f"a histogram of no values: {none}")
    check(set(scalars) == tags, f"the tags are {sorted(scalars)}")
    check([s for s, _ in scalars["train/loss"]] == list(range(300)), "every step is there")
    check(all(abs(v - (3 + 8 / (1 + 0.01 * s))) < 1e-5 for s, v in scalars["train/loss"]), "the loss is the loss")
    check([s for s, _ in scalars["validation/loss"]] == list(range(9, 300, 10)), "validations are there")
    check(second[1][2] == 250 and dict(fields(second[1][7])) == {1: 1}, "a restart is marked with its step")


def follows(program, folder):
    """--follow writes the page again until no process holds the lock of a run."""
    page = f"{folder}/followed.html"

    def every():
        return int(re.search(r'"every":(\d+)', text_of(page))[1])

    with open(f"{folder}/first/metrics.jsonl", "rb") as run:
        fcntl.flock(run, fcntl.LOCK_EX)
        words = [program, "first", "second", "-o", page, "--follow", "1"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=folder) as started:
            check(started.stdout.readline() == f"wrote {page}\n" and every() == 1, "a page that loads itself again")
            check(started.stdout.readline() == f"wrote {page}\n", "the page is written again")
            fcntl.flock(run, fcntl.LOCK_UN)
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()
            check(started.returncode == 0 and every() == 0, f"the last page is that of finished runs: {started}")


def exports(run, folder):
    """--csv and --jsonl, read with Python's standard library."""
    done = run("first", "second", "--csv", "runs.csv")
    check(done.returncode == 0 and done.stdout == "wrote runs.csv\n", f"shardlib-report writes a table: {done}")
    with open(f"{folder}/runs.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [(row["run"], int(row["step"])) for row in rows]
    check(steps[:300] == [("first", i) for i in range(300)] and steps[300][0] == "second", "a row for each step of a run")
    for row, record in zip(rows, records(folder, "first", "metrics.jsonl")):
        same = {
            "train/loss": record["loss"],
            "speed/mfu": record["mfu"],
            "validation/loss": record.get("validation_loss"),
            "time/forward": record["seconds"]["forward"],
        }
        check(all((float(row[k]) if row[k] else None) == v for k, v in same.items()), f"the row of a record: {row}")
    check(rows[-1]["speed/mfu"] == "", "what a run lacks is empty")
    done = run("first", "second", "--jsonl", "-")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    check(len(lines) == len(rows), "a line for each row")
    for line, row in zip(lines, rows):
        check(line == {k: v if k == "run" else float(v) for k, v in row.items() if v}, f"lines are the rows: {line}")
    done = run("first", "--csv", "nowhere/x.csv")
    check(done.returncode == 2 and "'nowhere/x.csv'" in done.stderr, f"a table that cannot be written: {done}")
    put(f"{folder}/notes", "mine\n")
    for option, again in ("--csv", "runs.csv"), ("--jsonl", "runs.jsonl"), ("-o", "by_tool.html"):
        check(all(run("first", option, again).returncode == 0 for _ in range(2)), f"{option} replaces what it has written")
        done = run("first", option, "notes")
        check(done.returncode == 2 and "the file 'notes' holds something else" in done.stderr, f"{option} replaces nothing else: {done}")
    check(text_of(folder, "notes") == "mine\n", "another file stays")
    done = run("first", "--csv", "a", "--jsonl", "b")
    check(done.returncode == 2 and "give one of" in done.stderr, f"one format at a time: {done}")


def tool(program, folder):
    def run(*words):
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=60, cwd=folder)

    done = run("first", "second/", "-o", "by_tool.html")
    check(done.returncode == 0 and done.stdout == "wrote by_tool.html\n", f"shardlib-report compares: {done}")
    check(text_of(folder, "by_tool.html") == text_of(folder, "compared.html"), "the tool writes the same report")
    done = run("second")
    check(done.returncode == 0 and os.path.exists(f"{folder}/second/report.html"), "a run's report goes into its folder")
    follows(program, folder)
    exports(run, folder)
    put(f"{folder}/first/console.log", "step 0\n")
    done = run("first", "-o", "first/console.log")
    check(done.returncode == 2 and "'first' is the folder of a run, which writes console.log itself" in done.stderr, f"no page in a run's own file: {done}")
    check(text_of(folder, "first/console.log") == "step 0\n", "the run's file stays")
    other = f"{folder}/other"  # a run that is not shown
    os.mkdir(other)
    for file in "config.toml", "run.json":
        put(f"{other}/{file}", "")
    for option, file in ("-o", "run.json"), ("--csv", "report.html"), ("--jsonl", "samples.jsonl"):
        done = run("first", option, f"other/{file}")
        check(done.returncode == 2 and f"'{other}' is the folder of a run, which writes {file} itself" in done.stderr, f"no output in another run's file: {done}")
    check(sorted(os.listdir(other)) == ["config.toml", "run.json"] and text_of(other, "run.json") == "", "the other run stays as it is")
    for page in "first/report.html", "other/report.html", "other/own.html":
        check(run("first", "-o", page).returncode == 0, f"a page may be {page}")
    done = run("first/metrics.jsonl", "--jsonl", "first/metrics.jsonl")
    check(done.returncode == 2 and "the file is read as a run" in done.stderr, f"no table in what it is made of: {done}")
    for words, text in [
        (["nothing"], "error: there is no folder or file 'nothing': give the folder of a run, or its metrics.jsonl\n"),
        (["first", "-o", ""], "error: -o is given an empty value: give FILE, or leave the option out (see --help)\n"),
        (["first", "--csv=/nowhere/a"], "error: --csv: cannot write '/nowhere/a': No such file or directory; nothing has "
         "been computed yet: check --csv\n"),
        ([], "error: RUN is required (see --help)\n"),
        (["first", "--outptu=x"], "error: unknown option --outptu; did you mean --output? (see --help)\n"),
    ]:
        done = run(*words)
        check(done.returncode == 2 and done.stderr == text, f"shardlib-report {words}: {done}")


def main():
    args = arguments("tests", tool=None)
    with tempfile.TemporaryDirectory() as folder:
        if ran(0, "env", f"SHARDLIB_RUN_REPORT={folder}", os.path.abspath(args.tests), "[.run_report]", timeout=120).returncode == 0:
            reports(folder)
            colors(f"{folder}/first/report.html")
            trace(f"{folder}/trace.json")
            tensorboard(f"{folder}/tensorboard")
            if args.tool:
                tool(os.path.abspath(args.tool), folder)
    finish()


main()
