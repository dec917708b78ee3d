"""The playground in a browser: stored answers, the live model, keyboard, themes and widths."""

import json

import numpy as np
import playground_page as page
import pytest
from test_site import MEASURE_OVERFLOW, SITE, THEMES, address, browser  # noqa: F401

CELLS = [(a["task"], a["method"], a["layer"]) for a in page.read_answers()["answers"]]
SHOWN = """() => ({
    verdict: document.getElementById('pg-verdict').dataset.label,
    text: document.getElementById('pg-verdict').textContent,
    follows: document.getElementById('pg-follows').textContent,
    origin: document.getElementById('pg-origin').textContent,
    logits: JSON.parse(document.getElementById('pg-verdict').dataset.logits || '[]'),
    cells: [...document.querySelectorAll('#pg-matrix tbody tr')].map(
        row => [...row.querySelectorAll('td')].map(cell => cell.textContent)),
    state: document.getElementById('pg-matrix').dataset.state,
})"""
# contrast of the text of an element with the first background behind it
CONTRAST = """selector => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number)
    const light = colour => {
        const [r, g, b] = numbers(colour).map(x => x / 255)
            .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
        return .2126 * r + .7152 * g + .0722 * b
    }
    const isClear = colour => /rgba\\(.*, 0\\)/.test(colour)
    return [...document.querySelectorAll(selector)].filter(e => e.offsetParent).map(e => {
        let behind = e
        while (behind.parentElement && isClear(getComputedStyle(behind).backgroundColor))
            behind = behind.parentElement
        const pair = [light(getComputedStyle(e).color),
                      light(getComputedStyle(behind).backgroundColor)].sort()
        return (pair[1] + .05) / (pair[0] + .05)
    })
}"""


class Visit:
    """An opened page, with its requests and its errors."""

    def __init__(self, browser, address, **options):  # noqa: F811
        self.address = address
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.requests, self.defects = [], []
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.on("pageerror", lambda e: self.defects.append(str(e)))
        self.page.on(
            "console",
            lambda m: self.defects.append(m.text) if m.type in ("error", "warning") else None,
        )
        self.page.on("requestfailed", lambda r: self.defects.append(f"failed: {r.url}"))
        self.page.goto(f"{address}/playground.html", wait_until="load")

    def choose(self, task, method, layer, owner="other"):
        self.page.check(f'input[name="pg-task"][value="{task}"]')
        self.page.check(f'input[name="pg-owner"][value="{"static" if method == "lpt" else owner}"]')
        if method != "lpt":
            self.page.select_option("#pg-method", method)
        self.page.select_option("#pg-layer", "input" if layer is None else str(layer))

    def wait(self, task, method, layer, source, owner="other"):
        """Wait until all answers of a setting are shown, and return them."""
        owner = "static" if method == "lpt" else owner
        state = f"{task} {method} {'input' if layer is None else layer} {owner} {source}"
        self.page.wait_for_function(
            "state => document.getElementById('pg-matrix').dataset.state === state",
            arg=state,
            timeout=60_000,
        )
        self.page.wait_for_timeout(150)
        return self.page.evaluate(SHOWN)

    def load(self):
        self.page.click("#pg-load")
        self.page.wait_for_selector('#pg-load-line[data-state="loaded"]', timeout=120_000)

    def other_hosts(self):
        return [r for r in self.requests if not r.startswith((self.address, "data:", "blob:"))]

    def close(self):
        self.context.close()


def is_live():
    return (SITE / "playground/ort-wasm-simd-threaded.wasm").is_file()


@pytest.fixture
def visit(browser, address):  # noqa: F811
    if not (SITE / "playground.html").is_file():
        pytest.skip("the built site has no playground")
    visit = Visit(browser, address)
    yield visit
    visit.close()


