"""The scores of short answers, and the answers after solved examples."""

from dataclasses import replace

import pytest

from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.heads import GenerationHead
from idp_tutorial.core.prompted_model import PromptedModel
from idp_tutorial.data.tasks import load_task
from idp_tutorial.reproduction.analysis import short_answers
from idp_tutorial.reproduction.analysis.short_answers import (
    answer_after_examples,
    score_parts,
    split_answer,
)


@pytest.mark.parametrize(
    "text,parts",
    [
        ("hot soup, good", ["hot soup", "good"]),
        ("hot, spicy soup, good", ["hot, spicy soup", "good"]),
        ("good", ["", "good"]),
        ("", ["", ""]),
    ],
)
def test_the_verdict_is_the_last_part_of_an_answer(text, parts):
    assert split_answer(text) == parts


def test_words_and_verdict_are_scored_separately():
    rows = [dict(target="hot soup, good"), dict(target="cold beer, bad")] * 2
    texts = ["hot soup, bad", "cold beer, bad", "cold soup, good", "soup"]
    assert score_parts(texts, rows) == dict(n=4, words=50.0, verdict=50.0)


def test_an_answer_follows_the_solved_examples_and_ends_with_its_line(monkeypatch):
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
    model = PromptedModel(bb, GenerationHead(bb), {})
    assert answer_after_examples(model, task, n=2) == ["hot soup, good"] * 3
    assert len(prompts) == 3
    for prompt, row in zip(prompts, task.splits["test"]):
        lines = prompt.removesuffix("</s>").split("\n")
        assert len(lines) == 3 and all(" = " in line for line in lines[:2])
        assert lines[2] == f"{row['sentence1']} =".lower()
