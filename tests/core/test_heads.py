"""Heads: which hidden states they read, and their sizes."""

import pytest
import torch
import torch.nn.functional as F
from small import FAMILY, backbone, batch_of, model_of, one, same, small_task

from idp_tutorial.core.heads import ClassificationHead, VerbalizerHead
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.planned_model import PlannedModel, count_parameters


def test_a_two_layer_head_has_one_more_matrix():
    bb = backbone()
    one, two = [
        count_parameters(model_of("lpt", bb, two_layer_head=h))["head"] for h in (False, True)
    ]
    assert two - one == bb.d * bb.d + bb.d


@pytest.mark.parametrize("family", FAMILY)
def test_verbalizer_reads_the_language_model_head(family):
    bb = backbone(family)
    task = small_task("questions")
    batch = batch_of(bb, task, template="code")
    words = task.word_ids(bb.tokenizer)
    rows = []
    for i in range(len(batch["input_ids"])):
        x = one(batch, i)
        position = (
            int((x["input_ids"][0] == bb.tokenizer.mask_token_id).nonzero())
            if family != "gpt2"
            else x["input_ids"].shape[1] - 1
        )
        with torch.no_grad():
            rows.append(
                bb.model(input_ids=x["input_ids"], attention_mask=x["attention_mask"]).logits[
                    0, position
                ]
            )
    full = torch.stack(rows)
    label = batch["label"]
    model = PlannedModel(bb, VerbalizerHead(bb, words)).eval()
    same(model(batch), full[:, words], 1e-4)
    same(model.loss(batch), F.cross_entropy(full, torch.tensor(words)[label]), 1e-4)
    narrow = PlannedModel(bb, VerbalizerHead(bb, words, "labels")).eval().loss(batch)
    same(narrow, F.cross_entropy(full[:, words], label), 1e-4)
    assert abs(narrow - model.loss(batch)) > 1e-3


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_what_the_classification_head_reads(pooling):
    bb = backbone()
    batch = batch_of(bb)
    model = PlannedModel(bb, ClassificationHead(32, 2, pooling)).eval()
    h = run_layers(bb, batch).h
    n = batch["attention_mask"].sum(1)
    want = {
        "cls": h[:, 0],
        "last": h[torch.arange(len(h)), n - 1],
        "mean": torch.stack([h[i, : n[i]].mean(0) for i in range(len(h))]),
    }[pooling]
    same(model(batch), model.head.net(want))


def test_decoders_do_not_read_their_first_row():
    bb = backbone("gpt2")
    batch = batch_of(bb)
    y = model_of("prompt-tuning", bb, pooling="cls")(batch)  # row 0 has seen no word
    assert (y[0] - y[1]).abs().max() > 1e-3
    same(y, model_of("prompt-tuning", bb, pooling="last")(batch))  # built under the same seed


def test_idpgs_head():
    assert (
        sum(p.numel() for p in ClassificationHead(1024, 2, two_layer=True).parameters())
        == 1_049_600 + 2 * 1025
    )
