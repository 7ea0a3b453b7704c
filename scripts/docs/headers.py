"""Reads the public names of the headers: declarations, their `///` comments, files and lines.

`public_names(root)` walks include/shardlib. A name is public if it is in the namespace shardlib or one of its parts (io, run,
pipeline), but not in detail, impl, rules or kernels. A class has its public members. Folders named impl hold no public names. A
function-like macro that declares names is expanded: the comment above `SHARDLIB_UNARY(exp)` is the comment of `exp`. The reader
is not a compiler: it knows declarations as clang-format writes them, and skips function bodies.
"""
import collections
import dataclasses
import re

PRIVATE = {"detail", "impl", "rules", "kernels"}
TOKEN = re.compile(
    r"""(?P<doc>///[^\n]*)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
    |(?P<string>R"(?P<d>[^()\s\\]*)\(.*?\)(?P=d)"|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)+')
    |(?P<number>\d(?:[eEpP][+-]|[\w.']\w*)*)|(?P<word>[A-Za-z_]\w*)|(?P<sign>->|::|<=>|[<>=!]=|&&|\|\||\.\.\.|\S)""",
    re.X | re.S | re.M,
)
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclasses.dataclass
class Declaration:
    kind: str  # class, enum, concept, alias, constant, function; of members: field, function, type, enumerator
    name: str
    path: object
    line: int
    doc: str
    text: str  # without its body, or what it is initialized with
    template: str = ""  # what stands between the brackets of the last `template <...>`
    parameters: str = ""
    result: str = ""
    members: list = dataclasses.field(default_factory=list)
    note: bool = False  # its comment is a `///<` behind it
    virtual: bool = False  # it overrides, is defaulted or deleted: the comment stands elsewhere, or there is nothing to say

    @property
    def only_an_error(self):
        """Whether the function is there to make a wrong call a compile error with a sentence. Macros declare most of these,
        without a comment and without a result type."""
        if self.kind != "function":
            return False
        undocumented = not self.doc and re.search(r"\bauto\b(?!.*->)", self.text, re.S)
        return bool(self.doc.startswith("A compile error") or undocumented or re.search(r"\brules::no_", self.result))


@dataclasses.dataclass
class Name:
    """All declarations of one name in one namespace."""
    name: str
    namespace: str  # "" for shardlib itself, else "io", "run", ...
    declarations: list

    @property
    def kind(self):
        return self.declarations[0].kind

    @property
    def qualified(self):
        return f"{self.namespace}::{self.name}" if self.namespace else self.name

    @property
    def documented(self):
        """The declaration to which a reader should be led: the first of `forms`."""
        return self.forms(self.declarations)[0]

    @staticmethod
    def forms(declarations):
        """The declarations in the order of a page: first those with a comment, then those of calls that compile, then those
        of the header that has most of them."""
        of_header = collections.Counter(d.path for d in declarations)
        return sorted(declarations, key=lambda d: (not d.doc, d.only_an_error, -of_header[d.path], str(d.path), d.line))


class Token:
    __slots__ = ("kind", "text", "line", "begin", "end")

    def __init__(self, match, line):
        self.kind, self.text, self.line = match.lastgroup, match[0], line
        self.begin, self.end = match.span()


def tokens_of(text, line):
    found, at, last = [], line or 1, 0
    for match in TOKEN.finditer(text):
        if not line:
            at += text.count("\n", last, match.start())
            last = match.start()
        kind = match.lastgroup
        if kind != "comment":
            found.append(Token(match, at))
    return found


def joined(lines):
    """The lines of a comment as paragraphs, with an empty line between them; indented lines are code, and stay so."""
    blocks = [""]
    for line in lines:
        code = line.startswith("   ")
        if not line.strip() or code != blocks[-1].startswith("   ") and blocks[-1]:
            blocks.append("")
        blocks[-1] += ("\n" + line if blocks[-1] else line) if code else (" " + line.strip() if blocks[-1] else line.strip())
    return "\n\n".join(block for block in blocks if block)


