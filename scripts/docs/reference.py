"""Makes the page of each public name in the reference, and checks what its comment must have.

A comment is sentences, with examples in backticks: `all_gather<"A/t -> A">(x)`. A sentence that begins with an example goes to
the page's examples; "Backward: ..." and what tells of errors get lines of their own.
"""
import html
import re
import textwrap

from headers import headers

ERRORS = re.compile(r"\b(throws?|thrown|is an error|an Error)\b", re.I)
BACKWARD = re.compile(r"^(Backward:|No derivative|It has no derivative)")
# Names whose calls are the same in every program. They need no example.
PLAIN = {"to_string", "name"}
SIGNS = {"+": "plus", "-": "minus", "*": "times", "/": "divide", "|": "or", "==": "equal", "<": "less"}


# ---- comments ----


def sentences(doc):
    """The sentences of a comment. Text in backticks is never cut. Indented code counts as one sentence."""
    if "\n\n" in doc:
        return [sentence for block in doc.split("\n\n") for sentence in sentences(block)]
    if doc.startswith("   "):
        return [doc]
    parts, begin, code = [], 0, False
    for i, char in enumerate(doc):
        if char == "`":
            code = not code
        if code or char not in ".!?:" or re.search(r"\b(e\.g|i\.e|vs|et al)\.$", doc[:i + 1]):
            continue
        if re.match(r" `(\w|::)+[<(]" if char == ":" else r" [A-Z`\"]", doc[i + 1:]):  # ": `example(...)`", ". The next"
            parts.append(doc[begin:i + 1].strip())
            begin = i + 1
    return [part for part in parts + [doc[begin:].strip()] if part]


def has_sentence(doc):
    return len(re.findall(r"[A-Za-z]+", re.sub(r"`[^`]*`", " ", doc))) >= 2


def fragment(doc, note):
    """Why a comment is a fragment, or None. A `///<` is a note of two words or more; any other comment begins with a sentence,
    unless it is an example alone. Whether a sentence has a subject and a verb is left to the reader."""
    words = len(re.findall(r"[\w'-]+", re.sub(r"`[^`]*`", "code", doc)))
    if re.match(r"of\b", doc, re.I):
        return "its comment begins with 'of': begin with a noun or a verb"
    if note:
        return None if words >= 2 else "its note has one word: write two or more"
    if re.fullmatch(r"(`[^`]*`[,;. ]*)+", doc):
        return None
    if not re.match(r"[A-Z0-9`\"(-]|\w*[_(]", doc):  # or a name or formula without backticks: save_every, log(x)
        return "its comment begins with a small letter: write a sentence"
    if words < 4:
        return "its comment has fewer than four words: write a sentence"
    if not re.search(r"[.?!:]$", sentences(doc)[0]):
        return "its comment's first sentence has no full stop"
    return None


def has_example(name, doc):
    return any(re.search(rf"(?<!\w){re.escape(name)}\s*[<({{]", code) for code in re.findall(r"`([^`]*)`", doc))


def called_by_users(function):
    """Whether the function's page needs an example. It does if its call says more than the declaration: if it names specs or
    takes more than one operand. Operators, to_string and name are called as everywhere."""
    if function.name.startswith("operator") or function.name in PLAIN:
        return False
    if function.only_an_error:
        return False
    call = Call(function)
    return bool(call.written or len(call.operands) > 1 or "Tensor<" in function.parameters or "Tree" in function.parameters)


def missing(names):
    """Yields (path, line, name, what) for each thing that a comment lacks."""
    for name in names:
        docs = [d.doc for d in name.declarations if d.doc]
        first = name.declarations[0]
        if not any(has_sentence(doc) for doc in docs):
            yield first.path, first.line, name.qualified, "no sentence: write what it does or is, in a /// comment"
        if name.kind == "function" and any(called_by_users(d) for d in name.declarations) and not any(
                has_example(name.name, doc) for doc in docs):
            yield (name.documented.path, name.documented.line, name.qualified,
                   f"no example: write a call of {name.name} in backticks, in its /// comment")
        for declaration in name.declarations:
            yield from missing_members(name.qualified, declaration, declaration.doc)
            yield from fragments(name.qualified, declaration)


def not_in_table(root, names, page):
    """Yields (path, line, name, what) for each op, a function of include/shardlib/ops, that no table of a page names in
    backticks."""
    lines = (root / page).read_text().splitlines()
    rows = [number for number, line in enumerate(lines, 1) if line.startswith("|")]
    said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", "\n".join(lines[number - 1] for number in rows)))))
    table = next((number for number in rows if lines[number - 1].startswith("| op ")), 1)
    for name in names:
        at_ops = any(declaration.path.parent.name == "ops" for declaration in name.declarations)
        if name.kind == "function" and not name.namespace and at_ops and not name.name.startswith("operator") \
                and name.name not in said:
            yield root / page, table, name.name, "no table of this page has the op: add it, in backticks"


