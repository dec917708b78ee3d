"""Small models of several tasks on one backbone, and rows for them."""

import torch
from small import config, model_of, small_task

from idp_tutorial.data.encoding import collate
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.serving.multitask import MultiTaskModel, TaskModel

IN_WEIGHTS = [m for m, row in METHODS.items() if row.insertion_point.endswith("weights")]
PROMPTS = [m for m in METHODS if m not in IN_WEIGHTS]
KINDS = ("sentiment", "questions", "similarity", "entailment")  # classes, numbers, pairs


def task_model(method, bb, task="sentiment", **kw):
    cfg = config(method=method, task=task, max_len=60, **kw)
    options = {k: v for k, v in kw.items() if k not in ("head",)}
    return TaskModel(
        model_of(method, bb, TASKS[task], kw.get("head", "classification"), max_len=60, **options),
        TASKS[task],
        cfg,
    )


def everything(bb):
    """A task for every prompt method, with different lengths and depths."""
    return {
        f"{m} {i}": task_model(
            m,
            bb,
            KINDS[i % 4],
            prompt_length=3 + i % 4,
            layer=i % 3 if m.startswith(("lpt", "id-spam")) else None,
        )
        for i, m in enumerate(PROMPTS)
        if m != "cartridge" or bb.supports_kv_prompt
    }


def rows_of(members, n=2, start=0):
    """Rows of every task, `n` of each, the tasks in turn."""
    data = {k: small_task(k).splits["train"] for k in KINDS}
    return [
        dict(task=name, **data[m.task.name][start + i])
        for i in range(n)
        for name, m in members.items()
    ]


def alone(members, r):
    """The outputs of a row's own model for a batch of this row."""
    m = members[r["task"]]
    e = m.task.encode(
        [r], m.model.backbone.tokenizer, 60, m.cfg.template if m.cfg.head == "verbalizer" else None
    )
    with torch.no_grad():
        return m.model(collate(e, m.model.backbone.tokenizer.pad_token_id))[0]


def mixed(members, rows):
    model = MultiTaskModel(members)
    return model.compute_outputs(model.encode(rows))
