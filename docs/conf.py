"""How Sphinx builds the documentation: `make docs`. A warning is an error."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

project = "kombu-binary-delay"
author = "The kombu_binary_delay authors"
project_copyright = author  # LICENSE names the year

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "cli_help",
    "conformance_table",
    "faults_table",
    "ladder_figure",
    "pipeline_tables",
    "settings_table",
]
exclude_patterns = ["_build", "examples", "explanation/performance/tables"]
nitpicky = True
nitpick_ignore_regex = [
    # No inventory is fetched: a build needs no network.
    ("py:.*", r"(kombu|amqp|collections|typing|decimal|datetime)\..*"),
    ("py:class", r"Arguments"),
    # Documented as they are imported: from the package, not from the file of their subcommand.
    ("py:class", r"kombu_binary_delay\.admin\.\w+\.\w+"),
]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = project
html_show_sphinx = False
