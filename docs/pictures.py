"The pictures of the course, drawn from plans that methods really build: `python docs/pictures.py` writes all of them."
import json
import re
import statistics
from functools import cache
from pathlib import Path

from idp_tutorial.config import RunConfig
from idp_tutorial.drawing import Box, Line, Picture, Text, key, side_by_side
from idp_tutorial.efficiency.cost_model import cost
from idp_tutorial.efficiency.parameter_counts import method_counts
from idp_tutorial.houses import draw_plan, house, methods_map
from idp_tutorial.methods.id_spam import AttentionPromptGenerator
from idp_tutorial.methods.idpg import PromptGenerator, idpg_plan
from idp_tutorial.methods.idpg_multilayer import multilayer_plan
from idp_tutorial.methods.lpt import NaivePromptGenerator, PoolingPromptGenerator, lpt_plan
from idp_tutorial.methods.p_tuning_v2 import KeyValuePrompt, deep_plan
from idp_tutorial.methods.phm import phm_param_count
from idp_tutorial.methods.prompt_tuning import SoftPrompt, prompt_plan
from idp_tutorial.methods.registry import METHODS
from idp_tutorial.model.plan import Step, check_plan
from idp_tutorial.model.pretrained import load_backbone

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT/'docs/images/course'
BEER,SOUP = ('<s>', 'beer', 'was', 'cold'),('<s>', 'soup', 'was', 'cold')

@cache
def backbone(layers=4):
    "A RoBERTa of four layers, without memory: plans need its shape only"
    return load_backbone('roberta-base', 'meta', num_hidden_layers=layers)

def draw(plan, reads='nothing', title='', note='', **more):
    "The house of a plan that the layer loop would accept"
    check_plan(plan, backbone())
    return draw_plan(plan, backbone(), reads, title, note, **more)

def soft():
    return SoftPrompt(2, backbone().d)

# ---- one function a picture

def frozen_model():
    "What may be touched in a frozen model"
    h = house(5, title='frozen layers').moved(212, 6)
    y = {k: place[1] for k,place in h.at.items()}
    shapes = [s for s in h.shapes if getattr(s, 'kind', '')!='grad']
    for i in (0, 22):
        shapes += [Box(233+i, y[3]+3, 18, 18, 'may'), Box(233+i, y['street'], 18, 18, 'may')]
        shapes += [Box(233+i, y[1]+3, 18, 8, 'may'), Box(233+i, y[1]+13, 18, 8, 'may')]
    said = {'roof': ['the answer:', 'a head of our own'], 3: ['new rows of a layer,', 'or what is added to rows'],
        1: ['keys and values', 'of a layer'], 'street': ['vectors among the words', 'that are no word']}
    for where,lines in said.items():
        shapes += [Text(12, y[where]+9+16*j, line, 'note', 'start') for j,line in enumerate(lines)]
        shapes.append(Line(((180, y[where]+12), (262 if where=='roof' else 228, y[where]+12)), 'state'))
    alt = f"{'; '.join(' '.join(lines) for lines in said.values())}. The weights of all layers stay as they are."
    return framed(shapes, h.h+8, 'What may be touched in a frozen model', alt)

def framed(shapes, h, title, alt, w=424):
    "A picture with its key"
    foot = key({s.kind for s in shapes}, w).moved(0, h)
    return Picture([*shapes, *foot.shapes], w, h+foot.h+4, title, f'{title}. {alt}')

def four_ways():
    "How vectors enter: insert, add, replace, keys and values"
    def at_two(op):
        return {0: Step('insert', soft()), 2: Step(op, soft())}
    return side_by_side([
        draw({2: Step('insert', soft())}, title='insert', note='new rows before layer 2'),
        draw(at_two('add'), title='add', note='vectors to the prompt rows'),
        draw(at_two('replace'), title='replace', note='new vectors for old ones'),
        draw({2: Step('kv', KeyValuePrompt(2, backbone().d))},
            title='keys and values', note='of layer 2; no new row')],
        'Four ways in which a prompt enters')

