"""The table of defects: what each is, what it does when served, how it is mended, who reported it. One more is one more row.

docs/inspect.md is written from it, and a test holds the two together.
"""

from __future__ import annotations

from assay_quantize.inspection import cache_checks as cache
from assay_quantize.inspection import claim_checks as claims
from assay_quantize.inspection import file_checks as files
from assay_quantize.inspection import layer_checks as layers
from assay_quantize.inspection import source_checks as base
from assay_quantize.inspection import structure_checks as structure
from assay_quantize.inspection import value_checks as values
from assay_quantize.inspection.defect import Defect
from assay_quantize.inspection.subject import Subject

VLLM = "https://github.com/vllm-project/vllm"

DEFECTS: tuple[Defect[Subject], ...] = (
    # ---------------------------------------------------------------------------------------- files, shards, index
    Defect(
        "shard_unreadable", "fails", "header and length of every shard",
        "vLLM ends while it loads", "base", "download or upload the shard again",
        "https://github.com/huggingface/safetensors#format", files.shard_unreadable,
    ),
    Defect(
        "index_unreadable", "fails", "the index is JSON and names files beside it",
        "vLLM ends while it loads", "text", "write the index again from the headers of the shards",
        "https://github.com/huggingface/safetensors#format", files.index_unreadable,
    ),
    Defect(
        "shard_missing", "fails", "every file that the index names is there",
        "vLLM 0.32 refuses it; earlier versions served it with parameters that were never set", "base",
        "upload the shard, or take an index that belongs to these shards", f"{VLLM}/issues/34859", files.shard_missing,
    ),
    Defect(
        "indexed_tensor_missing", "wrong", "every tensor that the index names is in the shard that it names",
        "of a quantized checkpoint vLLM checks no completeness: the parameter keeps whatever memory held", "base",
        "add the tensor from the base, or take it out of the index if another shard has it",
        "https://github.com/huggingface/huggingface_hub/pull/4728", files.indexed_tensor_missing,
    ),
    Defect(
        "unindexed_tensor", "risk", "every tensor of a shard is in the index",
        "vLLM's default loader takes it all the same; loaders that go by the index do not", "text",
        "add it to the index", f"{VLLM}/pull/54230", files.unindexed_tensor,
    ),
    Defect(
        "tensor_twice", "wrong", "no tensor is in two shards",
        "vLLM's default loader reads both copies and keeps the last; others refuse the checkpoint", "tensors",
        "write the shard without the copy that the index does not mean", f"{VLLM}/pull/54230", files.tensor_twice,
    ),
    Defect(
        "shard_not_in_index", "wrong", "every shard with tensors of its own is in the index",
        "vLLM never reads the file; drafts of an MTP block in it are noise", "text", "add its tensors to the index",
        "https://github.com/osaurus-ai/vmlx-swift/pull/388", files.shard_not_in_index,
    ),
    Defect(
        "extra_weights", "risk", "no weights lie beside the shards",
        "vLLM's default loader leaves it alone; streaming loaders read both, and every download is larger", "text",
        "delete the file, or move it to a repository of its own", f"{VLLM}/issues/40765", files.extra_weights,
    ),
    Defect(
        "total_size", "risk", "`total_size` of the index is what the shards hold, to 1 %",
        "vLLM does not read it; tools that plan memory by it are wrong, and the index may be that of another checkpoint",
        "text",
        "write the index again from the headers of the shards", "https://github.com/ml-explore/mlx-swift-lm/issues/554",
        files.total_size,
    ),
    Defect(
        "total_size_off", "note", "`total_size` of the index is what the shards hold, to the byte",
        "nothing", "text", "correct the number", "https://github.com/ml-explore/mlx-swift-lm/issues/554", files.total_size_off,
    ),
    Defect(
        "index_absent", "risk", "several shards have an index",
        "vLLM reads every *.safetensors file; transformers refuses the folder", "text",
        "write the index from the headers of the shards", "https://huggingface.co/docs/transformers/big_models",
        files.index_absent,
    ),
    Defect(
        "file_unreadable", "fails", "small JSON files are JSON",
        "vLLM or the tokenizer ends while it starts", "base", "take the file from the base",
        "https://huggingface.co/docs/transformers/main_classes/configuration", files.file_unreadable,
    ),
    # ---------------------------------------------------------------------------------------- shapes against config.json
    Defect(
        "router_rows", "fails", "routers and their biases have a row for every expert",
        "vLLM refuses the shape, or tokens are sent to experts that are not there", "tensors",
        "prune router and bias with the experts, or correct the number in config.json",
        "https://github.com/vllm-project/llm-compressor/pull/2864", structure.router_rows,
    ),
    Defect(
        "vocabulary_rows", "fails", "embedding and output head have vocab_size rows",
        "vLLM's loader asserts that they have", "text", "set vocab_size to the rows that are stored",
        f"{VLLM}/blob/main/vllm/model_executor/layers/vocab_parallel_embedding.py", structure.vocabulary_rows,
    ),
    Defect(
        "width_unlike_config", "fails", "widths of routers, embeddings and MLPs are those of config.json",
        "vLLM refuses the shape", "text", "correct the number in config.json, or take the base's",
        f"{VLLM}/blob/main/vllm/model_executor/parameter.py", structure.width_unlike_config,
    ),
    Defect(
        "dense_layers", "fails", "layers with experts begin at first_k_dense_replace",
        "vLLM ends with a KeyError while it loads", "text", "correct first_k_dense_replace",
        "https://huggingface.co/docs/transformers/model_doc/deepseek_v3", structure.dense_layers,
    ),
    Defect(
        "layers_missing", "wrong", "every layer up to num_hidden_layers has tensors",
        "of a quantized checkpoint vLLM checks no completeness: the layer computes noise", "base",
        "add the layers from the base, or correct num_hidden_layers", f"{VLLM}/issues/34859", structure.layers_missing,
    ),
    Defect(
        "experts_missing", "wrong", "every layer has every expert whole, and none beyond their number",
        "of a quantized checkpoint vLLM checks no completeness: tokens that are sent to the expert get noise", "base",
        "add the experts from the base, or correct their number in config.json",
        "https://github.com/vllm-project/llm-compressor/issues/2060", structure.experts_missing,
    ),
    Defect(
        "expert_shapes_differ", "fails", "experts of a layer have one shape", "vLLM refuses the shape", "base",
        "take the experts from the base", f"{VLLM}/blob/main/vllm/model_executor/layers/fused_moe/layer.py",
        structure.expert_shapes_differ,
    ),
    Defect(
        "tensors_missing", "wrong", "layers of one kind have the same names; embedding, last norm and head are there",
        "of a quantized checkpoint vLLM checks no completeness: the parameter keeps whatever memory held", "base",
        "add the tensors from the base", f"{VLLM}/pull/57108", structure.tensors_missing,
    ),
    Defect(
        "older_names", "risk", "tensors have the names of the base",
        "vLLM 0.32 renames them while it loads; other engines look for names that are not there", "tensors",
        "rename the tensors as the base has them", "https://github.com/sgl-project/sglang/pull/18370", structure.older_names,
    ),
    Defect(
        "unknown_tensor", "risk", "every name is one of the family's",
        "vLLM skips it, or ends with a KeyError", "tensors", "take the tensor out, or rename it as the base has it",
        f"{VLLM}/issues/52111", structure.unknown_tensor,
    ),
    Defect(
        "tied_head_stored", "risk", "a head that config.json ties to the embedding is not stored, or is the same",
        "vLLM 0.32 and transformers 5 serve the stored head; older loaders skip it and multiply by the embedding", "text",
        "set tie_word_embeddings to false, or delete the head if it was trained tied",
        "https://github.com/Blaizzy/mlx-vlm/issues/459", structure.tied_head_stored,
    ),
    Defect(
        "dtype_disagrees", "risk", "some plain weight is stored in the dtype of config.json",
        "vLLM casts every plain weight to the dtype of config.json; from BF16 to FP16 large values become infinite", "text",
        "set dtype to what is stored", "https://docs.vllm.ai/en/latest/serving/engine_args/", structure.dtype_disagrees,
    ),
    # ---------------------------------------------------------------------------------------- MTP
    Defect(
        "mtp_absent", "wrong", "an MTP block that config.json declares is stored",
        "with speculation vLLM refuses it or drafts noise at 0 % acceptance; without, nothing", "base",
        "copy the block from the base, or declare 0 MTP layers", "https://github.com/NVIDIA/Model-Optimizer/issues/750",
        structure.mtp_absent,
    ),
    Defect(
        "mtp_undeclared", "fails", "an MTP block that is stored is declared",
        "vLLM refuses to draft, and of inlined layers ends with a KeyError", "text", "declare the number of MTP layers",
        "https://github.com/local-inference-lab/vllm/pull/436", structure.mtp_undeclared,
    ),
    Defect(
        "mtp_experts_missing", "wrong", "the MTP block has every expert whole",
        "vLLM loads the block without a word and drafts noise", "base", "copy the experts from the base",
        f"{VLLM}/pull/41994", structure.mtp_experts_missing,
    ),
    Defect(
        "mtp_incomplete", "wrong", "the MTP block has every tensor that it needs, and no more layers than declared",
        "vLLM loads the block without a word and drafts noise", "base", "copy the block from the base",
        "https://github.com/vllm-project/llm-compressor/issues/1630", structure.mtp_incomplete,
    ),
    # ---------------------------------------------------------------------------------------- the claim and what is stored
    Defect(
        "method_not_served", "fails", "the claimed method is one that vLLM has",
        "vLLM ends before it loads: Unknown quantization method; without a name it takes codes for plain weights", "requantize",
        "serve it with the engine that it was made for, or quantize the base with a method that vLLM has",
        f"{VLLM}/issues/16713", claims.method_not_served,
    ),
    Defect(
        "claim_refused", "fails", "vLLM takes the numbers of the claim: bits, symmetry, order of columns, packing, algorithm",
        "vLLM ends while it reads the claim, or finds no tensor of its layout", "requantize",
        "quantize the base anew, with what vLLM takes; an older vLLM may still serve it",
        f"{VLLM}/pull/54809", claims.claim_refused,
    ),
    Defect(
        "stacked_scales_unread", "fails", "scales of experts that are one tensor have names and shapes that vLLM reads",
        "vLLM ends while it loads: it has no parameter of that name; before 0.32 the scales were passed over", "tensors",
        "store the experts one by one: experts.0.gate_proj.weight, .weight_scale and so on", f"{VLLM}/issues/49638",
        claims.stacked_scales_unread,
    ),
    Defect(
        "scaled_activation", "fails", "no activation function has scales",
        "vLLM ends with a KeyError while it loads", "requantize",
        "quantize anew with a mapping that scales no activation function", f"{VLLM}/issues/18718", claims.scaled_activation,
    ),
    Defect(
        "stored_not_declared", "fails", "a checkpoint with quantized weights says so",
        "vLLM takes codes for plain weights: a KeyError, or noise", "text", "write quantization_config into config.json",
        f"{VLLM}/issues/53950", layers.stored_not_declared,
    ),
    Defect(
        "declared_not_stored", "fails", "a checkpoint that claims quantization has quantized weights",
        "vLLM looks for codes and scales that are not there", "text", "delete quantization_config from config.json",
        f"{VLLM}/issues/28274", layers.declared_not_stored,
    ),
    Defect(
        "pattern_invalid", "fails", "patterns of the claim are regular expressions", "vLLM ends while it builds the model",
        "text",
        "correct the pattern", "https://github.com/vllm-project/llm-compressor/issues/1428", layers.pattern_invalid,
    ),
    Defect(
        "plain_not_listed", "fails", "every plain linear is left out by the claim, in names that vLLM has",
        "vLLM builds the module quantized: a KeyError, or an assertion about shapes", "text",
        "add the module to the list, by the name that vLLM gives it", "https://github.com/NVIDIA/Model-Optimizer/pull/1858",
        layers.plain_not_listed,
    ),
    Defect(
        "mtp_plain_not_listed", "fails", "the same inside the MTP block",
        "the server starts without speculation and ends with it; for `mtp.fc` of ModelOpt vLLM 0.32 makes an exception", "text",
        "add the whole block to the list", f"{VLLM}/pull/38832", layers.mtp_plain_not_listed,
    ),
    Defect(
        "listed_but_packed", "fails", "no quantized weight is left out by the claim",
        "vLLM builds the module plain and finds no parameter for its scales", "text",
        "take the module out of the list; where vLLM cannot hold it quantized, take the plain weight from the base",
        f"{VLLM}/issues/44081", layers.listed_but_packed,
    ),
    Defect(
        "fused_partly_listed", "fails", "the claim treats members of a fused module alike", "vLLM refuses to start", "text",
        "list all members or none, as they are stored", "https://github.com/sgl-project/sglang/pull/38443",
        layers.fused_partly_listed,
    ),
    Defect(
        "fused_members_differ", "fails", "weights that vLLM fuses are stored in one form",
        "vLLM refuses to start, or ends with a KeyError", "requantize", "store all members in one form",
        "https://github.com/intel/auto-round/issues/586", layers.fused_members_differ,
    ),
    Defect(
        "other_form", "fails", "codes are stored in the form that the claim says",
        "vLLM looks for tensors of another form", "text", "correct the claim", f"{VLLM}/issues/55496", layers.other_form,
    ),
    Defect(
        "quantized_layers_absent", "fails", "ModelOpt's MIXED_PRECISION has an algorithm for each layer",
        "vLLM refuses to start: MIXED_PRECISION needs a non-empty quantized_layers", "text",
        "write quantized_layers into config.json, from hf_quant_config.json or from what is stored",
        f"{VLLM}/blob/main/vllm/model_executor/layers/quantization/modelopt.py", layers.quantized_layers_absent,
    ),
    Defect(
        "layer_without_tensor", "risk", "every entry of quantized_layers names a module that is stored",
        "vLLM passes the entry over; the module that it was meant for is built plain", "text",
        "name the module as the shards do, or delete the entry",
        f"{VLLM}/blob/main/vllm/model_executor/layers/quantization/modelopt.py", layers.layer_without_tensor,
    ),
    Defect(
        "router_quantized", "fails", "routers are stored plain",
        "vLLM builds most routers without a quantization config: a KeyError; where it loads, other experts are chosen", "base",
        "take the router from the base and list it", f"{VLLM}/issues/25029", layers.router_quantized,
    ),
    Defect(
        "unquantizable_quantized", "fails", "modules that vLLM builds without a quantization config (eh_proj) are stored plain",
        "vLLM ends with a KeyError; in the MTP block, once it drafts", "base", "take the weight from the base",
        f"{VLLM}/blob/main/vllm/model_executor/models/deepseek_mtp.py", layers.unquantizable_quantized,
    ),
    Defect(
        "experts_left_out", "risk", "of a MoE that claims quantization some routed expert is quantized",
        "it is served, in nearly the memory of the base", "requantize", "quantize with a tool that splits stacked experts",
        "https://github.com/NVIDIA/Model-Optimizer/issues/1173", layers.experts_left_out,
    ),
    # ---------------------------------------------------------------------------------------- scales
    Defect(
        "scale_missing", "wrong", "codes have the scales that their form needs",
        "vLLM boots, and the layer computes with a scale that was never set", "requantize",
        "compute the scales anew from the base, or take the weight from the base", f"{VLLM}/pull/57108", layers.scale_missing,
    ),
    Defect(
        "input_scale_missing", "wrong", "of weights with static activations every one has their scale",
        "1 / 0 or 1 / garbage: NaN for whatever is sent to the expert, so some prompts fail and others do not", "tensors",
        "give the expert the largest scale of its layer's others", f"{VLLM}/issues/45212", layers.input_scale_missing,
    ),
    Defect(
        "scale_shape", "fails", "scales fit the shape of their weight", "vLLM refuses the shape, or reads other groups",
        "requantize", "quantize the weight anew, or correct the group size of the claim", f"{VLLM}/issues/50617",
        layers.scale_shape,
    ),
    Defect(
        "router_bias_in_16_bits", "wrong", "biases by which experts are chosen are FP32",
        "of values near 7 BF16 leaves about 8 different ones: nearly every token gets other experts", "base",
        "take the bias from the base", "https://github.com/NVIDIA-NeMo/Automodel/issues/2553", layers.router_bias_in_16_bits,
    ),
    Defect(
        "cache_scale_alone", "fails", "where the KV cache has a scale of values, it has one of keys",
        "vLLM asserts that the keys have one, where the cache is quantized", "tensors",
        "store the scale of the keys too, or take that of the values out", f"{VLLM}/issues/46264", cache.cache_scale_alone,
    ),
    Defect(
        "cache_scales_missing", "wrong", "where some layers have scales of the KV cache, all attention layers have",
        "with an FP8 cache the layer takes 1 for its scale, or that of the keys for the values", "tensors",
        "calibrate the layer's scales, or take out those of the others", f"{VLLM}/pull/46265", cache.cache_scales_missing,
    ),
    Defect(
        "cache_scale_shape", "fails", "scales of the KV cache are single numbers, or one for a head as the claim says",
        "vLLM refuses the shape", "tensors", "store the largest of them, or claim the strategy attn_head",
        "https://github.com/sgl-project/sglang/pull/40243", cache.cache_scale_shape,
    ),
    Defect(
        "embedding_quantized", "fails", "embeddings are stored plain, unless the claim is of compressed-tensors and names them",
        "vLLM builds them plain and finds no parameter for codes and scales", "base", "take the embedding from the base",
        "https://github.com/intel/auto-round/issues/1776", layers.embedding_quantized,
    ),
    Defect(
        "awq_without_groups", "fails", "AWQ experts have groups of columns",
        "vLLM counts groups by a group size of -1: a negative size while it builds the experts", "requantize",
        "quantize the experts in groups", f"{VLLM}/issues/18885", layers.awq_without_groups,
    ),
    Defect(
        "scale_not_finite", "wrong", "no scale is NaN or infinite", "NaN for every token that meets the weight", "requantize",
        "compute the scale anew from the base", f"{VLLM}/issues/45212", values.scale_not_finite, "scales",
    ),
    Defect(
        "scale_zero", "wrong", "no scale is zero",
        "the group is served as zeros; of activations, 1 / 0 gives NaN", "requantize", "compute the scale anew from the base",
        f"{VLLM}/issues/54189", values.scale_zero, "scales",
    ),
    Defect(
        "scale_negative", "wrong", "no scale is negative, but of GPTQ's and AWQ's integers",
        "kernels that take its logarithm or root give NaN; others flip signs",
        "requantize", "compute the scale anew from the base", f"{VLLM}/issues/54189", values.scale_negative, "scales",
    ),
    Defect(
        "scale_not_invertible", "wrong", "scales of activations and global scales have a finite inverse",
        "vLLM's kernels take 1 / scale: infinite, so NaN for whatever is sent to the expert", "tensors",
        "give the expert the largest scale of its layer's others", f"{VLLM}/pull/42601", values.scale_not_invertible, "scales",
    ),
    Defect(
        "global_scale_inverted", "wrong", "compressed-tensors' global scales divide, ModelOpt's multiply",
        "every weight is off by the square of the scale: one token over and over", "tensors",
        "store the inverse of the global scale", "https://github.com/modular/modular/issues/6600",
        values.global_scale_inverted, "scales",
    ),
    Defect(
        "global_scales_differ", "wrong", "weights that vLLM fuses have one global scale",
        "vLLM takes the first one's for all: the others are off by the ratio", "tensors",
        "take the largest range for all and correct their group scales; codes stay", f"{VLLM}/issues/54974",
        values.global_scales_differ, "scales",
    ),
    Defect(
        "zero_points_wrong", "wrong", "zero points are in range, and in the middle where the claim is symmetric",
        "vLLM takes the middle without a look: every weight of the group is shifted", "requantize",
        "correct `sym` and `checkpoint_format`, or quantize the weight anew",
        "https://github.com/ModelCloud/GPTQModel/blob/main/README.md", values.zero_points_wrong, "scales",
    ),
    Defect(
        "column_order_wrong", "wrong", "g_idx names groups that are there", "kernels read scales behind the last", "requantize",
        "quantize the weight anew", f"{VLLM}/pull/22017", values.column_order_wrong, "scales",
    ),
    Defect(
        "packed_shape_wrong", "wrong", "weight_shape is the shape of the codes", "vLLM unpacks another number of columns",
        "tensors",
        "correct weight_shape", "https://github.com/vllm-project/compressed-tensors/blob/main/README.md",
        values.packed_shape_wrong, "scales",
    ),
    # ---------------------------------------------------------------------------------------- weights
    Defect(
        "weight_not_finite", "wrong", "plain and FP8 weights are finite", "NaN for every token that meets the weight", "base",
        "take the weight from the base", "https://github.com/vllm-project/llm-compressor/issues/2939", values.weight_not_finite,
        "weights",
    ),
    Defect(
        "weight_all_zero", "wrong", "no weight is zero throughout",
        "a router of zeros sends all tokens to the same experts; other modules give nothing", "base",
        "take the weight from the base", "https://github.com/vllm-project/vllm-omni/issues/5573", values.weight_all_zero,
        "weights",
    ),
    # ---------------------------------------------------------------------------------------- beside the weights
    Defect(
        "tokenizer_absent", "note", "there is a tokenizer", "vLLM starts only with --tokenizer", "base",
        "copy the tokenizer from the base", "https://docs.vllm.ai/en/latest/serving/engine_args/", files.tokenizer_absent,
    ),
    Defect(
        "chat_template_absent", "note", "there is a chat template", "vLLM refuses /v1/chat/completions without --chat-template",
        "base", "copy chat_template.jinja from the base", "https://github.com/hiyouga/LlamaFactory/issues/8399",
        files.chat_template_absent,
    ),
    Defect(
        "chat_templates_folder", "note", "no named templates lie in additional_chat_templates",
        "vLLM takes chat_template.jinja; named ones only with --chat-template", "text",
        "copy the folder with the checkpoint, and name the template when serving",
        "https://github.com/QwenLM/Qwen3-VL/issues/1488",
        files.chat_templates_folder,
    ),
    Defect(
        "licence_absent", "note", "the model card names a licence", "nothing; hubs and mirrors refuse or hide it", "text",
        "add `license:` to the front matter of README.md", "https://huggingface.co/docs/hub/model-cards", files.licence_absent,
    ),
    Defect(
        "base_model_absent", "note", "the card of a quantized model names its base",
        "nothing; nobody can tell what it was made from",
        "text", "add `base_model:` to the front matter of README.md", "https://huggingface.co/docs/hub/model-cards",
        files.base_model_absent,
    ),
    # ---------------------------------------------------------------------------------------- against the base (--source)
    Defect(
        "tokenizer_unlike_base", "wrong", "tokenizer files are the base's",
        "other tokens than those the model was trained with",
        "base", "copy the file from the base", "https://github.com/hiyouga/LlamaFactory/issues/9189",
        base.tokenizer_unlike_base, "source",
    ),
    Defect(
        "chat_template_unlike_base", "wrong", "the chat template is the base's",
        "other prompts than those the model was trained with; none at all is an error of every chat request", "base",
        "copy the template from the base", "https://github.com/hiyouga/LlamaFactory/issues/8399",
        base.chat_template_unlike_base, "source",
    ),
    Defect(
        "generation_config_unlike_base", "wrong", "generation_config.json is the base's",
        "other sampling, or replies that do not end: vLLM takes its end tokens and defaults from it", "base",
        "copy generation_config.json from the base", "https://github.com/marin-community/marin/issues/4760",
        base.generation_config_unlike_base, "source",
    ),
    Defect(
        "config_unlike_base", "wrong", "what config.json says of the model is what the base's says",
        "another model is computed",
        "text", "take the value of the base", "https://github.com/marin-community/marin/issues/4153", base.config_unlike_base,
        "source",
    ),
    Defect(
        "tensor_lost", "wrong", "every tensor of the base is stored, plain or quantized",
        "of a quantized checkpoint vLLM checks no completeness", "base", "copy the tensor from the base",
        "https://github.com/vllm-project/llm-compressor/issues/1630", base.tensor_lost, "source",
    ),
    Defect(
        "narrowed", "wrong", "no kept tensor has fewer bits than in the base", "what was FP32 on purpose is rounded", "base",
        "copy the tensor from the base", "https://github.com/NVIDIA-NeMo/Automodel/issues/2553", base.narrowed, "source",
    ),
    Defect(
        "shape_unlike_base", "wrong", "weights have the shapes of the base's", "another model is computed", "base",
        "take the weight from the base", "https://github.com/vllm-project/llm-compressor/pull/2864", base.shape_unlike_base,
        "source",
    ),
    Defect(
        "kept_tensor_differs", "wrong", "kept tensors are the base's, byte for byte", "the model is not the base, quantized",
        "base",
        "copy the tensor from the base", "https://github.com/vllm-project/vllm-omni/issues/5573",
        base.kept_tensor_differs, "source",
    ),
    Defect(
        "error_beyond_format", "wrong", "quantized weights are as near to the base as their form allows, tensor and row",
        "the weight is noise or another one", "requantize", "quantize the weight anew from the base",
        "https://github.com/vllm-project/llm-compressor/issues/2939", base.error_beyond_format, "source",
    ),
)  # fmt: skip
