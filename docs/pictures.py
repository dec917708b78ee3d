"""Draw the pictures of the course from the plans of the methods.

`python docs/pictures.py` writes all of them.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from drawing import (
    AnimatedPicture,
    Box,
    Line,
    Picture,
    Shape,
    Text,
    arrange_pictures,
    draw_legend,
)
from method_diagrams import (
    INSERTION_LABELS,
    draw_methods_map,
    draw_plan,
    draw_prompted_model,
)

from idp_tutorial.assembly.config import RunOptions
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import Backbone
from idp_tutorial.core.context import INPUT
from idp_tutorial.core.plan_checks import check_plan
from idp_tutorial.core.steps import Add, Insert, KeyValue, Plan, Replace, Step
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.id_spam import AttentionPromptGenerator
from idp_tutorial.methods.idpg import PromptGenerator, idpg_plan
from idp_tutorial.methods.idpg_multilayer import multilayer_idpg_plan
from idp_tutorial.methods.key_value_prompt import KeyValuePrompt
from idp_tutorial.methods.lpt import PoolingPromptGenerator, lpt_plan
from idp_tutorial.methods.npg import NaivePromptGenerator
from idp_tutorial.methods.p_tuning_v2 import deep_prompt_plan
from idp_tutorial.methods.phm import count_phm_parameters
from idp_tutorial.methods.prompt_tuning import prompt_plan
from idp_tutorial.methods.sentence_vectors import mean_sentence_vector
from idp_tutorial.methods.soft_prompt import SoftPrompt
from idp_tutorial.reproduction.efficiency.cost_model import step_cost
from idp_tutorial.reproduction.efficiency.parameter_counts import count_method_parameters

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/images/course"
SODA = ("<s>", "soda", "was", "cold")
SOUP = ("<s>", "soup", "was", "cold")


@cache
def backbone(layers: int = 4) -> Backbone:
    """Return a RoBERTa of a few layers without weights: a plan needs its shape only."""
    return load_backbone("roberta-base", "meta", num_hidden_layers=layers)


def draw(
    plan: Plan,
    generator_input: str | Mapping = "none",
    title: str = "",
    note: str = "",
    **kwargs: Any,
) -> Picture:
    """Draw a plan after the checks of the layer loop."""
    check_plan(plan, backbone())
    return draw_plan(plan, backbone(), generator_input, title, note, **kwargs)


def soft() -> SoftPrompt:
    """Return a static prompt of two vectors."""
    return SoftPrompt(2, backbone().d)


# ---- one function for each picture


def _draw_reader(x: float, is_generated: bool, lines: list[str]) -> list[Shape]:
    """Draw a text, a prompt half-way and, if it is generated, the network that writes it."""
    title = "generated prompt" if is_generated else "static prompt"
    shapes: list[Shape] = [Text(x + 104, 18, title, "title")]
    for box, label in (
        (Box(x + 76, 30, 56, 24, "trained"), "head"),
        (Box(x + 6, 74, 196, 30, "layer"), "layers above"),
        (Box(x + 72, 184, 130, 30, "layer"), "layers below"),
    ):
        kind = "on" if box.kind == "trained" else "label"
        shapes += [box, Text(box.x + box.w / 2, box.y + box.h / 2 + 4, label, kind)]
    for i in range(2):
        kind = "generated" if is_generated else "trained"
        shapes.append(Box(x + 10 + 28 * i, 126, 24, 24, kind))
        shapes.append(Line(((x + 22 + 28 * i, 126), (x + 22 + 28 * i, 104)), "pointer"))
    for i, word in enumerate(("a", "cold", "soda")):
        x_left = x + 76 + 43 * i
        shapes += [Box(x_left, 126, 38, 24, "position"), Box(x_left, 236, 38, 24, "position")]
        shapes.append(Text(x_left + 19, 252, word, "label"))
        for bottom, top in ((126, 104), (184, 150), (236, 214)):
            shapes.append(Line(((x_left + 10, bottom), (x_left + 10, top)), "pointer"))
        if is_generated:
            path = (x_left + 28, 150), (x_left + 28, 166), (x + 50, 166), (x + 50, 184)
            shapes.append(Line(path, "read"))
    shapes.append(Line(((x + 104, 74), (x + 104, 54)), "pointer"))
    if is_generated:
        shapes += [Box(x + 2, 184, 66, 30, "trained"), Text(x + 35, 203, "network", "on")]
        shapes.append(Line(((x + 20, 184), (x + 20, 150)), "read"))
    return shapes + [Text(x + 104, 282 + 17 * i, line, "note") for i, line in enumerate(lines)]


def who_reads() -> Picture:
    """Draw a static prompt and a generated one, and who reads the text."""
    static = ["the same for every text:", "only the layers above", "can read the text for it"]
    generated = [
        "written for this text by a",
        "network that reads the",
        "states of the layers below",
    ]
    shapes = _draw_reader(4, False, static) + _draw_reader(216, True, generated)
    return add_legend(
        shapes,
        330,
        "Who reads the text",
        "a static prompt is trained and the same for every text, and a generated prompt is the "
        "output of a trained network that reads the hidden states of the layers below",
    )


def frozen_model() -> Picture:
    """Draw the places at which a frozen model can be changed."""
    diagram = draw_prompted_model(5, title="frozen layers", n_before=1).translate(212, 6)
    y = {name: point[1] for name, point in diagram.anchors.items()}
    shapes = [s for s in diagram.shapes if s.kind != "grad"]
    for dx in (0, 22):
        shapes += [Box(260 + dx, y[3] + 3, 18, 18, "trainable")]
        shapes += [Box(260 + dx, y["embeddings"], 18, 18, "trainable")]
        shapes += [Box(260 + dx, y[1] + 3, 18, 8, "trainable")]
        shapes += [Box(260 + dx, y[1] + 13, 18, 8, "trainable")]
    labels = {
        "head": ["the prediction:", "a head of your own"],
        3: ["new positions in a layer,", "or changes of positions"],
        1: ["keys and values", "of a layer"],
        "embeddings": ["vectors among the words", "that are not words"],
    }
    for name, lines in labels.items():
        for j, line in enumerate(lines):
            shapes.append(Text(12, y[name] + 9 + 16 * j, line, "note", "start"))
        end = 282 if name == "head" else 226
        shapes.append(Line(((180, y[name] + 12), (end, y[name] + 12)), "pointer"))
    alt = (
        "its head, new positions or changes of positions in a layer, keys and values of a layer, "
        "and vectors among the words; the layers are frozen"
    )
    return add_legend(shapes, diagram.h + 8, "What can be changed in a frozen model", alt)


def add_legend(shapes: list[Shape], h: float, title: str, alt: str, w: float = 424) -> Picture:
    """Return a picture of shapes with a legend below them."""
    legend = draw_legend({s.kind for s in shapes}, w).translate(0, h)
    return Picture([*shapes, *legend.shapes], w, h + legend.h + 4, title, f"{title}: {alt}.")


def four_ways() -> Picture:
    """Draw the four operations: insert, add, replace, keys and values."""

    def at_two(step_class: type[Step]) -> Plan:
        return {0: Insert(soft()), 2: step_class(soft())}

    return arrange_pictures(
        [
            draw({2: Insert(soft())}, title="insert", note="positions before layer 2"),
            draw(at_two(Add), title="add", note="vectors to the prompt"),
            draw(at_two(Replace), title="replace", note="new vectors for old ones"),
            draw(
                {2: KeyValue(KeyValuePrompt(2, backbone().d))},
                title="keys and values",
                note="of layer 2; no position",
            ),
        ],
        "Four ways in which a prompt can enter",
        "Four diagrams of a frozen model whose prompt is inserted as new positions, "
        "added to a prompt, put in place of a prompt, or given to a layer as keys and "
        "values.",
    )


def head_or_word() -> Picture:
    """Draw a classification head and a verbalizer."""
    plan = prompt_plan(backbone(), soft())
    mask = ("<s>", "cold", "was", "mask")
    return arrange_pictures(
        [
            draw(plan, title="a new head", note="trained; reads the mean", prediction="blame"),
            draw(
                plan,
                title="a word",
                note="frozen; read at the mask",
                words=mask,
                head_position=-1,
                is_head_frozen=True,
                head_label="words",
                prediction="terrible",
            ),
        ],
        "A new head, or a word of the vocabulary",
        "Two diagrams of a frozen model with a prompt: a trained head predicts a label "
        "from the mean of the hidden states, or the frozen language model predicts a "
        "word at the mask.",
    )


def prompt_tuning() -> Picture:
    """Draw prompt tuning: the same vectors for every text."""
    plan = prompt_plan(backbone(), soft())
    return arrange_pictures(
        [
            draw(plan, title="one text", note="two learned vectors", words=SODA),
            draw(plan, title="another text", note="the same two vectors", words=SOUP),
        ],
        "Prompt tuning",
        "Two texts go through a frozen model with the same two trained vectors after "
        "their first token.",
    )


def deep_prompts() -> Picture:
    """Draw P-tuning v2 with prompts that replace states, and with prompts that are added."""
    bb = backbone()
    return arrange_pictures(
        [
            draw(
                deep_prompt_plan(bb, 2, "replace"),
                title="replaced",
                note="new vectors read nothing",
            ),
            draw(
                deep_prompt_plan(bb, 2, "add"),
                title="added",
                note="reads, and carries it on",
            ),
        ],
        "A replaced prompt reads nothing, an added one reads",
        "Two diagrams of a prompt in every layer: replaced, each layer gets new vectors; added, "
        "the state of the prompt goes on and carries what it has read.",
    )


def _draw_rule(rule: list, kind: str, name: str, y: float) -> list[Shape]:
    """Draw a 2 x 2 rule, the sign of the Kronecker product, and a block."""
    shapes: list[Shape] = []
    for i, values in enumerate(rule):
        for j, value in enumerate(values):
            shapes.append(Box(30 + 26 * j, y + 26 * i, 25, 25, "position"))
            shapes.append(Text(42.5 + 26 * j, y + 17 + 26 * i, f"{value}".replace("-", "−")))
    shapes += [Text(97, y + 31, "⊗", "title"), Box(112, y + 4, 66, 44, kind)]
    return [*shapes, Text(145, y + 31, name)]


def phm() -> Picture:
    """Draw an 8 x 12 matrix as a sum of two Kronecker products with the rule of complex numbers."""
    rules = [[[1, 0], [0, 1]], [[0, 1], [-1, 0]]]  # 1 and i, as in chapter 05
    n = 2
    rows = 8
    columns = 12
    kinds = ("generated", "generated-q")
    names = ("B₁", "B₂")
    shapes: list[Shape] = []
    w = 424
    for q, (rule, kind, name) in enumerate(zip(rules, kinds, names)):
        y = 14 + q * 74
        shapes += _draw_rule(rule, kind, name, y)
        if q:
            shapes.append(Text(17, y + 31, "+", "title"))
    shapes.append(Text(205, 83, "=", "title"))
    for i in range(n):
        for j in range(n):
            q = next(q for q in range(n) if rules[q][i][j])
            x = 232 + 90 * j
            y = 20 + 60 * i
            sign = "−" if rules[q][i][j] < 0 else ""
            shapes += [Box(x, y, 88, 58, kinds[q]), Text(x + 44, y + 34, f"{sign}{names[q]}")]
    parameters = count_phm_parameters(rows, columns, n, bias=False)
    counts = f"{parameters} parameters instead of {rows * columns}"
    d = 5 * 1024
    m = 256
    large = (
        f"{m} × {d:,}, n=16: {count_phm_parameters(m, d, 16, bias=False):,} instead of {m * d:,}"
    )
    lines = [
        "Complex numbers: the rule (left) is fixed. PHM learns it:",
        "then each block is a mixture of B₁ and B₂.",
        f"{rows} × {columns}, n={n}: {counts}",
        large,
    ]
    shapes += [Text(w / 2, 168 + 18 * i, line, "note") for i, line in enumerate(lines)]
    title = "A matrix as a sum of Kronecker products"
    alt = (
        f"{title}: two 2 × 2 rules place B₁, B₂, −B₂ and B₁ in a matrix of four blocks, which has "
        f"{counts}."
    )
    return Picture(shapes, w, 232, title, alt, description=f"{alt} {large}.")


def idpg() -> Picture:
    """Draw the two passes of IDPG: the first one is the input of the generator of the second."""
    bb = backbone()
    plan = idpg_plan(bb, PromptGenerator(bb.d, bb.d, 2, 16), encoder=mean_sentence_vector)
    first = draw_prompted_model(
        4, title="first pass", note="no prompt, no gradient", head_label="M(x)", is_head_frozen=True
    )
    second = draw(plan, "first_pass", "second pass", "with the generated prompt")
    generator_y = second.anchors["word_generator"][1]

    def is_m_of_x(shape: Shape) -> bool:
        """M(x) is drawn above the first pass, and is not needed beside the generator."""
        x, y = shape.points[0] if isinstance(shape, Line) else (shape.x, shape.y)
        return y >= generator_y and x > 95

    second.shapes = [s for s in second.shapes if not is_m_of_x(s)]
    first.h = second.h  # the words of both passes are at the same height
    both = arrange_pictures(
        [first, second],
        "IDPG: the model generates its own prompt",
        "A first pass through the frozen model gives a sentence vector M(x), from which a small "
        "network generates the prompt of a second pass.",
    )
    head_y = both.anchors[0, "head"][1] + 10
    x, y = both.anchors[1, "word_generator"]
    corner = 206
    points = ((168, head_y), (corner, head_y), (corner, y + 9.5), (x + 31, y + 9.5))
    both.shapes.append(Line(points))
    return both


def _label_generators(plan: Plan) -> tuple[dict, bool]:
    """Return the name of each layer's generator, and whether it is one network for all layers."""
    networks = [step.source.generator for step in plan.values()]
    is_shared = all(network is networks[0] for network in networks)
    has_biases = len(networks[0].b2) > 1
    name = "G+b" if is_shared and has_biases else "G"
    is_numbered = has_biases or not is_shared
    labels = {k: f"{name}{'₀₁₂₃'[i]}" if is_numbered else name for i, k in enumerate(plan)}
    return labels, is_shared


