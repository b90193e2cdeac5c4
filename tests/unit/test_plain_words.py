"""Prose in plain words: docs, docstrings, comments and messages. Single words: dev/words.txt."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md")
    for page in ROOT.glob(pattern)
    if "_build" not in page.parts
)
SOURCES = sorted((ROOT / "kombu_binary_delay").glob("**/*.py"))
API = ROOT / "tests/unit/api.txt"

#: What a docstring must not open with, and how it should open.
OPENINGS = {
    r"Tells?\b": "Return …, or Describe …",
    r"Lends?\b": "Yield …",
    r"Gives?\b": "Return …, or Yield …",
    r"Teach(es)?\b": "Make …, or Replace …",
    r"(Have|Let)\b": "say what the function does, or returns",
    r"See to\b": "Make …",
}
#: What no prose should say, and what to write.
PHRASES = {
    r"(?:^|[.;:,(] )[Ww]ho (?:may|can|does|reads|has|is|only|would|knows|writes)\b(?!.*\?)": (
        "a user that may …, a program that reads …"
    ),
    r"\bthat (?:cannot be|is none)[.,;]": "an invalid …",
    r"\bdoubles nothing\b": "cannot duplicate a message",
    r"\b[Nn]one for as many as\b": "By default, enough …",
    r"\bwhat does not fit\b": "name what does not fit",
    r"\bhold(s)? what comes in\b": "buffer frames",
    r"\b(?:so far|as far) as (?:that )?is known\b": "if known",
    r"\bwithout a word\b": "silently",
    r"\bis to know\b": "must know",
}
#: Names that make a reader guess.
GUESSED = {
    "ancestors",
    "believes",
    "doubt",
    "enlist",
    "keeper",
    "lab",
    "lend",
    "own",
    "party",
    "pump",
    "scene",
    "screen",
    "settle",
    "shadow",
    "site",
    "stand",
    "verb",
    "world",
}


def paragraphs(page):
    """Return the text of a page without code and headings, one paragraph a line."""
    text = re.sub(r"^( *)(```+).*?^\1\2$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^#.*$|`[^`\n]*`", "", text, flags=re.MULTILINE)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def prose(source):
    """Return docstrings, comments and other text of several words, each on one line."""
    text = source.read_text()
    tree = ast.parse(text)
    said = list(docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts = [str(value.value) for value in node.values if isinstance(value, ast.Constant)]
            said.append("…".join(texts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            said.append(node.value)
    block = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            block += token.string.lstrip("#: ") + " "
        elif token.type != tokenize.NL:
            said.append(block)
            block = ""
    return [" ".join(text.split()) for text in said if text.count(" ") > 1]


def test_no_docstring_opens_with_a_verb_that_says_nothing():
    complaints = [
        f"{source.relative_to(ROOT)}: {text.splitlines()[0]!r}: {remedy}"
        for source in SOURCES
        for text in docstrings(ast.parse(source.read_text()))
        for opening, remedy in OPENINGS.items()
        if re.match(opening, text)
    ]

    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("files", [PAGES, SOURCES], ids=["pages", "sources"])
def test_prose_has_none_of_the_phrases_that_a_reader_stumbles_over(files):
    complaints = [
        f"{file.relative_to(ROOT)}: {match[0]!r} in {text[:80]!r}: {remedy}"
        for file in files
        for text in (paragraphs(file) if file.suffix == ".md" else prose(file))
        for phrase, remedy in PHRASES.items()
        if (match := re.search(phrase, text))
    ]

    assert not complaints, "\n".join(complaints)


def test_no_public_name_makes_a_reader_guess():
    words = re.findall(r"[A-Z]?[a-z]+", API.read_text())

    assert not GUESSED & {word.lower() for word in words}