class Reader:
    """One text: a header, or what a macro in it expands to (then all of it stands on the line of the call)."""

    def __init__(self, text, path, report, macros, line=None, doc=""):
        self.text, self.path, self.report, self.macros, self.line = text, path, report, macros, line
        self.tokens, self.i, self.inherited = tokens_of(text, line), 0, doc
        self.docs, self.last = [], []

    # ---- tokens ----

    def peek(self, ahead=0):
        at = self.i + ahead
        return self.tokens[at].text if at < len(self.tokens) else ""

    def match(self):
        """Steps over a bracket, its content and the closing bracket. Does not step over a `<` that is not a bracket."""
        opening = self.peek()
        if opening == "<":
            at = self.i
            self.i += 1
            while self.peek() != ">":
                if self.peek() in ("", ";", ")", "}", "]"):
                    self.i = at + 1
                    return False
                self.match() if self.peek() in "([{<" else self.step()
            self.i += 1
            return True
        self.i += 1
        while self.peek() not in ("", CLOSING[opening]):
            self.match() if self.peek() and self.peek() in "([{" else self.step()
        self.i += 1
        return True

    def step(self):
        self.i += 1

    def skip_to(self, *ends):
        while self.peek() not in ("", *ends):
            if self.peek() in "([{":
                self.match()
            elif self.peek() == "<" and self.tokens[self.i - 1].kind == "word":
                self.match()
            else:
                self.step()

    def slice(self, begin, end):
        """The text of the tokens [begin, end), as it stands."""
        if begin >= end:
            return ""
        text = self.text[self.tokens[begin].begin:self.tokens[end - 1].end]
        text = re.sub(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*', lambda match: match[1] or "", text)
        return re.sub(r"\s*\n\s*", " ", text)

    def constraint(self):
        """Steps over `requires ...` before or after a declarator."""
        self.step()
        while True:
            if self.peek() == "requires":
                self.step()
                if self.peek() == "(":
                    self.match()
                self.match()
            elif self.peek() == "(":
                self.match()
            else:
                while self.peek() == "!" or (self.peek() and self.tokens[self.i].kind == "word" and (
                        self.peek(-1) in ("::", "&&", "||", "requires", "!"))) or self.peek() == "::":
                    self.step()
                    if self.peek() == "<":
                        self.match()
            if self.peek() not in ("&&", "||"):
                return
            self.step()

    # ---- scopes ----

    def scope(self, namespace, owner=None):
        """Declarations up to the closing brace. `namespace`: None where nothing is public."""
        public = owner is None or owner.default_public
        while self.i < len(self.tokens) and self.peek() != "}":
            token = self.tokens[self.i]
            if token.kind == "doc":
                self.doc_line(token)
            elif token.kind == "directive":
                self.directive(token.text)
                self.step()
            elif token.text == ";":
                self.step()
            elif token.text == "namespace":
                self.namespace(namespace)
            elif token.text in ("public", "private", "protected") and self.peek(1) == ":":
                public = token.text == "public"
                self.docs = []
                self.i += 2
            elif token.text in self.macros and self.peek(1) == "(":
                self.expand(namespace if public else None, owner)
            else:
                self.declaration(namespace if public else None, owner)
        self.step()

    def doc_line(self, token):
        if token.text.startswith("///<"):
            for declaration in self.last:
                declaration.note = declaration.note or not declaration.doc
                declaration.doc = (declaration.doc + " " + token.text[4:].strip()).strip()
        else:
            self.docs.append(token.text[3:].rstrip())
        self.step()

    def take_doc(self):
        doc, self.docs = joined(self.docs) or self.inherited, []
        return doc

    def directive(self, text):
        define = re.match(r"\s*#\s*define\s+(\w+)\(([^)]*)\)\s*(.*)", text, re.S)
        if define and define[3].strip() and "..." not in define[2]:
            self.macros[define[1]] = ([p.strip() for p in define[2].split(",")], define[3].replace("\\\n", "\n"))
        undefine = re.match(r"\s*#\s*undef\s+(\w+)", text)
        if undefine:
            self.macros.pop(undefine[1], None)

    def expand(self, namespace, owner):
        parameters, body = self.macros[self.peek()]
        line = self.tokens[self.i].line
        self.step()
        first = self.i + 1
        self.match()
        arguments, at = [], first
        for i in range(first, self.i):
            if self.tokens[i].text == "," or i == self.i - 1:
                arguments.append(self.slice(at, i))
                at = i + 1
        for parameter, argument in zip(parameters, arguments):
            body = re.sub(rf"(?<!#)#\s*{parameter}\b", lambda _: f'"{argument}"', body)
            body = re.sub(rf"\s*##\s*{parameter}\b|\b{parameter}\s*##\s*|\b{parameter}\b", lambda _: argument, body)
        inner = Reader(body, self.path, self.report, self.macros, line, self.take_doc())
        inner.scope(namespace, owner)

    def namespace(self, outer):
        self.step()
        names = []
        while self.peek() not in ("{", "=", ""):
            if self.tokens[self.i].kind == "word":
                names.append(self.peek())
            self.step()
        if self.peek() == "=":
            return self.skip_to(";")
        self.step()
        self.docs = []
        inner = None if outer is None or not names or PRIVATE & set(names) else outer + tuple(names)
        self.scope(inner)

    # ---- declarations ----

    def declaration(self, namespace, owner):
        begin, doc, line = self.i, self.take_doc(), self.tokens[self.i].line
        self.last = []
        made = Declaration("", "", self.path, line, doc, "")
        name, before, special = None, "", False
        while True:
            text = self.peek()
            if text in ("", "}"):
                return
            if self.tokens[self.i].kind in ("doc", "directive"):
                self.step()
            elif text == "template":
                self.step()
                first = self.i + 1
                if self.match():
                    made.template = self.slice(first, self.i - 1)
                begin_name = self.i
            elif text == "requires":
                self.constraint()
            elif text == "[" and self.peek(1) == "[":
                self.match()
            elif text in ("using", "typedef", "friend", "static_assert", "extern", "concept", "class", "struct", "union",
                          "enum"):
                return self.keyword(text, made, begin, namespace, owner)
            elif text == "operator":
                first = self.i
                self.step()
                if self.peek() == "(":
                    self.i += 2
                while self.peek() != "(":
                    self.match() if self.peek() == "<" and self.tokens[self.i - 1].kind == "word" else self.step()
                return self.function(self.slice(first, self.i), made, begin, namespace, owner)
            elif text == "(" and before in ("decltype", "noexcept", "explicit", "alignas"):
                self.match()
            elif text == "(":
                scoped = self.peek(-2) == "::"
                name = ("~" if self.peek(-2) == "~" else "") + (name or "")
                return self.function(name, made, begin, None if scoped or special else namespace, owner)
            elif text == "<" and self.tokens[self.i - 1].kind == "word":
                special = self.match()
                before = ""
                continue
            elif text in ("=", "{", ";", ",", ":", "["):
                return self.variable(name, made, begin, None if special else namespace, owner)
            elif self.tokens[self.i].kind == "word":
                name, special = text, False
                self.step()
            else:
                self.step()
            before = self.peek(-1)

    def emit(self, made, namespace, owner):
        self.last.append(made)
        if namespace is not None and made.name:
            (owner.members.append if owner else lambda d: self.report(namespace, d))(made)

    def keyword(self, text, made, begin, namespace, owner):
        self.step()
        if text in ("class", "struct", "union", "enum"):
            return self.type(text, made, begin, namespace, owner)
        if text == "friend":
            return self.declaration(None, owner)
        if text == "extern" and self.tokens[self.i].kind != "string":
            return self.declaration(None, owner)
        first = self.i
        self.skip_to("=", ";", ":")
        if text == "concept" or (text == "using" and self.peek() == "="):
            made.kind, made.name = {"concept": "concept"}.get(text, "alias"), self.tokens[first].text
            self.skip_to(";")
            made.text = self.slice(begin, self.i)
            self.emit(made, namespace, owner)
        self.skip_to(";")
        self.step()

    def type(self, text, made, begin, namespace, owner):
        special = False
        while self.peek() not in ("{", ";", ":"):
            if self.peek() in ("[", "("):
                self.match()
            elif self.peek() == "<":
                special = self.match()
            else:
                if self.tokens[self.i].kind == "word" and self.peek() not in ("class", "struct", "final", "alignas"):
                    made.name = self.peek()
                special = special or self.peek() == "::"
                self.step()
        if self.peek() == ";":  # only declared
            return self.step()
        end = self.i
        self.skip_to("{")
        made.kind = "enum" if text == "enum" else "type" if owner else "class"
        made.text = self.slice(begin, end if text == "enum" else self.i)
        made.default_public = text != "class"
        made.owned = owner is not None
        within = None if special else namespace
        self.emit(made, within, owner)
        self.step()
        self.docs, last = [], self.last
        if text == "enum":
            self.enumerators(made)
        else:
            inherited, self.inherited = self.inherited, ""
            self.scope(within, made)
            self.inherited = inherited
        self.last, self.docs = last, []
        while self.peek() not in (";", ""):  # enum Kind { ... } kind = replicated;
            field = Declaration("field", self.peek(), self.path, made.line, made.doc, f"{made.name} {self.peek()}")
            self.emit(field, within, owner)
            self.skip_to(",", ";")
        self.step()

    def enumerators(self, owner):
        self.last = []
        while self.peek() not in ("}", ""):
            token = self.tokens[self.i]
            if token.kind == "doc":
                self.doc_line(token)
            elif token.kind == "word":
                self.last = [Declaration("enumerator", token.text, self.path, token.line, self.take_doc(), token.text)]
                owner.members += self.last
                self.skip_to(",", "}") if not self.comment_before("}") else self.step()
            else:
                self.step()
        self.step()

    def comment_before(self, end):
        """Whether a `///<` stands between this enumerator and what follows it."""
        return self.i + 1 < len(self.tokens) and self.tokens[self.i + 1].kind == "doc"

    def function(self, name, made, begin, namespace, owner):
        head = self.i
        self.match()
        made.parameters = self.slice(head + 1, self.i - 1)
        made.kind, made.name = "function", name
        end = arrow = None
        while self.peek() not in (";", "{", ""):
            text = self.peek()
            if text == ":":
                end = end or self.i
                self.step()
                while self.peek() not in ("{", "(", ""):
                    self.match() if self.peek() == "<" else self.step()
                self.match()
                if self.peek() == "...":
                    self.step()
                if self.peek() == ",":
                    self.tokens[self.i].text = ":"
            elif text == "=":
                made.virtual = self.peek(1) in ("default", "delete")
                end = end or self.i
                self.skip_to(";")
            elif text == "requires":
                self.constraint()
            elif text == "->":
                arrow = self.i + 1
                self.step()
            elif text in ("(", "["):
                self.match()
            elif text == "<" and self.tokens[self.i - 1].kind == "word":
                self.match()
            else:
                made.virtual = made.virtual or text == "override"
                self.step()
        end = end or self.i
        made.text = self.slice(begin, end)
        made.result = self.slice(arrow, end) if arrow else self.result_before(begin, head)
        self.match() if self.peek() == "{" else self.step()
        self.emit(made, namespace, owner)

    def result_before(self, begin, head):
        text = self.slice(begin, head)
        text = re.sub(r"^template <.*?> (?=\[|auto|inline|constexpr|std|\w)", "", text)
        text = re.sub(r"\[\[.*?\]\]|\b(inline|constexpr|static|virtual|explicit|SHARDLIB_INLINE|friend)\b", "", text)
        return re.sub(r"\s*\S+$", "", text).strip()

    def variable(self, name, made, begin, namespace, owner):
        made.kind = "field" if owner else "constant"
        made.text = self.slice(begin, self.i)
        while True:
            self.emit(dataclasses.replace(made, name=name, members=[]), namespace, owner)
            while self.peek() in ("{", "["):
                self.match()
            if self.peek() in ("=", ":"):
                self.step()
                self.skip_to(",", ";")
                # `= std::array<int, 2>{}` and the like have been stepped over as a whole.
            if self.peek() != ",":
                break
            self.step()
            while self.peek() in ("*", "&"):
                self.step()
            name = self.peek()
            self.step()
        if owner:  # one statement, with the defaults
            for field in self.last:
                field.text = self.slice(begin, self.i)
        self.step()


def public_names(root):
    """Every public name of include/shardlib, sorted: a list of Name."""
    names = {}

    def report(namespace, declaration):
        if namespace[:1] == ("shardlib",):
            key = "::".join(namespace[1:]), declaration.name
            names.setdefault(key, Name(key[1], key[0], [])).declarations.append(declaration)

    macros = {}
    for reported in (lambda *_: None, report):  # first for the macros alone: norms.hpp uses one of result.hpp
        for path in headers(root):
            Reader(path.read_text(), path, reported, macros).scope(())
    return sorted(names.values(), key=lambda n: (n.name.lower(), n.namespace, n.name))


def headers(root):
    folder = root / "include" / "shardlib"
    for path in sorted(folder.rglob("*.hpp")):
        inner = path.relative_to(folder).parts[:-1]
        if "impl" not in inner:
            yield path