def head_or_word():
    "A trained head, or a word of the vocabulary"
    plan = prompt_plan(backbone(), soft())
    mask = ('<s>', 'cold', ':', 'mask')
    return side_by_side([
        draw(plan, title='a new head', note='trained; reads <s>', answer='praise'),
        draw(plan, title='a word', note='frozen; read at the mask', words=mask, row=-1, frozen=True, head='words',
            answer='good')], 'A new head, or a word of the vocabulary')

def prompt_tuning():
    "The same vectors for every text"
    plan = prompt_plan(backbone(), soft())
    return side_by_side([
        draw(plan, title='one text', note='two learnt rows', words=BEER),
        draw(plan, title='another text', note='the same two rows', words=SOUP)], 'Prompt tuning')

def deep_prompts():
    "P-tuning v2 in the three ways that go by this name"
    bb = backbone()
    return side_by_side([
        draw(prompt_plan(bb, soft()), title='prompt tuning', note='one prompt, at the input'),
        draw(deep_plan(bb, 2, 'kv'), title='P-tuning v2: kv', note='keys and values, no rows'),
        draw(deep_plan(bb, 2, 'replace'), title='replace', note='new rows at each layer'),
        draw(deep_plan(bb, 2, 'add'), title='add', note='added at each layer')], 'One prompt, or one a layer')

def phm():
    "A matrix of 8 x 12 as a sum of two Kronecker products, by the rule of complex numbers"
    rule,n,rows,columns = [[[1, 0], [0, 1]], [[0, -1], [1, 0]]],2,8,12
    kinds,names,shapes,w = ('made', 'made-q'),('B₁', 'B₂'),[],424
    for q,(kind,name) in enumerate(zip(kinds, names)):
        y = 14+q*74
        for i,numbers in enumerate(rule[q]):
            shapes += [Box(30+26*j, y+26*i, 25, 25, 'row') for j in range(n)]
            shapes += [Text(42.5+26*j, y+17+26*i, f'{a}'.replace('-', '−')) for j,a in enumerate(numbers)]
        shapes += [Text(97, y+31, '⊗', 'title'), Box(112, y+4, 66, 44, kind), Text(145, y+31, name)]
        shapes += [Text(17, y+31, '+', 'title')]*q
    shapes.append(Text(205, 83, '=', 'title'))
    for i in range(n):
        for j in range(n):
            q = next(q for q in range(n) if rule[q][i][j])
            x,y = 232+90*j,20+60*i
            shapes += [Box(x, y, 88, 58, kinds[q]), Text(x+44, y+34, f"{'−' if rule[q][i][j]<0 else ''}{names[q]}")]
    counts = f'{phm_param_count(rows, columns, n, bias=False)} numbers instead of {rows*columns}'
    d,m = 5*1024,256
    large = f"{m} × {d:,}, n=16: {phm_param_count(m, d, 16, bias=False):,} instead of {m*d:,}"
    shapes += [Text(w/2, 168+18*i, line, 'note') for i,line in enumerate(
        ['Complex numbers: the rule (left) is fixed. PHM learns it:', 'then each block is a mixture of B₁ and B₂.',
        f'{rows} × {columns}, n={n}: {counts}', large])]
    alt = ('Two rules of 2 × 2 numbers say where B₁ and B₂ stand in a matrix of four blocks: B₁, −B₂, B₂, B₁. '
        f'PHM learns the rules. With n={n} a matrix of {rows} × {columns} has {counts}; {large}.')
    title = 'A matrix as a sum of Kronecker products'
    return Picture(shapes, w, 232, title, f'{title}. {alt}')

def idpg():
    "Two passes: the first writes the prompt of the second"
    bb = backbone()
    plan = idpg_plan(bb, PromptGenerator(bb.d, bb.d, 2, 16))
    first = house(4, title='first pass', note='no prompt, no gradient', head='M(x)', frozen=True)
    second = draw(plan, 'pass', 'second pass', 'with the written prompt')
    cellar = second.at['cellar'][1]
    def beside(s): # M(x) is on the roof of the first house, and needs no second place
        x,y = s.points[0] if isinstance(s, Line) else (s.x, s.y)
        return y>=cellar and x>60
    second.shapes = [s for s in second.shapes if not beside(s)]
    first.h = second.h # its words stand as high as those of the second
    both = side_by_side([first, second], 'IDPG: the model writes its own prompt')
    roof,(x,y) = both.at[0,'roof'][1]+10,both.at[1,'cellar']
    both.shapes.append(Line(((121, roof), (206, roof), (206, y+9.5), (x-1, y+9.5))))
    return both

