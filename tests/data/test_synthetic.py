"The bundled tasks as installed: distinct, disjoint, balanced, the same everywhere, and fair to a bag of words."
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from idp_tutorial.data.synthetic import SPLITS, SYNTHETIC, TWO, Synthetic, combo_of, combos, make_rows, split_of


def texts(rows): return [r[k] for r in rows for k in ('sentence1','sentence2') if k in r]

@pytest.mark.parametrize('name', SYNTHETIC)
def test_rows(name):
    task,splits = SYNTHETIC[name],{s: make_rows(name, s, 300) for s in SPLITS}
    for split,rows in splits.items():
        assert len({tuple(r.values())[:-1] for r in rows})==300
        assert all(split_of(s)==split and '{' not in s and '  ' not in s and s[0].isupper() and s[-1] in '.?'
            for s in texts(rows))
        last = 'target' if name=='in-short' else 'label'
        assert all(list(r)==['sentence1']+['sentence2']*task.pair+[last] for r in rows)
        if name=='in-short': assert sum(r['target'].endswith('good') for r in rows)==150
        elif task.labels: assert set(Counter(r['label'] for r in rows).values())=={300//len(task.labels)}
        else: assert all(isinstance(r['label'], float) and 0<=r['label']<=5 for r in rows)
    seeds = set(texts(make_rows(name, 'train', 300, seed=7)))
    assert not seeds & set(texts(splits['test'])) # another seed stays in its split

def test_same_in_another_process():
    code = "from idp_tutorial.data.synthetic import *; print([make_rows(n, 'test', 5, seed=3) for n in SYNTHETIC])"
    out = subprocess.run([sys.executable,'-c',code], capture_output=True, text=True, check=True,
        env=os.environ|{'PYTHONHASHSEED':'5'}).stdout
    assert eval(out)==[make_rows(n, 'test', 5, seed=3) for n in SYNTHETIC]

def test_domains_combinations():
    train,val,test = ([combo_of(r['sentence1']) for r in make_rows('domains', s)] for s in SPLITS)
    assert not any(c.held_out for c in train+val) and 100<sum(c.held_out for c in test)<250
    assert {c.noun for c in test}<={c.noun for c in train}
    nouns,descriptors = {c.noun for c in combos()},{c.word for c in combos()}
    for r in make_rows('domains', 'test'): # one noun, one descriptor, and the label is theirs
        found = re.findall(r'\w+', r['sentence1'].lower())
        assert sum(w in nouns for w in found)==1 and sum(w in descriptors for w in found)==1 and 4<=len(found)<=20
        assert r['label']==combo_of(r['sentence1']).good

def test_two_domains():
    train,test = ([combo_of(r['sentence1']) for r in make_rows('two-domains', s)] for s in ('train','test'))
    assert {c.domain for c in train}=={c.domain for c in test}=={*TWO['domain']} and not any(c.held_out
        for c in train) and any(c.held_out for c in test)
    for word in {c.word for c in train}: # every descriptor is good in one domain and bad in another
        assert len({(c.domain,c.good) for c in train if c.word==word})==2==len({c.good for c in train if c.word==word})

def test_in_two_domains_order_the_last_word_decides_and_a_bag_of_words_cannot_know_which():
    for r in make_rows('two-domains-order', 'test', 300):
        found = re.findall(r'\w+', r['sentence1'].lower())
        said = sorted((c for c in combos() if c.noun in found and c.word in found), key=lambda c: found.index(c.word))
        assert len(said)==2 and said[0].good!=said[1].good==r['label']

@pytest.mark.parametrize('name,field,most', [('domains','sentence1',58), ('two-domains','sentence1',58),
    ('two-domains-order','sentence1',58),
    ('entailment','sentence2',56), ('sentiment','sentence1',80)])
def test_bag_of_words(name, field, most):
    (x,y),(x_te,y_te) = (([r[field] for r in rows],[r['label'] for r in rows])
        for rows in (make_rows(name, 'train'),make_rows(name, 'test')))
    assert 100*make_pipeline(CountVectorizer(), LogisticRegression(max_iter=1000)).fit(x, y).score(x_te, y_te)<most

@pytest.mark.parametrize('args,message', [
    (('domain','train'), "unknown bundled task 'domain', did you mean 'domains'"),
    (('sst2','train'), "unknown bundled task 'sst2'.* Known: sentiment, questions"),
    (('domains','dev'), "unknown split 'dev': use 'train', 'validation' or 'test'"),
    (('domains','train',0), 'n=0 must be .* at least 1'),
    (('domains','train',2.5), 'n=2.5 must be a whole number'),
    (('questions','validation',5001), 'n=5001 is too many.*up to n=5000')])
def test_errors(args, message):
    with pytest.raises(ValueError, match=message): make_rows(*args)

def test_small_grammar(monkeypatch): # a lexicon that somebody cut down must not loop for ever
    monkeypatch.setitem(SYNTHETIC, 'tiny', Synthetic(lambda rng, label,
        split: dict(sentence1=f'Sentence {rng.randrange(40)}.', label=label), ('no','yes')))
    with pytest.raises(ValueError, match='no 500 distinct rows, only about [0-9]+'): make_rows('tiny', 'validation')

def test_promised_size(): # the smallest grammar still gives ten times the default
    assert len({r['sentence1'] for r in make_rows('questions', 'validation', 5000)})==5000
