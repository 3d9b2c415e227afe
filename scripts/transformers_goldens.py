"""Logits of small models by Hugging Face transformers, on the CPU in float32, for the golden numbers of
flashgla/model/tests/peer_logits_test.cpp: python3 transformers_goldens.py (needs torch and transformers; made with
transformers 5.x). Weights are a formula, so that the test has them without a file."""

import math

import torch
import transformers


def fill(parameters):
    """Parameter k in the test's order, element j: a hash of (j, k) in [0, 1), centred and scaled; norms around 1."""
    for k, (name, parameter) in enumerate(parameters):
        values = []
        for j in range(parameter.numel()):
            x = math.sin((j + 1) * 12.9898 + (k + 1) * 78.233) * 43758.5453
            values.append(x - math.floor(x) - 0.5)
        norm = "norm" in name or ".ln" in name or "pre_ln" in name
        scale, shift = (0.4, 1.0) if norm else (0.8, 0.0)
        with torch.no_grad():
            parameter.copy_(torch.tensor(values, dtype=torch.float64).reshape(parameter.shape) * scale + shift)


MIXERS = {
    "mamba": ("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight",
              "dt_proj.bias", "A_log", "D", "out_proj.weight", "out_proj.bias"),
    "mamba2": ("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight",
               "out_proj.weight", "out_proj.bias"),
}


def mamba_in_order(model):
    """The same of Mamba and Mamba-2."""
    named = dict(model.named_parameters())
    order = ["backbone.embeddings.weight"]
    for layer in range(model.config.num_hidden_layers):
        prefix = f"backbone.layers.{layer}."
        order.append(prefix + "norm.weight")
        order += [prefix + "mixer." + name for name in MIXERS[model.config.model_type]]
    order += ["backbone.norm_f.weight", "lm_head.weight"]
    order = [name for name in order if name in named]
    assert sorted(order) == sorted(named), set(named) ^ set(order)
    return [(name, named[name]) for name in order]


def rwkv_in_order(model):
    named = dict(model.named_parameters())
    mixes = [f"time_mix_{part}" for part in ("key", "value", "receptance")]
    order = ["rwkv.embeddings.weight", "rwkv.blocks.0.pre_ln.weight", "rwkv.blocks.0.pre_ln.bias"]
    for layer in range(model.config.num_hidden_layers):
        prefix = f"rwkv.blocks.{layer}."
        order += [prefix + "ln1.weight", prefix + "ln1.bias"]
        order += [prefix + "attention." + name for name in ["time_decay", "time_first"] + mixes]
        order += [prefix + f"attention.{name}.weight" for name in ("key", "value", "receptance", "output")]
        order += [prefix + "ln2.weight", prefix + "ln2.bias"]
        order += [prefix + "feed_forward." + name for name in (mixes[0], mixes[2])]
        order += [prefix + f"feed_forward.{name}.weight" for name in ("key", "receptance", "value")]
    order += ["rwkv.ln_out.weight", "rwkv.ln_out.bias", "head.weight"]
    order = [name for name in order if name in named]
    assert sorted(order) == sorted(named), set(named) ^ set(order)
    return [(name, named[name]) for name in order]


def in_order(model):
    """HF's parameters in the order in which flashgla visits them."""
    if model.config.model_type == "rwkv":
        return rwkv_in_order(model)
    if model.config.model_type in MIXERS:
        return mamba_in_order(model)
    named = dict(model.named_parameters())
    layers = model.config.num_hidden_layers
    order = ["model.embed_tokens.weight"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        order.append(prefix + "input_layernorm.weight")
        order += [prefix + f"self_attn.{p}_proj.weight" for p in "qkv"]
        order += [prefix + f"self_attn.{p}_proj.bias" for p in "qkv"]
        order += [prefix + "self_attn.o_proj.weight", prefix + "self_attn.o_proj.bias"]
        order.append(prefix + "post_attention_layernorm.weight")
        order += [prefix + f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    order += ["model.norm.weight", "lm_head.weight"]
    order = [name for name in order if name in named]
    assert sorted(order) == sorted(named), set(named) ^ set(order)
    return [(name, named[name]) for name in order]


def show(name, model, tokens):
    fill(in_order(model))
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    print(name)
    for t in (0, len(tokens) // 2, len(tokens) - 1):
        print(f"  {{{t}, {{" + ", ".join(f"{x:.8g}" for x in logits[t, :6].tolist()) + "}},")


COMMON = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 29,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
TOKENS = [3, 14, 15, 9, 26, 5, 0, 28, 8, 17, 9, 3, 2, 3, 8, 4]


def main():
    print(transformers.__version__, torch.__version__)
    show("llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, attention_bias=True)), TOKENS)
    show("mistral", transformers.MistralForCausalLM(
        transformers.MistralConfig(**COMMON, sliding_window=5, head_dim=8)), TOKENS)
    mamba2 = {"vocab_size": 29, "hidden_size": 24, "num_hidden_layers": 2, "head_dim": 8, "num_heads": 6,
              "state_size": 10, "chunk_size": 8, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    show("mamba2", transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**mamba2, n_groups=1)), TOKENS)
    show("mamba2, groups and biases", transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(**mamba2, n_groups=2, use_bias=True)), TOKENS)
    mamba = {"vocab_size": 29, "hidden_size": 24, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 2,
             "pad_token_id": 1}
    show("mamba", transformers.MambaForCausalLM(transformers.MambaConfig(
        **mamba, state_size=16, tie_word_embeddings=False)), TOKENS)
    show("mamba, biases, tied", transformers.MambaForCausalLM(transformers.MambaConfig(
        **mamba, state_size=5, time_step_rank=3, use_bias=True, tie_word_embeddings=True)), TOKENS)
    rwkv = {"vocab_size": 29, "hidden_size": 24, "bos_token_id": 0, "eos_token_id": 2}
    show("rwkv", transformers.RwkvForCausalLM(transformers.RwkvConfig(**rwkv, num_hidden_layers=2)), TOKENS)
    show("rwkv, rescaled, other widths", transformers.RwkvForCausalLM(transformers.RwkvConfig(
        **rwkv, num_hidden_layers=3, rescale_every=2, attention_hidden_size=20, intermediate_size=40)), TOKENS)


main()
