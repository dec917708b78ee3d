"The pictures of the course: stored as they are drawn, legible on a phone, and true of what the methods do."
import dataclasses
import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import small
import torch

from idp_tutorial.drawing import SIZE, Box, Line, Picture, Text, key, side_by_side, wrapped
from idp_tutorial.houses import OPS, READS, draw_plan, house, methods_map
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.layer_loop import run_layers
from idp_tutorial.model.pretrained import load_backbone

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location('pictures', ROOT/'docs/pictures.py')
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)
PHONE = 360-2*16 # pixels that a page leaves to a picture


@pytest.mark.parametrize('name', pictures.PICTURES)
def test_a_stored_picture_is_what_the_code_draws(name):
    stored = (pictures.FOLDER/f'{name}.svg').read_text(encoding='utf-8')
    assert stored==pictures.PICTURES[name]()._repr_svg_(), 'run `python docs/pictures.py`'


def test_no_other_picture_is_stored():
    assert {p.stem for p in pictures.FOLDER.glob('*')}==set(pictures.PICTURES)


@pytest.mark.parametrize('name', pictures.PICTURES)
def test_a_picture_says_what_it_shows_in_both_lights(name):
    root = ET.parse(pictures.FOLDER/f'{name}.svg').getroot()
    title,desc,style = (root.find(f'{{*}}{tag}').text for tag in ('title', 'desc', 'style'))
    assert len(title)>10 and desc.startswith(title) and len(desc)>len(title)+40
    assert 'prefers-color-scheme:dark' in style


@pytest.mark.parametrize('path', sorted((ROOT/'nbs').rglob('*.ipynb')), ids=lambda p: p.stem)
def test_a_notebook_describes_the_pictures_it_shows(path):
    text = path.read_text(encoding='utf-8')
    assert pictures.described(text)==text, 'run `python docs/pictures.py`'


def test_a_description_can_stand_in_markdown():
    for make in pictures.PICTURES.values():
        assert not set('[]<>`"\\\n') & set(make().alt)


def overlap(a, b):
    "Of two boxes (x, y, width, height): the smaller extent of what they share"
    return min(min(a[i]+a[i+2], b[i]+b[i+2])-max(a[i], b[i]) for i in (0, 1))


@pytest.mark.parametrize('name', pictures.PICTURES)
def test_a_picture_is_legible_on_a_phone(name):
    p = pictures.PICTURES[name]()
    texts = [s for s in p.shapes if isinstance(s, Text) and s.s]
    assert min(SIZE[t.kind] for t in texts)*PHONE/p.w>=9, 'letters of less than nine pixels'
    for i,t in enumerate(texts):
        x,y,w,h = t.box()
        assert x>=0 and y>=0 and x+w<=p.w and y+h<=p.h, f'{t.s!r} is cut off'
        for other in texts[i+1:]:
            assert overlap(t.box(), other.box())<1, f'{t.s!r} and {other.s!r} overlap'
        for box in (s for s in p.shapes if isinstance(s, Box)):
            crossed = overlap(t.box(), tuple(box[:4]))
            inside = x>=box.x-1 and x+w<=box.x+box.w+1
            assert crossed<1 or inside, f'{t.s!r} crosses the edge of a box at {box.x}, {box.y}'
        for line in (s for s in p.shapes if isinstance(s, Line)):
            for (a,b),(c,d) in zip(line.points, line.points[1:]):
                assert overlap(t.box(), (min(a, c), min(b, d), abs(c-a), abs(d-b)))<0, f'a line goes through {t.s!r}'


def drawn_plans(monkeypatch):
    "The plans of all pictures, built for a model with weights, and what the pictures say of their sources"
    sizes = {**small.SIZES, 'num_hidden_layers': 4, 'intermediate_size': 64}
    bb = load_backbone('roberta-base', weights='random', **sizes)
    found,draw = [],pictures.draw_plan
    monkeypatch.setattr(pictures, 'backbone', lambda layers=4: bb)
    monkeypatch.setattr(pictures, 'draw_plan', lambda plan, bb, reads='nothing', *a, **kw:
        found.append((plan, reads)) or draw(plan, bb, reads, *a, **kw))
    for make in pictures.PICTURES.values():
        make()
    return bb, [f for f in found if f[0]]


