"""Open the built site in a browser: every page at three widths, in the light and the dark theme.

`make site` builds it and checks all pages; `make docs` builds it only.
"""

import functools
import http.server
import os
import re
import shutil
import threading
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(os.environ.get("IDP_SITE_FOLDER", ROOT / "docs/_build/html"))
WIDTHS = (390, 820, 1400)
THEMES = ("light", "dark")
SAMPLE_PAGES = (
    "index.html",
    "search.html",
    "changelog.html",
    "course/09_idpg.html",
    "course/11_late_prompt_tuning.html",
    "course/glossary.html",
    "course/15_a_fair_comparison.html",
    "lab/depth.html",
    "engine/core/index.html",
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
