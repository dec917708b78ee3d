"""The playground of the site: its data, its formulas, and the exported models."""

import gzip
import json
import re
import shutil
import subprocess
from statistics import mean

import numpy as np
import playground
import playground_page as page
import pytest
import torch

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.encoding import collate
from idp_tutorial.data.tasks import load_task
from idp_tutorial.training.examples import encode_for_model

SCRIPTS = playground.DOCS_FOLDER / "_static/playground"
BUILT = playground.OUTPUT_FOLDER
N_SENTENCES = 200
STRANGE = [
    "",
    " ",
    "Ünïcödé, naïve café",
    "日本語の文です。",
    "مرحبا بالعالم",
    "a\u0301 e\u0301 (combining)",
    "🙂🙃 👩‍👩‍👧",
    "tabs\tand\nlines\r\n",
    "<s> </s> <mask> <pad>",
    "it's don't we'll I've",
    "1,234.56 €/£ 10^-3",
    "\u200b\u00a0\ufeff",
    "...!!!???---___",
    "A" * 300,
    "ΟΔΟΣ ΣΑΣ.",
]


@pytest.fixture(scope="module")
def training():
    return playground.load_training()


def run_node(script, stdin=""):
    """Return what a module prints under node, as JSON."""
    if not shutil.which("node"):
        pytest.skip("no node on this machine")
    command = ["node", "--input-type=module", "-e", script]
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# ---- data


def test_every_stored_prompt_has_a_run_and_an_answer(training):
    cells = set(training.cells())
    assert {(r["task"], r["method"], r["layer"]) for r in training.read_runs()} == cells
    assert {(a["task"], a["method"], a["layer"]) for a in page.read_answers()["answers"]} == cells
    files = {file.name for file in (training.HERE / "prompts").iterdir()}
    assert files == {training.prompt_file(*cell).name for cell in cells}
    assert {task: list(load_task(task).labels) for task in training.TASKS} == page.LABELS


def test_stored_answers_are_those_of_the_stored_prompts(training):
    cell = ("two-domains", "id-spam", 7)
    stored = next(
        a for a in page.read_answers()["answers"] if (a["task"], a["method"], a["layer"]) == cell
    )
    computed = training.compute_answers(*cell)
    for name in ("logits", "without", "after", "before"):
        for a, b in zip(np.ravel(stored[name][0]), np.ravel(computed[name][0])):
            assert a == pytest.approx(b, abs=2e-3)
    assert stored["tokens"] == computed["tokens"]


def test_points_of_the_depth_panel_are_means_of_records():
    for entry in page.DEPTH_RECORDS:
        records = page.read_json_lines(page.ROOT / entry["file"])
        for method, points in page.read_depths(entry["file"], entry["has_times"]).items():
            for point in points:
                runs = [
                    r for r in records if (r["method"], r.get("layer")) == (method, point["layer"])
                ]
                by_rate = {}
                for r in runs:
                    by_rate.setdefault(r["lr"], []).append(r)
                most = max(len(rate_runs) for rate_runs in by_rate.values())
                means = [mean(r["score"] for r in s) for s in by_rate.values() if len(s) == most]
                assert len(point["scores"]) == most
                assert any(mean(point["scores"]) == pytest.approx(m, abs=0.06) for m in means)
    smollm2 = page.read_depth_data()[0]
    assert all(len(p["scores"]) == 5 for points in smollm2["points"].values() for p in points)


def test_the_page_shows_its_answers_without_javascript():
    text = page.render_page()
    data = page.page_data()
    answer = page.best_answer(data["stored"], data["scores"])
    rows = [line for line in text.splitlines() if line.startswith("| … with the prompt of")]
    shown = [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows]
    expected = [
        [page.LABELS["two-domains"][int(np.argmax(logits))] for logits in row]
        for row in answer["logits"]
    ]
    assert shown == expected
    assert np.shape(answer["logits"]) == (4, 4, 2)


def test_a_script_cannot_end_inside_the_data():
    panels = page.render_page().partition("```{raw} html")[2]
    data = panels.partition('id="pg-data">')[2].partition("</script>")[0]
    assert json.loads(data)["stored"] == page.read_answers()


def test_formulas_of_the_page_are_those_of_the_papers_and_the_package():
    published = page.read_published_counts()
    assert {p["reported"] for p in published} == {"105K", "134K", "792K"}
    sizes = [p["sizes"] | dict(L=p["sizes"].get("L", 24)) for p in published]
    small = dict(d=192, t=5, m=32, n=16, L=8)
    script = f"""
        import {{COUNTS}} from {json.dumps((SCRIPTS / "counts.mjs").as_uri())}
        const sizes = {json.dumps([*sizes, small])}
        const count = s => Object.fromEntries(Object.entries(COUNTS).map(([k, f]) => [k, f(s)]))
        console.log(JSON.stringify(sizes.map(s => count({{n: 16, ...s}}))))
    """
    *counts, tiny = run_node(script)
    for paper, counted in zip(published, counts):
        assert counted[paper["method"]] == paper["exact"]
    parameters = {(r["method"]): r["parameters"] for r in page.read_json_lines(page.RUNS)}
    assert tiny["static prompt"] == parameters["lpt"]
    assert tiny["LPT w/ NPG"] == parameters["lpt-npg"]
    assert tiny["ID-SPAM"] == parameters["id-spam"]
    # the package has a rule for each PHM layer, the paper counts one; m is 256
    two_rules = 192 * 256 // 16 + 256 + 256 * 960 // 16 + 960 + 2 * 16**3
    assert parameters["s-idpg-phm"] == two_rules


