"""What SmolLM2 writes, for `results/writing`: python results/writing.py MODEL MODEL --out FOLDER, where the models are
what `idp_train --task in-short` saved; beside them the model without a prompt, alone and behind eight examples."""
import argparse
from pathlib import Path

from idp_tutorial.data.metrics import exact_match
from idp_tutorial.data.tasks import load_task
from idp_tutorial.methods.prompt_files import from_pretrained
from idp_tutorial.model.generation import generate_ids
from idp_tutorial.model.heads import TextHead
from idp_tutorial.model.pretrained import load_backbone
from idp_tutorial.model.prompted_model import PromptedModel
from idp_tutorial.records import append, read_records
from idp_tutorial.training.evaluation import evaluate, predict
from idp_tutorial.training.examples import examples_of

N = 200 # sentences of the test split


def written(model, task, cfg, rows):
    return [a['generated'] for a in predict(model, task, cfg, [dict(sentence1=r['sentence1']) for r in rows])]


def parts_of(texts, rows):
    "Percent that name thing and state as the target does, and percent whose last word is its verdict"
    def halves(text):
        return [w.strip() for w in text.rpartition(',')[::2]]
    pairs = [(halves(text), halves(r['target'])) for text,r in zip(texts, rows)]
    words,verdict = (round(100*sum(a[i]==b[i] for a,b in pairs)/len(pairs), 1) for i in (0,1))
    return dict(n=len(pairs), words=words, verdict=verdict)


def behind_examples(model, task, n=8): # what the model writes behind `n` solved examples
    tok,out = model.backbone.tokenizer,[]
    solved = '\n'.join(f"{r['sentence1']} = {r['target']}" for r in task.splits['train'][:n])
    for i in range(0, N, 40):
        some = task.splits['test'][i:i+40][:N-i]
        ids = [tok(f"{solved}\n{r['sentence1']} =").input_ids for r in some]
        out += [tok.decode(new).split('\n')[0].strip() for new in generate_ids(model, ids, 12)]
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('models', nargs=2, type=Path)
    p.add_argument('--out', type=Path, required=True)
    a = p.parse_args()
    a.out.mkdir(parents=True) # a new one: nothing is measured twice into one file
    task,said = load_task('in-short'),{}
    rows = task.splits['test'][:N]
    for folder in a.models:
        model,_,cfg = from_pretrained(folder)
        texts = said[cfg.method] = written(model, task, cfg, rows)
        run = read_records(folder/'record.jsonl')[0]
        run.pop('digest', None) # of the record without the parts
        append(run | dict(parts=parts_of(texts, rows)), a.out/'in-short.jsonl')
    bb = load_backbone('smollm2', dtype='bfloat16')
    bare = PromptedModel(bb, TextHead(bb), {}).eval()
    said['no prompt'] = written(bare, task, cfg, rows[:3])
    said['eight examples'] = behind_examples(bare, task)
    alone = evaluate(bare, examples_of(bare, task, cfg, rows), task)[0]['exact_match']
    shots = exact_match(said['eight examples'], [r['target'] for r in rows])
    for name,score in (('no prompt', alone), ('no prompt, 8 examples in front', shots)):
        append(dict(method=name, task='in-short', backbone='smollm2', **bb.weights_are, metric='exact_match',
            score=score, sizes=dict(test=N)), a.out/'in-short.jsonl')
    for i,r in enumerate(rows[:3]):
        append(dict(sentence1=r['sentence1'], target=r['target'], **{who: texts[i] for who,texts in said.items()}),
            a.out/'texts.jsonl')


if __name__=='__main__':
    main()
