"""Sphinx settings."""

from debubble import __version__

project = "debubble"
copyright = "The debubble developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "debubble"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False