# ---- exported models


def test_weights_that_half_precision_holds_are_stored_in_it():
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    exact = np.array([[0.5, 1.25], [-3.0, 0.0]], np.float32)
    inexact = np.array([0.1, 1e-9], np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["out"])],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(exact, "w"), numpy_helper.from_array(inexact, "b")],
    )
    opset = [helper.make_opsetid("", 18)]
    model = playground.store_in_half(helper.make_model(graph, opset_imports=opset, ir_version=9))
    types = {i.name: i.data_type for i in model.graph.initializer}
    assert types == {"w.half": onnx.TensorProto.FLOAT16, "b": onnx.TensorProto.FLOAT}
    session = runtime.InferenceSession(model.SerializeToString())
    x = np.array([[1.0, 2.0]], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ exact + inexact)


class ExportedModel:
    """The exported graphs in the order in which `model.mjs` runs them."""

    def __init__(self, folder):
        import onnxruntime

        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.open = lambda name: onnxruntime.InferenceSession(
            (folder / f"{name}.onnx").read_bytes(), options
        )
        self.sessions = {}

    def run(self, name, x):
        if name not in self.sessions:
            self.sessions[name] = self.open(name)
        return self.sessions[name].run(None, {"x": x})

    def states(self, ids, prompt=None, layer=None):
        """Return the states `[1,T,d]` before each layer, and the final ones."""
        (x,) = self.run("words", ids)
        if prompt is not None and layer is None:
            x = np.concatenate([x[:, :1], prompt, x[:, 1:]], 1)
        (x,) = self.run("embed", x)
        seen = []
        for i in range(self.manifest["n_layers"]):
            if prompt is not None and i == layer:
                x = np.concatenate([prompt, x], 1)
            seen.append(x)
            (x,) = self.run(f"layer-{i}", x)
        return [*seen, x]

    def prompt(self, entry, ids):
        if "prompt" in entry:
            return np.array(entry["prompt"], np.float32).reshape(1, -1, self.manifest["d"])
        if entry["reads"] == "words":
            return self.run(entry["file"], self.run("words", ids)[0])[0]
        states = self.states(ids)
        x = states[-1].mean(1) if entry["reads"] == "sentence" else states[entry["layer"]][:, 0]
        return self.run(entry["file"], x)[0]

    def logits(self, entry, ids, mask, giver):
        prompt = self.prompt(entry, giver)
        final = self.states(ids, prompt, entry["layer"])[-1]
        head = self.manifest["tasks"][entry["task"]]["head"]
        return self.run(head, final[:, mask + prompt.shape[1]])[0][0]


@torch.inference_mode()
def exchanged_logits(model: PlannedModel, batch, i, giver):
    """Return PyTorch's logits of a text with the prompt of another."""
    (source,) = model.sources
    prompts = []
    with source.register_forward_hook(lambda _module, _inputs, prompt: prompts.append(prompt)):
        model(batch(giver))
    with source.register_forward_hook(lambda *_: prompts[0]):
        return model(batch(i))[0].numpy()


@pytest.mark.slow
def test_exported_graphs_compute_what_the_package_computes(training, tmp_path):
    """200 sentences, every prompt and layer that is offered, own and exchanged prompts."""
    pytest.importorskip("onnxruntime")
    folder = BUILT
    if not (BUILT / "manifest.json").exists():
        folder = tmp_path / "playground"
        playground.build(folder, runtime=False)
    exported = ExportedModel(folder)
    assert len(exported.manifest["prompts"]) == len(list(training.cells()))
    largest: dict[str, float] = {}
    for entry in exported.manifest["prompts"]:
        cell = (entry["task"], entry["method"], entry["layer"])
        name = "-".join(map(str, cell))
        model, experiment = training.load_model(*cell)
        rows = experiment.task.splits["test"][:N_SENTENCES]
        examples = encode_for_model(model, experiment.task, experiment.cfg, rows)

        def batch(i, examples=examples, pad=model.backbone.pad_id):
            return collate([examples[i]], pad)

        for i in range(N_SENTENCES):
            giver = i if i % 2 else (i + 37) % N_SENTENCES
            ids, of_giver = (batch(j)["input_ids"].numpy() for j in (i, giver))
            mask = examples[i]["mask_position"]
            got = exported.logits(entry, ids, mask, of_giver)
            expected = exchanged_logits(model, batch, i, giver)
            difference = float(np.abs(got - expected).max())
            largest[name] = max(largest.get(name, 0.0), difference)
            assert got.argmax() == expected.argmax()
    assert max(largest.values()) < 1e-4, largest


