"""A task: templates, label words, predictions, scores, and fields that do not fit together."""

import random
from dataclasses import replace

import pytest
import torch
from small import YES_NO

from idp_tutorial.data.metrics import question_exact_match
from idp_tutorial.data.task import (
    Task,
    make_column_templates,
    mark_best_candidates,
    require_classes,
)
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.utils.checks import UserError

# ---- definition


def test_inconsistent_tasks_raise_errors():
    with pytest.raises(ValueError, match="does not fit .*: use "):
        Task("t", labels=("a", "b"), metric="pearson")
    with pytest.raises(ValueError, match="does not fit .*: use "):
        Task("t")
    with pytest.raises(ValueError, match="one label word for each label"):
        Task("t", labels=("a", "b", "c"), label_words=("A", "B"))
    with pytest.raises(
        ValueError, match=r"no template 'best' \(known: code and paper\): pass a string"
    ):
        TASKS["sst2"].template("best")
    with pytest.raises(ValueError, match="known: none"):
        YES_NO.template("code")


def test_labels_are_a_tuple_of_names():
    for field in (
        dict(labels="billing"),
        dict(labels=("a", "b"), label_words="AB"),
        dict(labels=(1, 2)),
    ):
        with pytest.raises(ValueError, match="must be tuples of strings"):
            Task("t", **field)
    with pytest.raises(ValueError, match="labels must be different names"):
        Task("t", labels=("a", "b", "a"))
    assert Task("t", labels=["a", "b"]) == Task("t", labels=("a", "b"))


def test_grouping_must_fit_labels_and_rows():
    for kw in (
        dict(grouping="pick", labels=("a", "b")),
        dict(grouping="choose", labels=("a", "b", "c")),
        dict(grouping="each", metric="pearson"),
    ):
        with pytest.raises(ValueError, match="must be 'choose' or 'each' with two labels"):
            Task("mine", **kw)
    with pytest.raises(ValueError, match="metric 'f1\\+exact' scores questions: pass the `group`"):
        TASKS["multirc"].score([0, 1], [0, 1])
    with pytest.raises(ValueError):
        question_exact_match([1, 0], [1])


# ---- templates and label words


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


def test_label_words_must_be_different_single_tokens(bpe, wordpiece):
    for t in TASKS.values():
        for tok in (bpe, wordpiece):
            if t.label_words:
                assert [
                    o.lstrip("Ġ").lower() for o in tok.convert_ids_to_tokens(t.word_ids(tok))
                ] == [w.lower() for w in t.label_words]
    with pytest.raises(
        ValueError,
        match="must be another single token, but 'extraordinarily' is .* use other label_words",
    ):
        replace(YES_NO, label_words=("No", "extraordinarily")).word_ids(bpe)
    with pytest.raises(ValueError, match="must be another single token, but 'yes' is"):
        replace(YES_NO, label_words=("Yes", "yes")).word_ids(wordpiece)
    with pytest.raises(ValueError, match="has no label words.*classification head"):
        TASKS["stsb"].word_ids(bpe)


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


# ---- predictions


def test_the_likelier_candidate_wins_in_any_order():
    rng = random.Random(1)
    g = [q for q in range(30) for _ in range(2 + q % 3)]
    odds = [rng.gauss(-5, 1) for _ in g]
    best = {q: max(o for o, k in zip(odds, g) if k == q) for q in g}
    want = [int(o == best[q]) for o, q in zip(odds, g)]
    order = rng.sample(range(len(g)), len(g))
    assert (
        mark_best_candidates(odds, g) == want and sum(want) == 30 and max(odds) < 0
    )  # though every candidate alone is predicted false
    assert mark_best_candidates([odds[i] for i in order], [g[i] for i in order]) == [
        want[i] for i in order
    ]
    assert mark_best_candidates([1.0, 1.0], [0, 0]) == [1, 0]
    out = torch.tensor([[0.0, o] for o in odds])
    assert (
        TASKS["copa"].to_predictions(out, g) == want
        and TASKS["copa"].to_predictions(out + 7.0, g) == want
    )
    assert TASKS["multirc"].to_predictions(out, g) == [0] * len(g)


def test_regression_and_classes_ignore_groups():
    out = torch.tensor([[0.1], [0.5]])
    assert TASKS["stsb"].to_predictions(out, [None] * 2) == pytest.approx([0.5, 2.5])
    assert TASKS["mnli"].to_predictions(
        torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), [None] * 2
    ) == [1, 0]


def test_a_generated_text_is_correct_if_it_has_the_words_of_the_target(gpt):
    task = Task("short", is_generation=True, metric="exact_match", max_answer_len=8)
    assert task.score(["dull", " a  film"], ["dull", "a film"]) == dict(exact_match=100.0)
    assert task.score(["dull", "film"], ["dull", "a film"]) == dict(exact_match=50.0)
    (example,) = task.encode([dict(sentence1="it is a dull film", target="dull")], gpt, 64)
    assert gpt.decode(example["input_ids"][example["answer_start"] :]) == " dull<s>"


