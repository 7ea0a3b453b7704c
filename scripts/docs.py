#!/usr/bin/env python3
"""Makes the documentation as a site of plain HTML, and checks the headers' comments that the reference needs.

docs.py --check         fails, with file, line and name, on a public name without its sentence, a comment that is a fragment, a
                        function that users call without its example, and an op that the tables of docs/ops.md or
                        docs/spec-language.md lack; Python's standard library is enough for it
docs.py --site FOLDER   writes the site: README.md, docs/*.md and a page for each public name, with a search that needs no
                        server. Fails on a link to a file or heading that is not there. Needs Debian's python3-markdown-it.

A public name's page comes from its `///` comment in the headers, which scripts/docs/headers.py reads. Doxygen (1.9.4) was tried.
It reads the trailing return types, but loses the comments of ops that a macro declares (exp, relu, ...) and of variable templates
(over, make_op), so a third of the table of ops would have no text. A result such as `detail::after_t<..., detail::result_of<
rules::all_gather, O, S>>` would need a script of ours in any case, to be readable.
"""
import argparse
import html
import json
import os
import pathlib
import re
import shutil
import sys

sys.dont_write_bytecode = True
here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here / "docs"))
import headers  # noqa: E402
import pages  # noqa: E402
import reference  # noqa: E402

FRONT = "README.md"
TABLE = "docs/README.md"  # which pages there are, by kind
OPS = ("docs/ops.md", "docs/spec-language.md")  # pages whose tables name every op
KINDS = ("Tutorial", "How-to", "Reference", "Explanation")
ROW = re.compile(r"^\|\s*(?P<kind>[\w-]+)\s*\|\s*\[(?P<title>[^]]+)\]\((?P<file>[^)#]+)\)\s*\|[^|]*\|$")


