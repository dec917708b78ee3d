"""Stage 1 trains everything on pairs in both orders; stage 2 starts from it, with its own cache."""

import json
import math
from dataclasses import replace

import pytest
import torch
from small import Killed, backbone, config, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.backbones.load import load_backbone
from idp_tutorial.core.backbone import backbone_id
from idp_tutorial.core.loop import run_layers
from idp_tutorial.data.encoding import collate
from idp_tutorial.methods.sentence_vectors import sentence_vector
from idp_tutorial.runs.experiment import Experiment, run_experiment
from idp_tutorial.saving.prompt_files import load_first_stage
from idp_tutorial.training.cache import cache_states
from idp_tutorial.training.fit import TrainingRun, fit
from idp_tutorial.utils.tensor_files import deserialise_tensors, save_tensors
from results.supplement.supplementary_training import (
    append_swapped_pairs,
    run_supplementary_training,
)


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    bb = backbone(max_position_embeddings=258)
    folder = tmp_path_factory.mktemp("backbone")
    bb.model.save_pretrained(folder)
    bb.tokenizer.save_pretrained(folder)
    return lambda **kw: config(**{**dict(backbone=str(folder), layer=1, eval_every=99), **kw})


@pytest.fixture(scope="module")
def first(cfg):
    """Return a function that gives the config of stage 1."""
    options = dict(lr=1e-3, epochs=1, batch_size=32, weight_decay=0.1, warmup=0.0)
    return lambda **kw: cfg(**{**options, **kw})


@pytest.fixture(scope="module")
def pairs():
    return small_task("entailment")


@pytest.fixture(scope="module")
def stage1(first, pairs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("supplementary") / "new" / "stage1"
    return folder, run_supplementary_training(first(), build_model, pairs, folder)


def test_a_kill_loses_no_more_than_the_steps_since_an_evaluation(first, tmp_path, monkeypatch):
    task = small_task("entailment", 12, 6, 6)
    steps = []
    original_step = TrainingRun.step

    def step(run):
        steps.append(1)
        if len(steps) == 6:
            raise Killed
        original_step(run)

    def train(name):
        return run_supplementary_training(
            first(eval_every=2, epochs=2, batch_size=8), build_model, task, tmp_path / name
        )

    whole = train("whole")
    monkeypatch.setattr(TrainingRun, "step", step)
    with pytest.raises(Killed):
        train("killed")
    assert not (tmp_path / "killed").exists()
    again = train("killed")
    assert again["validation"] == whole["validation"] and again["steps"] == whole["steps"] == 6
    assert len(steps) - 1 <= 6 + 2
    tensors = [
        deserialise_tensors((tmp_path / n / "prompts.safetensors").read_bytes())[1]
        for n in ("whole", "killed")
    ]
    assert all(torch.equal(tensors[0][n], t) for n, t in tensors[1].items())
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".killed-")]


