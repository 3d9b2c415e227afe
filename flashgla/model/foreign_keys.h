// Keys of config.json that libraries write into every model's and that say nothing of what it computes: what
// transformers notes of files, outputs and generation, and how training code is to run.
#pragma once

#include <string_view>

namespace flashgla::model {

inline constexpr std::string_view kForeignKeys[] = {
    // Of the files. quantization_config is read with the weights (checkpoint.cpp).
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "name_or_path",
    "tokenizer_class", "transformers.js_config", "unsloth_version", "unsloth_fixed", "is_llama_config",
    "quantization_config",
    // Of outputs and of how the code runs.
    "use_cache", "return_dict", "output_hidden_states", "output_attentions", "output_scores", "return_dict_in_generate",
    "attn_implementation", "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "pruned_heads",
    "is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
    "finetuning_task", "problem_type", "task_specific_params", "id2label", "label2id",
    // Of tokens and generation.
    "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id", "prefix", "max_length", "min_length",
    "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    // flash-linear-attention's, of kernels and of training; where older weights lie otherwise their names tell.
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    "norm_first", "share_conv_kernel",
    // Probabilities of training (the run's configuration has its own), and initial values.
    "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "rescale_prenorm_residual", "residual_in_fp32",
    "A_init_range", "conv_init", "dt_init_floor", "dt_init_scheme", "dt_max", "dt_min", "dt_scale", "time_step_floor",
    "time_step_init_scheme", "time_step_max", "time_step_min", "time_step_rank", "time_step_scale",
    // What other fields say already, where a layout has no place for it: expand * hidden_size.
    "intermediate_size",
    // Of kernels.
    "chunk_size", "pretraining_tp", "rescale_every", "use_associative_scan", "use_mambapy"};

}  // namespace flashgla::model
