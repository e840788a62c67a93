"""Where lines may break on narrow pages: long lines of outputs, and names and paths in tables."""

import html
import re

OUTPUT = re.compile(
    r'(<div class="output (?:stream|text_plain)[^>]*><div class="highlight"><pre>)(.*?)(</pre>)', re.DOTALL
)
TABLE = re.compile(r"<table\b.*?</table>", re.DOTALL)
TAG = re.compile(r"(<[^>]*>)")
NAME = re.compile(r"[^\s<>&;]{12,}")  # longer than most words; not within an entity such as &#39;
AFTER = re.compile(r"(?<=[\w)\]])([./_=,(:]+)(?=[\w\"'])")
WIDEST = 88  # characters that a page of full width shows


def with_broken_lines(body: str) -> str:
    """``body`` with long lines in outputs of cells wrapped, and with names in tables that can break."""
    return TABLE.sub(lambda table: _breakable(table[0]), OUTPUT.sub(_wrapped, body))


def _wrapped(output: re.Match[str]) -> str:
    """Lines that the widest page would cut, such as sentences; those of tables keep their columns."""
    lines = output[2].split("\n")
    return output[1] + "\n".join([_hanging(line) for line in lines]) + output[3]


def _hanging(line: str) -> str:
    text = html.unescape(TAG.sub("", line)).rstrip()
    if len(text) <= WIDEST or line.count("<span") != line.count("</span"):
        return line
    indent = len(text) - len(text.lstrip()) + 4
    return f'<span class="lazyviz-long-line" style="--hang: {indent}ch">{line}</span>'


def _breakable(table: str) -> str:
    """Names break after a dot, a slash, or an underscore, and otherwise not."""
    parts = TAG.split(table)
    parts[::2] = [NAME.sub(lambda name: AFTER.sub(r"\1<wbr>", name[0]), text) for text in parts[::2]]
    return "".join(parts)