def observed(source, ctx):
    "What a prompt changes with: the first row, other rows, the words; and whether the model runs for it"
    bb,ran = ctx.backbone,[]
    hooks = [bb.layers[0].register_forward_hook(lambda *_: ran.append(1))]
    def differs(**changed):
        other = dataclasses.replace(ctx, memo={}, **changed)
        with torch.no_grad():
            return not torch.equal(source(other), source(dataclasses.replace(ctx, memo={})))
    first,others = ctx.h.clone(),ctx.h.clone()
    at = torch.arange(len(first)),ctx.rows['cls']
    first[at] += 1
    others += 1
    others[at] = ctx.h[at]
    ids = ctx.ids.clone()
    ids[:,1] = 3+ids[:,1]%7
    res = differs(h=first), differs(h=others), differs(ids=ids, batch={**ctx.batch, 'ids': ids})
    hooks[0].remove()
    return *res, bool(ran)


def test_what_a_picture_says_is_read_is_what_the_source_reads(monkeypatch):
    bb,plans = drawn_plans(monkeypatch)
    batch = small.batch_of(bb, small.small_task(), n=4)
    expected = dict(nothing=(False, False, False, False), state=(True, False, False, False),
        rows=(True, True, False, False), words=(False, False, True, False))
    expected['pass'] = (False, False, True, True)
    seen = set()
    for plan,reads in plans:
        def watched(layer, source):
            def probe(ctx):
                said = reads[layer] if isinstance(reads, dict) else reads
                assert observed(source, ctx)==expected[said], f'the picture says {said!r} at {layer!r}'
                seen.add(said)
                return source(ctx)
            return probe
        run_layers(bb, batch, {k: s._replace(source=watched(k, s.source.eval())) for k,s in plan.items()})
    assert seen==set(READS)


def test_a_house_says_where_how_and_from_what():
    for op in OPS:
        steps = {2: op} if op in ('insert', 'kv') else {0: 'insert', 2: op}
        assert OPS[op] in str(house(4, steps))
    assert 'before every layer' in str(house(4, dict.fromkeys(range(4), 'kv')))
    assert 'before layer 1, 2, 3 ' in str(house(4, {'words':'insert', **dict.fromkeys((1,2,3), 'add')}))
    assert 'through 4 of 4' in str(house(4, {'words': 'insert'}, 'pass'))
    with pytest.raises(ValueError, match='thing to read'):
        house(4, {0: 'insert'}, 'minds')


@pytest.mark.parametrize('layers', [1, 8, 24])
def test_a_house_has_a_floor_a_layer_however_high(layers):
    p = house(layers, {layers-1: 'insert'}, 'state')
    assert sum(s.kind=='floor' for s in p.shapes)==layers and p.h<600


def test_every_method_is_on_the_map_once():
    texts = [s.s for s in methods_map(METHODS).shapes if isinstance(s, Text)]
    prompted = [n for n,m in METHODS.items() if m.kind in ('static', 'generated', 'second pass')]
    assert all(texts.count(n)==1 for n in prompted)
    listed = ' '.join(texts).replace(',', '').split()
    assert all(n in listed for n in METHODS)


def test_pictures_join_and_move():
    shapes = [Box(0, 0, 10, 10, 'p'), Line(((0, 0), (5, 5))), Text(5, 5, '<s> & co')]
    p = Picture(shapes, 40, 20, 'one', 'One.', dict(a=(1, 2)))
    both = side_by_side([p, p], 'two', note='a line below')
    assert both.at[1, 'a'][0]-both.at[0, 'a'][0]==40 and both.alt=='two. One. One.'
    assert ET.fromstring(both._repr_svg_()).findall('{*}text')[0].text=='<s> & co'
    assert {s.s for s in key({'p', 'grad'}, 100).shapes if isinstance(s, Text)}=={'trained', 'reach of the gradient'}
    assert wrapped('', 100, 'note')==[] and len(wrapped('a word or two more', 60, 'note'))>1


def test_a_picture_can_be_saved(tmp_path):
    draw_plan({}, small.backbone(), title='nothing').save(tmp_path/'a.svg')
    assert ET.parse(tmp_path/'a.svg').getroot().get('role')=='img'
