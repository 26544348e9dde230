"""The table of defects of GGUF files. docs/inspect.md is written from it, and a test holds the two together."""

from __future__ import annotations

from assay_quantize.inspection.defect import Defect
from assay_quantize.inspection.gguf import checks
from assay_quantize.inspection.gguf.model import GgufModel

LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
IK_LLAMA_CPP = "https://github.com/ikawrakow/ik_llama.cpp"

GGUF_DEFECTS: tuple[Defect[GgufModel], ...] = (
    # ---------------------------------------------------------------------------------------- files
    Defect(
        "shard_unreadable", "fails", "header and length of every file",
        "llama.cpp ends while it loads: data is not within the file bounds", "base", "download or upload the file again",
        f"{LLAMA_CPP}/issues/6774", checks.shard_unreadable,
    ),
    Defect(
        "shard_missing", "fails", "all parts of a split model are there, by name and split.count",
        "llama.cpp ends while it loads: failed to load GGUF split", "base", "download or upload the part",
        f"{LLAMA_CPP}/issues/15164", checks.shard_missing,
    ),
    Defect(
        "split_name", "fails", "a part is called NAME-00001-of-0000N.gguf, as split.no and split.count say",
        "llama.cpp ends while it loads: invalid split file", "text",
        "rename the part; parts that were joined by cat are no model, llama-gguf-split --merge joins them",
        f"{LLAMA_CPP}/issues/9613", checks.split_name,
    ),
    Defect(
        "split_tensors", "fails", "the parts hold split.tensors.count tensors",
        "llama.cpp ends while it loads: corrupted model", "base", "split the whole model again",
        f"{LLAMA_CPP}/pull/6187", checks.split_tensors,
    ),
    Defect(
        "tensor_twice", "fails", "no tensor is there twice", "llama.cpp refuses the model: tensor is duplicated", "tensors",
        "write the file without the second copy", f"{LLAMA_CPP}/issues/6836", checks.tensor_twice,
    ),
    Defect(
        "tensors_overlap", "fails", "no tensor begins inside another",
        "llama.cpp refuses offsets that the types do not give; ik_llama.cpp reads the rest of the tensor from the next one",
        "requantize", "convert or quantize again: the bytes between are lost", f"{IK_LLAMA_CPP}/pull/2437",
        checks.tensors_overlap,
    ),
    Defect(
        "tensor_type_unknown", "risk", "every tensor has a type that llama.cpp has",
        "llama.cpp refuses it: invalid ggml type; the fork that made it (ik_llama.cpp) loads it", "requantize",
        "quantize to a type of llama.cpp's, or serve it by the fork", f"{LLAMA_CPP}/issues/11975", checks.tensor_type_unknown,
    ),
    # ---------------------------------------------------------------------------------------- metadata
    Defect(
        "key_missing", "fails", "general.architecture, block_count, context_length, embedding_length; of a MoE expert_count",
        "llama.cpp ends while it loads: key not found in model", "text", "add the key (gguf_new_metadata.py), or convert again",
        f"{LLAMA_CPP}/issues/12857", checks.key_missing,
    ),
    Defect(
        "tokenizer_absent", "fails", "there is a tokenizer", "llama.cpp ends while it loads: error loading model vocabulary",
        "base", "convert again with the tokenizer of the base", f"{LLAMA_CPP}/issues/3917", checks.tokenizer_absent,
    ),
    Defect(
        "pre_tokenizer_absent", "wrong", "a tokenizer of byte pairs says how text is cut before",
        "llama.cpp cuts it by its default: other tokens than those the model was trained with", "text",
        "set tokenizer.ggml.pre, or convert again", f"{LLAMA_CPP}/issues/7006", checks.pre_tokenizer_absent,
    ),
    Defect(
        "gating_absent", "wrong", "of DeepSeek's architecture: it is told how scores become weights of experts",
        "llama.cpp takes softmax, but of GLM-4.7-Flash in newer versions: experts are weighted otherwise than in training",
        "text", "set expert_gating_func (2: sigmoid), or convert again", f"{LLAMA_CPP}/pull/18980", checks.gating_absent,
    ),
    Defect(
        "special_token_outside", "wrong", "ids of special tokens are in the vocabulary",
        "llama.cpp leaves the token out: replies may not end", "text", "set the id to the base's", f"{LLAMA_CPP}/pull/3635",
        checks.special_token_outside,
    ),
    Defect(
        "chat_template_absent", "note", "there is a chat template",
        "llama-server writes chats as ChatML: other prompts than those most models were trained with", "text",
        "add tokenizer.chat_template from the base, or give --chat-template-file", f"{LLAMA_CPP}/pull/6156",
        checks.chat_template_absent,
    ),
    Defect(
        "licence_absent", "note", "metadata or the model card name a licence", "nothing; hubs and mirrors refuse or hide it",
        "text", "add general.license, or `license:` to README.md", "https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
        checks.licence_absent,
    ),
    Defect(
        "base_model_absent", "note", "metadata or the card of a quantized model name its base",
        "nothing; nobody can tell what it was made from", "text",
        "add general.base_model.0.repo_url, or `base_model:` to README.md",
        "https://github.com/ggml-org/ggml/blob/master/docs/gguf.md", checks.base_model_absent,
    ),
    # ---------------------------------------------------------------------------------------- names
    Defect(
        "layers_missing", "fails", "every block up to block_count has tensors", "llama.cpp ends while it loads: missing tensor",
        "base", "convert again, or correct block_count", f"{LLAMA_CPP}/issues/24211", checks.layers_missing,
    ),
    Defect(
        "unknown_tensor", "fails", "no block lies behind block_count",
        "llama.cpp ends while it loads: wrong number of tensors", "text", "correct block_count, or take the tensors out",
        f"{LLAMA_CPP}/pull/28764", checks.unknown_tensor,
    ),
    Defect(
        "tensors_missing", "fails", "blocks of one kind have the same names; embedding and last norm are there",
        "llama.cpp ends while it loads: missing tensor", "base", "convert again", f"{LLAMA_CPP}/issues/3917",
        checks.tensors_missing,
    ),
    Defect(
        "experts_not_stacked", "fails", "experts of a block are one tensor",
        "llama.cpp no longer reads single experts: missing tensor 'blk.0.ffn_down_exps.weight'", "tensors",
        "stack the experts of each block, or take a later conversion", f"{LLAMA_CPP}/issues/10244", checks.experts_not_stacked,
    ),
    Defect(
        "experts_missing", "fails", "a block with a router has expert_count experts",
        "llama.cpp refuses the shape; loaders that do not look read behind the tensor", "base",
        "convert again, or correct expert_count", "https://github.com/gittensor-ai-lab/sparkinfer/issues/291",
        checks.experts_missing,
    ),
    Defect(
        "dense_layers", "fails", "blocks with experts begin at leading_dense_block_count",
        "llama.cpp ends while it loads: missing tensor", "text", "correct leading_dense_block_count",
        f"{LLAMA_CPP}/issues/10244", checks.dense_layers,
    ),
    # ---------------------------------------------------------------------------------------- shapes and types
    Defect(
        "router_rows", "fails", "routers and their biases have a row for every expert", "llama.cpp refuses the shape",
        "tensors", "prune router and bias with the experts, or correct expert_count", f"{LLAMA_CPP}/pull/6515",
        checks.router_rows,
    ),
    Defect(
        "vocabulary_rows", "fails", "embedding and output head have a row for every token",
        "llama.cpp refuses the shape: token_embd.weight has wrong shape", "base",
        "convert again with a tokenizer that has as many tokens", f"{LLAMA_CPP}/issues/8445", checks.vocabulary_rows,
    ),
    Defect(
        "width_unlike_metadata", "fails", "embedding, routers and experts have the widths of the metadata",
        "llama.cpp refuses the shape", "text", "correct the number, or convert again", f"{LLAMA_CPP}/pull/15539",
        checks.width_unlike_metadata,
    ),
    Defect(
        "router_quantized", "risk", "routers are stored plain",
        "llama.cpp serves it, and experts are chosen by rounded scores; other loaders end", "base",
        "take the router from the base: llama-quantize leaves it plain", "https://github.com/warpfront/hipfire/issues/171",
        checks.router_quantized,
    ),
    Defect(
        "router_bias_in_16_bits", "wrong", "biases by which experts are chosen are F32",
        "of values near 7 BF16 leaves about 8 different ones: nearly every token gets other experts", "base",
        "take the bias from the base", "https://github.com/NVIDIA-NeMo/Automodel/issues/2553", checks.router_bias_in_16_bits,
    ),
    # ---------------------------------------------------------------------------------------- MTP
    Defect(
        "mtp_absent", "fails", "an MTP block that nextn_predict_layers declares is stored",
        "llama.cpp ends while it loads: missing tensor of the block behind the last", "text",
        "set nextn_predict_layers to 0 and block_count to what is stored, or convert with the block",
        f"{LLAMA_CPP}/issues/21172", checks.mtp_absent,
    ),
    Defect(
        "mtp_undeclared", "fails", "an MTP block that is stored is declared",
        "loaders count its tensors as unknown and end; where it loads, nothing drafts", "text", "set nextn_predict_layers",
        f"{IK_LLAMA_CPP}/pull/2369", checks.mtp_undeclared,
    ),
    Defect(
        "mtp_incomplete", "fails", "the MTP block has every tensor that it needs",
        "llama.cpp ends while it loads: tensor not found", "base", "convert again with the block", f"{LLAMA_CPP}/issues/29174",
        checks.mtp_incomplete,
    ),
    Defect(
        "mtp_experts_missing", "fails", "the MTP block has every expert", "llama.cpp ends while it loads: tensor not found",
        "base", "convert again with the block", f"{LLAMA_CPP}/pull/20533", checks.mtp_experts_missing,
    ),
    # ---------------------------------------------------------------------------------------- values
    Defect(
        "weight_not_finite", "wrong", "plain weights and scales of blocks are finite",
        "llama.cpp loads it unless --check-tensors is given: NaN for every token that meets the block", "requantize",
        "quantize again; where the block's weights are zeros, a scale of 0 mends it",
        "https://github.com/intel/auto-round/issues/1908", checks.weight_not_finite, "weights",
    ),
    Defect(
        "weight_all_zero", "wrong", "no weight and no expert is zero throughout",
        "a router of zeros sends all tokens to the same experts; other weights give nothing", "base",
        "convert again from the base", "https://github.com/vllm-project/vllm-omni/issues/5573", checks.weight_all_zero,
        "weights",
    ),
)  # fmt: skip
