"""Rows of weight tables for families whose checkpoints have Llama's names (Qwen2's, Qwen3's, ...).

A family's table is the sum of the texts that it needs; `table` says what a row is.
"""

from __future__ import annotations

# Embedding, norms, LM head, and the projections of attention.
STACK = """
    model.embed_tokens.weight                 word_embeddings
    model.norm.weight                         norm.weight
    lm_head.weight                            lm_head
    {layer}.input_layernorm.weight            {layer}.input_layernorm.weight
    {layer}.self_attn.q_proj.weight           {layer}.attention.w_qkv[q]
    {layer}.self_attn.k_proj.weight           {layer}.attention.w_qkv[k]
    {layer}.self_attn.v_proj.weight           {layer}.attention.w_qkv[v]
    {layer}.self_attn.o_proj.weight           {layer}.attention.w_out
    {layer}.post_attention_layernorm.weight   {layer}.post_attention_layernorm.weight
"""

# Biases of q, k and v, as Qwen2 has them.
QKV_BIASES = """
    {layer}.self_attn.q_proj.bias             {layer}.attention.b_qkv[q]
    {layer}.self_attn.k_proj.bias             {layer}.attention.b_qkv[k]
    {layer}.self_attn.v_proj.bias             {layer}.attention.b_qkv[v]
"""

# Norms of each head of q and k.
QK_NORMS = """
    {layer}.self_attn.q_norm.weight           {layer}.attention.query_layernorm.weight
    {layer}.self_attn.k_norm.weight           {layer}.attention.key_layernorm.weight
"""

DENSE = """
    {layer}.mlp.gate_proj.weight              {layer}.mlp.w_gate_up[gate]
    {layer}.mlp.up_proj.weight                {layer}.mlp.w_gate_up[up]
    {layer}.mlp.down_proj.weight              {layer}.mlp.w_down
"""

# A router without a bias, and experts that are split.
EXPERTS = """
    {layer}.mlp.gate.weight                       {layer}.mlp.router.weight[transposed]
    {layer}.mlp.experts.{expert}.gate_proj.weight {layer}.mlp.experts.w_gate_up[{expert},moe_gate]
    {layer}.mlp.experts.{expert}.up_proj.weight   {layer}.mlp.experts.w_gate_up[{expert},moe_up]
    {layer}.mlp.experts.{expert}.down_proj.weight {layer}.mlp.experts.w_down[{expert}]
"""