@pytest.mark.slow
def test_the_live_page_is_small_and_has_its_licences():
    if not (BUILT / "ort-wasm-simd-threaded.wasm").exists():
        pytest.skip("the live model is not built: `python docs/playground.py` builds it")
    manifest = json.loads((BUILT / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["files"] == playground.list_files(BUILT)
    assert playground.total_megabytes(manifest["files"].values()) < 30
    files = [file for file in BUILT.iterdir() if file.suffix != ".txt"]  # what a page can ask for
    assert sum(len(gzip.compress(file.read_bytes(), 6)) for file in files) < 16e6
    licences = [name for name in manifest["files"] if name.startswith(("LICENSE", "NOTICES"))]
    assert len(licences) == 3


# ---- tokenizer


def test_the_tokenizer_of_the_page_gives_the_ids_of_the_package():
    """2,000 texts: of the bundled tasks, strange ones, and random letters of many scripts."""
    if not (BUILT / "tokenizers.min.mjs").exists():
        pytest.skip("the live model is not built: `python docs/playground.py` builds it")
    rng = np.random.default_rng(0)
    rows = [
        row["sentence1"]
        for task in ("sentiment", "two-domains", "two-domains-order", "questions", "entailment")
        for row in load_task(task).splits["test"][:300]
    ]
    codes = [*range(32, 127), *range(0xA0, 0x250), *range(0x370, 0x400), *range(0x400, 0x460)]
    codes += [*range(0x2010, 0x2040), *range(0x4E00, 0x4E40), *range(0x1F600, 0x1F640)]
    while len(rows) < 2000 - len(STRANGE):
        rows.append("".join(chr(c) for c in rng.choice(codes, rng.integers(1, 60))))
    texts = [*STRANGE, *rows]
    texts = [prefix + text for prefix, text in zip(["", " "] * 1000, texts)]
    script = f"""
        import {{readFileSync}} from "node:fs"
        import {{Tokenizer}} from {json.dumps((BUILT / "tokenizers.min.mjs").as_uri())}
        import {{normalise}} from {json.dumps((SCRIPTS / "model.mjs").as_uri())}
        const read = name => JSON.parse(readFileSync({json.dumps(str(BUILT))} + "/" + name))
        const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"))
        const texts = JSON.parse(readFileSync(0))
        const ids = t => tokenizer.encode(normalise(t), {{add_special_tokens: false}}).ids
        console.log(JSON.stringify(texts.map(ids)))
    """
    ours = run_node(script, json.dumps(texts))
    tokenizer = load_backbone("tiny").tokenizer
    expected = tokenizer(texts, add_special_tokens=False)["input_ids"]
    different = [t for t, a, b in zip(texts, ours, expected) if a != b]
    assert not different, f"{len(different)} texts differ, such as {different[:5]}"
    assert len(texts) == 2000


# ---- panels in notebooks


def test_the_panels_of_the_notebooks_are_those_of_the_site():
    text = page.render_notebook_file()
    assert page.NOTEBOOK_FILE.read_text(encoding="utf-8") == text, (
        "run `python docs/playground_page.py`"
    )
    assert 'src="' not in text and "@import" not in text  # one file, without requests


@pytest.mark.parametrize(
    "chapter,panel",
    [
        ("00_why", "whose prompt"),
        ("06_idpg", "whose prompt"),
        ("08_late_prompt_tuning", "how deep"),
        ("09_id_spam", "which words"),
        ("10_counting_and_cost", "how many parameters"),
    ],
)
def test_a_chapter_opens_its_panel_and_links_to_the_playground(chapter, panel):
    from idp_tutorial.reproduction.course import PANELS, PLAYGROUND_URL

    file = page.ROOT / f"nbs/course/{chapter}.ipynb"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    sources = {kind: [] for kind in ("code", "markdown", "raw")}
    for cell in cells:
        sources[cell["cell_type"]].append("".join(cell["source"]))
    assert any(f'show_panel("{panel}")' in source for source in sources["code"])
    link = f"]({PLAYGROUND_URL}#{PANELS[panel][0]})"
    assert any(link in source for source in sources["markdown"])


def test_every_panel_that_a_notebook_can_show_is_in_the_file():
    from idp_tutorial.reproduction.course import PANELS

    text = page.NOTEBOOK_FILE.read_text(encoding="utf-8")
    assert text.count('data-panel=""') == 1
    shown = {heading for heading, _height in PANELS.values()}
    assert shown == set(re.findall(r'class="pg-panel" aria-labelledby="([\w-]+)"', text))
