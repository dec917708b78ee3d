"""Checkpoints: killed runs resume with identical results; contents of a file; refused files."""

import random
import threading

import numpy as np
import pytest
import torch
from small import (
    EACH_METHOD,
    Killed,
    backbone,
    config,
    kill_at,
    model_of,
    numbers,
    small_task,
    write_glove,
)

from idp_tutorial.assembly.build import build_model
from idp_tutorial.core import planned_model
from idp_tutorial.training.checkpoint import Checkpoint, run_fingerprint
from idp_tutorial.training.fit import TrainingRun, fit
from idp_tutorial.utils import durable_files, tensor_files
from idp_tutorial.utils.durable_files import folder_lock
from idp_tutorial.utils.tensor_files import (
    PROMPTS_FILE,
    read_last_snapshot,
    save_tensors,
    write_snapshot,
)


def make(cfg, task=None):
    return build_model(cfg, backbone(), task or small_task())


def kill_and_resume(cfg, folder, step, every, task=None):
    """Kill a run and resume it; return log, model and number of steps of the second start."""
    first = make(cfg, task)
    kill_at(first, step)
    with pytest.raises(Killed):
        fit(first, task or small_task(), cfg, checkpoint_dir=folder, save_every=every)
    model = make(cfg, task)
    if [*folder.glob("checkpoint-*")]:
        torch.rand(5)
        random.random()  # the states of the generators must come from the checkpoint
    calls = kill_at(model, 0)
    log = fit(model, task or small_task(), cfg, checkpoint_dir=folder, save_every=every)
    return log, model, len(calls)


def visible_files(folder):
    return sorted(p.name for p in folder.glob("[!.]*"))


def tensors(model):
    return {n: p.detach().clone() for n, p in planned_model.trained_state(model).items()}


def assert_same_tensors(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_resumed_run_equals_an_uninterrupted_one(method, tmp_path):
    cfg = config(
        method=method, steps=7, eval_every=3, lr=1e-3, standardise=True
    )  # dropout is on; 4 batches a pass
    whole = make(cfg)
    log = fit(whole, small_task(), cfg)
    resumed, model, steps = kill_and_resume(cfg, tmp_path / method, 6, 2)
    assert numbers(resumed) == numbers(log) and steps == 3  # steps 5, 6, 7
    assert_same_tensors(tensors(model), tensors(whole))


@pytest.mark.parametrize(
    "kill_step,save_every,remaining_steps",
    [(1, 1, 5), (2, 1, 4), (5, 1, 1), (3, 2, 3), (5, 5, 5), (5, 100, 5)],
)
def test_a_run_resumes_from_any_step(kill_step, save_every, remaining_steps, tmp_path):
    cfg = config(steps=5, eval_every=2)
    log = fit(make(cfg), small_task(), cfg)
    resumed, _, steps = kill_and_resume(cfg, tmp_path, kill_step, save_every)
    assert numbers(resumed) == numbers(log) and steps == remaining_steps


@pytest.mark.parametrize(
    "options",
    [
        dict(accumulate=2, batch_size=8),
        dict(precision="bf16"),
        dict(warmup=0.5, clip=0.01, weight_decay=0.3),
        dict(dropout_below_prompt=True),
    ],
    ids=str,
)
def test_a_run_with_accumulation_precision_or_schedule_resumes(options, tmp_path):
    cfg = config(steps=6, **options)
    log = fit(make(cfg), small_task(), cfg)
    assert numbers(kill_and_resume(cfg, tmp_path, 5 * cfg.accumulate, 2)[0]) == numbers(log)


def test_a_cached_regression_resumes(tmp_path):
    task = small_task("similarity")
    cfg = config(
        task="similarity", steps=6, cache="hidden", cache_dir=str(tmp_path / "cache"), lr=1e-3
    )
    log = fit(make(cfg, task), task, cfg)
    assert numbers(kill_and_resume(cfg, tmp_path / "run", 5, 2, task)[0]) == numbers(log)


def test_the_best_tensors_survive_a_kill(tmp_path, monkeypatch):
    """The best evaluation is before the kill; all later ones are worse."""
    cfg = config(steps=6, eval_every=2, lr=0.05)
    evaluated = []

    def script_scores(scores):
        remaining_scores = iter(scores)

        def validate(run):
            evaluated.append(tensors(run.model))
            return next(remaining_scores), 0.5, []

        monkeypatch.setattr(TrainingRun, "validate", validate)

    script_scores([70, 60, 50])
    whole = make(cfg)
    fit(whole, small_task(), cfg)
    best = evaluated[0]
    assert_same_tensors(tensors(whole), best)
    evaluated.clear()
    script_scores([70, 60, 50])
    log, model, _ = kill_and_resume(cfg, tmp_path, 5, 1)
    assert log.validation == 70 and log.history == [(2, 70), (4, 60), (6, 50)]
    assert log.validation_outputs is None  # to be computed again
    assert log.validation_losses == [0.5, 0.5, 0.5]
    assert_same_tensors(tensors(model), best)
    assert not all(torch.equal(evaluated[-1][n], best[n]) for n in best)


def test_a_run_that_is_killed_twice_resumes(tmp_path):
    cfg = config(steps=6)
    log = fit(make(cfg), small_task(), cfg)
    for step in (3, 2):  # counted from the last start
        m = make(cfg)
        kill_at(m, step)
        with pytest.raises(Killed):
            fit(m, small_task(), cfg, checkpoint_dir=tmp_path, save_every=1)
    assert read_last_snapshot(tmp_path)["progress"]["step"] == 3
    assert numbers(
        fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=1)
    ) == numbers(log)


