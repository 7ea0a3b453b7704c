"""Turns Markdown and source text into HTML, for the pages of the site.

Links are checked as they are rendered: one whose file or heading is not there is a mistake, with file and line.
"""
import html
import os
import re

WORDS = {
    "cpp": "alignas auto bool break case catch char class concept const consteval constexpr continue decltype default delete do"
    " double else enum explicit export extern false float for friend if inline int long mutable namespace new noexcept nullptr"
    " operator override private protected public requires return short signed sizeof static static_assert struct switch"
    " template this throw true try typedef typename unsigned using virtual void volatile while",
    "sh": "if then else elif fi for in do done while case esac function return export local",
    "python": "and as assert break class continue def del elif else except False finally for from if import in is lambda None"
    " not or pass raise return True try while with yield",
}
LANGUAGES = {"c++": "cpp", "hpp": "cpp", "c": "cpp", "cmake": "sh", "toml": "sh", "yaml": "sh", "bash": "sh", "py": "python"}


def highlight(code, language):
    """Comments, strings, words of the language and numbers in spans; other languages as they are."""
    language = LANGUAGES.get(language, language)
    if language not in WORDS:
        return html.escape(code, quote=False)
    comment = r"//[^\n]*|/\*.*?\*/" if language == "cpp" else r"(?<![^\s])\#[^\n]*"
    words = "|".join(WORDS[language].split())
    pattern = re.compile(
        rf"""(?P<c>{comment})|(?P<s>"(?:[^"\\\n]|\\.)*"|(?<!\w)'(?:[^'\\\n]|\\.)*')|(?P<p>^[ ]*\#[ ]*\w+)"""
        rf"""|(?P<k>(?<![\w-])(?:{words})(?![\w-]))|(?P<n>(?<!\w)\d[\w.']*)""", re.S | re.M)
    parts, at = [], 0
    for match in pattern.finditer(code):
        parts.append(html.escape(code[at:match.start()], quote=False))
        parts.append(f'<span class="{match.lastgroup}">{html.escape(match[0], quote=False)}</span>')
        at = match.end()
    return "".join(parts) + html.escape(code[at:], quote=False)


def slug(title):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


class Page:
    """A page of the site: `url` from the site's root, `source` the file that it comes from."""

    def __init__(self, url, source, title="", kind=""):
        self.url, self.source, self.title, self.kind = url, source, title, kind
        self.body, self.anchors, self.sections, self.links = "", set(), [], []

    def to(self, url):
        """The address of another page, from this one."""
        target, mark, anchor = url.partition("#")
        return os.path.relpath(target, os.path.dirname(self.url) or ".") + mark + anchor


def plain(token):
    """The text of an inline token, without markup."""
    return "".join(" " if t.type == "softbreak" else t.content for t in token.children or [] if t.type != "html_inline")


class Markdown:
    """Renders the Markdown files of the repository. `resolve(page, href)` gives a link's address on the site, or None."""

    def __init__(self, resolve):
        from markdown_it import MarkdownIt  # Debian's python3-markdown-it; CommonMark, as GitHub reads it

        self.parser = MarkdownIt("commonmark").enable("table")
        self.parser.add_render_rule("fence", self.fence)
        self.resolve = resolve

    @staticmethod
    def fence(_, tokens, i, *__):
        token = tokens[i]
        return f"<pre><code>{highlight(token.content, token.info.strip())}</code></pre>\n"

    def render(self, page, text):
        tokens = self.parser.parse(text)
        seen, section, line = {}, None, 0
        for i, token in enumerate(tokens):
            line = token.map[0] if token.map else line
            if token.type in ("html_block", "html_inline"):
                token.content = re.sub(r"<!--.*?-->", "", token.content, flags=re.S)
            if token.type == "heading_open":
                title = plain(tokens[i + 1])
                anchor = slug(title)
                seen[anchor] = seen.get(anchor, -1) + 1
                anchor += f"-{seen[anchor]}" if seen[anchor] else ""
                token.attrSet("id", anchor)
                page.anchors.add(anchor)
                page.title = page.title or title
                section = [title, anchor, ""]
                page.sections.append(section)
            elif token.type == "inline":
                if section and section[0] != plain(token):
                    section[2] += " " + plain(token)
                self.links(page, token, line)
            elif token.type == "fence" and section:
                section[2] += " " + token.content
        page.body = self.parser.renderer.render(tokens, self.parser.options, {})
        page.body = page.body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")

    def links(self, page, inline, line):
        for child in inline.children or []:
            if child.type == "softbreak":
                line += 1
            elif child.type == "html_inline":
                child.content = re.sub(r"<!--.*?-->", "", child.content, flags=re.S)
            elif child.type in ("link_open", "image"):
                name = "href" if child.type == "link_open" else "src"
                address = self.resolve(page, child.attrGet(name), line + 1)
                if address:
                    child.attrSet(name, address)
