"What a sweep says: its shape, what depth buys, and what a choice lost."
import math
from pathlib import Path

import pytest
from sweeps import HUMP, SETTINGS, fake

from idp_tutorial.analysis.depth import regret, sweep_shape, tradeoff_table
from idp_tutorial.analysis.layer_choice import made_for
from idp_tutorial.analysis.layer_sweep import one_sweep, plot_convergence, plot_sweep, sweep_table
from idp_tutorial.records import read_records


@pytest.mark.parametrize('read', [one_sweep, sweep_table, sweep_shape, plot_sweep, tradeoff_table,
    lambda r: plot_convergence(r, 'lpt'), lambda r: regret(r, dict(layer=1, seconds=1.))],
    ids=['one_sweep','table','shape','plot','tradeoff','convergence','regret'])
def test_different_experiments_are_not_averaged(read):
    for change in SETTINGS+[dict(task='b'), dict(backbone='b'), dict(data='b'), dict(sizes=dict(train=5)),
        dict(compile=True), dict(lr_selected='given')]:
        with pytest.raises(ValueError, match='several sweeps.*one sweep at a time'):
            read(HUMP+[{**r, 'seed':r['seed']+3, **({'lr_selected':'given'} if 'lr' in change else change)}
                for r in HUMP])
    with pytest.raises(ValueError, match="'lpt' at layer 0 with seed 0 is there 2 times"):
        read(HUMP+[{**HUMP[0], 'lr':.7}])
    read(HUMP+[{**r, 'seed':r['seed']+3, 'lr':.3, 'device':'cpu'} for r in HUMP])

STORED = sorted((Path(__file__).parents[2]/'results/depth').glob('sweep-*.jsonl'))

@pytest.mark.parametrize('path', STORED, ids=lambda p: p.stem)
def test_stored_sweeps_are_read(path):
    r = read_records(path)
    choice = path.with_name(path.name.replace('sweep', 'choice'))
    assert one_sweep(r)==r and len(sweep_shape(r))>0 and len(tradeoff_table(r))>0
    if choice.exists():
        c = read_records(choice)[-1]
        assert made_for(c, r[0]) and (regret(r, c).regret>=0).all()

@pytest.mark.parametrize('scores,noise,is_one', [([60,63,66,66,63,60],.5,True), ([60,62,63,64,66,67],.5,False),
    ([67,66,64,63,62,60],.5,False), ([60,63,66,66,63,60],9,False), ([66,60,60,60,60,66],.5,False),
    ([60,60.2,60.4,60.4,60.2,60],.5,False)], ids=['hump','rising','falling','noise','valley','too small'])
def test_middle_maximum(scores, noise, is_one):
    s, = sweep_shape(fake(scores, noise)).to_dict('records')
    assert s['middle_maximum'] is is_one or bool(s['middle_maximum'])==is_one
    assert (s['first'],s['last'],s['best'])==(scores[0],scores[-1],max(scores)) and s['middle']==sum(scores[2:4])/2
    assert s['error']==pytest.approx(noise*(1.5/3)**.5)

def test_no_maximum_without_seeds_or_ends():
    assert not sweep_shape(fake([60,63,66,66,63,60], seeds=1)).middle_maximum[0] # one seed has no error
    assert not sweep_shape([r for r in HUMP if r['layer'] not in (0,)]).middle_maximum[0]

def test_error_is_that_of_the_layer_with_the_fewest_seeds():
    s, = sweep_shape([r for r in HUMP if (r['layer'],r['seed'])!=(2,2)]).to_dict('records')
    assert s['error']==pytest.approx(((5*.25+.125)/6*1.5/2)**.5)

def test_tradeoff_is_table_10():
    full = fake([80], m='fine-tuning', layer=None, n_layers=24, ms_per_step=72., peak_memory_mb=200.)
    t = tradeoff_table(fake(list(range(24)), ms_per_step=None)+full)
    assert t.layer.tolist()==[6,12,18]
    assert t.ideal.round(2).tolist()==[1.71,2.,2.4] and t.ideal_cached.tolist()==[2.,3.,6.]
    t = tradeoff_table(fake(list(range(24)))+full)
    assert t.speed_up.tolist()==[72/(48-k) for k in (6,12,18)]
    assert t.memory_saved.tolist()==[1-(100-5*k)/200 for k in (6,12,18)]
    # nothing to compare with
    assert tradeoff_table(HUMP).speed_up.isna().all() and tradeoff_table(HUMP).measured.isna().all()

def test_tradeoff_with_measured_times():
    "At the same share of the layers; between two depths a step's time is on the line; nothing is known outside"
    def row(layer, ratio, cached=False):
        return dict(method='lpt-npg', backbone='big', n_layers=24, layer=layer, cached=cached, ratio=ratio)
    times = [row(6, 2.), row(12, 4.), row(12, 5., True), row(18, 10., True)]
    t = tradeoff_table(fake(list(range(8))), times=times)
    assert t.layer.tolist()==[2,4,6] and t.measured.tolist()[:2]==[2.,4.] and t.measured_cached.tolist()[1:]==[5.,10.]
    assert math.isnan(t.measured[2]) and math.isnan(t.measured_cached[0])
    third, = tradeoff_table(fake(list(range(6))), shares=[1/3], times=times).measured
    assert third==pytest.approx(1/(1/2-(1/2-1/4)/3))
    for wrong in (times+[row(12, 3.)|{'method':'lpt'}], [row(12, 3.)|{'method':'lora'}]):
        with pytest.raises(ValueError, match='one late method on one backbone'): tradeoff_table(HUMP, times=wrong)

def test_regret():
    r, = regret(HUMP, dict(layer=4, seconds=3.)).to_dict('records')
    assert (r['best'],r['chosen'],r['regret'],r['middle'],r['random'])==(2,4,3,0,3)
    assert r['share_of_sweep']==3/270 and r['noise']==pytest.approx(.5/3**.5)
    both = regret(HUMP+fake([1,2,3,4,5,6], m='lpt-npg'), dict(layer=5, seconds=3.))
    assert both.method.tolist()==['lpt','lpt-npg'] and both.regret.tolist()==[6,0]

@pytest.mark.parametrize('make,words', [
    (lambda: sweep_shape(fake([1], m='fine-tuning')), ['no records of a late method','lpt-npg']),
    (lambda: sweep_shape(HUMP+fake([1,2,3], task='b')), ['one sweep at a time']),
    (lambda: tradeoff_table(fake([1], m='fine-tuning')), ['no records of a late method']),
    (lambda: regret(HUMP, dict(layer=7, seconds=1.)), ['not 7','sweep every layer first']),
    (lambda: regret(HUMP, dict(layer=4, seconds=1., t=20)), ['made for t=20','choose again']),
    (lambda: regret(HUMP, dict(layer=4, seconds=1., backbone='minilm')), ["made for backbone='minilm'"])])
def test_what_is_refused(make, words):
    with pytest.raises(ValueError) as e:
        make()
    assert all(w in str(e.value) for w in words), str(e.value)
