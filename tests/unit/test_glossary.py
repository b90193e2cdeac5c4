"""Each word of the glossary has one entry, and is used on a page."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = DOCS / "reference" / "glossary.md"


def test_each_word_has_one_entry_in_order_and_is_used():
    words = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(), re.MULTILINE)[1:]
    pages = [path.read_text().lower() for path in DOCS.glob("**/*.md") if path != GLOSSARY]

    assert words == sorted(set(words))
    assert [word for word in words if not any(word in page for page in pages)] == []