def idpg_in_every_layer():
    "What the layers share: S, M, L"
    bb = backbone()
    def reads(plan):
        return {k: 'pass' if k=='words' else 'state' for k in plan}
    def drawn(share, title, note):
        plan = multilayer_plan(bb, 2, 16, share)
        nets = [step.source.generator for step in plan.values()]
        one = all(net is nets[0] for net in nets)
        names = ['G+b' if len(nets[0].b2)>1 else 'G']*len(nets) if one else ['G']*len(nets)
        if len(nets[0].b2)>1 or not one:
            names = [f"{name}{'₀₁₂₃'[k]}" for k,name in enumerate(names)]
        return draw(plan, reads(plan), title, note, linked=one, labels=dict(zip(plan, names)))
    return side_by_side([
        draw(idpg_plan(bb, PromptGenerator(bb.d, bb.d, 2, 16)), 'pass', 'IDPG', 'one prompt, at the input'),
        drawn('S', 'S: all is shared', 'one network for all layers'),
        drawn('M', 'M: all but a bias', 'one network, many biases'),
        drawn('L', 'L: nothing is shared', 'a network for each layer')], 'IDPG in every layer: what is shared')

def late_prompt_tuning():
    "The prompt enters half-way"
    bb = backbone()
    return side_by_side([
        draw(prompt_plan(bb, soft()), title='prompt tuning', note='enters among the words'),
        draw(lpt_plan(bb, soft()), title='LPT', note='enters half-way'),
        draw(lpt_plan(bb, NaivePromptGenerator(bb.d, 2, 16)), 'state', 'LPT, NPG', 'written from the first row'),
        draw(lpt_plan(bb, PoolingPromptGenerator(bb.d, 2, 16)), 'rows', 'LPT, APPG or MPPG',
            'written from all rows')], 'Late prompt tuning')

def how_deep():
    "The same prompt at four floors"
    def drawn(layer):
        left = backbone().n_layers-layer
        note = f"{left} layer{'s' if left>1 else ''} to work in"
        return draw(lpt_plan(backbone(), soft(), layer), title=f'layer {layer}', note=note)
    return side_by_side([drawn(layer) for layer in range(backbone().n_layers)],
        'How deep should a prompt enter?')

def comparison():
    "A prompt, and what it is set beside"
    bb = backbone()
    plan = lpt_plan(bb, PoolingPromptGenerator(bb.d, 2, 16))
    return side_by_side([
        draw({}, title='probe', note='a linear head, nothing enters'),
        house(bb.n_layers, title='side network', note='a small net writes the answer', head='G'),
        draw(plan, 'rows', 'late prompt', 'a small net writes a prompt')],
        'What a score is set beside')

def your_own():
    "A source of one's own: the mean of the rows that are here"
    bb = backbone()
    plan = lpt_plan(bb, PoolingPromptGenerator(bb.d, 2, 16), 3)
    return side_by_side([
        draw(lpt_plan(bb, soft(), 3), title='any source', note='t vectors for each text'),
        draw(plan, 'rows', 'your own', 'written from the rows here')], 'A source and a plan of your own')

def id_spam():
    "The words vote"
    bb = backbone()
    def plan(pool):
        return lpt_plan(bb, AttentionPromptGenerator(bb.d, 2, 16, pool))
    return side_by_side([
        draw(plan('attention'), 'words', 'ID-SPAM', 'words count by attention',
            weights=(.05, .35, .1, .5)),
        draw(plan('mean'), 'words', 'its ablation', 'all words count the same', weights=(.25,)*4)],
        'ID-SPAM: the words vote', note='The widths of the arrows are an example.')

def map_of_methods():
    "All methods: source and plan"
    return methods_map(METHODS, 'The map of all methods')

# ---- what is measured or counted

def measured(method):
    "Mean test score of a method on the running example in %, and the number of runs, from the records"
    file = ROOT/'results/what_a_prompt_adds/two-domains-tiny.jsonl'
    records = [json.loads(line) for line in file.read_text(encoding='utf-8').splitlines()]
    scores = [r['score'] for r in records if r['method']==method]
    return round(statistics.mean(scores)), len(scores)

