"""Towers of multimodal models, small: names and shapes as transformers writes them. `H`: the width of the language model.

`+bias`: beside a weight there is a bias of its first dimension.
"""

from __future__ import annotations

from collections.abc import Iterator

TOWERS: dict[str, str] = {
    "kimi_k3": """
mm_projector.post_norm.weight H
mm_projector.proj.0.weight 384 384
mm_projector.proj.2.weight H 384
vision_tower.encoder.blocks.0.mlp.fc0.weight 160 96
vision_tower.encoder.blocks.0.mlp.fc1.weight 96 160
vision_tower.encoder.blocks.0.norm0.weight 96
vision_tower.encoder.blocks.0.norm1.weight 96
vision_tower.encoder.blocks.0.wo.weight 96 128
vision_tower.encoder.blocks.0.wqkv.weight 384 96
vision_tower.encoder.final_layernorm.weight 96
vision_tower.patch_embed.pos_emb.weight 64 64 96
vision_tower.patch_embed.proj.weight 96 3 14 14
""",
    "llama4": """
multi_modal_projector.linear_1.weight H 112
vision_model.class_embedding 96
vision_model.layernorm_post.weight 96 +bias
vision_model.layernorm_pre.weight 96 +bias
vision_model.model.layers.0.input_layernorm.weight 96 +bias
vision_model.model.layers.0.mlp.fc1.weight 384 96 +bias
vision_model.model.layers.0.mlp.fc2.weight 96 384 +bias
vision_model.model.layers.0.post_attention_layernorm.weight 96 +bias
vision_model.model.layers.0.self_attn.k_proj.weight 96 96 +bias
vision_model.model.layers.0.self_attn.o_proj.weight 96 96 +bias
vision_model.model.layers.0.self_attn.q_proj.weight 96 96 +bias
vision_model.model.layers.0.self_attn.v_proj.weight 96 96 +bias
vision_model.patch_embedding.linear.weight 96 588
vision_model.positional_embedding_vlm 5 96
vision_model.vision_adapter.mlp.fc1.weight 112 384
vision_model.vision_adapter.mlp.fc2.weight 112 112
""",
    "qwen3_vl_moe": """
model.visual.blocks.0.attn.proj.weight 96 96 +bias
model.visual.blocks.0.attn.qkv.weight 288 96 +bias
model.visual.blocks.0.mlp.linear_fc1.weight 160 96 +bias
model.visual.blocks.0.mlp.linear_fc2.weight 96 160 +bias
model.visual.blocks.0.norm1.weight 96 +bias
model.visual.blocks.0.norm2.weight 96 +bias
model.visual.deepstack_merger_list.0.linear_fc1.weight 384 384 +bias
model.visual.deepstack_merger_list.0.linear_fc2.weight H 384 +bias
model.visual.deepstack_merger_list.0.norm.weight 384 +bias
model.visual.merger.linear_fc1.weight 384 384 +bias
model.visual.merger.linear_fc2.weight H 384 +bias
model.visual.merger.norm.weight 96 +bias
model.visual.patch_embed.proj.weight 96 3 2 16 16 +bias
model.visual.pos_embed.weight 16 96
""",
    "glm4v_moe": """
model.visual.blocks.0.attn.proj.weight 96 96
model.visual.blocks.0.attn.qkv.weight 288 96
model.visual.blocks.0.mlp.down_proj.weight 96 H
model.visual.blocks.0.mlp.gate_proj.weight H 96
model.visual.blocks.0.mlp.up_proj.weight H 96
model.visual.blocks.0.norm1.weight 96
model.visual.blocks.0.norm2.weight 96
model.visual.downsample.weight H 96 2 2 +bias
model.visual.embeddings.position_embedding.weight 576 96
model.visual.merger.down_proj.weight H 160
model.visual.merger.gate_proj.weight 160 H
model.visual.merger.post_projection_norm.weight H +bias
model.visual.merger.proj.weight H H
model.visual.merger.up_proj.weight 160 H
model.visual.patch_embed.proj.weight 96 3 2 14 14 +bias
model.visual.post_conv_layernorm.weight 96
model.visual.post_layernorm.weight 96
""",
    "gemma4": """
model.embed_vision.embedding_projection.weight H 96
model.vision_tower.encoder.layers.0.input_layernorm.weight 96
model.vision_tower.encoder.layers.0.mlp.down_proj.linear.weight 96 160
model.vision_tower.encoder.layers.0.mlp.gate_proj.linear.weight 160 96
model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight 160 96
model.vision_tower.encoder.layers.0.post_attention_layernorm.weight 96
model.vision_tower.encoder.layers.0.post_feedforward_layernorm.weight 96
model.vision_tower.encoder.layers.0.pre_feedforward_layernorm.weight 96
model.vision_tower.encoder.layers.0.self_attn.k_norm.weight 48
model.vision_tower.encoder.layers.0.self_attn.k_proj.linear.weight 96 96
model.vision_tower.encoder.layers.0.self_attn.o_proj.linear.weight 96 96
model.vision_tower.encoder.layers.0.self_attn.q_norm.weight 48
model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight 96 96
model.vision_tower.encoder.layers.0.self_attn.v_proj.linear.weight 96 96
model.vision_tower.patch_embedder.input_proj.weight 96 768
model.vision_tower.patch_embedder.position_embedding_table 2 10240 96
""",
    "qwen3_omni_moe": """
thinker.audio_tower.conv2d1.weight 32 1 3 3 +bias
thinker.audio_tower.conv2d2.weight 32 32 3 3 +bias
thinker.audio_tower.conv2d3.weight 32 32 3 3 +bias
thinker.audio_tower.conv_out.weight 64 512
thinker.audio_tower.layers.0.fc1.weight 96 64 +bias
thinker.audio_tower.layers.0.fc2.weight 64 96 +bias
thinker.audio_tower.layers.0.final_layer_norm.weight 64 +bias
thinker.audio_tower.layers.0.self_attn.k_proj.weight 64 64 +bias
thinker.audio_tower.layers.0.self_attn.out_proj.weight 64 64 +bias
thinker.audio_tower.layers.0.self_attn.q_proj.weight 64 64 +bias
thinker.audio_tower.layers.0.self_attn.v_proj.weight 64 64 +bias
thinker.audio_tower.layers.0.self_attn_layer_norm.weight 64 +bias
thinker.audio_tower.ln_post.weight 64 +bias
thinker.audio_tower.proj1.weight 64 64 +bias
thinker.audio_tower.proj2.weight H 64 +bias
thinker.visual.blocks.0.attn.proj.weight 96 96 +bias
thinker.visual.blocks.0.attn.qkv.weight 288 96 +bias
thinker.visual.blocks.0.mlp.linear_fc1.weight 160 96 +bias
thinker.visual.blocks.0.mlp.linear_fc2.weight 96 160 +bias
thinker.visual.blocks.0.norm1.weight 96 +bias
thinker.visual.blocks.0.norm2.weight 96 +bias
thinker.visual.merger.ln_q.weight 96 +bias
thinker.visual.merger.mlp.0.weight 384 384 +bias
thinker.visual.merger.mlp.2.weight H 384 +bias
thinker.visual.merger_list.0.ln_q.weight 384 +bias
thinker.visual.merger_list.0.mlp.0.weight 384 384 +bias
thinker.visual.merger_list.0.mlp.2.weight H 384 +bias
thinker.visual.patch_embed.proj.weight 96 3 2 16 16 +bias
thinker.visual.pos_embed.weight 16 96
""",
    "minimax_m3": """
multi_modal_projector.linear_1.weight 6144 96 +bias
multi_modal_projector.linear_2.weight H 6144 +bias
patch_merge_mlp.linear_1.weight 6144 24576 +bias
patch_merge_mlp.linear_2.weight H 6144 +bias
vision_tower.vision_model.embeddings.patch_embedding.weight 96 3 2 14 14
vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight 160 96 +bias
vision_tower.vision_model.encoder.layers.0.mlp.fc2.weight 96 160 +bias
vision_tower.vision_model.encoder.layers.0.layer_norm1.weight 96 +bias
vision_tower.vision_model.encoder.layers.0.layer_norm2.weight 96 +bias
vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.weight 96 96 +bias
vision_tower.vision_model.encoder.layers.0.self_attn.out_proj.weight 96 96 +bias
vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight 96 96 +bias
vision_tower.vision_model.encoder.layers.0.self_attn.v_proj.weight 96 96 +bias
vision_tower.vision_model.pre_layrnorm.weight 96 +bias
""",
    "step3p7": """
vision_model.conv1.weight 96 3 14 14
vision_model.ln_pre.weight 96 +bias
vision_model.positional_embedding 2704 96
vision_model.transformer.resblocks.0.attn.in_proj_bias 288
vision_model.transformer.resblocks.0.attn.in_proj_weight 288 96
vision_model.transformer.resblocks.0.attn.out_proj.weight 96 96 +bias
vision_model.transformer.resblocks.0.ln_1.weight 96 +bias
vision_model.transformer.resblocks.0.ln_2.weight 96 +bias
vision_model.transformer.resblocks.0.ls_1.gamma 96
vision_model.transformer.resblocks.0.ls_2.gamma 96
vision_model.transformer.resblocks.0.mlp.c_fc.weight 560 96 +bias
vision_model.transformer.resblocks.0.mlp.c_proj.weight 96 560 +bias
vision_model.vit_downsampler1.weight 192 96 3 3 +bias
vision_model.vit_downsampler2.weight 384 192 3 3 +bias
vit_large_projector.weight H 384
""",
    "glm5_next": """
model.visual.blocks.0.attn.k_norm.weight 12
model.visual.blocks.0.attn.proj.weight 96 96 +bias
model.visual.blocks.0.attn.q_norm.weight 12
model.visual.blocks.0.attn.qkv.weight 288 96 +bias
model.visual.blocks.0.mlp.down_proj.weight 96 160 +bias
model.visual.blocks.0.mlp.gate_proj.weight 160 96 +bias
model.visual.blocks.0.mlp.up_proj.weight 160 96 +bias
model.visual.blocks.0.norm1.weight 96
model.visual.blocks.0.norm2.weight 96
model.visual.downsample.weight H 96 2 2 +bias
model.visual.merger.down_proj.weight H 10240
model.visual.merger.gate_proj.weight 10240 H
model.visual.merger.post_projection_norm.weight H +bias
model.visual.merger.proj.weight H H
model.visual.merger.up_proj.weight 10240 H
model.visual.patch_embed.proj.weight 96 3 2 14 14 +bias
model.visual.post_layernorm.weight 96
""",
    "qwen4_exp": """
model.visual.blocks.0.attn.proj.weight 96 96 +bias
model.visual.blocks.0.attn.qkv.weight 288 96 +bias
model.visual.blocks.0.mlp.linear_fc1.weight 160 96 +bias
model.visual.blocks.0.mlp.linear_fc2.weight 96 160 +bias
model.visual.blocks.0.norm1.weight 96 +bias
model.visual.blocks.0.norm2.weight 96 +bias
model.visual.merger.linear_fc1.weight 384 384 +bias
model.visual.merger.linear_fc2.weight H 384 +bias
model.visual.merger.norm.weight 96 +bias
model.visual.patch_embed.proj.weight 96 3 2 16 16 +bias
model.visual.pos_embed.weight 16 96
""",
}
"""Fixture -> its tower, a tensor a line."""


def tower_shapes(name: str, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes. hidden: the width of the language model."""
    for line in TOWERS[name].split("\n"):
        words = line.split()
        if not words:
            continue
        sizes = tuple(hidden if word == "H" else int(word) for word in words[1:] if word != "+bias")
        yield words[0], sizes
        if words[-1] == "+bias":
            yield f"{words[0].removesuffix('weight')}bias", sizes[:1]
