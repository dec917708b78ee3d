"What a command refuses is what no builder reads: every method is built, and its reads are watched."
from dataclasses import replace

import numpy as np
import pytest
from small import backbone, small_task

from idp_tutorial.config import RunConfig
from idp_tutorial.methods.build import build
from idp_tutorial.methods.controls import CONTROLS
from idp_tutorial.methods.options import READERS, layer_among, refuse_unused
from idp_tutorial.methods.registry import METHODS


class Watched(RunConfig):
    "A config that notes which of the options are read"
    seen = None

    def __getattribute__(self, name):
        if name in READERS and Watched.seen is not None:
            Watched.seen.add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize('name', [*METHODS, *CONTROLS])
def test_a_method_reads_the_options_that_it_is_said_to_read(name, monkeypatch):
    bb,cfg = backbone(),RunConfig(name)
    if name in METHODS:
        own = {k: v(bb) if callable(v) else v for k,v in METHODS[name].defaults.items()}
        watched = Watched(**vars(replace(cfg, **own)))
        Watched.seen = set()
        METHODS[name].build(bb, watched)
    else:
        watched = Watched(**vars(cfg))
        Watched.seen = set()
        build(watched, bb, small_task())
    seen,Watched.seen = Watched.seen,None
    if name in METHODS:
        seen -= {'t'}&{*METHODS[name].defaults} # which always holds, whatever is given
    assert seen=={option for option,reads in READERS.items() if reads(name)}


@pytest.mark.parametrize('name', [None, 3, ['lpt'], {}], ids=str)
def test_a_method_that_is_no_name(name):
    with pytest.raises(ValueError, match='unknown method'):
        build(RunConfig(method=name), backbone(), small_task())
    with pytest.raises(ValueError, match='unknown read-out'):
        RunConfig('lpt', t=2, readout={})


def test_one_of_several_methods_is_enough():
    refuse_unused(['head-only','lpt'], RunConfig(layer=2))
    for kw in (dict(t=5), dict(layer=2), dict(m=8), dict(position=1), dict(prompt_dropout=.2), dict(standardise=True),
            dict(glove="x")):
        with pytest.raises(ValueError, match='head-only, fine-tuning has no such option; leave it out, or use one of'):
            refuse_unused(['head-only','fine-tuning'], RunConfig(**kw))
    for kw in (dict(template='paper'), dict(loss_vocab='labels')):
        with pytest.raises(ValueError, match='only a verbalizer reads it'):
            refuse_unused(['lpt'], RunConfig(**kw))
        refuse_unused(['lpt'], RunConfig(head='verbalizer', **kw))


@pytest.mark.parametrize('methods,kw,words', [('majority', dict(patience=3), 'majority has no such option'),
    ('majority', dict(lr=.1), 'lr=0.1: majority has no such option'), ('probe', dict(head_lr=.1), 'no such option'),
    ('lora', dict(cache='hidden'), 'nothing to keep'), ('lpt', dict(cache='sentence'), 'nothing to keep'),
    ('lpt', dict(head='verbalizer', readout='cls'), 'a verbalizer reads its mask'),
    ('majority', dict(cache='both'), 'nothing to keep')], ids=str)
def test_options_of_training_that_would_change_nothing(methods, kw, words):
    with pytest.raises(ValueError, match=words):
        refuse_unused([methods], RunConfig(**kw))
    refuse_unused([methods,'side-network','lpt','s-idpg-phm'], RunConfig(**kw))


@pytest.mark.parametrize('kw', [dict(head_hidden=True), dict(readout='last'), dict(head_lr=.5),
    dict(head='verbalizer'), dict(head_init='probe'), dict(loss_vocab='labels'), dict(head_first=True)], ids=str)
def test_a_task_that_is_answered_with_a_text_has_no_head(kw):
    fields,how = {k: v for k,v in kw.items() if k!='head_first'},{k: v for k,v in kw.items() if k=='head_first'}
    with pytest.raises(ValueError, match="task 'in-short' is answered with a text"):
        refuse_unused(['lpt'], RunConfig(task='in-short', **fields), **how)


def test_what_a_task_of_texts_reads():
    "Its template; and M(x) is what `readout` says"
    refuse_unused(['lpt'], RunConfig(task='in-short', template='{s1} ->{mask}'))
    refuse_unused(['lpt','s-idpg-phm'], RunConfig(task='in-short', readout='cls'))


@pytest.mark.parametrize('methods,kw', [('lpt', dict(cache='hidden', layer=0)),
    ('adapterdrop', dict(cache='both', layer=0)), ('s-idpg-phm', dict(cache='sentence', sentence_pass='noisy')),
    ('m-idpg-phm', dict(cache='both', sentence_pass='noisy'))], ids=str)
def test_a_cache_of_what_is_not_there(methods, kw):
    with pytest.raises(ValueError, match='nothing to keep'):
        refuse_unused([methods], RunConfig(**kw))
    for more in ([methods,'head-only','s-idpg-phm'], [methods,'side-network'], ['lpt','s-idpg-phm','probe']):
        refuse_unused(more, RunConfig(**{**kw, 'cache':'both'}))
    refuse_unused(['lpt','adapterdrop'], RunConfig(cache='hidden', layer=0)) # which keeps its half