def test_a_finished_run_returns_its_log_without_training(tmp_path):
    cfg = config()
    whole = make(cfg)
    log = fit(whole, small_task(), cfg, checkpoint_dir=tmp_path)
    model = make(cfg)
    calls = kill_at(model, 1)  # would be killed by its first step
    again = fit(model, small_task(), cfg, checkpoint_dir=tmp_path)
    assert numbers(again) == numbers(log)
    assert again.ms_per_step == log.ms_per_step
    assert again.peak_memory_mb == log.peak_memory_mb
    assert not calls
    assert_same_tensors(tensors(model), tensors(whole))


def test_checkpoints_do_not_change_the_run(tmp_path):
    cfg = config()
    assert numbers(
        fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=1)
    ) == numbers(fit(make(cfg), small_task(), cfg))


# --- the file


def test_a_checkpoint_contains_trained_tensors_optimizer_and_progress(tmp_path):
    cfg = config(steps=4, standardise=True, method="s-idpg-phm")
    m = make(cfg)
    kill_at(m, 4)
    with pytest.raises(Killed):
        fit(m, small_task(), cfg, checkpoint_dir=tmp_path, save_every=3)
    content = read_last_snapshot(tmp_path)
    assert (
        content["tensors"].keys() == planned_model.trained_state(m).keys()
        and not any(n.startswith("lm.") for n in content["tensors"])
        and len(content["optimizer"]["state"]) == len(m.trained_parameters())
    )
    assert (
        sum("scale" in n for n in content["tensors"]) == 3
    )  # the running statistics of `standardise`
    assert (
        content["progress"]["step"] == 3
        and len(content["progress"]["losses"]) == 3
        and visible_files(tmp_path) == ["checkpoint-3.safetensors"]
    )
    assert (
        str(tmp_path) not in str(content["fingerprint"])
        and content["fingerprint"]["other frozen weights"]
        == run_fingerprint(make(cfg), [[]], cfg, 1.0)["other frozen weights"]
    )
    size = (tmp_path / "checkpoint-3.safetensors").stat().st_size
    fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=3)
    assert (tmp_path / "checkpoint-4.safetensors").stat().st_size < size  # finished: no optimizer


