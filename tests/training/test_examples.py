"""Encoding of texts for a model: how many training texts are cut at `max_len`.

Packed examples equal the list of dictionaries, use less memory, and train identically.
"""

import logging
import tracemalloc
from dataclasses import replace

import pytest
from accelerate import Accelerator
from small import backbone, config, model_of, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.training import examples
from idp_tutorial.training import examples as module
from idp_tutorial.training.examples import (
    PackedExamples,
    count_cut_texts,
    encode_for_model,
    encode_rows,
    encode_training_splits,
    pack_examples,
)
from idp_tutorial.training.fit import fit


@pytest.mark.parametrize("n_rows", [5, 2505])  # a list, and flat arrays
@pytest.mark.parametrize("head", ["classification", "verbalizer"])
@pytest.mark.parametrize("task_name", ["sentiment", "entailment"])
def test_texts_that_do_not_fit_are_counted(task_name, head, n_rows, bbs):
    bb = bbs("roberta")
    task = small_task(task_name)
    cfg = config("prompt-tuning", task=task_name, head=head, template="code")
    model = build_model(cfg, bb, task)
    row = {column: "tea" for column in ("sentence1", "sentence2")[: 1 + task.pair]} | {"label": 0}
    fitting = len(encode_for_model(model, task, cfg, [row])[0]["input_ids"])
    cfg = replace(cfg, max_len=fitting + 2)
    rows = [row | {"sentence1": "tea" + " tea" * (i % 5)} for i in range(n_rows)]
    examples = encode_for_model(model, task, cfg, rows)
    # with up to two words more a text still fits
    assert count_cut_texts(model, task, cfg, rows, examples) == 2 * n_rows // 5


def test_inputs_of_a_generation_task_are_counted_without_their_answers():
    bb = backbone("gpt2")
    task = replace(TASKS["in-short"], splits={})
    cfg = config("prompt-tuning", task=task.name, max_len=24)
    model = build_model(cfg, bb, task)
    rows = [dict(sentence1="tea" + " tea" * n, target="a b") for n in range(20)]
    examples = encode_for_model(model, task, cfg, rows)
    longest = max(
        e["answer_start"] for e in encode_for_model(model, task, replace(cfg, max_len=99), rows)
    )
    expected = longest - (24 - task.max_answer_len)
    assert 0 < expected < 20
    assert count_cut_texts(model, task, cfg, rows, examples) == expected


def test_the_share_of_cut_texts_is_logged_once(bbs, caplog):
    module._log_cut_texts_once.cache_clear()
    task = small_task()
    cfg = config("prompt-tuning", task=task.name, max_len=6)
    model = build_model(cfg, bbs("roberta"), task)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            *_, n_cut = encode_training_splits(Accelerator(cpu=True), model, task, cfg)
    (line,) = caplog.messages
    assert line == (
        f"{n_cut} of 64 training texts of sentiment ({100 * n_cut / 64:.0f} %) are longer than "
        "max_len=6 tokens and are cut"
    )
    caplog.clear()
    *_, n_cut = encode_training_splits(
        Accelerator(cpu=True), model, task, replace(cfg, max_len=128)
    )
    assert n_cut == 0 and not caplog.messages


def encode(rows):
    return [
        dict(input_ids=[*range(300, 300 + n)], token_type_ids=[0] * n, label=n / 7) for n in rows
    ]


def test_values_and_their_types_are_preserved():
    rows = [5, 0, 9, 1] * 3
    got = pack_examples(encode, rows, 4)
    assert isinstance(got, PackedExamples) and [*got] == encode(rows) and len(got) == 12
    assert (
        got[-1] == encode(rows)[-1]
        and got[2:4] == encode(rows)[2:4]
        and type(got[0]["input_ids"][0]) is int
    )
    with pytest.raises(IndexError):
        got[12]
    assert pack_examples(encode, rows[:4], 4) == encode(rows[:4]) and isinstance(
        pack_examples(encode, rows[:4], 4), list
    )


def test_examples_with_different_columns_stay_a_list():
    def odd(rows):
        return [dict(input_ids=[1], token_type_ids=[0], **{f"n{i}": 1}) for i in range(len(rows))]

    assert isinstance(pack_examples(odd, [1] * 9, 4), list)


def test_packed_examples_use_less_memory():
    rows = [20] * 6000

    def memory_of(f):  # megabytes for a thousand rows
        tracemalloc.start()
        examples = f()
        mb = tracemalloc.get_traced_memory()[0] / 1e6
        tracemalloc.stop()
        return len(examples) and mb / 6

    assert memory_of(lambda: pack_examples(encode, rows)) < 0.2 < memory_of(lambda: encode(rows))


def test_a_run_on_packed_examples_is_the_same(monkeypatch):
    task = small_task()
    bb = backbone()
    c = config(steps=3)
    want = fit(model_of("lpt-npg", bb, task), task, c)
    monkeypatch.setattr(
        examples, "pack_examples", lambda encode, rows: pack_examples(encode, rows, 8)
    )
    assert isinstance(encode_rows(task, make_rows("sentiment", "train", n=20), bb), PackedExamples)
    got = fit(model_of("lpt-npg", bb, task), task, c)
    assert (got.losses, got.history) == (want.losses, want.history)