def test_pooling_without_the_last_word_is_for_decoders():
    with pytest.raises(ValueError, match='skip_last=True on backbone .*use a decoder'):
        build(RunConfig('lpt-appg', skip_last=True), backbone(), small_task())
    build(RunConfig('lpt-appg', skip_last=True), backbone('gpt2'), small_task())


def test_options_of_a_command_that_would_change_nothing():
    with pytest.raises(ValueError, match='tune=True: majority, probe has no such option'):
        refuse_unused(['majority','probe'], RunConfig(), tune=True, rates=(), save_every=None)
    with pytest.raises(ValueError, match='head_first=True: a verbalizer has no such head'):
        refuse_unused(['lpt'], RunConfig(head='verbalizer'), head_first=True)
    refuse_unused(['lpt'], RunConfig(), tune=True, head_first=True, rates=(.1,), save_every=0)
    with pytest.raises(ValueError, match="'probe'") as e:
        refuse_unused(['probe'], RunConfig(), rows=METHODS)
    assert 'side-network' not in str(e.value) # what the command would refuse next is not offered
    with pytest.raises(ValueError, match='head_lr=0.001 with head_first'):
        refuse_unused(['lpt'], RunConfig(head_lr=1e-3), head_first=True)


@pytest.mark.parametrize('kw,words', [(dict(prompt_dropout=float("nan")), "prompt_dropout=nan"),
    (dict(batch_size=10**23), 'at most'),
    (dict(accumulate=10**7), 'at most 1,000,000'), (dict(steps=-1), 'at least 1'), (dict(seed=-1), 'seed=-1'),
    (dict(seed=2**40), 'at most'), (dict(weight_decay=float("nan")), "weight_decay=nan"),
    (dict(t=10**9), 'at most')], ids=str)
def test_numbers_that_no_run_can_have(kw, words):
    with pytest.raises(ValueError, match=words):
        RunConfig(**kw)


@pytest.mark.parametrize('kw,words', [(dict(eps=-1.), 'eps=-1.0: it must be at least 0'),
    (dict(eps=0.), 'eps=0.0: a positive number'), (dict(eps=float('inf')), 'eps=inf: a positive'),
    (dict(eps=float('nan')), 'eps=nan'), (dict(eps='x'), "eps='x': a number"), (dict(eps=None), 'eps=None: a number'),
    (dict(beta2=1.5), 'beta2=1.5: it is .* below 1'), (dict(beta2=1.), 'beta2=1.0'), (dict(beta2=-3), 'beta2=-3'),
    (dict(beta2='x'), "beta2='x': a number"), (dict(warmup='x'), "warmup='x': a number"),
    (dict(clip='x'), "clip='x': a number"), (dict(clip=float('nan')), 'clip=nan'),
    (dict(weight_decay=None), 'weight_decay=None: a number'), (dict(share='X'), "unknown share 'X': use 'S', 'M'"),
    (dict(inject='Q'), "unknown inject 'Q'"), (dict(reads='z'), "unknown reads 'z'"),
    (dict(readout='foo'), "unknown read-out 'foo'"), (dict(head='bar'), "unknown head 'bar'"),
    (dict(loss_vocab='q'), "unknown loss_vocab 'q'"), (dict(class_weight={'a':True}), 'a positive number'),
    (dict(prompt_dropout=True), 'prompt_dropout=True: a number'), (dict(steps=True), 'steps=True: a whole number'),
    (dict(lr=True), 'lr=True: a positive number'), (dict(standardise='no'), "standardise='no': True or False"),
    (dict(head_hidden=None), 'head_hidden=None: True'), (dict(no_decay=1), 'no_decay=1: True')], ids=str)
def test_what_no_run_could_mean(kw, words):
    "It is refused where it is written, whether its method reads it or not"
    with pytest.raises(ValueError, match=words):
        RunConfig(**kw)


def test_numbers_of_numpy_are_numbers():
    RunConfig(eps=np.float32(1e-6), beta2=np.float64(.98), clip=np.float32(2), warmup=np.float64(.1), t=np.int64(3),
        standardise=np.bool_(True), prompt_dropout=np.float32(.2))
    RunConfig(clip=float('inf'), beta2=0, warmup=0)


def test_a_layer_that_is_given_to_several_methods_moves_the_late_prompts():
    late = [m for m in METHODS if METHODS[m].enters=='middle']
    for m in late:
        both = ['adapterdrop', m, 'probe']
        assert [layer_among(name, both, 1) for name in both]==[None,1,1]
    assert layer_among('adapterdrop', ['adapterdrop','adapter','majority'], 1)==1
    bb = backbone()
    METHODS['adapterdrop'](bb, RunConfig(layer=layer_among('adapterdrop', ['adapterdrop'], 2)))
    assert _adapters(bb)==[2]
    bb.changed.restore()
    METHODS['adapterdrop'](bb, RunConfig(layer=layer_among('adapterdrop', ['lpt','adapterdrop'], 2)))
    assert _adapters(bb)==[*range(bb.n_layers//2, bb.n_layers)]


def _adapters(bb): # layers that have them
    return [i for i,layer in enumerate(bb.layers) if any('Adapter' in type(m).__name__ for m in layer.modules())]
