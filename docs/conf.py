"""How Sphinx builds the documentation: `make docs`. A warning is an error.

The pages are plain Markdown, so that code hosts show them too. The tree of pages is made from the
lists of `index.md`, and the directives of the API from its generated lists.
"""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.generate import api

project = "kombu-binary-delay"
author = "The kombu_binary_delay authors"
project_copyright = author  # LICENSE names the year

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
]
exclude_patterns = ["_build", "examples", "generate"]
nitpicky = True
nitpick_ignore_regex = [
    # No inventory is fetched: a build needs no network.
    (
        "py:.*",
        r"(kombu|amqp|collections|typing|decimal|datetime|opentelemetry|prometheus_client)\..*",
    ),
    ("py:class", r"Arguments"),
    # Documented as they are imported: from the package, not from the file of their subcommand.
    ("py:class", r"kombu_binary_delay\.operate\.\w+\.\w+"),
]

myst_heading_anchors = 3

autodoc_member_order = "bysource"

html_theme = "furo"
html_title = project
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["site.css"]


#: A group of pages in a list: its name, and the links to them.
_GROUP = re.compile(r"^- \*\*(.+?)\*\*: (.+(?:\n  .+)*)", re.MULTILINE)


def for_the_site(_: Sphinx, name: str, page: list[str]) -> None:
    """Add what only Sphinx understands: directives of the API, and the tree of pages."""
    page[0] = api.for_the_site(page[0])
    if name == "index":
        page[0] += "".join(_tree(*group) for group in _GROUP.findall(page[0]))


def _tree(caption: str, links: str) -> str:
    names = re.findall(r"\]\(([\w/-]+)\.md\)", links)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(names) + "\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", for_the_site)
