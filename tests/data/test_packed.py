"Flat arrays give back what the list of dictionaries held, in a fraction of its memory, and train to the same numbers."
import tracemalloc

import pytest
from small import backbone, config, model_of, small_task

from idp_tutorial.data import packed
from idp_tutorial.data.packed import Packed, Picked, pack
from idp_tutorial.data.synthetic import make_rows
from idp_tutorial.training import examples
from idp_tutorial.training.examples import encode_rows
from idp_tutorial.training.fit import fit


def encode(rows):
    return [dict(ids=[*range(300, 300+n)], types=[0]*n, label=n/7) for n in rows]


def test_values_and_their_kinds_come_back():
    rows = [5,0,9,1]*3
    got = pack(encode, rows, 4)
    assert isinstance(got, Packed) and got==encode(rows) and len(got)==12
    assert got[-1]==encode(rows)[-1] and got[2:4]==encode(rows)[2:4] and type(got[0]['ids'][0]) is int
    assert [*Picked(got, [3,0])]==[got[3], got[0]]
    with pytest.raises(IndexError):
        got[12]
    assert pack(encode, rows[:4], 4)==encode(rows[:4]) and isinstance(pack(encode, rows[:4], 4), list)


def test_what_does_not_fit_stays_a_list():
    def odd(rows):
        return [dict(ids=[1], types=[0], target=[1,2]) for _ in rows]
    assert isinstance(pack(odd, [1]*9, 4), list)


def test_memory_of_twenty_tokens_a_text():
    rows = [20]*6000
    def of(f):
        tracemalloc.start()
        kept = f()
        mb = tracemalloc.get_traced_memory()[0]/1e6
        tracemalloc.stop()
        return len(kept) and mb/6 # a thousand rows
    assert of(lambda: pack(encode, rows))<.2<of(lambda: encode(rows))


def test_a_run_on_packed_examples_is_the_same(monkeypatch):
    task,bb,c = small_task(),backbone(),config(steps=3)
    want = fit(model_of('lpt-npg', bb, task), task, c)
    monkeypatch.setattr(examples, 'pack', lambda encode, rows: packed.pack(encode, rows, 8))
    assert isinstance(encode_rows(task, make_rows('sentiment', 'train', n=20), bb), Packed)
    got = fit(model_of('lpt-npg', bb, task), task, c)
    assert (got['losses'],got['history'])==(want['losses'],want['history'])
