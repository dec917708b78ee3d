import sys

import pytest
import torch
from small import backbone

from results.speed.share import BACKWARD, LAYERS, START, measure, name_part


def test_the_innermost_listed_call_names_the_part():
    parts = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: parts.append(name_part(sys._getframe())))
    x.sum().backward()
    assert parts == [BACKWARD]
    assert name_part(sys._getframe()) == "other"


def test_a_layer_of_a_backbone_is_frozen_work():
    bb = backbone()
    parts = []
    for layer in bb.model.roberta.encoder.layer:
        layer.register_forward_hook(lambda *_: parts.append(name_part(sys._getframe())))
    ids = torch.ones(1, 4, dtype=torch.long)
    bb.model(input_ids=ids, attention_mask=ids)
    assert parts == [LAYERS] * len(bb.model.roberta.encoder.layer)


def test_a_command_is_watched_until_its_end(tmp_path):
    measured = measure(["params", "--published"], tmp_path)
    assert 0 <= measured["frozen"] < 1 and measured["parts"][START] > 0
    assert measured["seconds"] == pytest.approx(sum(measured["parts"].values()), abs=0.1)


def test_a_command_that_fails_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="no-such-command"):
        measure(["no-such-command"], tmp_path)