def test_a_generation_task_needs_a_decoder(bpe):
    task = Task("short", is_generation=True, metric="exact_match")
    with pytest.raises(ValueError, match="needs a model that generates text"):
        task.encode([dict(sentence1="a film", target="dull")], bpe, 64)


def test_outputs_of_a_question_are_compared_before_they_are_scored():
    """Both candidates are unlikely, the second one more so."""
    logits = torch.tensor([[3.0, 1.0], [9.0, 1.0]] * 10)
    examples = [dict(label=int(i % 2 == 0), group=i // 2) for i in range(20)]
    scores, predictions = TASKS["copa"].score_outputs(logits, examples)
    assert predictions == [1, 0] * 10
    assert (scores["accuracy"], scores["exact"]) == (100.0, 100.0)


# ---- the main metric, and several labels of a row

LETTERS = Task("letters", labels=("a", "b", "c"), multi_label=True, metric="micro_f1")


def test_a_metric_must_fit_the_labels():
    task = TASKS["trec"]
    assert task.with_metric(None) is task and task.with_metric("mcc").metric == "mcc"
    for metric in ("f1", "micro_f1", "pearson", "exact", "accuracy+f1"):
        with pytest.raises(ValueError, match=f"metric '{metric}' does not fit".replace("+", ".")):
            task.with_metric(metric)
    assert TASKS["sst2"].with_metric("accuracy+f1").metric == "accuracy+f1"
    with pytest.raises(
        ValueError, match="fit a task that may have several labels in a row: use micro_f1"
    ):
        LETTERS.with_metric("accuracy")
    with pytest.raises(ValueError, match="does not fit a task that is a regression"):
        TASKS["stsb"].with_metric("accuracy")


def test_the_main_metric_is_in_the_digest():
    task = TASKS["trec"]
    assert task.digest() != task.with_metric("mcc").digest()


def test_log_loss_is_computed_from_the_outputs():
    task = TASKS["sst2"].with_metric("neg_log_loss")
    outputs = torch.tensor([[0.0, 2.0], [1.0, 0.0]])
    scores, predictions = task.score_outputs(outputs, [dict(label=1), dict(label=1)])
    by_hand = torch.tensor([outputs.log_softmax(-1)[i, 1] for i in (0, 1)]).mean()
    assert next(iter(scores)) == "neg_log_loss"
    assert scores["neg_log_loss"] == pytest.approx(100 * by_hand.item(), rel=1e-5)
    assert predictions == [1, 0] and scores["accuracy"] == 50


def test_labels_with_a_probability_above_one_half_are_predicted():
    outputs = torch.tensor([[0.1, -3.0, 2.0], [-1.0, -1.0, -0.1]])
    assert LETTERS.to_predictions(outputs) == [[1, 0, 1], [0, 0, 0]]
    assert LETTERS.label_names([1, 0, 1]) == ["a", "c"]
    assert LETTERS.to_probabilities(outputs)[0, 1].item() == pytest.approx(0.0474, abs=1e-4)
    scores, _ = LETTERS.score_outputs(outputs, [dict(label=[1, 0, 1]), dict(label=[0, 0, 1])])
    assert [*scores] == ["micro_f1", "macro_f1", "subset_accuracy"]
    assert scores["micro_f1"] == pytest.approx(80) and scores["subset_accuracy"] == 50


def test_several_labels_need_labels_and_no_grouping():
    with pytest.raises(ValueError, match="grouping must be"):
        replace(LETTERS, labels=("a", "b"), grouping="each")
    assert LETTERS.digest() != replace(LETTERS, multi_label=False, metric="macro_f1").digest()


def test_what_needs_one_class_a_row_refuses_several_labels():
    require_classes(TASKS["trec"], "probe")
    with pytest.raises(ValueError, match="probe needs one class for each row"):
        require_classes(LETTERS, "probe")


def test_indicators_and_names_are_two_forms_of_one_label():
    assert LETTERS.label_indicators(["c", "a"]) == [1, 0, 1]
    assert LETTERS.label_names(LETTERS.label_indicators(["b"])) == ["b"]


@pytest.mark.parametrize("text2", [None, "answer"])
def test_the_columns_of_a_table_are_read_from_their_templates(text2):
    columns = make_column_templates("question", text2, "topic")
    task = replace(YES_NO, pair=text2 is not None, columns=columns)
    assert task.source_columns == ("question", text2, "topic")
    assert task.text_columns == ("sentence1", "sentence2")[: 2 if text2 else 1]


def test_a_message_quotes_only_the_beginning_of_a_long_name():
    long = "x" * 10_000
    for fields in (dict(metric=long), dict(name=long, labels=("a", "a")), dict(labels=(long,))):
        with pytest.raises(UserError) as refused:
            Task(**{"name": "own", "labels": ("a", "b"), **fields})
        assert len(str(refused.value)) < 1000