class Site:
    def __init__(self, root, folder):
        self.root, self.folder, self.mistakes = root, folder, []
        self.pages, self.sources, self.targets, self.entries = {}, {}, [], []
        self.kinds = self.table()
        for file in [FRONT, *sorted(str(p.relative_to(root)) for p in (root / "docs").glob("*.md"))]:
            self.add(file)

    def mistake(self, file, line, what):
        self.mistakes.append(f"{file}:{line}: {what}")

    def table(self):
        """The pages of each kind, as docs/README.md lists them: (title, file)."""
        kinds, listed = {kind: [] for kind in KINDS}, {FRONT, TABLE}
        for number, line in enumerate((self.root / TABLE).read_text().splitlines(), 1):
            row = ROW.match(line)
            if not row:
                continue
            file = os.path.normpath(os.path.join("docs", row["file"]))
            if row["kind"] not in kinds:
                self.mistake(TABLE, number, f"`{row['kind']}` is not a kind of page: there are {', '.join(KINDS)}")
                continue
            kinds[row["kind"]].append((row["title"], file))
            listed.add(file)
        for path in sorted((self.root / "docs").glob("*.md")):
            file = f"docs/{path.name}"
            if file not in listed:
                self.mistake(file, 1, f"not in the table of {TABLE}: add a row with its kind")
        return kinds

    # ---- pages and links ----

    def add(self, file):
        """The page of a Markdown file of the repository."""
        if file not in self.pages:
            url = "index.html" if file == FRONT else re.sub(r"README\.md$", "index.md", file)[:-3] + ".html"
            self.pages[file] = pages.Page(url, file, kind="page")
            pages.Markdown(self.resolve).render(self.pages[file], (self.root / file).read_text())
        return self.pages[file]

    def source(self, path):
        """The address of the page that shows a file of the repository."""
        return self.sources.setdefault(str(path), f"source/{path}.html")

    def resolve(self, page, link, line):
        """The address on the site of a link in a Markdown file; None for one that stays as it is."""
        if re.match(r"[a-z]+:", link):
            return None
        target, _, anchor = link.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(page.source), target)) if target else page.source
        mark = f"#{anchor}" if anchor else ""
        if file.startswith("..") or not (self.root / file).is_file():
            self.mistake(page.source, line, f"link to `{link}`: there is no such file")
            return None
        if file.endswith(".md"):
            if anchor:
                self.targets.append((page.source, line, file, anchor))
            return page.to((page if file == page.source else self.add(file)).url) + mark
        return page.to(self.source(file)) + mark

    def check_anchors(self):
        for source, line, file, anchor in self.targets:
            if anchor not in self.pages[file].anchors:
                self.mistake(source, line, f"link to `{file}#{anchor}`: that page has no such heading")

    # ---- output ----

    def build(self, names):
        ref = reference.Reference(self.root, names, self.source)
        for path, line, file in reference.documented_files(self.root):
            if not (self.root / file).is_file():
                self.mistake(path.relative_to(self.root), line, f"there is no {file}")
        self.check_anchors()
        if self.mistakes:
            return
        made = list(self.pages.values())
        texts = [(page, (self.root / file).read_text()) for file, page in self.pages.items() if file not in (FRONT, TABLE)]
        index = pages.Page("reference/index.html", "", "API reference", "page")
        ref.index(index)
        made.append(index)
        for name in names:
            page = pages.Page(ref.urls[name.qualified], "", name.qualified, name.kind)
            spoken = re.compile(rf"(?<![\w:.>]){re.escape(name.name)}(?=[<({{`])")
            mentions = [p for p, text in texts if not name.namespace and spoken.search(text)]
            ref.fill(page, name, mentions)
            made.append(page)
        for path, url in self.sources.items():
            made.append(self.source_page(path, url))
        for page in made:
            self.write(page.url, self.framed(page))
        self.write("search-index.js", "const searchIndex = " + json.dumps(self.search_entries(made)) + ";\n")
        for file in ("site.css", "search.js"):
            shutil.copyfile(here / "docs" / file, self.folder / file)

    def source_page(self, path, url):
        page = pages.Page(url, path, str(path), "source")
        code = pages.highlight((self.root / path).read_text(), pathlib.Path(path).suffix[1:])
        lines = "\n".join(f'<span id="L{i}"><a href="#L{i}">{i}</a>{line}</span>'
                          for i, line in enumerate(code.rstrip("\n").split("\n"), 1))
        page.body = f'<h1>{path}</h1>\n<pre class="source"><code>{lines}</code></pre>'
        return page

    def search_entries(self, made):
        """A page for each name, a section for each heading."""
        for page in made:
            for title, anchor, text in page.sections:
                first = page.kind != "page" or anchor == page.sections[0][1]
                kind = {"class": "type"}.get(page.kind, page.kind) if first else page.title
                self.entries.append({"t": title, "u": page.url + ("" if first else f"#{anchor}"), "k": kind,
                                     "x": re.sub(r"\s+", " ", text).strip()[:4000]})
        return self.entries

    def framed(self, page):
        """The page with its navigation and search."""
        root = page.to("index.html").removesuffix("index.html")

        def item(title, url):
            here_class = ' class="here"' if url == page.url else ""
            return f'<li><a{here_class} href="{page.to(url)}">{html.escape(title, quote=False)}</a></li>'

        nav = []
        for kind, listed in self.kinds.items():
            items = [item(title, self.pages[file].url) for title, file in listed]
            if kind == "Reference":
                items.insert(0, item("API reference", "reference/index.html"))
            nav.append(f"<h2>{kind}</h2><ul>{''.join(items)}</ul>")
        title = page.title if page.url == "index.html" else f"{page.title} - shardlib"
        return f"""<!doctype html>
<html lang="en" data-root="{root}">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title, quote=False)}</title><link rel="stylesheet" href="{root}site.css"></head>
<body>
<nav><a class="home" href="{root}index.html">shardlib</a>
<input id="search" type="search" placeholder="Search  ( / )" aria-label="Search"><div id="found" hidden></div>
{"".join(nav)}</nav>
<main>
{page.body}
</main>
<script src="{root}search-index.js"></script><script src="{root}search.js"></script>
</body></html>
"""

    def write(self, url, text):
        path = self.folder / url
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def check(root, names):
    found = set(reference.missing(names))
    for page in OPS:
        found.update(reference.not_in_table(root, names, page))
    found = sorted(found)
    for path, line, name, what in found:
        print(f"{path.relative_to(root)}:{line}: {name}: {what}")
    return found


def need_markdown():
    try:
        import markdown_it  # noqa: F401
    except ImportError:
        # Debian's packages belong to Debian's Python, which need not be the first one in the path.
        if sys.executable != "/usr/bin/python3" and os.access("/usr/bin/python3", os.X_OK):
            os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
        sys.exit("docs.py: this Python has no markdown_it module: apt-get install python3-markdown-it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=here.parent)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--site", type=pathlib.Path, metavar="FOLDER")
    options = parser.parse_args()
    if not (options.check or options.site):
        parser.error("give --check, --site FOLDER, or both")
    if options.site:
        need_markdown()
    root, names = options.root.resolve(), headers.public_names(options.root.resolve())
    failed = False
    if options.check:
        found = check(root, names)
        failed = bool(found) or not names
        print(f"{len(names)} public names, {len(found)} things missing")
    if options.site:
        site = Site(root, options.site)
        site.build(names)
        for mistake in site.mistakes:
            print(mistake)
        failed = failed or bool(site.mistakes)
        if not site.mistakes:
            print(f"{len(site.entries)} entries to search; open {options.site}/index.html")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
