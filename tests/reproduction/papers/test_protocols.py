"""Every table expands into the runs that its paper states."""

import pytest
from small import backbone, batch_of, small_task

from idp_tutorial.assembly.build import build_model
from idp_tutorial.data.tasks import TASKS
from idp_tutorial.methods.all_methods import METHODS
from idp_tutorial.methods.method_registry import CONTROL_METHODS
from idp_tutorial.reproduction.papers import protocols as P
from idp_tutorial.reproduction.papers import reproduce as R
from idp_tutorial.reproduction.papers.published_scores import (
    load_published_tables,
)

TABLES = load_published_tables()


GRIDS = [
    r.table
    for r in TABLES.itertuples()
    if r.command.startswith(f"idp reproduce --table {r.table} ")
    and r.kind not in ("data", "analysis")
]


@pytest.mark.parametrize("table", GRIDS)
def test_a_table_expands_into_runs(table):
    small = R.plan_table_runs(table)
    full = R.plan_table_runs(table, "full")
    assert (
        0 < len(small) <= len(full)
        and len({c.task for c in small}) <= 4
        and len({c.backbone for c in small}) == 1
    )
    assert {c.method for c in small} <= {c.method for c in full}


@pytest.mark.parametrize(
    "row",
    [r for r in TABLES.itertuples() if r.table not in [*GRIDS, *R.FIGURE_TO_TABLE]],
    ids=lambda r: r.table,
)
def test_a_table_without_scores_is_refused(row):
    with pytest.raises(ValueError, match="is not a table of scores"):
        R.plan_table_runs(row.table)


def only(table, method, scale="full", **fields):
    """Return the planned runs of a method with these fields."""
    runs = [c for c in R.plan_table_runs(table, scale) if c.method == method]
    return [c for c in runs if all(c.to_dict().get(k) == v for k, v in fields.items())]


def values(runs, *names):
    return {tuple(c.to_dict().get(n) for n in names) for c in runs}


def test_the_configs_of_idpg_agree_with_its_appendix_and_code():
    """Table 4, A.1.1: 10 or 50 epochs; few-shot 313, 1,563 or 3,125 steps, from an MNLI model."""
    configs = {(c.method, c.task): c for c in R.plan_table_runs("idpg-1", "full")}
    length = {
        t: (configs["m-idpg-phm", t].epochs, configs["m-idpg-phm", t].batch_size)
        for t in P.IDPG_TASKS
    }
    assert length == {
        t: (10.0, 32) if t in ("sst2", "qnli", "qqp") else (50.0, 16) for t in P.IDPG_TASKS
    }
    steps = configs["m-idpg-phm", "rte"].resolve_epochs(2490)
    assert (steps.steps, steps.eval_every) == (7781, 156)  # an evaluation after every epoch
    for table, scale in (("idpg-1", "full"), ("idpg-3", "full"), ("idpg-1", "small")):
        prompts = [
            c
            for c in R.plan_table_runs(table, scale)
            if c.method not in (*CONTROL_METHODS, "fine-tuning", "efl")
        ]
        assert values(prompts, "schedule", "warmup", "clip", "beta2", "weight_decay") == {
            ("constant", 0.0, float("inf"), 0.98, 0.1)
        }
    for m in ("fine-tuning", "efl"):
        assert values(only("idpg-1", m), "epochs", "schedule", "warmup") == {(10.0, "linear", 0.06)}
    few_shot = only("idpg-3", "m-idpg-phm")
    assert values(few_shot, "shots", "steps", "batch_size") == {
        (100, 313, 16),
        (500, 1563, 16),
        (1000, 3125, 16),
    }
    assert values(few_shot, "generator_input", "backbone", "stratified") == {
        ("layer0", "roberta-large-mnli", False)
    }
    assert values(only("idpg-1", "m-idpg-phm"), "generator_input", "backbone") == {
        ("previous", "roberta-large")
    }
    assert values(only("idpg-1", "s-idpg-phm"), "backbone") == {("roberta-large-mnli",)}
    pairs = {c.task: c.get("position") for c in only("idpg-1", "s-idpg-phm")}
    assert pairs == {t: int(TASKS[t].pair) for t in P.IDPG_TASKS}
    assert (
        values(only("idpg-1", "s-idpg-phm"), "sentence_pooling")
        == {("noisy",)}
        == {(c.get("sentence_pooling"),) for c in few_shot}
    )
    assert values(only("idpg-1", "s-idpg-phm", "small"), "sentence_pooling", "steps") == {
        (None, 200)
    }
    assert values(only("idpg-3", "p-tuning-v2"), "insertion") == {("add",)}
    assert values(only("idpg-1", "m-idpg-phm-glove"), "glove_noise") == {(0.6,)}
    assert {c.get("glove") for c in R.plan_table_runs("idpg-1", glove="g")} == {None, "g"}
    sml = {
        (c.get("parameter_sharing"), c.get("bottleneck"), c.get("generator_input"))
        for c in only("idpg-6", "m-idpg-phm", "small")
    }
    assert ("S", 256, "layer0") in sml and ("M", 16, "previous") in sml and len(sml) == 8


