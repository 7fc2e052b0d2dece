"""Names and shapes of a checkpoint's tensors, from the spec alone, in HF's DeepseekV3 layout.

Pure. Loading, checking and writing checkpoints all use this one list.
"""

from __future__ import annotations

from mooncake.base import ModelSpec

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(spec: ModelSpec, *, one_expert: bool = False, with_mtp: bool = False) -> Shapes:
    """Return every tensor of a model of this shape, in the order of a forward pass.

    Linear weights are [out, in]; experts are one tensor each. `lm_head.weight` is left out when the
    embeddings are tied.

    one_expert: the first routed expert of each layer stands for all. with_mtp: also return the
    tensors of its first MTP layer.
    """
    shapes: Shapes = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        dense = layer < spec.first_k_dense_replace
        shapes |= _layer(spec, prefix, dense=dense, one_expert=one_expert)
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    if with_mtp:
        shapes |= mtp_shapes(spec, 0, one_expert=one_expert)
    return shapes


def mtp_shapes(
    spec: ModelSpec, number: int, *, with_copies: bool = False, one_expert: bool = False
) -> Shapes:
    """Return the tensors of MTP layer `number`, which comes after the model's layers (DeepSeek-V3).

    with_copies: also return what a checkpoint repeats there: the model's embedding and head.
    """
    hidden, prefix = spec.hidden_size, f"model.layers.{spec.num_hidden_layers + number}."
    shapes: Shapes = {prefix + f"{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
    shapes[prefix + "eh_proj.weight"] = (hidden, 2 * hidden)
    shapes |= _layer(spec, prefix, dense=False, one_expert=one_expert)
    shapes[prefix + "shared_head.norm.weight"] = (hidden,)
    if with_copies:
        for name in ("embed_tokens", "shared_head.head"):
            shapes[prefix + f"{name}.weight"] = (spec.vocab_size, hidden)
    return shapes


def _layer(spec: ModelSpec, prefix: str, *, dense: bool, one_expert: bool) -> Shapes:
    shapes: Shapes = {prefix + "input_layernorm.weight": (spec.hidden_size,)}
    shapes |= _attention(spec, prefix + "self_attn.")
    shapes[prefix + "post_attention_layernorm.weight"] = (spec.hidden_size,)
    if dense:
        return shapes | _mlp(spec.hidden_size, spec.intermediate_size, prefix + "mlp.")
    return shapes | _moe(spec, prefix + "mlp.", 1 if one_expert else spec.n_routed_experts)


def _attention(spec: ModelSpec, prefix: str) -> Shapes:
    heads = spec.num_attention_heads
    shapes: Shapes = {}
    biased = {}
    if spec.q_lora_rank is None:
        shapes["q_proj.weight"] = (heads * spec.qk_head_dim, spec.hidden_size)
    else:
        shapes["q_a_proj.weight"] = (spec.q_lora_rank, spec.hidden_size)
        shapes["q_a_layernorm.weight"] = (spec.q_lora_rank,)
        shapes["q_b_proj.weight"] = (heads * spec.qk_head_dim, spec.q_lora_rank)
        biased["q_a_proj.bias"] = (spec.q_lora_rank,)
    shapes["kv_a_proj_with_mqa.weight"] = (spec.kv_width, spec.hidden_size)
    shapes["kv_a_layernorm.weight"] = (spec.kv_lora_rank,)
    expanded = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    shapes["kv_b_proj.weight"] = (expanded, spec.kv_lora_rank)
    shapes["o_proj.weight"] = (spec.hidden_size, heads * spec.v_head_dim)
    biased["kv_a_proj_with_mqa.bias"] = (spec.kv_width,)
    biased["o_proj.bias"] = (spec.hidden_size,)
    if spec.attention_bias:
        shapes |= biased
    return {prefix + name: shape for name, shape in shapes.items()}


def _mlp(hidden: int, inner: int, prefix: str) -> Shapes:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def _moe(spec: ModelSpec, prefix: str, num_experts: int) -> Shapes:
    hidden, inner = spec.hidden_size, spec.moe_intermediate_size
    shapes: Shapes = {
        prefix + "gate.weight": (spec.n_routed_experts, hidden),
        prefix + "gate.e_score_correction_bias": (spec.n_routed_experts,),
    }
    for expert in range(num_experts):
        shapes |= _mlp(hidden, inner, f"{prefix}experts.{expert}.")
    if spec.n_shared_experts:
        shapes |= _mlp(hidden, inner * spec.n_shared_experts, prefix + "shared_experts.")
    return shapes