def fragments(owner, declaration):
    """The comments of a declaration and its members that are not sentences."""
    if declaration.doc and (why := fragment(declaration.doc, declaration.note)):
        yield declaration.path, declaration.line, owner, why
    for member in declaration.members:
        yield from fragments(f"{owner}::{member.name}", member)


def missing_members(owner, declaration, above):
    """Yields the members without a comment that no comment of the class or of another member names. A comment names a function
    in backticks."""
    said = " ".join([above, *(member.doc for member in declaration.members)])
    documented = {member.name for member in declaration.members if member.doc}  # of overloads one has the comment
    for member in declaration.members:
        special = member.name in (declaration.name, f"~{declaration.name}") or member.name.startswith("operator")
        named = rf"`{re.escape(member.name)}\b" if member.kind == "function" else rf"\b{re.escape(member.name)}\b"
        if not (special or member.virtual or member.name in documented or re.search(named, said)):
            yield (member.path, member.line, f"{owner}::{member.name}",
                   "no sentence: write one in a /// comment, or name it, in backticks, in that of its class")
        yield from missing_members(f"{owner}::{member.name}", member, said)


# ---- declarations, readable ----


def split(text, separator=","):
    """The parts of a list between top-level separators."""
    parts, depth, begin = [], 0, 0
    quoted = False
    for i, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "(<[{":
            depth += 1
        elif char in ")]}" or (char == ">" and text[i - 1] != "-"):
            depth -= 1
        elif char == separator and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    last = text[begin:].strip()
    return parts + [last] if last else parts


def unwrap(text):
    """A result type without the checks in it, and the rules that its specs follow."""
    rules = []

    def inner(match_at, opening):
        depth, i = 1, match_at
        while depth and i < len(text):
            depth += {"<": 1, ">": -1 if text[i - 1] != "-" else 0}.get(text[i], 0)
            i += 1
        return text[match_at:i - 1], i

    while match := re.search(r"(?:detail::after_t|detail::if_float|std::enable_if_t|detail::result_of|detail::result_for)<", text):
        body, end = inner(match.end(), "<")
        parts = split(body)
        if "result_" in match[0]:
            rules.append(parts[1 if "result_for" in match[0] else 0])  # result_for<dtype, rule, arguments...>
            made = "…"
        else:
            made = parts[-1]
        text = text[:match.start()] + made + text[end:]
    return re.sub(r"(?<=<) | (?=>)|\bdetail::", "", text), rules


class Call:
    """How a function is called: its template parameters that the caller writes, and its operands."""

    def __init__(self, function):
        self.written, self.deduced, self.operands = [], [], []
        for parameter in split(function.parameters):
            value = split(parameter, "=")
            declared = value[0]
            if re.match(r"(const )?Site\b", declared):
                continue
            found = re.match(r"(.*?)(\w+)$", declared)
            if not found or not found[1].strip() or found[1].rstrip().endswith("::"):
                found = re.match(r"(.*?)()$", declared)
            kind, name = re.sub(r"^const (.*?)\s*&(\.\.\.)?$", r"\1\2", found[1].strip()), found[2]
            kind = kind.replace("detail::LocatedNumber", "double")
            if kind.endswith("...") and name:
                kind, name = kind[:-3], name + "..."
            self.operands.append((name, kind, value[1] if len(value) > 1 else None))
        for parameter in split(function.template):
            value = split(parameter, "=")
            found = re.search(r"(\w+)$", value[0])
            name = found[1] if found else ""
            used = re.search(rf"\b{name}\b", function.parameters) if name else True
            (self.deduced if used else self.written).append((name, value[0], value[1] if len(value) > 1 else None))

    def line(self, name):
        template = ", ".join(n + (f" = {v}" if v else "") for n, _, v in self.written)
        operands = ", ".join((n or t) + (f" = {v}" if v else "") for n, t, v in self.operands)
        return f"{name}{f'<{template}>' if template else ''}({operands})"


def tidy(text):
    """A declaration without attributes, qualifiers and parameters that a reader does not need."""
    text = re.sub(r"\[\[.*?\]\]\s*|\bSHARDLIB_INLINE\s+|\binline\s+|\bexplicit\s+(?=\w+\()", "", text)
    return re.sub(r",? *Site site( = Site::current\(\))?", "", text).strip()


def same(declaration):
    """A key that two declarations of one thing have in common: everything except default arguments."""
    lists = declaration.template, declaration.parameters
    parts = "|".join(",".join(split(p, "=")[0] for p in split(text)) for text in lists)
    return declaration.kind, re.sub(r"\s", "", parts)


# ---- pages ----


