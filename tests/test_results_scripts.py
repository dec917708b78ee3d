"""Functions of the scripts in `results/`, which write the records beside them."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import GenerationHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.phm import PHMLinear

RESULTS = Path(__file__).resolve().parents[1] / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="results are not in this installation")


def load_script(path):
    """Return a script of `results/` as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, RESULTS / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_implementations_of_phm_are_the_same_function():
    phm = load_script("speed/phm.py")
    layer = PHMLinear(8, 12, 4).double()
    x = torch.randn(3, 8).double()
    expected = x @ layer.weight + layer.bias  # test_phm.py checks it entry by entry
    for way in ("auto", "factored", "materialised", "idpg", "compacter"):
        torch.testing.assert_close(phm.PHM_IMPLEMENTATIONS[way](layer, x), expected)
    records = phm.measure_phm(256, 2, (32,), (4, 3), (1,), min_seconds=0.001)
    assert [(r["n"], r["way"]) for r in records] == [  # 3 does not divide
        (4, way) for way in phm.PHM_IMPLEMENTATIONS
    ]
    mb = {r["way"]: r["peak_mb"] for r in records}
    # IDPG's code stores n matrices (both layers), the materialised path one, the factored path none
    W = (256 * 32 + 32 * 512) * 4 / 1e6
    assert mb["factored"] < W < mb["materialised"] < 3 * W and mb["idpg"] > 4 * W
    assert mb["compacter"] > 4 * 32 * 512 * 4 / 1e6


@pytest.mark.parametrize(
    "text,parts",
    [
        ("hot soup, good", ["hot soup", "good"]),
        ("hot, spicy soup, good", ["hot, spicy soup", "good"]),
        ("good", ["", "good"]),
        ("", ["", ""]),
    ],
)
def test_the_verdict_is_the_last_part_of_a_short_answer(text, parts):
    assert load_script("writing/short_answers.py").split_answer(text) == parts


def test_words_and_verdict_are_scored_separately():
    script = load_script("writing/short_answers.py")
    rows = [dict(target="hot soup, good"), dict(target="cold beer, bad")] * 2
    texts = ["hot soup, bad", "cold beer, bad", "cold soup, good", "soup"]
    assert script.score_parts(texts, rows) == dict(n=4, words=50.0, verdict=50.0)


def test_an_answer_follows_the_solved_examples_and_ends_with_its_line(monkeypatch):
    short_answers = load_script("writing/short_answers.py")
    monkeypatch.setattr(short_answers, "N_SENTENCES", 3)
    monkeypatch.setattr(short_answers, "BATCH_SIZE", 2)
    bb = load_backbone("tiny-gpt2")
    task = load_task("in-short")
    task = replace(task, splits={name: rows[:8] for name, rows in task.splits.items()})
    prompts = []

    def generate(model, ids, max_new_tokens):
        prompts.extend(bb.tokenizer.batch_decode(ids))
        answer = bb.tokenizer(" hot soup, good\nnext", add_special_tokens=False).input_ids
        return [answer for _ in ids]

    monkeypatch.setattr(short_answers, "generate_ids", generate)
    model = PlannedModel(bb, GenerationHead(bb), {})
    assert short_answers.answer_after_examples(model, task, n=2) == ["hot soup, good"] * 3
    assert len(prompts) == 3
    for prompt, row in zip(prompts, task.splits["test"]):
        lines = prompt.removesuffix("</s>").split("\n")
        assert len(lines) == 3 and all(" = " in line for line in lines[:2])
        assert lines[2] == f"{row['sentence1']} =".lower()


def test_memory_is_the_peak_of_live_tensors():
    phm = load_script("speed/phm.py")
    w = torch.ones(100, 50, requires_grad=True)

    def call():
        a = w.T[:3] * 2
        b = a.t()  # views are free, and what was there before
        del a, b
        w[:1] * 2

    assert 1e6 * phm._peak_mb(call) < 1.1 * 3 * 100 * 4
    assert 1e6 * phm._peak_mb(lambda: (w.exp() + 1).sum().backward()) >= 2 * w.nbytes
