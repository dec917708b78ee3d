"""The context of a pass: inserted positions, what is tracked, and which batches are refused."""

import pytest
import torch
from small_layers import B, T, backbone, d, make_batch, same, static, t
from torch import nn

from idp_tutorial.core.context import INPUT, Context, splice
from idp_tutorial.core.loop import run_layers
from idp_tutorial.core.steps import Insert, Replace


@pytest.mark.parametrize("position", [[0, 0, 0], [1, 1, 1], [9, 9, 9], [0, 5, 9], [3, 1, 2]])
def test_splice_row_by_row(position):
    x = torch.randn(B, T, d)
    new = torch.randn(B, t, d)
    want = torch.stack([torch.cat([x[i, :a], new[i], x[i, a:]]) for i, a in enumerate(position)])
    assert torch.equal(splice(x, new, torch.tensor(position)), want)
    if len({*position}) == 1:
        assert torch.equal(splice(x, new, position[0]), want)
    ids = torch.randint(0, 9, (B, T))
    assert splice(ids, ids[:, :t], torch.tensor(position)).dtype == ids.dtype


def test_tracked_rows_after_several_inserts():
    bb = backbone("roberta")
    batch = make_batch(bb)
    plan = {
        INPUT: Insert(static(), 1),
        0: Insert(static(t=2)),
        1: Insert(static(t=3), lambda ctx: ctx.tracked_positions["last"]),
        2: Insert(static(t=1), lambda ctx: ctx.tracked_positions["mask"] + 1),
    }

    def follow(ctx):
        return {
            k: ctx.token_type_ids.gather(1, r[:, None])[:, 0].tolist()
            for k, r in ctx.tracked_positions.items()
        }

    batch["token_type_ids"] = (
        torch.arange(9).expand(B, -1).contiguous() * batch["attention_mask"]
    )  # a name for each row, carried along
    bb.base.embeddings.token_type_embeddings = nn.Embedding(9, d)
    ctx = run_layers(bb, batch, plan)
    assert follow(ctx) == dict(cls=[0] * B, last=[8, 4, 1], mask=[4, 2, 1])
    assert (
        ctx.h.shape[1] == 9 + 4 + 2 + 3 + 1
        and ctx.word_mask.sum(1).tolist() == [9, 5, 2]
        and ctx.attention_mask.sum(1).tolist() == [19, 15, 12]
    )
    assert ctx.tracked_positions["cls"].tolist() == [2] * B  # two rows of layer 0 are before it


def test_the_mean_state_excludes_prompts_and_padding():
    bb = backbone("bert")
    batch = make_batch(bb)
    seen = []

    def source(ctx):
        seen.append((ctx.mean_state(), ctx.h))
        return torch.full((B, t, d), 1e6)

    run_layers(bb, batch, {0: Insert(source, 1), 1: Replace(source)})
    mean, h = seen[1]  # rows 1 to 4 are the prompt
    same(
        mean,
        torch.stack(
            [torch.cat([h[i, :1], h[i, 5 : n + 4]]).mean(0) for i, n in enumerate((9, 5, 2))]
        ),
        1e-5,
    )
    assert mean.abs().max() < 1e3


def test_layer_kwargs_are_computed_again_only_for_another_sequence():
    bb = backbone("roberta")
    calls = []
    compute = bb.layer_kwargs_by_type
    bb.layer_kwargs_by_type = lambda *a: calls.append(a[2]) or compute(*a)
    ctx = Context.from_batch(bb, make_batch(bb))
    assert ctx.layer_kwargs() is ctx.layer_kwargs() and calls == [0]
    ctx.layer_kwargs(3)
    assert calls == [0, 3]
    ctx.insert(torch.zeros(B, t, d))
    ctx.layer_kwargs(3)
    assert calls == [0, 3, 3]