class Reference:
    """The pages of the reference, by their names."""

    def __init__(self, root, names, source_of):
        self.root, self.names, self.source_of = root, names, source_of
        self.rules = {}
        for path in sorted((root / "include" / "shardlib").rglob("*.hpp")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if rule := re.search(r"\bVerdict (\w+)\(", line):
                    self.rules.setdefault(f"rules::{rule[1]}", (path.relative_to(root), number))
        self.urls, taken = {}, set()
        for name in names:
            url = name.qualified.replace("::", ".")
            url = re.sub(r"[^\w.]+", lambda sign: "-" + SIGNS.get(sign[0], "sign"), url)
            if url.lower() in taken:  # on file systems that fold case `tensor` and `Tensor` are one
                url += f"-{name.kind}"
            taken.add(url.lower())
            self.urls[name.qualified] = f"reference/{url}.html"

    def text(self, page, text):
        """A comment's text as HTML: code, links to other names and to pages of docs/."""
        parts = re.split(r"(`[^`]*`)", text)
        return "".join(self.code(page, part[1:-1]) if part[:1] == "`" else self.words(page, part) for part in parts)

    def code(self, page, code):
        shown = f"<code>{html.escape(code, quote=False)}</code>"
        return self.linked(page, code, shown)

    def linked(self, page, word, shown):
        url = self.urls.get(word)
        return f'<a href="{page.to(url)}">{shown}</a>' if url and url != page.url else shown

    def words(self, page, text):
        def word(match):
            if match[0].startswith("docs/"):
                return f'<a href="{page.to(match[0][:-3] + ".html")}">{match[0]}</a>'
            return self.linked(page, match[0], match[0])

        return re.sub(r"\bdocs/[\w-]+\.md\b|\b[a-z]\w*_\w+\b|\b[A-Z]\w+[a-z]\w*\b", word, html.escape(text, quote=False))

    def rule(self, page, name):
        shown = f"<code>{name}</code>"
        if name not in self.rules:
            return shown
        path, line = self.rules[name]
        return f'<a href="{page.to(self.source_of(path))}#L{line}">{shown}</a>'

    def where(self, page, declaration):
        path = declaration.path.relative_to(self.root)
        return f'<a href="{page.to(self.source_of(path))}#L{declaration.line}">{path}:{declaration.line}</a>'

    def title(self, name):
        return f"{name.namespace}::{name.name}" if name.namespace else name.name

    def fill(self, page, name, mentions):
        """Fills the page of one name. `mentions`: the pages of docs/ that mention it."""
        out = [f"<h1>{html.escape(self.title(name), quote=False)}</h1>"]
        kind = {"class": "type"}.get(name.kind, name.kind)
        out.append(f'<p class="where">{kind} · {self.where(page, name.documented)}</p>')
        shown = {}
        for declaration in name.declarations:  # of a declaration and a definition, the one with the comment or the defaults
            key = same(declaration) if name.kind == "function" else name.kind
            if key not in shown or (bool(declaration.doc), len(declaration.text)) > (
                    bool(shown[key].doc), len(shown[key].text)):
                shown[key] = declaration
        for declaration in name.forms(shown.values()):
            if name.kind != "function":
                out.append(self.other(page, declaration))
            elif declaration.doc or not declaration.only_an_error:
                out.append(self.function(page, declaration))
        if mentions:
            links = ", ".join(f'<a href="{page.to(p.url)}">{html.escape(p.title, quote=False)}</a>' for p in mentions)
            out.append(f'<p class="where">In the docs: {links}</p>')
        page.body = "\n".join(out)
        said = [d.doc for d in name.declarations] + [f"{m.name} {m.doc}" for d in name.declarations for m in d.members]
        page.sections = [[self.title(name), "", " ".join(text for text in said if text)]]

    def comment(self, page, doc, rows=()):
        """Its sentences, its examples, and a table of the rest."""
        prose, examples, rows = [], [], list(rows)
        backward, errors = [], []
        for sentence in sentences(doc):
            if re.match(r"`(\w|::)+[^`]*[<({]", sentence):
                examples.append(sentence)
            elif BACKWARD.match(sentence):
                backward.append(re.sub(r"^Backward: *", "", sentence))
            elif ERRORS.search(sentence):
                errors.append(sentence)
            else:
                prose.append(sentence)
        out = [self.prose(page, prose)] if prose else []
        if backward:
            rows.append(("Backward", self.text(page, " ".join(backward))))
        if errors:
            rows.append(("Errors", self.text(page, " ".join(errors))))
        if examples:
            rows.insert(0, ("Examples" if len(examples) > 1 else "Example",
                            "<br>".join(self.text(page, e.removesuffix(".")) for e in examples)))
        if rows:
            out.append("<dl>" + "".join(f"<dt>{title}</dt><dd>{body}</dd>" for title, body in rows) + "</dl>")
        return "\n".join(out)

    def prose(self, page, prose):
        """Paragraphs of sentences, with the indented code between them."""

        def proper(sentence):  # a comment behind its line has neither a capital nor a full stop
            sentence = re.sub(r"^[a-z]{2,}(?= )", lambda word: word[0].capitalize(), sentence)
            return re.sub(r":$", ".", sentence) + ("." if re.search(r"[\w)]$", sentence) else "")

        out = []
        for i, sentence in enumerate(prose):
            if sentence.startswith("   "):
                out.append(f"</p><pre><code>{html.escape(textwrap.dedent(sentence), quote=False)}</code></pre><p>")
            else:
                last = i + 1 == len(prose)
                out.append(self.text(page, proper(sentence) if last or i == 0 else sentence))
        return "<p>" + " ".join(out) + "</p>"

    def function(self, page, declaration):
        from pages import highlight

        call, rows = Call(declaration), []
        head = f'<pre class="call"><code>{highlight(call.line(declaration.name), "cpp")}</code></pre>'
        whole = highlight(declaration.text, "cpp")
        whole = f"<details><summary>Declaration</summary><pre><code>{whole}</code></pre></details>"
        if not declaration.doc:  # another overload
            return head + whole

        def listed(parameters):
            return "<br>".join(f"<code>{html.escape(p, quote=False)}</code>" for p in parameters)

        if call.written:
            rows.append(("Template", listed(p + (f" = {v}" if v else "") for _, p, v in call.written)))
        if call.operands:
            rows.append(("Operands", listed(f"{t} {n}".strip() + (f" = {v}" if v else "") for n, t, v in call.operands)))
        result, rules = unwrap(declaration.result)
        if result and result not in ("auto", "void"):
            row = f"<code>{html.escape(result, quote=False)}</code>"
            if rules:
                row += ", whose spec the rule " + " and ".join(self.rule(page, r) for r in rules) + " gives"
            rows.append(("Result", row))
        return "\n".join((head, self.comment(page, declaration.doc, rows), whole))

    def other(self, page, declaration):
        from pages import highlight

        out = [f"<pre><code>{highlight(tidy(declaration.text), 'cpp')}</code></pre>", self.comment(page, declaration.doc)]
        if declaration.members:
            out.append("<h2>Members</h2>" + self.members(page, declaration))
        return "\n".join(out)

    def members(self, page, declaration):
        from pages import highlight

        out, group = [], []  # neighbors without a comment of their own stand together
        shown = [member for member in declaration.members if member.doc or not member.virtual]
        shown = [member for i, member in enumerate(shown) if not i or member.text != shown[i - 1].text]
        for i, member in enumerate(shown):
            group.append(tidy(member.text))
            following = shown[i + 1] if i + 1 < len(shown) else None
            if following and not (member.doc or member.members or following.doc or following.members):
                continue
            text = f"<pre><code>{highlight(chr(10).join(group), 'cpp')}</code></pre>"
            doc = self.prose(page, sentences(member.doc)) if member.doc else ""
            out.append(f'<div class="member">{text}{doc}{self.members(page, member)}</div>')
            group = []
        return "\n".join(out)

    def index(self, page):
        """All names, by folder and header; each with its first sentence."""
        out, rooms = ["<h1>API reference</h1>"], {}
        for name in self.names:
            path = name.documented.path.relative_to(self.root)
            rooms.setdefault(str(path.parent), {}).setdefault(path, []).append(name)
        out.append("<p>One page for each public name, generated from the comments in the headers.</p>")
        for room in sorted(rooms):
            anchor = room.replace("/", "-")
            page.anchors.add(anchor)
            out.append(f'<h2 id="{anchor}">{room.removeprefix("include/")}</h2>')
            for path in sorted(rooms[room]):
                about = re.match(r"((?://(?!/)[^\n]*\n)+)", (self.root / path).read_text())
                about = " ".join(line[2:].strip() for line in about[1].splitlines()) if about else ""
                out.append(f'<h3><a href="{page.to(self.source_of(path))}">{path.name}</a></h3>'
                           f'<p class="where">{self.text(page, about)}</p><dl class="names">')
                for name in rooms[room][path]:
                    prose = [s for s in sentences(name.documented.doc) if not s.startswith("`")]
                    out.append(f'<dt><a href="{page.to(self.urls[name.qualified])}">{self.title(name)}</a></dt>'
                               f"<dd>{self.prose(page, prose[:1])}</dd>")
                out.append("</dl>")
        page.body = "\n".join(out)


def documented_files(root):
    """References to docs/*.md in the headers' comments: (path, line, file)."""
    for path in headers(root):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in re.finditer(r"//.*?\b(docs/[\w-]+\.md)\b", line):
                yield path, number, match[1]
