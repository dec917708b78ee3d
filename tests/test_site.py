"""Open the built site and JupyterLab in a browser.

Every page of the site is opened at three widths, in the light and the dark theme. Every notebook of
the course and the lab is opened in JupyterLab as `make lab` starts it. `make site` builds the site
and checks all pages and notebooks; `make docs` builds it only.
"""

import functools
import http.server
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from html import unescape
from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote, urldefrag
from urllib.request import Request, urlopen

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(os.environ.get("IDP_SITE_FOLDER", ROOT / "docs/_build/html"))
WIDTHS = (390, 820, 1400)
THEMES = ("light", "dark")
SAMPLE_PAGES = (
    "index.html",
    "search.html",
    "playground.html",
    "changelog.html",
    "course/06_idpg.html",
    "course/08_late_prompt_tuning.html",
    "course/glossary.html",
    "course/11_a_fair_comparison.html",
    "lab/depth.html",
    "engine/core/index.html",
    "engine/index.html",
    "api/index.html",
    "api/methods.html",
    "api/methods.lpt.html",
)
FIND_DEFECTS = """() => {
    const prose = document.querySelector('article') || document.body
    const walker = document.createTreeWalker(prose, NodeFilter.SHOW_TEXT), raw = []
    const skip = 'pre, code, script, style, .katex, .highlight, annotation'
    const maths = /\\\\\\(|\\\\\\[|\\$[^$\\d\\s][^$]*\\$/
    while (walker.nextNode()) {
        const t = walker.currentNode
        const visible = !t.parentElement.closest(skip)
        if (visible && maths.test(t.data)) raw.push(t.data.trim().slice(0, 80))
    }
    return {
        maths: [...document.querySelectorAll('.math')].filter(m => !m.querySelector('.katex'))
            .map(m => m.textContent.slice(0, 80)),
        errors: document.querySelectorAll('.katex-error').length,
        raw,
        struck: [...prose.querySelectorAll('s, del, strike')].map(s => s.textContent.slice(0, 80)),
        no_alt: [...document.images].map(i => [i.src, (i.getAttribute('alt') || '').trim()])
            .filter(([src, alt]) => !alt || src.endsWith(alt)).map(([src]) => src),
        broken: [...document.images]
            .filter(i => i.complete && !i.naturalWidth && i.loading != 'lazy').map(i => i.src),
    }
}"""
MEASURE_OVERFLOW = """theme => {
    document.body.dataset.theme = theme
    const width = document.documentElement.clientWidth
    const page_width = document.documentElement.scrollWidth
    return page_width > width + 1 ? page_width : 0
}"""


def list_pages():
    """Return the pages to check: a sample, or all pages if the variable IDP_SITE is `all`."""
    pages = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
    if os.environ.get("IDP_SITE") == "all":
        return pages
    return [page for page in SAMPLE_PAGES if page in pages]


@pytest.fixture(scope="module")
def address():
    """Serve the built site, and return its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: `make docs` builds it")
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser():
    """Start a headless Chromium."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: pip install playwright"
    )
    chromium = (
        shutil.which("chromium")
        or shutil.which("google-chrome")
        or shutil.which("chromium-browser")
    )
    if not chromium:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as p:
        options = [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-background-networking",
        ]
        chromium_browser = p.chromium.launch(executable_path=chromium, args=options)
        yield chromium_browser
        chromium_browser.close()


def find_defects(browser, url):
    """Return the defects of a page as sentences."""
    defects = []
    page = browser.new_page()
    page.on(
        "console",
        lambda m: defects.append(f"console: {m.text}") if m.type == "error" else None,
    )
    page.on("pageerror", lambda e: defects.append(f"script: {e}"))
    page.on("requestfailed", lambda r: defects.append(f"request failed: {r.url}"))
    page.on(
        "response",
        lambda r: defects.append(f"{r.status}: {r.url}") if r.status >= 400 else None,
    )
    page.goto(url, wait_until="load")
    findings = page.evaluate(FIND_DEFECTS)
    defects += [f"{kind}: {elements}" for kind, elements in findings.items() if elements]
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in THEMES:
            page_width = page.evaluate(MEASURE_OVERFLOW, theme)
            if page_width:
                defects.append(f"{page_width} pixels wide in a window of {width}, {theme}")
    page.close()
    return defects