def test_the_configs_of_lpt_and_id_spam_agree_with_their_papers():
    """Ten epochs or 1,000 steps with ten evaluations; up to 30 epochs; dropout below the prompt."""
    assert values(only("lpt-1", "lpt-npg"), "epochs", "dropout_below_prompt", "cache") == {
        (10.0, True, "none")
    }
    assert values(only("lpt-2", "lpt-npg"), "steps", "eval_every", "epochs", "prompt_length") == {
        (1000, 100, None, 5)
    }
    few_shot = {c.method: c for c in R.plan_table_runs("lpt-2", "full")}
    assert (
        few_shot["lpt-mppg"].get("prompt_length"),
        few_shot["s-idpg-phm"].get("prompt_length"),
        few_shot["lpt-npg"].head,
        few_shot["lora"].head,
    ) == (10, 5, "verbalizer", "classification")
    small = only("lpt-2", "lpt-npg", "small")
    assert values(small, "dropout_below_prompt", "steps") == {(False, 200)}
    assert values(only("lpt-1", "lpt"), "layer", "prompt_length") == {
        (0, 20),
        (0, 256),
        (None, 20),
    }  # two baselines, and w/o PG
    assert "prompt-tuning" not in few_shot
    spam = {c.method: c for c in R.plan_table_runs("id-spam-2", "full")}
    assert {
        (c.epochs, c.get("prompt_length"))
        for m, c in spam.items()
        if m in ("id-spam", "lpt-npg", "prompt-tuning")
    } == {(30.0, 10)}
    assert (
        (spam["lpt-npg"].get("bottleneck"), spam["id-spam"].get("bottleneck")) == (256, 64)
        and "lora-all" in spam
        and "lora" not in spam
    )
    layers = {c.get("layer") for c in R.plan_table_runs("lpt-10") if c.method == "lpt-npg"}
    assert layers == {round(n * 30 / 24) for n in (6, 12, 18)}  # of smollm2's 30
    assert values(R.plan_table_runs("id-spam-16"), "epochs") == {(30.0,)}  # its losses are by epoch
    curve = R.plan_table_runs("id-spam-16", "full")
    assert (
        values(curve, "method", "backbone", "epochs") == {("lora-all", "roberta-base", 30.0)}
        and len(curve) == 2
    )


@pytest.mark.parametrize("table", ["idpg-f7", "idpg-f9", "lpt-1", "id-spam-2"])
def test_every_planned_model_can_process_a_batch(table):
    """Positions 2 and 3 are those of pairs."""
    bb = backbone()
    tasks = dict(pair=small_task("entailment"), one=small_task("sentiment"))
    for c in R.plan_table_runs(table):
        task = tasks["pair" if TASKS[c.task].pair else "one"]
        layer = c.get("layer")
        c = c.with_options(
            prompt_length=min(c.get("prompt_length", 20), 20), layer=layer and min(layer, 2)
        )
        changes = c.method in METHODS and METHODS[c.method].insertion_point in (
            "weights",
            "upper weights",
        )
        batch = batch_of(bb, task, 4, "code" if c.head == "verbalizer" else None)
        assert build_model(c, backbone() if changes else bb, task)(batch).isfinite().all()
    if table == "idpg-f7":
        assert values(
            [c for c in R.plan_table_runs(table) if not TASKS[c.task].pair], "method", "position"
        ) >= {("prompt-tuning", 0), ("prompt-tuning", 1), ("prompt-tuning", 4)}
        cfgs = [c for c in R.plan_table_runs(table) if c.method not in CONTROL_METHODS]
        assert {c.get("position") for c in cfgs if TASKS[c.task].pair} == {*range(5)}
        assert {c.get("position") for c in cfgs if not TASKS[c.task].pair} == {0, 1, 4}


def test_a_fixed_sample_has_one_split(tmp_path):
    (tmp_path / "sst2/k100").mkdir(parents=True)
    draws = {
        t: {c.split_seed for c in R.plan_table_runs("lpt-2", data=str(tmp_path)) if c.task == t}
        for t in ("sst2", "trec")
    }
    assert draws == dict(sst2={0}, trec={0, 1, 2, 3})


def test_every_layer_of_a_paper_is_a_layer_of_the_backbone():
    """The last of 24 becomes the last layer: after it a prompt would have no effect."""
    for depth in (1, 3, 6, 8, 12, 24, 30, 36):
        ours = [R.scale_to_backbone(dict(layer=l), "bb", depth)["layer"] for l in range(24)]
        assert ours == sorted(ours) and {*ours} <= {*range(depth)} and ours[0] == 0
        assert ours[-1] == depth - 1 or depth > 24
    assert R.scale_to_backbone(dict(layer=None, prompt_length=3), "tiny") == dict(
        layer=None, prompt_length=3
    )
