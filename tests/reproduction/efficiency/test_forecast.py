"""Estimates of the time and memory of a training run."""

import torch
from small import config, small_task

from idp_tutorial.reproduction.efficiency import forecast


def test_efl_trains_on_two_descriptions_and_evaluates_all(small_folder, monkeypatch):
    monkeypatch.setattr(forecast, "_time_forward_pass", lambda *a: 1.0)
    task = small_task("questions")  # of six labels

    def estimate(method):
        cfg = config(method=method, backbone=str(small_folder), steps=4, eval_every=2, batch_size=4)
        e = forecast.estimate_training(cfg, task)
        return e["ms_per_step"], e["seconds"] - 4 * e[
            "ms_per_step"
        ] / 1000  # a step; the evaluations

    (step, evaluation), (plain_step, plain_evaluation) = estimate("efl"), estimate("fine-tuning")
    assert 0.9 < step / (2 * plain_step) < 1.1 and 0.9 < evaluation / (6 * plain_evaluation) < 1.1


def test_steps_use_autocast_and_evaluations_do_not(small_folder, monkeypatch):
    monkeypatch.setattr(
        forecast, "_time_forward_pass", lambda *a: 1.0 if torch.is_autocast_enabled("cpu") else 2.0
    )
    task = small_task("questions")

    def estimate(precision):
        cfg = config(
            backbone=str(small_folder), steps=4, eval_every=2, batch_size=4, precision=precision
        )
        e = forecast.estimate_training(cfg, task)
        return e["ms_per_step"], e["seconds"] - 4 * e["ms_per_step"] / 1000, e["memory_mb"]

    step, evaluation, memory = estimate("bf16")
    plain_step, plain_evaluation, plain_memory = estimate("no")
    assert step == plain_step / 2 and abs(evaluation - plain_evaluation) < 1e-6
    assert memory != plain_memory  # saved tensors have half the bytes, but attention is not fused
