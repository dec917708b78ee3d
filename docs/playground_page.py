"""Write the page *Playground* of the site: its text, its stored answers and the data of its panels.

The page works without the exported models of `playground.py`, and without JavaScript it shows what
is stored. All numbers come from records, or from a formula that a test compares with the package.

`python docs/playground_page.py` writes the same panels, with stored answers only, as the one file
that the chapters of the course show: `nbs/course/panels.html`.
"""

import html
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ANSWERS = ROOT / "results/playground/answers.json"
RUNS = ROOT / "results/playground/runs.jsonl"
MANIFEST = ROOT / "docs/_build/live/playground/manifest.json"
PICTURE = ROOT / "docs/images/course/passes.svg"
TEMPLATE = ROOT / "docs/playground/panels.html"
SCRIPTS = ROOT / "docs/_static/playground"
NOTEBOOK_FILE = ROOT / "nbs/course/panels.html"
# the colours that the theme of the site defines
NOTEBOOK_STYLE = """
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--color-foreground-primary); }
:root {
  color-scheme: light dark;
  --color-foreground-primary: light-dark(#1f2933, #e6e9ec);
  --color-foreground-secondary: light-dark(#52606d, #aab4be);
  --color-foreground-muted: light-dark(#6b7680, #8b949e);
  --color-background-primary: light-dark(#ffffff, #16191d);
  --color-background-border: light-dark(#d5dbe1, #3a424b);
  --color-brand-primary: light-dark(#1f6fb2, #66b2ee);
}
body { background: var(--color-background-primary); }
.pg-panel { margin: 0; }
"""
LABELS = {
    "two-domains": ["negative", "positive"],
    "questions": ["abbreviation", "entity", "description", "human", "location", "numeric"],
}
METHOD_NAMES = {
    "lpt": "static prompt",
    "lpt-npg": "NPG",
    "id-spam": "ID-SPAM",
    "s-idpg-phm": "IDPG",
}
DEPTH_RECORDS = (
    dict(
        file="results/why/layers-trec-600.jsonl",
        name="SmolLM2-135M on TREC",
        n_layers=30,
        has_times=True,
    ),
    # the times of these runs are not comparable: other programs ran beside them
    dict(
        file="results/crossing/questions-tiny-600.jsonl",
        name="tiny on questions",
        n_layers=8,
        has_times=False,
    ),
)
PUBLISHED = ROOT / "idp_tutorial/assets/published_counts.json"


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file; without the file, an empty list."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def choose_runs(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs of the learning rate with most seeds; of several, the best on validation."""
    by_rate: dict[float, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_rate[record["lr"]].append(record)
    return max(by_rate.values(), key=lambda runs: (len(runs), mean(r["validation"] for r in runs)))


def read_depths(file: str, has_times: bool) -> dict[str, list[dict[str, Any]]]:
    """Return score, time and memory of static and generated prompts, by the layer of the prompt."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in read_json_lines(ROOT / file):
        if record["method"] in ("lpt", "lpt-npg") and record["status"] == "done":
            cells[record["method"], record["layer"]].append(record)
    depths: dict[str, list[dict[str, Any]]] = {"lpt": [], "lpt-npg": []}
    for (method, layer), records in sorted(cells.items()):
        runs = choose_runs(records)
        point: dict[str, Any] = dict(layer=layer, scores=[round(r["score"], 1) for r in runs])
        if has_times:
            point["ms"] = round(median(r["ms_per_step"] for r in runs), 1)
            point["mb"] = round(median(r["peak_memory_mb"] for r in runs))
        depths[method].append(point)
    return depths


def read_depth_data() -> list[dict[str, Any]]:
    """Return the data of the panel *How deep?*, for each model whose records are there."""
    data = []
    for entry in DEPTH_RECORDS:
        points = read_depths(str(entry["file"]), bool(entry["has_times"]))
        if all(points.values()):
            data.append(dict(name=entry["name"], n_layers=entry["n_layers"], points=points))
    return data


def read_published_counts() -> list[dict[str, Any]]:
    """Return the published counts that the panel *How many parameters?* marks."""
    shown = {("IDPG", "S-IDPG-PHM"), ("IDPG", "M-IDPG-PHM"), ("LPT", "LPT w/ NPG")}
    rows = json.loads(PUBLISHED.read_text(encoding="utf-8"))["counts"]
    counts = [
        {name: row[name] for name in ("paper", "method", "reported", "exact", "unit", "sizes")}
        for row in rows
        if (row["paper"], row["method"]) in shown and row["backbone"] == "RoBERTa-large"
    ]
    return sorted(counts, key=lambda row: row["exact"])


def read_live() -> dict[str, Any] | None:
    """Return what the page says about the exported models before it loads them; None without."""
    if not MANIFEST.exists():
        return None
    manifest = json.loads(MANIFEST.read_text(encoding="utf-8"))
    heads = [task["head"] for task in manifest["tasks"].values()]
    graphs = [f"{name}.onnx" for name in (*manifest["backbone"], *heads)]
    others = [name for name in manifest["files"] if name.endswith((".mjs", ".wasm", ".json"))]
    size = sum(manifest["files"][name]["bytes"] for name in (*graphs, *others))
    return dict(bytes=size, first=[*others, *graphs])


def read_answers() -> dict[str, Any]:
    """Return the stored answers: sentences by task, and logits [prompt][text][class]."""
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def read_scores() -> list[dict[str, Any]]:
    """Return what each trained prompt scores."""
    names = ("task", "method", "layer", "score", "steps", "lr")
    return [{name: run[name] for name in names} for run in read_json_lines(RUNS)]


def page_data(is_notebook: bool = False) -> dict[str, Any]:
    """Return the data of all panels; in a notebook there is no live model."""
    return dict(
        notebook=is_notebook,
        labels=LABELS,
        methods=METHOD_NAMES,
        stored=read_answers(),
        scores=read_scores(),
        depth=read_depth_data(),
        published=read_published_counts(),
        live=None if is_notebook else read_live(),
    )


def largest(values: list[float]) -> int:
    """Return the index of the largest value."""
    return max(range(len(values)), key=values.__getitem__)


def render_exchange_table(answer: dict[str, Any], sentences: list[str], labels: list[str]) -> str:
    """Return a table: what the model says about each sentence with the prompt of each."""
    lines = [
        "| the model reads … | " + " | ".join(f"*{s}*" for s in sentences) + " |",
        "|---|" + "---|" * len(sentences),
    ]
    for giver, row in zip(sentences, answer["logits"]):
        cells = " | ".join(labels[largest(logits)] for logits in row)
        lines.append(f"| … with the prompt of *{giver}* | {cells} |")
    return "\n".join(lines)


def best_answer(stored: dict[str, Any], scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the stored answers of the generator that scores best on the task of the course."""
    generated = [s for s in scores if s["task"] == "two-domains" and s["method"] != "lpt"]
    best = max(generated, key=lambda s: s["score"])
    return next(
        a
        for a in stored["answers"]
        if (a["task"], a["method"], a["layer"]) == ("two-domains", best["method"], best["layer"])
    )


def read_description(picture: Path) -> str:
    """Return what an SVG picture says about itself, as an alternative text."""
    text = picture.read_text(encoding="utf-8")
    return text.partition("<desc>")[2].partition("</desc>")[0]


def describe_place(layer: int | None) -> str:
    """Return where a prompt enters, in words."""
    return "among the words" if layer is None else f"before layer {layer}"


def render_panels(data: dict[str, Any]) -> str:
    """Return the panels as HTML, with their data."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", text)


def _read_script(name: str) -> str:
    """Return a module of the panels without its imports and exports."""
    text = (SCRIPTS / f"{name}.mjs").read_text(encoding="utf-8")
    text = re.sub(r"^import .+\n", "", text, flags=re.M)
    return re.sub(r"^export ", "", text, flags=re.M)


def render_notebook_file() -> str:
    """Return one HTML file with the panels, their style, data and scripts.

    `show_panel` of `idp_tutorial.reproduction.course` names the panel that is shown in
    `data-panel`.
    """
    panels = render_panels(page_data(is_notebook=True))
    panels = re.sub(r"<script>.*?</script>\s*<link .*?</script>", "", panels, flags=re.S)
    style = (SCRIPTS / "playground.css").read_text(encoding="utf-8")
    scripts = "\n".join(map(_read_script, ("counts", "model", "playground")))
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<style>{style}{NOTEBOOK_STYLE}</style></head>",
            f'<body data-panel="">{panels}',
            f'<script type="module">{scripts}</script></body></html>\n',
        ]
    )


def render_page() -> str:
    """Return the page as MyST Markdown."""
    data = page_data()
    answer = best_answer(data["stored"], data["scores"])
    sentences = data["stored"]["sentences"]["two-domains"]
    table = render_exchange_table(answer, sentences, LABELS["two-domains"])
    steps = max(score["steps"] for score in data["scores"])
    source = f"{METHOD_NAMES[answer['method']]} {describe_place(answer['layer'])}"
    return "\n".join(
        [
            "# Playground",
            "",
            "> Type a sentence, give the model the prompt of another sentence, and watch the "
            "prediction follow the prompt.",
            "",
            "Is a sentence praise? A cold soda is good and a cold soup is bad, so no word decides "
            "alone. A small trained network, the generator, reads the sentence and writes a "
            "*prompt*: five vectors. A language model whose weights stay frozen reads the sentence "
            "and the prompt, and answers. Now exchange the prompts: the answer changes with the "
            "prompt, not with the text. The generator has read, and the frozen layers above it "
            "repeat what they are told.",
            "",
            "::::{container} pg-stored",
            "Each column is a sentence, each row a prompt "
            f"({html.escape(source)}, stored answers).",
            "",
            table,
            "::::",
            "",
            "```{raw} html",
            render_panels(data),
            "```",
            "",
            "## How this works",
            "",
            f"![{read_description(PICTURE)}](images/course/{PICTURE.name})",
            "",
            "The page runs the project's own model of five million parameters in your browser: its "
            "layers are exported one by one, and the loop over them is "
            "[the one of the package](engine/core/loop.ipynb). What you type stays on your "
            "machine. The chapters behind the panels: [static and generated prompts]"
            "(course/00_why.ipynb), [IDPG](course/06_idpg.ipynb), [how deep]"
            "(course/08_late_prompt_tuning.ipynb), [ID-SPAM](course/09_id_spam.ipynb), "
            "[counting](course/10_counting_and_cost.ipynb).",
            "",
            "## Limits",
            "",
            f"Each prompt of the live model has been trained with one seed and at most {steps} "
            "steps; the scores beside it are illustrations. The comparison of methods is in "
            "[What works](lab/what_works.ipynb).",
            "",
        ]
    )


if __name__ == "__main__":
    NOTEBOOK_FILE.write_text(render_notebook_file(), encoding="utf-8")
