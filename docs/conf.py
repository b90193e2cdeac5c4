"""How Sphinx builds the documentation: `make docs`. A warning is an error.

The pages are plain Markdown, so that code hosts show them too. What only Sphinx understands stands
in a comment `<!-- site`; a generated list of the API is only for code hosts.
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


def for_the_site(_: Sphinx, __: str, page: list[str]) -> None:
    """Uncomment what only the site shows, and leave out what stands there on a code host."""
    text = re.sub(r"^<!-- site\n(.*?)^-->$", r"\1", page[0], flags=re.MULTILINE | re.DOTALL)
    page[0] = api.for_the_site(text)


def setup(app: Sphinx) -> None:
    app.connect("source-read", for_the_site)
