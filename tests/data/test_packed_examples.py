"""Packed examples equal the list of dictionaries, use less memory, and train identically."""

import tracemalloc

import pytest
from small import backbone, config, model_of, small_task

from idp_tutorial.data import packed_examples as packed
from idp_tutorial.data.packed_examples import PackedExamples, pack_examples
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.training import examples
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.training.fit import fit


def encode(rows):
    return [
        dict(input_ids=[*range(300, 300 + n)], token_type_ids=[0] * n, label=n / 7) for n in rows
    ]


def test_values_and_their_types_are_preserved():
    rows = [5, 0, 9, 1] * 3
    got = pack_examples(encode, rows, 4)
    assert isinstance(got, PackedExamples) and got == encode(rows) and len(got) == 12
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


def test_examples_that_arrays_cannot_store_stay_a_list():
    def odd(rows):
        return [dict(input_ids=[1], token_type_ids=[0], target=[1, 2]) for _ in rows]

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
        examples, "pack_examples", lambda encode, rows: packed.pack_examples(encode, rows, 8)
    )
    assert isinstance(encode_rows(task, make_rows("sentiment", "train", n=20), bb), PackedExamples)
    got = fit(model_of("lpt-npg", bb, task), task, c)
    assert (got.losses, got.history) == (want.losses, want.history)