def test_no_page_has_a_defect(browser, address):
    defects = []
    for page in list_pages():
        defects += [f"{page}: {defect}" for defect in find_defects(browser, f"{address}/{page}")]
    assert not defects, "\n".join(defects)


def test_search_returns_pages(browser, address):
    page = browser.new_page()
    page.goto(f"{address}/search.html?q=prompt+layer")
    page.wait_for_selector("#search-results li a", timeout=30_000)
    assert page.locator("#search-results li").count() > 5
    page.close()


def test_defects_of_a_page_are_found(browser, tmp_path):
    (tmp_path / "bad.html").write_text(
        '<html><body data-theme="auto"><article><s>struck</s> $x_1$ <img src="none.png">'
        '<div style="width:2000px">wide</div><script>console.error("problem")</script>'
        "</article></body></html>"
    )
    defects = " ".join(find_defects(browser, (tmp_path / "bad.html").as_uri()))
    assert all(
        expected in defects
        for expected in (
            "struck",
            "x_1",
            "no_alt",
            "pixels wide",
            "console: problem",
            "request failed",
        )
    )


@functools.cache
def list_anchors(path):
    return set(re.findall(r'\b(?:id|name)="([^"]+)"', path.read_text(encoding="utf-8")))


def test_links_and_anchors_resolve():
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built: `make docs` builds it")
    broken = []
    for page in SITE.rglob("*.html"):
        for href in re.findall(r'<a\b[^>]*?\bhref="([^"]+)"', page.read_text(encoding="utf-8")):
            path, anchor = urldefrag(unescape(href))
            if re.match(r"[a-z]+:|//", path):
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            has_anchor = anchor and target.suffix == ".html"
            if not target.is_file() or (has_anchor and unquote(anchor) not in list_anchors(target)):
                broken.append(f"{page.relative_to(SITE)}: {href}")
    assert not broken, "\n".join(sorted(set(broken))[:40])


# ---- JupyterLab

CHECKS_ALL = os.environ.get("IDP_SITE") == "all"
NOTEBOOKS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("nbs/course", "nbs/lab")
    for path in (ROOT / folder).glob("*.ipynb")
)
LAB_SETTINGS = {  # all cells are rendered, not only those on the screen
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false"},
}
SECONDS_TO_OPEN = 120  # of a notebook, on a busy machine
IS_RENDERED = """() => {
    const cells = [...document.querySelectorAll('.jp-MarkdownCell')]
    return cells.length && cells.every(c =>
        c.querySelector('.jp-RenderedMarkdown')?.textContent.trim() || c.querySelector('img'))
}"""
FIND_NOTEBOOK_DEFECTS = """() => {
    const notebook = document.querySelector('.jp-Notebook'), raw = []
    const walker = document.createTreeWalker(notebook, NodeFilter.SHOW_TEXT)
    const skip = 'pre, code, script, style, mjx-container, .MathJax, .cm-editor'
    const maths = /\\\\\\(|\\\\\\[|\\$[^$\\d\\s][^$]*\\$/
    while (walker.nextNode()) {
        const t = walker.currentNode
        const isVisible = t.parentElement.closest('.jp-RenderedMarkdown')
        if (isVisible && !t.parentElement.closest(skip) && maths.test(t.data))
            raw.push(t.data.trim().slice(0, 80))
    }
    const stderr = '[data-mime-type="application/vnd.jupyter.stderr"]'
    const error = '[data-mime-type="application/vnd.jupyter.error"]'
    return {
        raw,
        formulas: [...notebook.querySelectorAll('mjx-merror, .MathJax_Error')]
            .map(e => e.textContent),
        broken: [...notebook.querySelectorAll('img')]
            .filter(i => i.complete && !i.naturalWidth).map(i => i.src.slice(0, 120)),
        warnings: [...notebook.querySelectorAll(stderr)].map(e => e.textContent.slice(0, 200)),
        errors: [...notebook.querySelectorAll(error)].map(e => e.textContent.slice(0, 200)),
        wide: [...notebook.querySelectorAll('.jp-RenderedMarkdown table, .jp-RenderedImage img')]
            .filter(e => e.getBoundingClientRect().right > notebook.getBoundingClientRect().right)
            .map(e => (e.getAttribute('alt') || e.textContent).slice(0, 80)),
    }
}"""
COUNT_FOLDED = """() => [...document.querySelectorAll('.jp-CodeCell')]
    .filter(c => c.querySelector('.jp-Cell-inputWrapper .jp-Placeholder')).length"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab as `make lab` does, on a copy of the notebooks; return its address."""
    if not CHECKS_ALL:
        pytest.skip("opens all notebooks, which takes minutes: IDP_SITE=all, or `make site`")
    pytest.importorskip("jupyterlab", reason="JupyterLab is missing: pip install jupyterlab")
    folder = tmp_path_factory.mktemp("lab")
    copy = folder / "repository"  # JupyterLab saves notebooks
    ignored = shutil.ignore_patterns("_*", ".*")
    for name in ("nbs", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name, settings in LAB_SETTINGS.items():
        file = folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    (recipe,) = re.findall(r"jupyter lab (.*?) \$\(or", (ROOT / "Makefile").read_text())
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = ["--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token="]
    options.append("--ServerApp.disable_check_xsrf=True")  # for `end_kernels`
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "jupyterlab", *shlex.split(recipe), *options]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(SECONDS_TO_OPEN):
            try:
                urlopen(f"{url}/api", timeout=10).close()
                break
            except (URLError, OSError):
                time.sleep(1)
        else:
            pytest.fail(f"JupyterLab does not start: {log.read_text()}")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def end_kernels(url):
    """End the kernels that JupyterLab has started for the opened notebooks."""
    with urlopen(f"{url}/api/sessions", timeout=30) as response:
        sessions = json.load(response)
    for session in sessions:
        urlopen(Request(f"{url}/api/sessions/{session['id']}", method="DELETE"), timeout=30).close()