def idpg_in_every_layer() -> Picture:
    """Draw M-IDPG with each kind of parameter sharing: S, M and L."""
    bb = backbone()

    def draw_sharing(sharing: str, title: str, note: str) -> Picture:
        plan = multilayer_idpg_plan(bb, 2, 16, sharing)
        inputs = {k: "first_pass" if k == INPUT else "first_state" for k in plan}
        labels, is_shared = _label_generators(plan)
        return draw(
            plan, inputs, title, note, is_generator_shared=is_shared, generator_labels=labels
        )

    single = idpg_plan(bb, PromptGenerator(bb.d, bb.d, 2, 16))
    return arrange_pictures(
        [
            draw(single, "first_pass", "IDPG", "one prompt, at the input"),
            draw_sharing("S", "S: all is shared", "one network for all layers"),
            draw_sharing("M", "M: all but a bias", "one network, many biases"),
            draw_sharing("L", "L: nothing is shared", "a network for each layer"),
        ],
        "IDPG in every layer: what is shared",
        "IDPG with one prompt at the input, and with one in every layer whose generators "
        "share all parameters, all but a bias, or none.",
    )


def late_prompt_tuning() -> Picture:
    """Draw prompt tuning and three variants of LPT."""
    bb = backbone()
    return arrange_pictures(
        [
            draw(prompt_plan(bb, soft()), title="prompt tuning", note="enters among the words"),
            draw(lpt_plan(bb, soft()), title="LPT", note="enters half-way"),
            draw(
                lpt_plan(bb, NaivePromptGenerator(bb.d, 2, 16)),
                "first_state",
                "LPT, NPG",
                "from the first position",
            ),
            draw(
                lpt_plan(bb, PoolingPromptGenerator(bb.d, 2, 16)),
                "all_states",
                "LPT, APPG or MPPG",
                "from all positions",
            ),
        ],
        "Late prompt tuning",
        "A prompt at the input, the same prompt half-way, and late prompts that a "
        "network generates from the first hidden state or from all of them; the gradient "
        "stops at the prompt.",
    )