def test_a_link_to_no_folder_is_refused_before_training(first, pairs, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a link that leads to no folder"):
        run_supplementary_training(first(), build_model, pairs, tmp_path / "link")


def test_a_description_of_another_content_is_refused(first, pairs, stage1, tmp_path):
    folder, _ = stage1
    file = folder / "prompts.safetensors"
    saved, tensors = deserialise_tensors(file.read_bytes())
    for odd in (None, [], {**saved, "steps": None}, {**saved, "fingerprint": 3}):
        save_tensors(file, tensors, odd)
        with pytest.raises(ValueError, match="delete it to train it again"):
            run_supplementary_training(first(), build_model, pairs, folder)
    save_tensors(file, tensors, saved)


def test_every_pair_in_both_orders_with_its_label(pairs):
    rows = pairs.splits["train"]
    two = append_swapped_pairs(rows)
    assert len(two) == 2 * len(rows) and two[:64] == rows and len(pairs.splits["train"]) == 64
    for a, b in zip(rows, two[64:]):
        assert (a["sentence1"], a["sentence2"], a["label"]) == (
            b["sentence2"],
            b["sentence1"],
            b["label"],
        )
    for bad in (small_task().splits["train"], []):
        with pytest.raises(
            ValueError, match="give a task of sentence pairs, or set with_swapped_pairs=False"
        ):
            append_swapped_pairs(bad)


def test_stage_one_trains_everything_on_the_doubled_data(cfg, first, pairs, tmp_path, monkeypatch):
    from results.supplement import supplementary_training as supplementary

    seen = {}

    def spy(model, task, c, checkpoint_dir=None):
        seen.update(
            rows={s: len(r) for s, r in task.splits.items()},
            cfg=c,
            trained=set(model.trained_parameters()),
            lm=dict(model.lm.named_parameters()),
        )
        return fit(model, task, c)

    monkeypatch.setattr(supplementary, "fit", spy)
    stage1 = run_supplementary_training(
        first(cache="hidden", seed=3, epochs=0.5), build_model, pairs, tmp_path / "s"
    )
    assert seen["rows"] == dict(train=128, validation=24, test=24) and stage1["steps"] == seen[
        "cfg"
    ].steps == round(0.5 * 128 / 32)
    c = seen["cfg"]
    assert (c.lr, c.task, c.cache, c.seed, c.method) == (1e-3, "entailment", "none", 3, "lpt-npg")
    assert any(n.startswith("sources.") for n in seen["trained"]) and any(
        n.startswith("head.") for n in seen["trained"]
    )
    unread = {n for n in seen["lm"] if "lm_head" in n}
    assert {n[3:] for n in seen["trained"] if n.startswith("lm.")} == set(seen["lm"]) - unread
    assert (
        run_supplementary_training(
            first(),
            build_model,
            small_task(),
            tmp_path / "single",
            with_swapped_pairs=False,
        )["steps"]
        == 2
    )
    others = first(accumulate=4, steps=50)  # of stage 2
    assert (
        run_supplementary_training(
            others, build_model, small_task(), tmp_path / "own", with_swapped_pairs=False
        )["steps"]
        == 2
    )
    elsewhere = replace(others, cache_dir=str(tmp_path / "c"))
    assert (
        run_supplementary_training(
            elsewhere,
            build_model,
            small_task(),
            tmp_path / "own",
            with_swapped_pairs=False,
        )["steps"]
        == 2
    )
    with pytest.raises(ValueError, match="with_swapped_pairs=False"):
        run_supplementary_training(first(), build_model, small_task(), tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_gradients_of_stage_one_flow_through_m_of_x(first, pairs, tmp_path, monkeypatch):
    from results.supplement import supplementary_training as supplementary

    grads = []

    def spy(model, task, c, checkpoint_dir=None):
        batch = collate(task.encode(task.splits["train"][:8], model.backbone.tokenizer, 60), 1)
        model.eval()  # no dropout
        for z in (
            None,
            sentence_vector(run_layers(model.backbone, batch)).detach(),
        ):  # as from a cache: a constant
            model.zero_grad()
            model.loss({**batch, **({} if z is None else {"sentence": z})}).backward()
            grads.append(
                {
                    n: p.grad.clone()
                    for n, p in model.trained_parameters().items()
                    if p.grad is not None
                }
            )
        return fit(model, task, c)

    monkeypatch.setattr(supplementary, "fit", spy)
    run_supplementary_training(
        first(method="s-idpg-phm", pooling="cls", epochs=0.1), build_model, pairs, tmp_path / "s"
    )
    whole, cut = grads
    assert whole.keys() == cut.keys() and all(
        n.startswith("lm.") or torch.equal(whole[n], cut[n]) for n in whole
    )
    inside = [n for n in whole if ".layer." in n]
    assert len(inside) > 20 and all(
        not torch.equal(whole[n], cut[n]) for n in inside if "key.bias" not in n
    )


def test_stage_one_saves_a_backbone_with_its_prompts(cfg, pairs, stage1):
    folder, description = stage1
    old = load_backbone(cfg().backbone)
    new = load_backbone(str(folder))
    moved = [
        n
        for (n, a), b in zip(old.base.named_parameters(), new.base.parameters())
        if not torch.equal(a, b)
    ]
    assert len(moved) > 0.9 * len([*old.base.parameters()]) and backbone_id(old) != backbone_id(new)
    assert (
        description["steps"] == math.ceil(128 / 32)
        and 0 <= description["validation"] <= 100
        and {p.name for p in folder.parent.iterdir()} - {".stage1.lock"} == {"stage1"}
    )
    model = build_model(cfg(backbone=str(folder)), new, pairs)
    start = {n: p.clone() for n, p in model.trained_parameters().items()}
    names = load_first_stage(model, folder)
    assert set(names) == set(model.trained_parameters())  # same task, same head
    assert all(not torch.equal(start[n], p) for n, p in model.trained_parameters().items())


def test_the_saved_model_is_the_trained_one(cfg, first, pairs, tmp_path, monkeypatch):
    from results.supplement import supplementary_training as supplementary

    spied = {}

    def spy(model, task, c, checkpoint_dir=None):
        spied["model"] = model
        return fit(model, task, c)

    monkeypatch.setattr(supplementary, "fit", spy)
    run_supplementary_training(first(), build_model, pairs, tmp_path / "s")
    again = build_model(
        cfg(backbone=str(tmp_path / "s")), load_backbone(str(tmp_path / "s")), pairs
    )
    load_first_stage(again, tmp_path / "s")
    batch = collate(pairs.encode(pairs.splits["test"], again.backbone.tokenizer, 60), 1)
    torch.testing.assert_close(again.eval()(batch), spied["model"].eval()(batch))


def test_statistics_of_the_sentence_vectors_are_copied(first, pairs, tmp_path, monkeypatch):
    from idp_tutorial.core.planned_model import trained_state
    from results.supplement import supplementary_training as supplementary

    spied = {}
    c = first(method="s-idpg-phm", pooling="cls", standardise=True)

    def spy(model, task, c, checkpoint_dir=None):
        spied["model"] = model
        return fit(model, task, c)

    monkeypatch.setattr(supplementary, "fit", spy)
    run_supplementary_training(c, build_model, pairs, tmp_path / "s")
    again = build_model(
        replace(c, backbone=str(tmp_path / "s")), load_backbone(str(tmp_path / "s")), pairs
    )
    names = load_first_stage(again, tmp_path / "s")
    assert {n.split(".")[-1] for n in names} >= {"n", "total", "square"}
    for n, t in trained_state(spied["model"]).items():
        if not n.startswith("lm."):
            torch.testing.assert_close(trained_state(again)[n], t)
    assert next(t for n, t in trained_state(again).items() if n.endswith("scale.n")) >= 64
    batch = collate(pairs.encode(pairs.splits["test"], again.backbone.tokenizer, 60), 1)
    torch.testing.assert_close(again.eval()(dict(batch)), spied["model"].eval()(dict(batch)))
    with pytest.raises(ValueError, match="do not fit this model .*scale.n"):
        load_first_stage(
            build_model(replace(c, standardise=False), again.backbone, pairs), tmp_path / "s"
        )


def test_stage_two_is_an_ordinary_run(cfg, stage1):
    folder, _ = stage1
    task = small_task("sentiment")
    plain, tuned, carried = [
        run_experiment(cfg(task="sentiment", steps=3, eval_every=1, **kw), task)
        for kw in (
            {},
            dict(backbone=str(folder)),
            dict(backbone=str(folder), init_from=str(folder)),
        )
    ]
    assert len({json.dumps(r["history"]) + str(r["scores"]) for r in (plain, tuned, carried)}) >= 2
    assert tuned["params"] == plain["params"] and tuned["params"]["backbone"] == 0  # frozen again
    assert carried["init_from"] == folder.name


def first_loss(cfg, task, folder, **kw):
    c = cfg(backbone=str(folder), steps=1, lr=1e-9, **kw)
    model = Experiment(c, task).build_model()
    log = fit(model, task, c)
    return log.losses[0], model


def test_fit_starts_from_the_prompts_of_stage_one(cfg, pairs, stage1):
    folder, _ = stage1
    a, _ = first_loss(cfg, pairs, folder)
    b, model = first_loss(cfg, pairs, folder, init_from=str(folder))
    assert a != b
    fresh = build_model(cfg(backbone=str(folder)), load_backbone(str(folder)), pairs)
    load_first_stage(fresh, folder)
    for n, p in model.trained_parameters().items():
        torch.testing.assert_close(p, fresh.trained_parameters()[n], atol=1e-7, rtol=0)


def test_a_head_is_copied_only_if_it_fits(cfg, stage1):
    folder, _ = stage1
    bb = load_backbone(str(folder))
    for task, fits in (
        (small_task("sentiment"), True),
        (small_task("questions"), False),
        (small_task("similarity"), False),
    ):
        model = build_model(cfg(), bb, task)
        head = model.head.net.weight.clone()
        names = load_first_stage(model, folder)
        assert any(n.startswith("head.") for n in names) == fits != torch.equal(
            head, model.head.net.weight
        ) and any(n.startswith("sources.") for n in names)


def test_m_of_x_is_computed_with_the_backbone_of_stage_one(cfg, pairs, stage1, tmp_path):
    folder, _ = stage1
    old = load_backbone(cfg().backbone)
    new = load_backbone(str(folder))
    rows = pairs.encode(pairs.splits["train"][:6], old.tokenizer, 60)
    before, after = [cache_states(bb, rows, "sentence", tmp_path) for bb in (old, new)]
    assert before[1]["computed"] == after[1]["computed"] == 6
    a, b = [collate(c[0], 1)["sentence"] for c in (before, after)]
    assert (a - b).abs().max() > 1e-4
    torch.testing.assert_close(
        b, sentence_vector(run_layers(new, collate(rows, 1))), atol=1e-5, rtol=0
    )


def test_an_equal_stage_one_is_trained_once(first, pairs, stage1):
    folder, description = stage1
    modified = (folder / "model.safetensors").stat().st_mtime_ns
    assert (
        run_supplementary_training(first(), build_model, pairs, folder) == description
        and (folder / "model.safetensors").stat().st_mtime_ns == modified
    )
    for options, kw, word in (
        (dict(lr=2e-3), {}, "lr was 0.001 and is now 0.002"),
        (
            dict(epochs=2),
            dict(with_swapped_pairs=False),
            "with_swapped_pairs was True and is now False",
        ),
    ):
        with pytest.raises(ValueError, match=word):
            run_supplementary_training(first(**options), build_model, pairs, folder, **kw)
    with pytest.raises(ValueError, match="prompt_length was "):
        run_supplementary_training(first(prompt_length=5), build_model, pairs, folder)
    with pytest.raises(ValueError, match="data was '"):
        run_supplementary_training(
            first(),
            build_model,
            replace(pairs, splits={**pairs.splits, "test": pairs.splits["test"][:5]}),
            folder,
        )
    rows = pairs.splits["train"]
    changed = [*rows[:-1], {**rows[-1], "label": 1 - rows[-1]["label"]}]
    # other data of the same size
    for s in (
        {**pairs.splits, "train": rows[::-1]},
        {**pairs.splits, "train": changed},
        {**pairs.splits, "validation": pairs.splits["test"], "test": pairs.splits["validation"]},
    ):
        with pytest.raises(ValueError, match="holds another run .data was '"):
            run_supplementary_training(first(), build_model, replace(pairs, splits=s), folder)
    with pytest.raises(ValueError, match="warmup was "):
        run_supplementary_training(first(warmup=0.06), build_model, pairs, folder)
    with pytest.raises(ValueError, match="was not written by run_supplementary_training"):
        run_supplementary_training(first(), build_model, pairs, folder.parent)


def test_weights_inside_the_backbone_are_refused(first, pairs, tmp_path):
    for m in ("lora", "adapter", "compacter", "bitfit"):
        with pytest.raises(ValueError, match=f"'{m}' adds weights inside the backbone"):
            run_supplementary_training(
                first(method=m, epochs=0.1), build_model, pairs, tmp_path / "s"
            )
    assert not (tmp_path / "s").exists()


def test_a_stage_one_that_fails_leaves_nothing(first, pairs, tmp_path, monkeypatch):
    from results.supplement import supplementary_training as supplementary

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supplementary, "save_tensors", full)
    with pytest.raises(OSError):
        run_supplementary_training(first(epochs=0.1), build_model, pairs, tmp_path / "a" / "s")
    names = {p.name for p in (tmp_path / "a").iterdir()} - {".s.lock"}
    assert names == {".s-checkpoints"}  # with free space, nothing is trained again


def test_prompts_that_do_not_fit(cfg, pairs, stage1, tmp_path):
    folder, _ = stage1
    bb = load_backbone(str(folder))
    for kw in (
        dict(prompt_length=5),
        dict(bottleneck=16),
        dict(method="prompt-tuning"),
        dict(method="head-only"),
    ):
        model = build_model(cfg(**kw), bb, pairs)
        start = {n: p.clone() for n, p in model.trained_parameters().items()}
        with pytest.raises(
            ValueError,
            match="use the same method, prompt_length, bottleneck and backbone in both stages, or "
            "init_from=None",
        ):
            load_first_stage(model, folder)
        assert all(
            torch.equal(start[n], p) for n, p in model.trained_parameters().items()
        )  # untouched
    with pytest.raises(
        FileNotFoundError, match="give a folder that `save_pretrained` or idp train wrote"
    ):
        Experiment(cfg(init_from=str(tmp_path)), pairs).build_model()
