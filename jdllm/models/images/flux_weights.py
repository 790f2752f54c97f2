"""The weight table of a FLUX.1 transformer."""

from __future__ import annotations

from jdllm.models.images.flux_config import FluxConfig

_WEIGHTS = """
time_text_embed.timestep_embedder.linear_1.weight     timestep_embedder.linear_1.weight
time_text_embed.timestep_embedder.linear_1.bias       timestep_embedder.linear_1.bias
time_text_embed.timestep_embedder.linear_2.weight     timestep_embedder.linear_2.weight
time_text_embed.timestep_embedder.linear_2.bias       timestep_embedder.linear_2.bias
time_text_embed.text_embedder.linear_1.weight         pooled_1.weight
time_text_embed.text_embedder.linear_1.bias           pooled_1.bias
time_text_embed.text_embedder.linear_2.weight         pooled_2.weight
time_text_embed.text_embedder.linear_2.bias           pooled_2.bias
context_embedder.weight                               context_embedder.weight
context_embedder.bias                                 context_embedder.bias
x_embedder.weight                                     x_embedder.weight
x_embedder.bias                                       x_embedder.bias
norm_out.linear.weight                                final_modulation.weight
norm_out.linear.bias                                  final_modulation.bias
proj_out.weight                                       proj_out.weight
proj_out.bias                                         proj_out.bias
transformer_blocks.{i}.attn.to_q.weight               double_blocks.{i}.image.qkv.weight[0/3]
transformer_blocks.{i}.attn.to_q.bias                 double_blocks.{i}.image.qkv.bias[0/3]
transformer_blocks.{i}.attn.to_k.weight               double_blocks.{i}.image.qkv.weight[1/3]
transformer_blocks.{i}.attn.to_k.bias                 double_blocks.{i}.image.qkv.bias[1/3]
transformer_blocks.{i}.attn.to_v.weight               double_blocks.{i}.image.qkv.weight[2/3]
transformer_blocks.{i}.attn.to_v.bias                 double_blocks.{i}.image.qkv.bias[2/3]
transformer_blocks.{i}.attn.norm_q.weight             double_blocks.{i}.image.heads.norm_q.weight
transformer_blocks.{i}.attn.norm_k.weight             double_blocks.{i}.image.heads.norm_k.weight
transformer_blocks.{i}.attn.to_out.0.weight           double_blocks.{i}.image.out.weight
transformer_blocks.{i}.attn.to_out.0.bias             double_blocks.{i}.image.out.bias
transformer_blocks.{i}.ff.net.0.proj.weight           double_blocks.{i}.image.mlp_in.weight
transformer_blocks.{i}.ff.net.0.proj.bias             double_blocks.{i}.image.mlp_in.bias
transformer_blocks.{i}.ff.net.2.weight                double_blocks.{i}.image.mlp_out.weight
transformer_blocks.{i}.ff.net.2.bias                  double_blocks.{i}.image.mlp_out.bias
transformer_blocks.{i}.attn.add_q_proj.weight         double_blocks.{i}.text.qkv.weight[0/3]
transformer_blocks.{i}.attn.add_q_proj.bias           double_blocks.{i}.text.qkv.bias[0/3]
transformer_blocks.{i}.attn.add_k_proj.weight         double_blocks.{i}.text.qkv.weight[1/3]
transformer_blocks.{i}.attn.add_k_proj.bias           double_blocks.{i}.text.qkv.bias[1/3]
transformer_blocks.{i}.attn.add_v_proj.weight         double_blocks.{i}.text.qkv.weight[2/3]
transformer_blocks.{i}.attn.add_v_proj.bias           double_blocks.{i}.text.qkv.bias[2/3]
transformer_blocks.{i}.attn.norm_added_q.weight       double_blocks.{i}.text.heads.norm_q.weight
transformer_blocks.{i}.attn.norm_added_k.weight       double_blocks.{i}.text.heads.norm_k.weight
transformer_blocks.{i}.attn.to_add_out.weight         double_blocks.{i}.text.out.weight
transformer_blocks.{i}.attn.to_add_out.bias           double_blocks.{i}.text.out.bias
transformer_blocks.{i}.ff_context.net.0.proj.weight   double_blocks.{i}.text.mlp_in.weight
transformer_blocks.{i}.ff_context.net.0.proj.bias     double_blocks.{i}.text.mlp_in.bias
transformer_blocks.{i}.ff_context.net.2.weight        double_blocks.{i}.text.mlp_out.weight
transformer_blocks.{i}.ff_context.net.2.bias          double_blocks.{i}.text.mlp_out.bias
single_transformer_blocks.{i}.attn.to_q.weight        single_blocks.{i}.qkv_mlp.weight[0/7]
single_transformer_blocks.{i}.attn.to_q.bias          single_blocks.{i}.qkv_mlp.bias[0/7]
single_transformer_blocks.{i}.attn.to_k.weight        single_blocks.{i}.qkv_mlp.weight[1/7]
single_transformer_blocks.{i}.attn.to_k.bias          single_blocks.{i}.qkv_mlp.bias[1/7]
single_transformer_blocks.{i}.attn.to_v.weight        single_blocks.{i}.qkv_mlp.weight[2/7]
single_transformer_blocks.{i}.attn.to_v.bias          single_blocks.{i}.qkv_mlp.bias[2/7]
single_transformer_blocks.{i}.proj_mlp.weight         single_blocks.{i}.qkv_mlp.weight[3:7/7]
single_transformer_blocks.{i}.proj_mlp.bias           single_blocks.{i}.qkv_mlp.bias[3:7/7]
single_transformer_blocks.{i}.attn.norm_q.weight      single_blocks.{i}.heads.norm_q.weight
single_transformer_blocks.{i}.attn.norm_k.weight      single_blocks.{i}.heads.norm_k.weight
single_transformer_blocks.{i}.proj_out.weight         single_blocks.{i}.out.weight
single_transformer_blocks.{i}.proj_out.bias           single_blocks.{i}.out.bias
"""
_GUIDANCE = """
time_text_embed.guidance_embedder.linear_1.weight     guidance_embedder.linear_1.weight
time_text_embed.guidance_embedder.linear_1.bias       guidance_embedder.linear_1.bias
time_text_embed.guidance_embedder.linear_2.weight     guidance_embedder.linear_2.weight
time_text_embed.guidance_embedder.linear_2.bias       guidance_embedder.linear_2.bias
"""


def weights(config: FluxConfig) -> str:
    """Returns the table of a transformer of these sizes (see `component`)."""
    double, single = config.num_layers, config.num_single_layers
    modulations = (
        ("transformer_blocks.{}.norm1.linear", "image_modulation", double),
        ("transformer_blocks.{}.norm1_context.linear", "text_modulation", double),
        ("single_transformer_blocks.{}.norm.linear", "single_modulation", single),
    )
    rows = [
        f"{tensor.format(i)}.{name}  {parameter}.{name}[{i}/{count}]"
        for tensor, parameter, count in modulations
        for i in range(count)
        for name in ("weight", "bias")
    ]
    return "\n".join([_WEIGHTS, _GUIDANCE if config.guidance_embeds else "", *rows])
