"The site in a browser: every page at three widths, light and dark. `make site` builds it and runs this over all pages."
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
SITE = Path(os.environ.get('IDP_SITE_FOLDER', ROOT/'docs/_build/html'))
WIDTHS,THEMES = (390, 820, 1400),('light', 'dark')
FEW = ('index.html', 'search.html', 'changelog.html', 'course/09_idpg.html', 'course/11_late_prompt_tuning.html',
    'course/glossary.html', 'course/15_a_fair_comparison.html', 'lab/depth.html', 'engine/model/index.html',
    'api/methods.lpt.html')
LOOK = """() => {
    const prose = document.querySelector('article') || document.body
    const walker = document.createTreeWalker(prose, NodeFilter.SHOW_TEXT), raw = []
    const skip = 'pre, code, script, style, .katex, .highlight, annotation'
    const maths = /\\\\\\(|\\\\\\[|\\$[^$\\d\\s][^$]*\\$/
    while (walker.nextNode()) {
        const t = walker.currentNode
        if (!t.parentElement.closest(skip) && maths.test(t.data)) raw.push(t.data.trim().slice(0, 80))
    }
    return {
        maths: [...document.querySelectorAll('.math')].filter(m => !m.querySelector('.katex'))
            .map(m => m.textContent.slice(0, 80)),
        errors: document.querySelectorAll('.katex-error').length,
        raw,
        struck: [...prose.querySelectorAll('s, del, strike')].map(s => s.textContent.slice(0, 80)),
        no_alt: [...document.images].map(i => [i.src, (i.getAttribute('alt') || '').trim()])
            .filter(([src, alt]) => !alt || src.endsWith(alt)).map(([src]) => src),
        broken: [...document.images].filter(i => i.complete && !i.naturalWidth && i.loading != 'lazy').map(i => i.src),
    }
}"""
WIDE = """theme => {
    document.body.dataset.theme = theme
    const room = document.documentElement.clientWidth
    return document.documentElement.scrollWidth > room + 1 ? document.documentElement.scrollWidth : 0
}"""

def pages():
    "Names of the pages to look at: a few, or all with IDP_SITE=all"
    there = sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob('*.html')) if SITE.is_dir() else []
    return there if os.environ.get('IDP_SITE')=='all' else [p for p in FEW if p in there]

@pytest.fixture(scope='module')
def address():
    "Where the built site is served"
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    if not (SITE/'index.html').is_file():
        pytest.skip('the site is not built: `make docs` builds it')
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()

@pytest.fixture(scope='module')
def browser():
    "A headless Chromium"
    sync_api = pytest.importorskip('playwright.sync_api', reason='playwright is missing: pip install playwright')
    chromium = shutil.which('chromium') or shutil.which('google-chrome') or shutil.which('chromium-browser')
    if not chromium:
        pytest.skip('no Chromium on this machine: apt-get install chromium')
    with sync_api.sync_playwright() as p:
        options = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--disable-background-networking']
        opened = p.chromium.launch(executable_path=chromium, args=options)
        yield opened
        opened.close()

def seen(browser, url):
    "What is wrong with a page, as sentences"
    wrong,page = [],browser.new_page()
    page.on('console', lambda m: wrong.append(f'console: {m.text}') if m.type=='error' else None)
    page.on('pageerror', lambda e: wrong.append(f'script: {e}'))
    page.on('requestfailed', lambda r: wrong.append(f'request failed: {r.url}'))
    page.on('response', lambda r: wrong.append(f'{r.status}: {r.url}') if r.status>=400 else None)
    page.goto(url, wait_until='load')
    wrong += [f'{what}: {found}' for what,found in page.evaluate(LOOK).items() if found]
    for width in WIDTHS:
        page.set_viewport_size(dict(width=width, height=900))
        for theme in THEMES:
            if wide := page.evaluate(WIDE, theme):
                wrong.append(f'{wide} pixels wide in a window of {width}, {theme}')
    page.close()
    return wrong

def test_every_page_is_as_it_should_be(browser, address):
    wrong = {name: found for name in pages() if (found := seen(browser, f'{address}/{name}'))}
    assert not wrong, '\n'.join(f'{name}: {w}' for name,found in wrong.items() for w in found)

def test_search_finds_a_prompt_layer(browser, address):
    page = browser.new_page()
    page.goto(f'{address}/search.html?q=prompt+layer')
    page.wait_for_selector('#search-results li a', timeout=30_000)
    assert page.locator('#search-results li').count()>5
    page.close()

def test_the_browser_sees_what_is_wrong(browser, tmp_path):
    (tmp_path/'bad.html').write_text('<html><body data-theme="auto"><article><s>struck</s> $x_1$ <img src="none.png">'
        '<div style="width:2000px">wide</div><script>console.error("said")</script></article></body></html>')
    wrong = ' '.join(seen(browser, (tmp_path/'bad.html').as_uri()))
    assert all(w in wrong for w in ('struck', 'x_1', 'no_alt', 'pixels wide', 'console: said', 'request failed'))

def test_links_and_anchors_resolve():
    if not (SITE/'index.html').is_file():
        pytest.skip('the site is not built: `make docs` builds it')
    anchors = functools.cache(lambda p: set(re.findall(r'\b(?:id|name)="([^"]+)"', p.read_text(encoding='utf-8'))))
    wrong = []
    for page in SITE.rglob('*.html'):
        for href in re.findall(r'<a\b[^>]*?\bhref="([^"]+)"', page.read_text(encoding='utf-8')):
            path,anchor = urldefrag(unescape(href))
            if re.match(r'[a-z]+:|//', path):
                continue
            target = (page.parent/unquote(path)).resolve() if path else page
            target = target/'index.html' if target.is_dir() else target
            if not target.is_file() or anchor and target.suffix=='.html' and unquote(anchor) not in anchors(target):
                wrong.append(f'{page.relative_to(SITE)}: {href}')
    assert not wrong, '\n'.join(sorted(set(wrong))[:40])