@pytest.fixture(scope="module")
def live(browser, address):  # noqa: F811
    if not is_live():
        pytest.skip("the live model is not built: `python docs/playground.py`, then `make docs`")
    visit = Visit(browser, address)
    before = [r for r in visit.requests if "/playground/" in r and "_static" not in r]
    assert not before, "the model is loaded before the reader asks for it"
    assert " MB)" in visit.page.inner_text("#pg-load")
    visit.load()
    yield visit
    visit.close()


def stored_answer(task, method, layer):
    answers = page.read_answers()["answers"]
    return next(a for a in answers if (a["task"], a["method"], a["layer"]) == (task, method, layer))


def expected_labels(task, method, layer):
    rows = np.array(stored_answer(task, method, layer)["logits"]).argmax(-1).tolist()
    labels = page.LABELS[task]
    return [[labels[i] for i in row] for row in (rows[:1] if method == "lpt" else rows)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_stored_answers_are_shown_before_the_model_is_loaded(visit, cell):
    visit.choose(*cell)
    assert visit.wait(*cell, "stored")["cells"] == expected_labels(*cell)
    assert not visit.defects and not visit.other_hosts()


def test_an_exchanged_prompt_flips_the_prediction(visit):
    """In the 16 cells of the task of the course, for the best of the generators."""
    answer = page.best_answer(page.read_answers(), page.read_scores())
    cell = (answer["task"], answer["method"], answer["layer"])
    visit.choose(*cell)
    visit.wait(*cell, "stored")
    sentences = page.read_answers()["sentences"]["two-domains"]
    flips = 0
    for i, text in enumerate(sentences):
        for j, giver in enumerate(sentences):
            visit.page.fill("#pg-text", text)
            visit.page.fill("#pg-giver", giver)
            visit.page.wait_for_timeout(80)
            shown = visit.page.evaluate(SHOWN)
            logits = np.array(answer["logits"])
            assert shown["verdict"] == page.LABELS["two-domains"][logits[j, i].argmax()]
            answer_i, answer_j = (logits[k, k].argmax() for k in (i, j))
            if answer_i != answer_j and logits[j, i].argmax() == answer_j:
                flips += 1
                assert "follows the prompt" in shown["follows"]
    assert flips == 8  # of the 8 pairs whose own answers differ
    assert not visit.defects


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_the_live_model_answers_as_the_package_does(live, cell):
    live.choose(*cell)
    shown = live.wait(*cell, "live")
    assert shown["cells"] == expected_labels(*cell)
    logits = stored_answer(*cell)["logits"]
    expected = logits[0][0] if cell[1] == "lpt" else logits[1][0]
    # stored with four decimals
    np.testing.assert_allclose(shown["logits"], expected, rtol=0, atol=2e-4)
    assert "Computed in this browser" in shown["origin"]
    assert not live.defects and not live.other_hosts()


@pytest.mark.parametrize(
    "text",
    [
        "The lemonade was warm.",
        "😀 日本語 \u202e abc \u0000",
        "<script>alert(1)</script>",
        "word " * 900,
    ],
    ids=["plain", "strange", "markup", "long"],
)
def test_any_text_is_answered_in_a_sentence(live, text):
    cell = ("two-domains", "lpt-npg", 7)
    live.choose(*cell, owner="own")
    live.wait(*cell, "live", owner="own")
    live.page.fill("#pg-text", text)
    live.page.wait_for_timeout(1500)
    shown = live.page.evaluate(SHOWN)
    assert shown["text"].startswith("The model answers: ")
    assert ("left out" in shown["origin"]) == (len(text) > 1000)
    live.page.fill("#pg-text", "  ")
    live.page.wait_for_timeout(300)
    assert live.page.inner_text("#pg-verdict") == "Type a sentence."
    assert not live.defects and not live.other_hosts()


def test_weights_of_the_words_change_with_training(visit):
    weights = {}
    for when in ("after", "before"):
        visit.page.check(f'input[name="pg-when"][value="{when}"]')
        visit.page.wait_for_timeout(200)
        weights[when] = visit.page.locator("#pg-weights .pg-number").all_inner_texts()
        assert sum(float(w.removesuffix(" %")) for w in weights[when]) == pytest.approx(100, abs=1)
    assert weights["after"] != weights["before"]
    assert not visit.defects


def test_the_depth_slider_moves_text_and_marker(visit):
    slider = visit.page.locator("#pg-depth")
    seen = set()
    n_positions = int(slider.get_attribute("max")) + 1
    slider.focus()
    for _ in range(n_positions):
        marker = visit.page.locator("#pg-depth-chart .pg-marker").get_attribute("x")
        seen.add((visit.page.inner_text("#pg-depth-text"), marker))
        visit.page.keyboard.press("ArrowLeft")
    assert len(seen) == n_positions > 2
    assert not visit.defects


def test_presets_set_the_sliders_and_mark_the_published_count(visit):
    for published in page.read_published_counts():
        visit.page.get_by_role("button", name=f"{published['method']}:").click()
        row = visit.page.locator("#pg-counts tr.pg-now", has_text=published["method"])
        assert f"{published['exact']:,}" in row.inner_text()
        assert published["reported"] in row.inner_text()
    visit.page.locator("#pg-n").focus()
    before = visit.page.inner_text("#pg-count-text")
    visit.page.keyboard.press("ArrowLeft")
    assert visit.page.inner_text("#pg-count-text") != before
    assert visit.page.locator("#pg-blocks svg").get_attribute("aria-label")
    assert not visit.defects


def test_the_page_can_be_used_with_the_keyboard_alone(visit):
    visit.page.locator('input[name="pg-owner"]:checked').focus()
    visit.page.keyboard.press("ArrowDown")
    visit.page.wait_for_timeout(200)
    assert visit.page.locator('input[name="pg-owner"]:checked').get_attribute("value") == "own"
    reached = []
    visit.page.locator('input[name="pg-task"]:checked').focus()
    for _ in range(70):
        visit.page.keyboard.press("Tab")
        reached.append(visit.page.evaluate("document.activeElement.id"))
    wanted = {"pg-text", "pg-method", "pg-layer", "pg-depth", "pg-words-text", "pg-d", "pg-n"}
    assert wanted <= set(reached)
    assert not is_live() or "pg-load" in reached


def test_a_cell_of_the_table_is_shown_above(visit):
    sentences = page.read_answers()["sentences"]["two-domains"]
    cell = ("two-domains", "lpt-npg", 7)
    visit.choose(*cell, owner="own")
    visit.wait(*cell, "stored", owner="own")
    visit.page.locator("#pg-matrix tbody tr").nth(3).get_by_role("button").nth(2).press("Enter")
    visit.page.wait_for_timeout(150)
    assert visit.page.input_value("#pg-text") == sentences[2]
    assert visit.page.input_value("#pg-giver") == sentences[3]
    assert visit.page.locator('input[name="pg-owner"]:checked').get_attribute("value") == "other"
    assert visit.page.evaluate(SHOWN)["verdict"] == expected_labels(*cell)[3][2]
    assert not visit.defects


def test_a_listed_question_is_weighed(visit):
    question = page.read_answers()["sentences"]["questions"][0]
    visit.page.get_by_role("button", name=question).click()
    visit.page.wait_for_timeout(150)
    assert visit.page.input_value("#pg-words-text") == question
    assert visit.page.locator("#pg-weights li").count() > 5


def test_a_link_to_a_panel_shows_it(visit):
    visit.page.goto(f"{visit.address}/course/08_late_prompt_tuning.html")
    visit.page.locator('article a[href$="playground.html#pg-deep"]').first.click()
    visit.page.wait_for_timeout(500)
    assert 0 <= visit.page.locator("#pg-deep").bounding_box()["y"] < 400


def test_a_visit_requests_only_what_it_needs(live):
    """The page, its style and scripts; then the model, as announced; then one file a generator."""
    names = [r.partition("/playground/")[2] for r in live.requests if "_static" not in r]
    exported = [name for name in names if name]
    manifest = json.loads((SITE / "playground/manifest.json").read_text(encoding="utf-8"))
    first = page.read_live()["first"]
    generators = {
        f"{p[key]}.onnx" for p in manifest["prompts"] for key in ("file", "untrained") if key in p
    }
    assert len(exported) == len(set(exported))
    assert set(exported) - generators == {"manifest.json", *first}
    assert not live.other_hosts()


@pytest.mark.parametrize("width", [360, 390])
def test_the_table_of_answers_fits_a_phone(visit, width):
    visit.page.set_viewport_size({"width": width, "height": 800})
    hidden = visit.page.evaluate(
        "[...document.querySelectorAll('.pg-scroll')].map(e => e.scrollWidth - e.clientWidth)"
    )
    assert hidden == [0]


def test_every_control_has_a_name(visit):
    missing = visit.page.evaluate("""() => [...document.querySelectorAll(
        '#pg-root :is(input, select, button, progress, [tabindex])')].filter(e => !(
            e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')
            || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML.slice(0, 120))""")
    assert not missing


@pytest.mark.parametrize("width", [360, 820, 1600])
def test_the_page_fits_every_width_in_both_themes(visit, width):
    visit.page.set_viewport_size({"width": width, "height": 900})
    for theme in THEMES:
        assert not visit.page.evaluate(MEASURE_OVERFLOW, theme)
        for selector in ("#pg-verdict", "#pg-follows", "#pg-matrix td", "#pg-load", ".pg-small"):
            assert all(c >= 4.5 for c in visit.page.evaluate(CONTRAST, selector)), (selector, theme)


def test_nothing_moves_where_the_reader_wants_no_motion(browser, address):  # noqa: F811
    visit = Visit(browser, address, reduced_motion="reduce")
    durations = visit.page.evaluate("""() => [...document.querySelectorAll('.pg-fill')]
        .map(e => getComputedStyle(e).transitionDuration)""")
    visit.close()
    assert durations and set(durations) == {"0s"}


def test_the_page_says_something_without_javascript(browser, address):  # noqa: F811
    visit = Visit(browser, address, java_script_enabled=False)
    text = visit.page.inner_text("article")
    assert visit.page.locator(".pg-stored table").is_visible()
    visit.close()
    for sentence in page.read_answers()["sentences"]["two-domains"]:
        assert sentence in text
    assert "need JavaScript" in text and "Whose prompt?" not in text


def test_the_table_is_shown_once(visit):
    assert not visit.page.locator(".pg-stored").is_visible()


def test_a_page_opened_as_a_file_says_how_to_serve_it(browser, address):  # noqa: F811
    tab = browser.new_page()
    tab.goto((SITE / "playground.html").as_uri(), wait_until="load")
    assert tab.locator("#pg-file").is_visible()
    assert tab.locator(".pg-stored table").is_visible()
    assert "python -m http.server" in tab.inner_text("#pg-file")
    tab.close()


def test_a_failed_download_can_be_repeated(browser, address):  # noqa: F811
    if not is_live():
        pytest.skip("the live model is not built: `python docs/playground.py`, then `make docs`")
    visit = Visit(browser, address)
    visit.page.route("**/words.onnx", lambda route: route.fulfill(status=404, body="missing"))
    visit.page.click("#pg-load")
    visit.page.wait_for_function(
        "document.getElementById('pg-status').textContent.includes('could not be loaded')"
    )
    visit.page.unroute("**/words.onnx")
    visit.load()
    visit.close()


def test_the_page_data_is_that_of_the_records(visit):
    assert json.loads(visit.page.inner_html("#pg-data"))["depth"] == page.read_depth_data()
