"""The pictures of the course: stored as drawn, legible on a phone, true of the methods."""

import dataclasses
import importlib.util
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small
import torch
from drawing import (
    FONT_SIZES,
    Box,
    Line,
    Text,
)
from method_diagrams import (
    GENERATOR_INPUTS,
    count_tokens_before,
    draw_methods_map,
)

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.loop import run_layers
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.phm import PHMLinear

ROOT = Path(__file__).resolve().parents[1]


spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")


pictures = importlib.util.module_from_spec(spec)


spec.loader.exec_module(pictures)


PHONE = 360 - 2 * 16  # pixels that a page leaves to a picture


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_stored_picture_is_what_the_code_draws(name):
    stored = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == pictures.PICTURES[name]()._repr_svg_(), "run `python docs/pictures.py`"


def test_no_other_picture_is_stored():
    assert {p.stem for p in pictures.FOLDER.glob("*")} == set(pictures.PICTURES)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_a_title_an_alternative_text_and_dark_colours(name):
    root = ET.parse(pictures.FOLDER / f"{name}.svg").getroot()
    title, desc, style = (root.find(f"{{*}}{tag}").text for tag in ("title", "desc", "style"))
    assert title and desc and title != desc
    assert "prefers-color-scheme:dark" in style


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_its_colours_without_css(name):
    """Renderers that are not browsers know neither variables nor media queries."""
    text = (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert "var(" not in text
    shapes = [e for e in ET.fromstring(text) if e.tag.split("}")[1] in ("rect", "path", "text")]
    assert shapes
    for shape in shapes:
        colours = [shape.get(name) for name in ("fill", "stroke")]
        assert any(colour and colour.startswith("#") for colour in colours), shape.attrib
        assert shape.tag.endswith("text") or shape.get("fill"), "a shape without a fill is black"


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_an_alternative_text_is_one_sentence(name):
    alt = pictures.PICTURES[name]().alt
    assert re.fullmatch(r"[A-Z]([^.!?]|\d\.\d)*\.", alt), alt


@pytest.mark.parametrize("path", sorted((ROOT / "nbs").rglob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_has_the_alternative_texts_of_its_pictures(path):
    text = path.read_text(encoding="utf-8")
    assert pictures.update_alt_texts(text) == text, "run `python docs/pictures.py`"


def test_an_alternative_text_contains_no_markdown_syntax():
    for make in pictures.PICTURES.values():
        assert not set('[]<>`"\\\n') & set(make().alt)


def overlap(a, b):
    """Return the smaller extent of the intersection of two boxes (x, y, width, height)."""
    return min(min(a[i] + a[i + 2], b[i] + b[i + 2]) - max(a[i], b[i]) for i in (0, 1))


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_legible_on_a_phone(name):
    p = pictures.PICTURES[name]()
    texts = [s for s in p.shapes if isinstance(s, Text) and s.content]
    assert min(FONT_SIZES[t.kind] for t in texts) * PHONE / p.w >= 9, (
        "letters of less than nine pixels"
    )
    for i, t in enumerate(texts):
        x, y, w, h = t.bounding_box()
        assert x >= 0 and y >= 0 and x + w <= p.w and y + h <= p.h, f"{t.content!r} is cut off"
        for other in texts[i + 1 :]:
            assert overlap(t.bounding_box(), other.bounding_box()) < 1, (
                f"{t.content!r} and {other.content!r} overlap"
            )
        for box in (s for s in p.shapes if isinstance(s, Box)):
            crossed = overlap(t.bounding_box(), tuple(box[:4]))
            inside = x >= box.x - 1 and x + w <= box.x + box.w + 1
            assert crossed < 1 or inside, (
                f"{t.content!r} crosses the edge of a box at {box.x}, {box.y}"
            )
        for line in (s for s in p.shapes if isinstance(s, Line)):
            for (a, b), (c, d) in zip(line.points, line.points[1:]):
                assert (
                    overlap(t.bounding_box(), (min(a, c), min(b, d), abs(c - a), abs(d - b))) < 0
                ), f"a line goes through {t.content!r}"


def drawn_plans(monkeypatch):
    """Return a model with weights, and the plans of all pictures with the inputs that they show."""
    sizes = {**small.SIZES, "num_hidden_layers": 4, "intermediate_size": 64}
    bb = load_backbone("roberta-base", weights="random", **sizes)
    plans = []
    draw = pictures.draw_plan

    def record_plan(plan, bb, generator_input="none", *args, **kwargs):
        if plan:
            plans.append((plan, generator_input))
        return draw(plan, bb, generator_input, *args, **kwargs)

    monkeypatch.setattr(pictures, "backbone", lambda layers=4: bb)
    monkeypatch.setattr(pictures, "draw_plan", record_plan)
    for draw_picture in pictures.PICTURES.values():
        draw_picture()
    return bb, plans


def observe_inputs(source, ctx):
    """Return whether a prompt changes with first state, other states, words, and uses a pass."""
    bb = ctx.backbone
    calls = []
    hook = bb.layers[0].register_forward_hook(lambda *_: calls.append(1))

    def changes_with(**changed):
        other = dataclasses.replace(ctx, memo={}, **changed)
        with torch.no_grad():
            return not torch.equal(source(other), source(dataclasses.replace(ctx, memo={})))

    first = ctx.h.clone()
    others = ctx.h.clone()
    index = torch.arange(len(first)), ctx.tracked_positions["cls"]
    first[index] += 1
    others += 1
    others[index] = ctx.h[index]
    input_ids = ctx.input_ids.clone()
    input_ids[:, 1] = 3 + input_ids[:, 1] % 7
    observed = (
        changes_with(h=first),
        changes_with(h=others),
        changes_with(input_ids=input_ids, batch=ctx.batch | {"input_ids": input_ids}),
    )
    hook.remove()
    return *observed, bool(calls)


def assert_position_is_true(bb, batch, plan):
    """Assert that a plan inserts its first prompt behind as many tokens as the picture shows."""
    spans = []

    def watched(source):
        def probe(ctx):
            spans.append(ctx.prompt_span)
            return source(ctx)

        return probe

    watched_plan = {k: replace(s, source=watched(s.source.eval())) for k, s in plan.items()}
    ctx = run_layers(bb, batch, watched_plan)
    span = next((span for span in [*spans, ctx.prompt_span] if span), None)
    if span:
        assert (span[0] == count_tokens_before(plan)).all()


def test_a_prompt_among_the_words_is_behind_the_first_token():
    bb = pictures.backbone()
    plan = pictures.prompt_plan(bb, pictures.soft())
    assert list(plan) == [INPUT]
    boxes = [s for s in pictures.draw(plan, words=pictures.SODA).shapes if isinstance(s, Box)]
    lowest = max(s.y for s in boxes)
    row = sorted((s for s in boxes if s.y == lowest), key=lambda s: s.x)
    assert [s.kind for s in row] == ["position", *["trained"] * 2, *["position"] * 3]


def test_the_head_of_a_picture_reads_the_mean_as_the_scored_runs_do():
    lines = [s for s in pictures.draw({}).shapes if isinstance(s, Line) and s.kind == "state"]
    ends = {line.points[0][0] for line in lines if line.points[0][0] == line.points[-1][0]}
    assert len(ends) == 4 + 1  # four tokens, and the head
    file = ROOT / "results/what_a_prompt_adds/two-domains-tiny.jsonl"
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert {r["pooling"] for r in records} == {"mean"}


def test_the_blocks_of_the_phm_picture_are_those_of_the_layer():
    layer = PHMLinear(2, 2, 2, bias=False)
    with torch.no_grad():
        layer.A.copy_(torch.tensor([[[1.0, 0], [0, 1]], [[0, 1], [-1, 0]]]))
        layer.B.copy_(torch.tensor([3.0, 4]).view(2, 1, 1))
    names = {3: "B₁", 4: "B₂", -4: "−B₂"}
    blocks = [names[int(value)] for row in layer.weight.tolist() for value in row]
    texts = [s for s in pictures.phm().shapes if isinstance(s, Text) and s.content in {*blocks}]
    right = sorted((s for s in texts if s.x > 230), key=lambda s: (s.y, s.x))
    assert [s.content for s in right] == blocks
    rules = [s for s in pictures.phm().shapes if isinstance(s, Text) and s.x < 90]
    numbers = [s for s in rules if re.fullmatch("−?[01]", s.content)]
    assert [s.content.replace("−", "-") for s in numbers] == [
        str(int(value)) for value in layer.A.flatten()
    ]


def test_the_picture_of_the_front_page_has_a_dot_for_each_seed_and_a_bar_for_each_layer():
    boxes = [s for s in pictures.crossing().shapes if isinstance(s, Box)]
    scores = {}
    for line in (ROOT / "results/why/layers-trec-600.jsonl").open(encoding="utf-8"):
        r = json.loads(line)
        runs = scores.setdefault((r["method"], r.get("layer")), {}).setdefault(r["lr"], [])
        runs.append(r["score"])
    for method, kind, layers in (
        ("lpt", "static-name", (0, 15, 24, 29)),
        ("lpt-npg", "generated-name", (15, 24, 29)),
    ):
        shown = sorted(-box.y for box in boxes if box.kind == kind)
        stored = sorted(s for k in layers for s in max(scores[method, k].values(), key=len))
        assert len(shown) == len(stored) == 5 * len(layers)
        slope, _ = np.polyfit(stored, shown, 1)
        assert slope == pytest.approx(4.6)
        assert np.corrcoef(stored, shown)[0, 1] == pytest.approx(1)
    assert sorted(box.h for box in boxes if box.kind == "backward") == [1, 6, 15, 30]


def test_a_picture_shows_the_true_input_of_each_source(monkeypatch):
    bb, plans = drawn_plans(monkeypatch)
    batch = small.batch_of(bb, small.small_task(), n=4)
    expected = {
        "none": (False, False, False, False),
        "first_state": (True, False, False, False),
        "all_states": (True, True, False, False),
        "words": (False, False, True, False),
        "first_pass": (False, False, True, True),
    }
    seen = set()
    for plan, generator_input in plans:
        assert_position_is_true(bb, batch, plan)

        def watched(layer, source, generator_input=generator_input):
            def probe(ctx):
                is_one = isinstance(generator_input, str)
                shown = generator_input if is_one else generator_input[layer]
                assert observe_inputs(source, ctx) == expected[shown], (
                    f"the picture shows {shown!r} at {layer!r}"
                )
                seen.add(shown)
                return source(ctx)

            return probe

        watched_plan = {
            k: replace(step, source=watched(k, step.source.eval())) for k, step in plan.items()
        }
        run_layers(bb, batch, watched_plan)
    assert seen == set(GENERATOR_INPUTS)


def test_the_methods_of_the_file_to_copy_are_drawn_once():
    from idp_tutorial.minimal import PROMPTS

    drawn = [name for names in pictures.READ_BY_GENERATOR.values() for name in names]
    assert sorted(drawn) == sorted(PROMPTS)


def test_every_method_is_on_the_map_once():
    texts = [s.content for s in draw_methods_map(METHODS).shapes if isinstance(s, Text)]
    prompted = [n for n, m in METHODS.items() if m.kind in ("static", "generated", "second pass")]
    assert all(texts.count(n) == 1 for n in prompted)
    listed = " ".join(texts).replace(",", "").split()
    assert all(n in listed for n in METHODS)
