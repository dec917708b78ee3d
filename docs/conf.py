"The documentation site: notebooks with their stored outputs, API pages made from the package. Built by `make docs`."
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import notebooks as nbs  # docs/notebooks.py
import site_pages  # docs/site_pages.py

cfg = nbs.settings()
site_pages.write(HERE/'_build/source', HERE/'_build/extra') # what Sphinx reads, and pictures for `<img>`

project,author,release = cfg['title'],cfg['author'],cfg['version']
project_copyright = cfg['copyright']
language = 'en'
extensions = ['myst_nb', 'sphinx.ext.autodoc', 'sphinx.ext.viewcode', 'sphinxcontrib.katex']

nb_execution_mode = 'off'
nb_render_markdown_format = 'myst' # tables
nb_merge_streams = True
myst_enable_extensions = ['dollarmath', 'amsmath', 'colon_fence', 'deflist', 'strikethrough']
myst_heading_anchors = 3
suppress_warnings = ['mystnb.unknown_mime_type', 'myst.strikethrough',
    'myst.xref_missing'] # ids in HTML (rows of a table) are unknown to Sphinx; tests/test_site.py follows every link
katex_css_path = 'katex/katex.min.css'   # in _static: no CDN; the script comes with sphinxcontrib-katex

autodoc_default_options = {'members': True, 'undoc-members': True, 'no-value': True}
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'               # types are in the parameter tables
autodoc_preserve_defaults = False # a command inherits defaults that its own source does not spell
autodoc_inherit_docstrings = False
add_module_names = False
python_maximum_signature_line_length = 90
toc_object_entries_show_parents = 'hide'

html_theme = 'furo'
html_title = cfg['title']
html_static_path,html_extra_path = ['_static'],['_build/extra']
html_css_files = ['site.css']
html_favicon = '_static/icon.svg'
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
pygments_style,pygments_dark_style = 'friendly','github-dark'
html_theme_options = {
    'source_repository': cfg['git_url']+'/', 'source_branch': cfg['branch'], 'source_directory': 'nbs/',
    'light_css_variables': {'color-brand-primary': '#0b5c8c', 'color-brand-content': '#0b5c8c',
        'color-api-name': '#0b5c8c', 'color-api-pre-name': '#5a6572'},
    'dark_css_variables': {'color-brand-primary': '#6cb6e8', 'color-brand-content': '#6cb6e8',
        'color-api-name': '#8ecbf5', 'color-api-pre-name': '#9aa7b4'},
}

def page_context(app, page, template, context, doctree):
    "Only notebooks have a source worth linking to"
    if not (nbs.NBS/f'{page}.ipynb').exists():
        context['page_source_suffix'] = None

def setup(app):
    app.connect('autodoc-process-docstring', site_pages.docstring)
    app.connect('autodoc-process-signature', site_pages.signature)
    app.connect('autodoc-skip-member', site_pages.skip)
    app.connect('doctree-resolved', site_pages.formulas)
    app.connect('html-page-context', page_context, priority=900)
