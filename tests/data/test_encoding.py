"""Token ids without a template, batches, and the order of examples."""

import random

import pytest
import torch
from small import YES_NO, YES_NO_PAIRS, toy_tokenizer
from superglue import groups_of

from idp_tutorial.data.encoding import collate, make_dataloader, tokenize_rows
from idp_tutorial.data.tasks import TASKS, load_task

# ---- token ids


def test_without_a_template_ids_are_those_of_the_tokenizer(bpe, wordpiece, gpt):
    rows = [
        dict(sentence1="the film", sentence2="is dull . " * 40, label=1),
        dict(sentence1="a", sentence2="b", label=0),
    ]
    for tok in (bpe, wordpiece):
        want = tok(["the film", "a"], ["is dull . " * 40, "b"], truncation=True, max_length=30)
        got = YES_NO_PAIRS.encode(rows, tok, 30)
        assert [e["input_ids"] for e in got] == want.input_ids and all(
            "mask_position" not in e for e in got
        )
        assert [e["label"] for e in got] == [1, 0]
    assert (
        max(YES_NO_PAIRS.encode(rows, wordpiece, 30)[0]["token_type_ids"]) == 1
        and max(YES_NO_PAIRS.encode(rows, bpe, 30)[0]["token_type_ids"]) == 0
    )
    e = YES_NO_PAIRS.encode(rows, gpt, 30)
    assert len(e[0]["input_ids"]) == 30 and e[1]["input_ids"] == [
        gpt.bos_token_id,
        *gpt("a b").input_ids,
        gpt.eos_token_id,
    ]


def test_max_len_must_leave_room_for_a_sentence(bpe):
    with pytest.raises(
        ValueError,
        match=r"max_len=5 leaves no room for a sentence, because the template .* takes \d+ tokens",
    ):
        TASKS["rte"].encode([dict(sentence1="a", sentence2="b")], bpe, 5, "code")
    with pytest.raises(ValueError, match="max_len=2 leaves no room"):
        YES_NO.encode([dict(sentence1="a")], bpe, 2)


def test_rows_without_labels_can_be_encoded(bpe):
    e = tokenize_rows([dict(sentence1="a film")], bpe)
    assert "label" not in e[0] and "label" not in collate(e, 2) and tokenize_rows([], bpe) == []


def test_tokenizers_without_a_first_or_last_token_give_ids():
    """No id is None for a decoder without BOS or for an encoder without <s> (T5)."""
    rows = [dict(sentence1="the film", label=0), dict(sentence1="a plane", label=1)]
    for causal, gone in (
        (True, ("bos_token",)),
        (True, ("bos_token", "eos_token")),
        (False, ("cls_token", "bos_token")),
        (False, ("cls_token", "sep_token", "eos_token", "bos_token")),
    ):
        tok = toy_tokenizer(causal)
        for name in gone:
            setattr(tok, name, None)
        for template in (None, "{s1} It was {mask}"):
            for e in tokenize_rows(rows, tok, 30, template, causal):
                assert (
                    e["input_ids"]
                    and all(type(i) is int for i in e["input_ids"])
                    and 0 <= e.get("mask_position", 0) < len(e["input_ids"])
                )
    tok = toy_tokenizer()
    tok.mask_token = None
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        tokenize_rows(rows, tok, 30, "{s1} {mask}", False)


def test_groups_stay_out_of_the_tensors(superglue_folder, bbs):
    task = load_task("multirc", superglue_folder)
    examples = task.encode(task.splits["train"], bbs("roberta").tokenizer, 60)
    assert groups_of(examples) == groups_of(task.splits["train"])
    assert {"input_ids", "attention_mask", "token_type_ids", "label"} == set(
        next(iter(make_dataloader(examples, 4, 1)))
    )
    assert (
        "group"
        not in TASKS["boolq"].encode(
            load_task("boolq", superglue_folder).splits["train"], bbs("roberta").tokenizer
        )[0]
    )


# ---- batches


def test_collate_pads_to_the_longest_only():
    b = collate(
        [
            dict(input_ids=[4, 5, 6], token_type_ids=[0, 0, 1], label=1.5, mask_position=2),
            dict(input_ids=[7], token_type_ids=[0], label=0.0, mask_position=0),
        ],
        pad_token_id=9,
    )
    assert b["input_ids"].tolist() == [[4, 5, 6], [7, 9, 9]] and b["attention_mask"].tolist() == [
        [1, 1, 1],
        [1, 0, 0],
    ]
    assert b["token_type_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]
    assert b["label"].dtype == torch.float32 and b["mask_position"].tolist() == [2, 0]
    assert b["input_ids"].dtype == b["attention_mask"].dtype == torch.int64
    with pytest.raises(ValueError, match="no padding token: pass its eos_token_id"):
        collate([dict(input_ids=[1], token_type_ids=[0])], None)
    with pytest.raises(ValueError, match="must be at least 1, got batch_size=4 and 0 examples"):
        make_dataloader([], 4, 0)


@pytest.mark.parametrize(
    "kw",
    [
        dict(),
        dict(shuffle=True),
        dict(group_by_length=False),
        dict(shuffle=True, group_by_length=False),
    ],
    ids=str,
)
def test_every_example_once_and_deterministic(kw):
    ex = [
        dict(input_ids=[5] * random.Random(i).randint(3, 40), token_type_ids=[0] * 99, label=i)
        for i in range(103)
    ]
    for o in ex:
        o["token_type_ids"] = [0] * len(o["input_ids"])

    def order(seed):
        return [b["label"].tolist() for b in make_dataloader(ex, 8, 0, seed=seed, **kw)]

    def flat_order(seed):
        return [label for batch in order(seed) for label in batch]

    assert (
        sorted(flat_order(0)) == list(range(103)) and order(0) == order(0) and len(order(0)) == 13
    )
    assert (order(0) != order(1)) == bool(kw.get("shuffle"))
    if kw == dict(group_by_length=False):
        assert flat_order(0) == list(range(103))


def test_a_shuffled_loader_changes_between_epochs_and_leaves_the_global_generator_alone():
    ex = [
        dict(input_ids=[5] * (i % 7 + 1), token_type_ids=[0] * (i % 7 + 1), label=i)
        for i in range(64)
    ]
    loader = make_dataloader(ex, 4, 0, shuffle=True)
    torch.manual_seed(3)
    want = torch.rand(1)
    torch.manual_seed(3)
    one, two = [[b["label"].tolist() for b in loader] for _ in range(2)]
    assert one != two and torch.rand(1) == want


def test_grouping_saves_padding():
    ex = [
        dict(input_ids=[5] * random.Random(i).randint(3, 60), token_type_ids=[0] * 60, label=i)
        for i in range(512)
    ]
    for o in ex:
        o["token_type_ids"] = [0] * len(o["input_ids"])

    def cells(**kw):
        return sum(b["input_ids"].numel() for b in make_dataloader(ex, 8, 0, shuffle=True, **kw))

    assert cells() < 0.75 * cells(group_by_length=False)