def open_in_lab(browser, url, notebook, defects):
    """Open a notebook in JupyterLab, and return the page when all Markdown cells are rendered."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.on(
        "response",
        lambda r: (
            defects.append(f"{r.status}: {r.url}")
            if r.status >= 400 and "/files/" in r.url
            else None
        ),
    )
    page.goto(f"{url}/doc/tree/{notebook}?reset", wait_until="load")
    page.wait_for_selector(".jp-Notebook", timeout=1000 * SECONDS_TO_OPEN)
    page.wait_for_function(IS_RENDERED, timeout=1000 * SECONDS_TO_OPEN)
    return page


def find_notebook_defects(page):
    """Return the defects of an opened notebook; formulas and pictures get some seconds to load."""
    for _ in range(30):
        findings = page.evaluate(FIND_NOTEBOOK_DEFECTS)
        if not any(findings.values()):
            break
        page.wait_for_timeout(1000)
    return [f"{kind}: {elements}" for kind, elements in findings.items() if elements]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_has_no_defect_in_jupyterlab(browser, lab, notebook):
    defects = []
    page = open_in_lab(browser, lab, notebook, defects)
    defects += find_notebook_defects(page)
    n_folded = page.evaluate(COUNT_FOLDED)
    page.close()
    end_kernels(lab)
    assert not defects, "\n".join(defects)
    cells = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
    assert n_folded == sum(
        cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in cells
    )


def run_all_cells(page):
    """Run all cells of an opened notebook, and return its errors and defects."""
    page.wait_for_selector('[data-status="idle"]', timeout=1000 * SECONDS_TO_OPEN)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    has_run = """() => [...document.querySelectorAll('.jp-CodeCell')].every(c =>
        !c.querySelector('.cm-content')?.textContent.trim()
        || /\\[\\d+\\]/.test(c.querySelector('.jp-InputPrompt').textContent))"""
    page.wait_for_function(has_run, timeout=900_000)
    return find_notebook_defects(page)


@pytest.mark.parametrize(
    "chapter", ["01_frozen_model", "04_prompt_tuning", "05_phm", "08_late_prompt_tuning"]
)
def test_all_cells_of_a_notebook_run_in_jupyterlab(browser, lab, chapter):
    page = open_in_lab(browser, lab, f"nbs/course/{chapter}.ipynb", [])
    defects = run_all_cells(page)
    n_sliders = page.locator(".widget-slider").count()
    page.close()
    end_kernels(lab)
    assert not defects, "\n".join(defects)
    if importlib.util.find_spec("ipywidgets"):
        assert n_sliders == (chapter == "05_phm")