def comparison() -> Picture:
    """Draw a late prompt and the two controls it is compared with."""
    bb = backbone()
    plan = lpt_plan(bb, PoolingPromptGenerator(bb.d, 2, 16))
    return arrange_pictures(
        [
            draw({}, title="probe", note="a linear head, no prompt"),
            draw_prompted_model(
                bb.n_layers,
                title="side network",
                note="a small network predicts",
                head_label="G",
            ),
            draw(plan, "all_states", "late prompt", "a network generates it"),
        ],
        "What a score is compared with",
        "A linear probe and a side network, both without a prompt, beside a late prompt "
        "that is generated from the hidden states.",
    )


def read_printed_scores(chapter: str) -> dict[str, int]:
    """Return the lines `name:   score %` that a chapter has printed, rounded to whole percent."""
    cells = json.loads((ROOT / f"nbs/course/{chapter}.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(o.get("text", "")) for cell in cells for o in cell.get("outputs", ())]
    lines = re.findall(r"^(.+?): +(\d+) %$", "\n".join(texts), re.M)
    return {name: int(score) for name, score in lines}


def your_own() -> Picture:
    """Draw the scores of a prompt and of its controls on the file of chapter 12."""
    scores = read_printed_scores("12_your_own")
    bars = [
        ("counting words", scores["logistic regression on words"], "layer"),
        ("probe", scores["probe of the hidden states"], "layer"),
        ("generated prompt", scores["MeanStatePrompt, 200 steps"], "trained"),
        ("largest class", scores["largest class"], "layer"),
    ]
    title = "On this file, counting words beats a prompt"
    shapes: list[Shape] = [
        Text(10, 22, title, "title", "start"),
        Text(10, 42, "accuracy in %, 100 questions of a CSV file", "note", "start"),
    ]
    for i, (name, score, kind) in enumerate(bars):
        y = 56 + 28 * i
        shapes += [
            Text(10, y + 14, name, "label", "start"),
            Box(130, y, 2.5 * score, 20, kind),
            Text(138 + 2.5 * score, y + 14, str(score), "label", "start"),
        ]
    listed = ", ".join(f"{name} {score} %" for name, score, _ in bars)
    alt = f"Bars of the accuracy on the test questions of a file: {listed}."
    return Picture(shapes, 424, 174, title, alt)


def id_spam() -> Picture:
    """Draw ID-SPAM and its ablation without attention."""
    bb = backbone()

    def plan(pool: str) -> Plan:
        return lpt_plan(bb, AttentionPromptGenerator(bb.d, 2, 16, pool))

    return arrange_pictures(
        [
            draw(
                plan("attention"),
                "words",
                "ID-SPAM",
                "words weighted by attention",
                word_weights=(0.05, 0.35, 0.1, 0.5),
            ),
            draw(
                plan("mean"),
                "words",
                "its ablation",
                "equal weights",
                word_weights=(0.25,) * 4,
            ),
        ],
        "ID-SPAM: a weighted mean of the words",
        "A prompt is generated half-way from the word vectors, which attention weights "
        "differently in ID-SPAM and equally in its ablation.",
        note="The widths of the arrows are an example.",
    )


def map_of_methods() -> Picture:
    """Draw the map of all methods."""
    return draw_methods_map(METHODS)


READ_BY_GENERATOR = {  # what the generators of `minimal.py` read: methods
    "nothing": ("prompt-tuning", "lpt"),
    "the words": ("id-spam",),
    "the states below": ("lpt-npg", "lpt-appg", "lpt-mppg"),
    "a first pass": ("s-idpg-phm", "m-idpg-phm"),
}


def eight_methods() -> Picture:
    """Draw the methods of `minimal.py` by what is read, and by where the prompt enters."""
    title = "One loop; what does the generator read?"
    columns = {"at the input": 134, "every layer": 240, "half-way": 334}
    shapes: list[Shape] = [
        Text(10, 22, title, "title", "start"),
        Text(10, 48, "reads", "note", "start"),
    ]
    shapes += [Text(x, 48, column, "note", "start") for column, x in columns.items()]
    y = 58.0
    for read, methods in READ_BY_GENERATOR.items():
        by_column: dict[str, list[str]] = {column: [] for column in columns}
        for method in methods:
            by_column[INSERTION_LABELS[METHODS[method].insertion_point]].append(method)
        height = 16 + 18 * max(map(len, by_column.values()))
        shapes += [Box(6, y, 412, height - 4, "layer"), Text(14, y + 19, read, "label", "start")]
        for column, names in by_column.items():
            for i, name in enumerate(names):
                shapes.append(Text(columns[column], y + 19 + 18 * i, name, "label", "start"))
        y += height
    described = "; ".join(f"{read}: {', '.join(m)}" for read, m in READ_BY_GENERATOR.items())
    alt = (
        "Eight methods in rows by what their generator reads: nothing, the words, the states below "
        "or a first pass; and in columns by where the prompt enters."
    )
    return Picture(shapes, 424, y + 6, title, alt, description=f"{title} {described}.")


# ---- pictures of measurements and counts


def read_json_lines(file: str, method: str) -> list[dict]:
    """Return the records of a method in a file."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["method"] == method]


N_SMOLLM2_LAYERS = 30
# method: kinds of its line and of its dots and name
CROSSING_METHODS = {"lpt": ("static", "static-name"), "lpt-npg": ("read", "generated-name")}


def read_crossing(method: str) -> dict[int, list[float]]:
    """Return the scores of a method on TREC by the layer of its prompt, five seeds each."""
    runs = read_json_lines("results/why/layers-trec-600.jsonl", method)
    scores: dict[tuple[int, float], list[float]] = {}
    for run in runs:
        scores.setdefault((run["layer"], run["lr"]), []).append(run["score"])
    # the learning rate that validation chose has all five seeds
    return {layer: values for (layer, _), values in sorted(scores.items()) if len(values) == 5}


def _draw_axes(x: Callable[[float], float], y: Callable[[float], float]) -> list[Shape]:
    """Draw the labels and the lines of the accuracies."""
    shapes: list[Shape] = []
    for value in range(60, 101, 10):
        shapes += [
            Line(((x(0) - 6, y(value)), (x(N_SMOLLM2_LAYERS), y(value))), "pointer", False, 0.5),
            Text(x(0) - 10, y(value) + 4, str(value), "note", "end"),
        ]
    return shapes


def _draw_curve(
    scores: dict[int, list[float]],
    line: str,
    dot: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[Shape]:
    """Draw the mean over the layers, and a dot for each seed."""
    means = [(x(layer), y(statistics.mean(values))) for layer, values in scores.items()]
    shapes: list[Shape] = [Line(tuple(means), line, False, 2.4)]
    for layer, values in scores.items():
        for i, value in enumerate(values):
            shapes.append(Box(x(layer) - 6.5 + 2 * i, y(value) - 2.5, 5, 5, dot))
    return shapes


def crossing() -> Picture:
    """Draw static and generated prompts over the layer where they enter, and the cost below."""

    def x(layer: float) -> float:
        return 44 + 11.6 * layer

    def y(score: float) -> float:
        return 62 + 4.6 * (100 - score)

    scores = {method: read_crossing(method) for method in CROSSING_METHODS}
    static = {layer: statistics.mean(values) for layer, values in scores["lpt"].items()}
    last = max(static)
    title = "Late static prompts fall; generated ones hold"
    probe = read_json_lines("results/claims/controls-smollm2.jsonl", "probe")
    probe_score = statistics.mean(r["score"] for r in probe if r["task"] == "trec")
    shapes: list[Shape] = [
        Text(10, 20, title, "title", "start"),
        Text(10, 40, "accuracy in %, TREC, SmolLM2, 600 steps, five seeds", "note", "start"),
        Text(x(0.4), y(67), "no generated prompt was", "note", "start"),
        Text(x(0.4), y(67) + 16, "trained at the input", "note", "start"),
    ]
    shapes += _draw_axes(x, y)
    shapes.append(
        Line(((x(0), y(probe_score)), (x(N_SMOLLM2_LAYERS), y(probe_score))), "control", False, 1.4)
    )
    shapes.append(Text(x(0.4), y(probe_score) + 15, "a probe, no prompt", "note", "start"))
    for method, kinds in CROSSING_METHODS.items():
        shapes += _draw_curve(scores[method], *kinds, x, y)
    shapes += [
        Text(x(22.5), y(75), "static: the same prompt for every text", "static-name", "end"),
        Text(x(29), y(96), "generated: a prompt of its own for each text", "generated-name", "end"),
    ]
    top = y(60) + 34
    shapes.append(
        Text(
            10,
            top - 10,
            "layers above the prompt, and in the backward pass",
            "note",
            "start",
        )
    )
    layers = sorted({layer for by_layer in scores.values() for layer in by_layer})
    for layer in layers:
        above = N_SMOLLM2_LAYERS - layer
        shapes += [
            Box(x(layer) - 7, top + 30 - above, 14, above, "backward"),
            Text(x(layer), top + 46, str(above), "note"),
        ]
    generated = {layer: statistics.mean(values) for layer, values in scores["lpt-npg"].items()}
    alt = (
        f"The fewer frozen layers are left above a static prompt, the less it scores, from "
        f"{static[0]:.1f} % to {static[last]:.1f} %, while a generated prompt stays at "
        f"{min(generated.values()):.1f} to {max(generated.values()):.1f} %."
    )
    return Picture(shapes, 424, top + 54, title, alt)


def costs(name: str = "roberta-large", layers: int = 24) -> Picture:
    """Draw the passes through the model in a training step, and the trained parameters."""
    methods = [
        "head-only",
        "prompt-tuning",
        "p-tuning-v2",
        "s-idpg-phm",
        "m-idpg-phm",
        "lpt-npg",
        "id-spam",
        "fine-tuning",
    ]
    base = RunOptions(prompt_length=5)  # as in the chapter
    counts = count_method_parameters(name, base, methods=methods).set_index("method")
    described = []
    w = 424
    x = 118
    unit = 70
    shapes: list[Shape] = [
        Text(10, 23, "method", "title", "start"),
        Text(x, 23, "passes of a step", "title", "start"),
        Text(w - 10, 23, "trained", "title", "end"),
    ]
    for i, method in enumerate(methods):
        y = 40 + 26 * i
        cost = step_cost(method, layers)
        forward = cost.forward / layers
        backward = (cost.input_gradients + cost.weight_gradients) / layers
        n = int(counts.prompt[method] + counts.backbone[method])
        shapes += [Text(10, y + 13, method, "label", "start")]
        shapes += [Box(x, y, forward * unit, 17, "forward")]
        if backward > 0:
            shapes += [Box(x + forward * unit + 2, y, backward * unit - 2, 17, "backward")]
        shapes.append(Text(w - 10, y + 13, f"{n:,}", "label", "end"))
        described.append(f"{method}: {forward:g} forward, {backward:g} backward, {n:,} trained")
    y = 44 + 26 * len(methods)
    shapes += [Text(10, y + 14, f"{name}, t={base.get('prompt_length')}, no head", "note", "start")]
    shapes += [Box(224, y + 3, 14, 14, "forward"), Text(244, y + 14, "forward", "note", "start")]
    shapes += [Box(320, y + 3, 14, 14, "backward"), Text(340, y + 14, "backward", "note", "start")]
    title = "Passes of a training step, and trained parameters"
    alt = (
        f"Bars of the forward and backward passes of a training step, and the number of trained "
        f"parameters, for {len(methods)} methods with {name}."
    )
    return Picture(shapes, w, y + 28, title, alt, description=f"{title}. {'; '.join(described)}.")


def _draw_pass(x: float, title: str, text: str, n_prompts: int) -> list[Shape]:
    """Draw a frozen model with a text below it; the first positions are left for a prompt."""
    shapes: list[Shape] = [Text(x, 22, title, "title", "start")]
    shapes += [Box(x, 84 + 14 * i, 138, 11, "layer") for i in range(6)]
    shapes += [Box(x + 23 * i, 186, 16, 16, "position") for i in range(n_prompts, 6)]
    return [*shapes, Text(x + 138, 221, text, "label", "end")]


def passes() -> Picture:
    """Draw IDPG in motion: pass, sentence vector, generator, prompt, pass, gradient."""
    x_left, right = 12, 274
    still = [
        *_draw_pass(x_left, "pass 1: read", "the soup was cold", 0),
        *_draw_pass(right, "pass 2: answer", "the soup was cold", 2),
    ]
    middle = x_left + 69
    first_pass = [Line(((middle, 180), (middle, 62)), "state")]
    vector = [
        Box(x_left, 40, 138, 20, "position"),
        Text(middle, 54, "sentence vector", "label"),
    ]
    generator = [
        Line(((x_left + 140, 50), (212, 50), (212, 98)), "read"),
        Box(166, 100, 92, 40, "trained"),
        Text(212, 124, "generator", "on"),
    ]
    prompt = [
        Line(((212, 142), (212, 194), (right - 5, 194)), "read"),
        *(Box(right + 23 * i, 186, 16, 16, "generated") for i in range(2)),
        Text(right - 4, 221, "prompt", "label", "end"),
    ]
    second_pass = [
        Line(((right + 92, 180), (right + 92, 62)), "state"),
        Box(right, 40, 138, 20, "position"),
        Text(right + 69, 54, "negative", "label"),
    ]
    gradient: list[Shape] = [
        Line(((right + 31, 64), (right + 31, 182)), "grad", False, 4),
        Line(((right - 5, 201), (204, 201), (204, 144)), "grad", False, 4),
    ]
    note = "Red: the gradient. It ends at the generator."
    gradient += [Text(10, 246, note, "note", "start")]
    alt = (
        "A first pass reads the text, a generator turns its sentence vector into a prompt, a "
        "second pass with the prompt answers, and the gradient runs back to the generator."
    )
    frames = [still, first_pass, vector, generator, prompt, second_pass, gradient]
    return AnimatedPicture(frames, 424, 256, "A prompt generated from the text, step by step", alt)


PICTURES: dict[str, Callable[[], Picture]] = dict(
    crossing=crossing,
    who_reads=who_reads,
    frozen_model=frozen_model,
    four_ways=four_ways,
    head_or_word=head_or_word,
    prompt_tuning=prompt_tuning,
    deep_prompts=deep_prompts,
    phm=phm,
    idpg=idpg,
    idpg_in_every_layer=idpg_in_every_layer,
    late_prompt_tuning=late_prompt_tuning,
    id_spam=id_spam,
    comparison=comparison,
    your_own=your_own,
    costs=costs,
    map=map_of_methods,
    eight_methods=eight_methods,
    passes=passes,
)


def update_alt_texts(text: str) -> str:
    """Return the text of a notebook with the alternative texts of its pictures."""

    def replace_link(match: re.Match) -> str:
        if match[2] not in PICTURES:
            return match[0]
        return f"![{PICTURES[match[2]]().alt}]({match[1]}{match[2]}.svg)"

    return re.sub(r"!\[[^\]]*\]\(([^)]*images/course/)(\w+)\.svg\)", replace_link, text)


def main() -> None:
    """Write all pictures, and their alternative texts in the notebooks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw_picture in PICTURES.items():
        draw_picture().save(FOLDER / f"{name}.svg")
        print(f"docs/images/course/{name}.svg")
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        text = path.read_text(encoding="utf-8")
        updated = update_alt_texts(text)
        if updated != text:
            path.write_text(updated, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