@pytest.mark.parametrize(
    "error", [Killed(), OSError(28, "No space left on device")], ids=["kill", "full disk"]
)
def test_an_interrupted_write_leaves_the_previous_checkpoint(error, tmp_path, monkeypatch):
    cfg = config(steps=5)
    original_fsync = durable_files.os.fsync
    log = fit(make(cfg), small_task(), cfg)
    calls = []

    def failing_fsync(descriptor):
        if len(calls) == 2:  # the first checkpoint syncs a file and its folder
            raise error
        calls.append(1)
        original_fsync(descriptor)

    monkeypatch.setattr(durable_files.os, "fsync", failing_fsync)
    disk_full = pytest.raises(
        ValueError,
        match=r"step 4 cannot be written: .*No space left.*The previous checkpoint is",
    )
    with pytest.raises(Killed) if isinstance(error, Killed) else disk_full:
        fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
    monkeypatch.setattr(durable_files.os, "fsync", original_fsync)
    assert (
        visible_files(tmp_path) == ["checkpoint-2.safetensors"]
        and read_last_snapshot(tmp_path)["progress"]["step"] == 2
    )
    assert numbers(
        fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
    ) == numbers(log)


def test_a_disk_that_is_full_from_the_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(
        durable_files.os,
        "fsync",
        lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    with pytest.raises(
        ValueError, match="of step 2 cannot be written: .*No space left .* No previous checkpoint"
    ):
        fit(
            make(config(steps=5)),
            small_task(),
            config(steps=5),
            checkpoint_dir=tmp_path,
            save_every=2,
        )


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(tmp_path):
    cfg = config(steps=5)
    log = fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
    assert visible_files(tmp_path) == ["checkpoint-4.safetensors", "checkpoint-5.safetensors"]
    newest = tmp_path / "checkpoint-5.safetensors"
    for damage in (
        lambda b: b[: len(b) // 2],
        lambda b: b[:-40] + bytes([b[-40] ^ 4]) + b[-39:],
        lambda b: b"",
    ):
        newest.write_bytes(damage(newest.read_bytes()))
        with pytest.warns(
            UserWarning, match="checkpoint-5.* is damaged: .*; the run continues from checkpoint-4"
        ):
            again = fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
        assert numbers(again) == numbers(log)
    newest.write_bytes((tmp_path / "checkpoint-4.safetensors").read_bytes())  # swapped
    with pytest.warns(UserWarning, match="its name and its content disagree"):
        assert numbers(
            fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
        ) == numbers(log)


@pytest.mark.parametrize("name", ["_optimizer_step", "validate"])
def test_a_diverged_run_leaves_its_folder_to_another_learning_rate(name, tmp_path, monkeypatch):
    cfg = config(steps=6, lr=1e-3)
    original = getattr(TrainingRun, name)
    calls = []

    def diverge_once(self, *args):
        calls.append(1)
        result = original(self, *args)
        if name == "validate" and len(calls) == 2:  # the loss before the step was finite
            raise FloatingPointError("The model's outputs are not finite.")
        return result * (float("nan") if name == "_optimizer_step" and len(calls) == 4 else 1)

    monkeypatch.setattr(TrainingRun, name, diverge_once)
    with pytest.raises(
        FloatingPointError,
        match="No checkpoint of this run is kept. A lower lr usually fixes it",
    ):
        fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path, save_every=1)
    assert not visible_files(tmp_path)
    fit(make(cfg), small_task(), cfg, lr=1e-4, checkpoint_dir=tmp_path)


def test_a_backbone_with_weights_that_are_not_finite_is_named():
    cfg = config()
    bb = backbone()
    bb.layers[1].output.dense.weight.data[0, 0] = float("nan")
    with pytest.raises(
        FloatingPointError, match=r"backbone's weights 'lm.*output.dense.weight' are not finite"
    ):
        fit(build_model(cfg, bb, small_task()), small_task(), cfg)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with folder_lock(tmp_path):
        refusals = []

        def start_second_run():
            with pytest.raises(ValueError, match=r"is in use by process \d+ on "):
                fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path)
            refusals.append(1)

        thread = threading.Thread(target=start_second_run)
        thread.start()
        thread.join()
    assert refusals and not visible_files(tmp_path)


