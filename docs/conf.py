"""Sphinx: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flowtt_torchrec import __version__  # noqa: E402

project = "FlowTT for TorchRec"
author = "the FlowTT for TorchRec maintainers"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["pictures"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
toc_object_entries_show_parents = "hide"
pygments_dark_style = "native"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Single backticks in docstrings name things of this package.
default_role = "code"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True


def keep_colons(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type; ours are sentences."""
    if what in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]  # an empty comment


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", keep_colons, priority=100)  # before Napoleon's 500
