"""A small Llama in a GGUF file, quantised to 4 bits."""

import re

import torch
from transformers import LlamaConfig, LlamaForCausalLM

QUANTISED = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)
IN_GGUF = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def name_in_gguf(name):
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if layer:
        return f"blk.{layer[1]}.{IN_GGUF[layer[2]]}.weight"
    return f"{IN_GGUF[name.removeprefix('model.').removesuffix('.weight')]}.weight"


def permute_rotary(w, heads):
    # the two rows of a rotary pair are adjacent in a GGUF file and half a head apart in the library
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def write_gguf(file, pre_tokenizer="smollm"):
    """Write a small Llama in 4 bits; return the model with the weights after quantisation."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**QUANTISED)).eval()
    kind = GGMLQuantizationType.Q4_1
    c = model.config
    w = GGUFWriter(file, "llama")
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(1e4)
    w.add_vocab_size(c.vocab_size)
    letters = [
        "<s>",
        "</s>",
        *"abcdefghijklmnopqrstuvwxyz0123456789ĠABCDEFGHIJKLMNOPQRSTUVWX",
        "ab",
    ]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre_tokenizer)
    w.add_token_list(letters)
    w.add_token_types([3, 3] + [1] * 62)
    w.add_token_merges(["a b"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.data += torch.rand_like(p)
            w.add_tensor(name_in_gguf(name), p.detach().numpy())
            continue
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        codes = quants.quantize(p.detach().numpy(), kind)
        p.data = torch.tensor(quants.dequantize(codes, kind))
        rows = torch.tensor(codes)
        w.add_tensor(
            name_in_gguf(name),
            (permute_rotary(rows, heads) if heads else rows).numpy(),
            raw_dtype=kind,
        )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return model