# --- refusals


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run_folder = tmp_path_factory.mktemp("run")
    fit(make(config()), small_task(), config(), checkpoint_dir=run_folder)
    return run_folder


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(lr=0.02), "lr was 0.01 and is now 0.02"),
        (dict(seed=1), "seed was 0 and is now 1"),
        (dict(steps=9), "steps was 4 and is now 9"),
        (dict(method="lpt-appg"), "method was 'lpt-npg' and is now 'lpt-appg'"),
        (dict(batch_size=8), "batch_size was 16 and is now 8"),
        (dict(precision="bf16"), "precision was 'no' and is now 'bf16'"),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_config_is_refused(options, message, folder):
    cfg = config(**options)
    before = (folder / "checkpoint-4.safetensors").read_bytes()
    with pytest.raises(ValueError, match="holds another run") as e:
        fit(make(cfg), small_task(), cfg, checkpoint_dir=folder)
    assert message in str(e.value)
    assert "Use another folder or the same settings" in str(e.value)
    assert (folder / "checkpoint-4.safetensors").read_bytes() == before


def test_a_checkpoint_of_another_learning_rate_argument_is_refused(folder):
    with pytest.raises(ValueError, match=r"\(lr was 0.01 and is now 0.02\)"):
        fit(make(config()), small_task(), config(), lr=0.02, checkpoint_dir=folder)


def test_a_checkpoint_of_other_texts_or_another_backbone_is_refused(folder):
    for task in (small_task(train=63), small_task(validation=23)):
        with pytest.raises(ValueError, match=r"\(examples was '\w+' and is now '\w+'\)"):
            fit(make(config()), task, config(), checkpoint_dir=folder)
    cfg = config()
    bb = backbone()
    bb.word_embeddings.weight.data[7, 0] += 1e-4
    with pytest.raises(ValueError, match="backbone was '"):
        fit(build_model(cfg, bb, small_task()), small_task(), cfg, checkpoint_dir=folder)


def test_a_checkpoint_of_an_earlier_version_is_continued(tmp_path):
    """Its digests of the backbone cannot be checked, but its settings can."""
    cfg = config()
    whole = fit(make(cfg), small_task(), cfg)
    model = make(cfg)
    kill_at(model, 4)
    with pytest.raises(Killed):
        fit(model, small_task(), cfg, checkpoint_dir=tmp_path, save_every=2)
    content = read_last_snapshot(tmp_path)
    for name in ("backbone", "other frozen weights"):
        del content["fingerprint"][name]
    content["fingerprint"] |= {"backbone weights": "a" * 16, "frozen weights": "b" * 16}
    del content["profiler"]["peak_bytes"]
    write_snapshot(tmp_path, content["progress"]["step"], content)
    other = config(batch_size=8)
    with pytest.raises(ValueError, match=r"\(batch_size was 16 and is now 8\)"):
        fit(make(other), small_task(), other, checkpoint_dir=tmp_path)
    assert numbers(fit(make(cfg), small_task(), cfg, checkpoint_dir=tmp_path)) == numbers(whole)


@pytest.mark.parametrize("method", ["fine-tuning", "efl", "lora", "bitfit"])
def test_a_checkpoint_of_another_trained_backbone_is_refused(method, tmp_path):
    """The fingerprint before training identifies a backbone, even after it was trained."""
    cfg = config(method=method, lr=1e-3)
    whole = fit(make(cfg), small_task(), cfg)
    model = make(cfg)
    kill_at(model, 4)
    with pytest.raises(Killed):
        fit(model, small_task(), cfg, checkpoint_dir=tmp_path)
    bb = backbone()
    bb.word_embeddings.weight.data[7, 0] += 1e-4
    with pytest.raises(ValueError, match="holds another run .*backbone was '"):
        fit(build_model(cfg, bb, small_task()), small_task(), cfg, checkpoint_dir=tmp_path)
    del model.forward
    assert numbers(fit(model, small_task(), cfg, checkpoint_dir=tmp_path)) == numbers(whole)