def hero():
    "Praise or blame: when must a prompt read the text?"
    bb,houses = backbone(3),[]
    static,written = prompt_plan(bb, soft()),idpg_plan(bb, PromptGenerator(bb.d, bb.d, 2, 16))
    for method,title,note,plan,reads,other in [
            ('head-only', 'a head alone', 'the same answer to both', {}, 'nothing', ''),
            ('prompt-tuning', 'one prompt for all', 'the same prompt for both', static, 'nothing', ''),
            ('s-idpg-phm', 'one prompt per text', 'written from the text', written, 'pass', '-q')]:
        score,runs = measured(method)
        houses += [draw_plan(plan, bb, reads, title, note, words=BEER, answer='praise'),
            draw_plan(plan, bb, reads, f'{score} % right', f'mean of {runs} runs', words=SOUP,
                answer='blame' if other else 'praise?', other=other)]
    return side_by_side(houses, 'A cold beer is praise, a cold soup is blame')

def costs(backbone='roberta-large', layers=24):
    "Passes through the model in a training step, and numbers trained"
    methods = ['head-only', 'prompt-tuning', 'p-tuning-v2', 's-idpg-phm', 'm-idpg-phm', 'lpt-npg', 'id-spam',
        'fine-tuning']
    base = RunConfig(t=5) # as in the chapter
    counts = method_counts(backbone, base, methods=methods).set_index('method')
    shapes,said,w,x,unit = [],[],424,118,70
    shapes += [Text(10, 23, 'method', 'title', 'start'), Text(x, 23, 'passes of a step', 'title', 'start'),
        Text(w-10, 23, 'trained', 'title', 'end')]
    for i,name in enumerate(methods):
        y,c = 40+26*i,cost(name, layers)
        forward,back = c.forward/layers,(c.inputs+c.weights)/layers
        n = int(counts.prompt[name]+counts.backbone[name])
        shapes += [Text(10, y+13, name, 'label', 'start'), Box(x, y, forward*unit, 17, 'ahead')]
        shapes += [Box(x+forward*unit+2, y, back*unit-2, 17, 'back')]*(back>0)
        shapes.append(Text(w-10, y+13, f'{n:,}', 'label', 'end'))
        said.append(f'{name}: {forward:g} forward, {back:g} backward, {n:,} trained')
    y = 44+26*len(methods)
    shapes += [Text(10, y+14, f'{backbone}, t={base.t}, no head', 'note', 'start')]
    shapes += [Box(224, y+3, 14, 14, 'ahead'), Text(244, y+14, 'forward', 'note', 'start')]
    shapes += [Box(320, y+3, 14, 14, 'back'), Text(340, y+14, 'backward', 'note', 'start')]
    title = 'What a training step costs, and what is trained'
    return Picture(shapes, w, y+28, title, f"{title}. {'; '.join(said)}.")

PICTURES = dict(hero=hero, frozen_model=frozen_model, four_ways=four_ways, head_or_word=head_or_word,
    prompt_tuning=prompt_tuning, deep_prompts=deep_prompts, phm=phm, idpg=idpg, idpg_in_every_layer=idpg_in_every_layer,
    late_prompt_tuning=late_prompt_tuning, how_deep=how_deep, id_spam=id_spam, comparison=comparison,
    your_own=your_own, costs=costs, map=map_of_methods)

def described(text):
    "A notebook's text, in which each of our pictures has the alternative text that belongs to it"
    def link(m):
        return f'![{PICTURES[m[2]]().alt}]({m[1]}{m[2]}.svg)' if m[2] in PICTURES else m[0]
    return re.sub(r'!\[[^\]]*\]\(([^)]*images/course/)(\w+)\.svg\)', link, text)

def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name,make in PICTURES.items():
        make().save(FOLDER/f'{name}.svg')
        print(f'docs/images/course/{name}.svg')
    for path in sorted((ROOT/'nbs').rglob('*.ipynb')):
        text = path.read_text(encoding='utf-8')
        if described(text)!=text:
            path.write_text(described(text), encoding='utf-8')
            print(path.relative_to(ROOT))

if __name__=='__main__':
    main()
