"""Configure Sphinx for the documentation site, which `make docs` builds.

The site consists of the notebooks with their stored outputs and of API pages made from the package.
"""

import sys
from pathlib import Path
from typing import Any

DOCS_FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS_FOLDER))
import notebooks as nbs  # docs/notebooks.py
import site_pages  # docs/site_pages.py

cfg = nbs.read_settings()
site_pages.write_site(DOCS_FOLDER / "_build/source", DOCS_FOLDER / "_build/extra")

project = cfg["title"]
author = cfg["author"]
release = cfg["version"]
project_copyright = cfg["copyright"]
language = "en"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinxcontrib.katex"]

nb_execution_mode = "off"
nb_render_markdown_format = "myst"  # tables
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "strikethrough"]
myst_heading_anchors = 3
# Sphinx does not know ids in HTML, such as rows of a table; tests/test_site.py follows every link
suppress_warnings = ["mystnb.unknown_mime_type", "myst.strikethrough", "myst.xref_missing"]
# from _static instead of a CDN; the script comes with sphinxcontrib-katex
katex_css_path = "katex/katex.min.css"

# links to the source only where an object is defined, not from the types of constants
viewcode_follow_imported_members = False

autodoc_default_options = {"members": True, "undoc-members": True, "no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the parameter tables
autodoc_preserve_defaults = False  # commands inherit defaults that their source does not contain
autodoc_inherit_docstrings = False
add_module_names = False
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = cfg["title"]
html_static_path = ["_static"]
html_extra_path = ["_build/extra"]
if (DOCS_FOLDER / "_build/live").is_dir():  # docs/playground.py exports models for the playground
    html_extra_path.append("_build/live")
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "source_repository": cfg["git_url"] + "/",
    "source_branch": cfg["branch"],
    "source_directory": "nbs/",
    "light_css_variables": {
        "color-brand-primary": "#0b5c8c",
        "color-brand-content": "#0b5c8c",
        "color-api-name": "#0b5c8c",
        "color-api-pre-name": "#5a6572",
    },
    "dark_css_variables": {
        "color-brand-primary": "#6cb6e8",
        "color-brand-content": "#6cb6e8",
        "color-api-name": "#8ecbf5",
        "color-api-pre-name": "#9aa7b4",
    },
}


def set_page_context(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Remove the link to the source from pages that are not made from a notebook."""
    if not (nbs.NOTEBOOKS_FOLDER / f"{page}.ipynb").exists():
        context["page_source_suffix"] = None


def setup(app: Any) -> None:
    """Connect the functions that adapt pages and docstrings."""
    app.connect("autodoc-process-docstring", site_pages.process_docstring)
    app.connect("autodoc-process-signature", site_pages.process_signature)
    app.connect("autodoc-skip-member", site_pages.skip_member)
    app.connect("doctree-resolved", site_pages.escape_formulas)
    app.connect("html-page-context", set_page_context, priority=900)
