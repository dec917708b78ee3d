"""A batch knows the lengths of its texts, and a training step reads no value of a tensor."""

import pytest
import torch
from small import backbone, batch_of, config, model_of, refused, small_task
from torch.utils._python_dispatch import TorchDispatchMode

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core.heads import GenerationHead
from idp_tutorial.core.planned_model import PlannedModel
from idp_tutorial.data.encoding import collate
from idp_tutorial.huggingface.prompt_model import get_prompt_model
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.training.cache import cache_states
from idp_tutorial.training.examples import encode_for_model
from idp_tutorial.utils.batch import Batch, require

# operators for which a GPU must have finished: what they return depends on values
READING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select")


class ReadingOperators(TorchDispatchMode):
    """Records the operators that read values, and calls of `tolist`."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen = []
        to_list = torch.Tensor.tolist
        monkeypatch.setattr(
            torch.Tensor, "tolist", lambda x: (self.seen.append("tolist"), to_list(x))[1]
        )

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.removeprefix("aten::")
        if name in READING:
            self.seen.append(name)
        return operator(*args, **(kwargs or {}))


def read_in_a_step(model, batch, monkeypatch):
    """Return which operators read values between `collate` and the end of the backward pass."""
    model.train()
    with ReadingOperators(monkeypatch) as operators:
        loss = model.loss(batch)
        if loss.requires_grad:
            loss.backward()
    return operators.seen


@pytest.mark.parametrize("family", ["roberta", "gpt2"])
# the network of 'shadow' is a model of transformers, which reads its mask
@pytest.mark.parametrize("method", [name for name in METHODS if name != "shadow"])
def test_a_step_reads_no_value(method, family, monkeypatch):
    bb = backbone(family)
    try:
        model = model_of(method, bb)
    except ValueError as error:
        pytest.skip(str(error))
    task = small_task()
    examples = task.encode(task.splits["train"][:6], bb.tokenizer, 60)
    for source in model.prompt_sources():  # GloVe's vectors are looked up once
        examples = source.prepare(examples)
    assert not read_in_a_step(model, collate(examples, bb.pad_id), monkeypatch)


@pytest.mark.parametrize(
    "method,options",
    [
        ("prompt-tuning", dict(position=4)),
        ("s-idpg-phm", dict(standardise=True, sentence_pooling="noisy")),
        ("m-idpg-phm", dict(insertion="replace")),
        ("p-tuning-v2", dict(insertion="add")),
        ("smop", dict(top_k=2)),
        ("lpt-npg", dict(pooling="cls", gradient_checkpointing=True)),
        ("lpt-appg", dict(head="verbalizer")),
    ],
    ids=str,
)
def test_a_step_with_options_reads_no_value(method, options, monkeypatch):
    bb = backbone("roberta")
    template = "code" if "head" in options else None
    model = model_of(method, bb, **options)
    assert not read_in_a_step(model, batch_of(bb, template=template), monkeypatch)


def test_a_step_from_cached_states_reads_no_value(monkeypatch, tmp_path):
    bb = backbone("roberta")
    task = small_task()
    cfg = config(method="lpt-npg", layer=1)
    model = build_model(cfg, bb, task)
    examples = encode_for_model(model, task, cfg, task.splits["train"][:6])
    batch = collate(cache_states(bb, examples, 1, tmp_path)[0], bb.pad_id)
    assert batch.start_layer == 1
    assert not read_in_a_step(model, batch, monkeypatch)


@pytest.mark.parametrize("method", ["s-idpg-phm", "lpt-npg"])
def test_a_step_on_target_texts_reads_no_value(method, monkeypatch):
    bb = backbone("gpt2")
    cfg = config(method=method)
    model = PlannedModel(bb, GenerationHead(bb), cfg.method_config.plan(bb, cfg))
    rows = [dict(input_ids=[5] * n, token_type_ids=[0] * n, answer_start=3) for n in (5, 8)]
    assert not read_in_a_step(model, collate(rows, 0), monkeypatch)


@pytest.mark.parametrize("num_labels", [2, None])
def test_a_prompt_model_reads_values_before_the_pass_only(num_labels, monkeypatch):
    base = backbone("gpt2").model
    model = get_prompt_model(base, "lpt-npg", num_labels=num_labels).train()
    ids = torch.randint(5, 100, (2, 6))
    labels = torch.tensor([0, 1]) if num_labels else ids.masked_fill(torch.arange(6) < 3, -100)
    embed = model.backbone.embed
    with ReadingOperators(monkeypatch) as operators:
        model.backbone.embed = lambda *args: (operators.seen.append("pass"), embed(*args))[1]
        model(input_ids=ids, labels=labels).loss.backward()
    assert operators.seen.index("pass") == len(operators.seen) - 1


def test_lengths_are_known_or_read_and_follow_changes():
    rows = [dict(input_ids=list(range(4)), token_type_ids=[0] * 4, answer_start=3)]
    rows.append(dict(input_ids=list(range(6)), token_type_ids=[0] * 6, answer_start=2))
    known = collate(rows, 1)
    read = Batch.from_tensors(dict(known))
    for batch in (known, read, known.to("cpu"), known | dict(label=torch.zeros(2))):
        assert list(batch.lengths) == [4, 6] and list(batch.answer_starts) == [3, 2]
        rows, columns = batch.find_targets()
        assert rows.tolist() == [0, 1, 1, 1, 1] and columns.tolist() == [3, 2, 3, 4, 5]
        assert batch.has_padding and Batch.from_tensors(batch) is batch
    texts = known.without_answers(known["attention_mask"])
    assert list(texts.lengths) == [3, 2] and not texts.answer_starts
    longer = known | dict(attention_mask=torch.ones(2, 6, dtype=torch.long))
    assert longer.lengths is None and list(Batch.from_tensors(longer).lengths) == [6, 6]
    known["attention_mask"] = longer["attention_mask"]
    assert not Batch.from_tensors(known).has_padding
    no_answer = Batch.from_tensors(dict(known, answer_start=torch.tensor([6, 2])))
    assert no_answer.find_targets() is None


def test_padding_on_the_left_is_refused():
    mask = torch.tensor([[1, 1], [0, 1]])
    refused(
        lambda: Batch.from_tensors(dict(input_ids=mask, attention_mask=mask)),
        "pad on the right",
    )


def test_a_condition_on_values():
    n = torch.tensor([1, 0])
    require(n >= 0, "never {}", n)
    refused(lambda: require(n > 0, "texts with {} tokens", n), "texts with [1, 0] tokens")


@pytest.mark.parametrize("change", ["update", "|=", "item"])
def test_lengths_are_read_again_after_every_kind_of_change(change):
    batch = batch_of(backbone(), small_task(), n=2)
    assert batch.lengths is not None
    mask = batch["attention_mask"].clone()
    mask[:, 2:] = 0
    if change == "update":
        batch.update(attention_mask=mask)
    elif change == "|=":
        batch |= {"attention_mask": mask}
    else:
        batch["attention_mask"] = mask
    assert isinstance(batch, Batch) and Batch.from_tensors(batch).lengths == [2, 2]


def test_an_answer_without_a_text_and_a_layer_without_states_are_refused():
    batch = {**batch_of(backbone(), small_task(), n=2)}
    refused(
        lambda: Batch.from_tensors(batch | {"answer_start": torch.tensor([0, 2])}),
        "answer_start must be at least 1",
    )
    refused(
        lambda: Batch.from_tensors(batch | {"start_layer": torch.tensor([1, 1])}),
        "start_layer needs hidden_states",
    )