def test_other_word_vectors_in_a_file_of_the_same_name_are_refused(tmp_path):
    words = sorted(
        {w for r in small_task().splits["train"] for w in r["sentence1"].lower().split()}
    )

    def cfg(folder, sign):
        (tmp_path / folder).mkdir(exist_ok=True)
        write_glove(
            {w: i for i, w in enumerate(words)},
            sign * np.arange(8.0 * len(words)).reshape(-1, 8) % 7,
            tmp_path / folder / "glove.txt",
        )
        return config(method="m-idpg-phm-glove", glove=str(tmp_path / folder / "glove.txt"))

    one = cfg("a", 1)
    log = fit(make(one), small_task(), one, checkpoint_dir=tmp_path / "run")
    same_words = cfg("b", 1)
    assert numbers(
        fit(make(same_words), small_task(), same_words, checkpoint_dir=tmp_path / "run")
    ) == numbers(log)
    other = cfg("b", -1)
    with pytest.raises(ValueError, match="holds another run .word vectors"):
        fit(make(other), small_task(), other, checkpoint_dir=tmp_path / "run")


def test_other_initial_prompts_in_a_folder_of_the_same_name_are_refused(tmp_path):
    def cfg(folder, offset):
        state = planned_model.trained_state(make(config()))
        moved_state = {name: p.detach() + offset for name, p in state.items()}
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        save_tensors(tmp_path / folder / PROMPTS_FILE, moved_state, {})
        return config(init_from=str(tmp_path / folder))

    one = cfg("a/first", 0.01)
    log = fit(make(one), small_task(), one, checkpoint_dir=tmp_path / "run")
    moved = cfg("b/first", 0.01)
    assert numbers(
        fit(make(moved), small_task(), moved, checkpoint_dir=tmp_path / "run")
    ) == numbers(log)
    other = cfg("b/first", 0.02)
    with pytest.raises(ValueError, match="holds another run .initial prompts was '"):
        fit(make(other), small_task(), other, checkpoint_dir=tmp_path / "run")


def test_a_fingerprint_does_not_depend_on_paths_or_the_device(tmp_path):
    folders = [tmp_path / "x/tiny", tmp_path / "y/tiny"]
    for folder in folders:
        folder.mkdir(parents=True)
    task = small_task()
    m = make(config())
    splits = [task.encode(task.splits["train"], m.backbone.tokenizer)]
    x, y = map(str, folders)
    assert run_fingerprint(
        m, splits, config(data="a/b", cache_dir="c", backbone=x), 1.0
    ) == run_fingerprint(m, splits, config(data="d", device="auto", backbone=y), 1.0)
    assert run_fingerprint(m, splits, config(), 1.0, 2) != run_fingerprint(
        m, splits, config(), 1.0, 1
    ) and run_fingerprint(m, splits, config(), 1.0) == run_fingerprint(
        model_of("lpt-npg", backbone()), splits, config(), 1.0
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"no checkpoint",
        lambda b: b[:300] + bytes(200) + b[500:],
    ],
    ids=["cut", "empty", "text", "zeros"],
)
def test_two_damaged_checkpoints_are_refused(damage, tmp_path):
    fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path)
    for f in tmp_path.glob("checkpoint-*"):
        f.write_bytes(damage(f.read_bytes()))
    with pytest.raises(
        ValueError,
        match="checkpoint-4.safetensors is damaged: .*; .*checkpoint-2.* is damaged: .*"
        "Delete them to start this run again",
    ):
        fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path)


def test_a_checkpoint_without_read_permission_is_not_called_damaged(tmp_path, monkeypatch):
    fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path)

    def read_without_permission(file, step):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(tensor_files, "_read_snapshot", read_without_permission)
    with pytest.raises(
        ValueError, match="checkpoint-4.* cannot be used .Permission denied.*do not delete it"
    ) as e:
        fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path)
    assert "damaged" not in str(e.value)


def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path):
    tensor_files.write_snapshot(tmp_path, 3, {"fingerprint": {}, "progress": {}})
    with pytest.raises(ValueError, match="checkpoint-3.* of another kind of run, or of an older"):
        fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for f in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises((FileExistsError, NotADirectoryError), match="file"):
            Checkpoint(f, {}, 1)


def test_a_run_without_checkpoints_writes_none(tmp_path):
    fit(make(config()), small_task(), config(), checkpoint_dir=tmp_path, save_every=0)
    assert not [*tmp_path.glob("checkpoint-*")]
