"A prompt in another text's place: whose answer comes out."
import pytest
import torch
from small import config, kept, model_of, same, small_task

from idp_tutorial.analysis.prompt_swaps import answers_with, prompt_swaps, prompts_of
from idp_tutorial.model.prompted_model import PromptedModel
from idp_tutorial.training.evaluation import answers
from idp_tutorial.training.examples import examples_to_score


@pytest.mark.parametrize('method', ['s-idpg-phm','m-idpg-phm','lpt-npg','id-spam'])
def test_own_prompts_own_answers(method):
    "In the order of the texts, whatever the batch; with another text's prompts, what a plan of them says"
    bb,task,cfg = kept('roberta'),small_task(),config(method=method)
    model = model_of(method, bb, task)
    examples,_ = examples_to_score(model, task, cfg, task.splits['test'])
    prompts,said = prompts_of(model, examples, 7)
    assert set(prompts)==set(model.plan) and {p.shape[:2] for p in prompts.values()}=={(24,4)}
    same(said, answers(model, examples), 1e-4, 1e-4)
    same(answers_with(model, prompts, examples, 9), said, 1e-4, 1e-4)
    rolled = {layer: p.roll(1, 0) for layer,p in prompts.items()}
    moved = answers_with(model, rolled, examples)
    assert (moved-said).abs().max()>1e-3
    if len(prompts)==1:
        (layer,p), = rolled.items()
        step = model.plan[layer]._replace(source=lambda ctx: p[3:4])
        same(answers(PromptedModel(bb, model.head, {layer: step}), examples[3:4]), moved[3:4], 1e-4, 1e-4)


def test_donors_and_scores():
    "Nobody gives to itself; every score is that of the answers beside it"
    bb,task,cfg = kept('roberta'),small_task(),config()
    scores,said = prompt_swaps(model_of('lpt-npg', bb, task), task, cfg)
    y = torch.tensor([r['label'] for r in task.splits['test']])
    own,other = said['same_donor'],said['other_donor']
    assert bool((y[own]==y).all()) and bool((own!=torch.arange(24)).all()) and bool((y[other]!=y).all())
    for name in ('own','mean','same','other'):
        assert scores[name]==pytest.approx(100*(said[name].argmax(1)==y).double().mean().item())
    assert scores['follows']==pytest.approx(100*(said['other'].argmax(1)==y[other]).double().mean().item())
    task.splits['test'] = [r for r in task.splits['test'] if r['label']]
    with pytest.raises(ValueError, match='there must be two labels'):
        prompt_swaps(model_of('lpt-npg', bb, task), task, cfg)
    with pytest.raises(ValueError, match='answered with texts: an exchange of prompts needs classes'):
        prompt_swaps(model_of('lpt-npg', bb, task), small_task('in-short'), cfg)
