"""RoBERTa's positions, which are counted from the padding id."""

import torch
from small_layers import backbone, make_batch


def test_roberta_position_ids_equal_the_librarys():
    bb = backbone("roberta", "sdpa")
    batch = make_batch(bb, (9, 4, 1))
    assert torch.equal(
        bb.position_ids(batch["attention_mask"]),
        bb.base.embeddings.create_position_ids_from_input_ids(batch["input_ids"], 1),
    )
    assert bb.position_ids(batch["attention_mask"])[1].tolist() == [
        2,
        3,
        4,
        5,
        1,
        1,
        1,
        1,
        1,
    ] and backbone("bert", "sdpa").position_ids(batch["attention_mask"])[1].tolist() == [*range(9)]
