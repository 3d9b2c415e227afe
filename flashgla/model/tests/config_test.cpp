#include "flashgla/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "flashgla/base/error.h"
#include "testing/random.h"
#include "testing/temporary_folder.h"

namespace flashgla::model {
namespace {

using ::testing::HasSubstr;

std::string error_of(const std::string& json) {
  try {
    parse_config(json, "config.json");
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Config, PresetsHaveThePublishedParameterCounts) {
  EXPECT_EQ(parameter_count(preset("gla-340m")), 341'707'776);
  EXPECT_EQ(parameter_count(preset("gla-1.3b")), 1'365'514'240);
  EXPECT_EQ(parameter_count(preset("gla-2.7b")), 2'703'583'744);
  EXPECT_LE(parameter_count(preset("gla-tiny")), 850'000);
  EXPECT_EQ(parameter_count(preset("transformer-340m")), 341'099'520);
  EXPECT_EQ(parameter_count(preset("transformer-1.3b")), 1'364'297'728);
  EXPECT_EQ(parameter_count(preset("retnet-340m")), 347'403'264);
  EXPECT_EQ(parameter_count(preset("retnet-1.3b")), 1'351'727'104);
  EXPECT_EQ(parameter_count(preset("mamba2-1.3b")), 1'371'839'488);
  EXPECT_EQ(parameter_count(preset("hgrn2-1.3b")), 1'364'396'032);
  EXPECT_EQ(parameter_count(preset("mamba-1.3b")), 1'400'276'992);
  EXPECT_EQ(parameter_count(preset("mamba-350m")), 352'797'696);
  EXPECT_EQ(parameter_count(preset("gsa-1.3b")), 1'376'929'792);
  EXPECT_EQ(parameter_count(preset("rwkv-169m")), 169'342'464);
  EXPECT_EQ(parameter_count(preset("rwkv-1b5")), 1'515'106'304);
  EXPECT_EQ(parameter_count(preset("gla-340m-scalar")), 341'204'064);
  EXPECT_EQ(parameter_count(preset("gla-340m-constant")), 341'105'664);
  EXPECT_EQ(parameter_count(preset("gla-340m-none")), 341'105'664);
  // The same with the head tied or not, and with RetNet's eight heads.
  const auto with = [](const char* name, const char* field, const char* value) {
    ModelConfig config = preset(name);
    config.set(field, value);
    return parameter_count(config);
  };
  EXPECT_EQ(with("transformer-1.3b", "tie_word_embeddings", "true"), 1'298'761'728);
  EXPECT_EQ(with("retnet-1.3b", "tie_word_embeddings", "true"), 1'286'191'104);
  EXPECT_EQ(with("mamba-1.3b", "tie_word_embeddings", "true"), 1'334'740'992);
  EXPECT_EQ(with("retnet-340m", "num_heads", "8"), 347'397'120);
  for (const Preset& row : presets()) {
    EXPECT_NO_THROW(preset(row.name).validate()) << row.name;
    EXPECT_FALSE(row.summary.empty());
  }
  EXPECT_THROW(preset("gla-3b"), Error);
}

TEST(Config, DefaultsAreThoseOfFlashLinearAttention) {
  const ModelConfig config = parse_config("{}", "config.json");
  EXPECT_EQ(config.hidden_size, 2048);
  EXPECT_EQ(config.num_hidden_layers, 24);
  EXPECT_THAT(to_json(config), HasSubstr("\"num_heads\": 4,"));
  EXPECT_EQ(config.mlp_dim(), 5632);
  EXPECT_EQ(config.vocab_size, 32000);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_FALSE(config.tie_word_embeddings);
  ModelConfig other = config;
  other.hidden_size = 1024;
  EXPECT_EQ(other.mlp_dim(), 2816);
  other.hidden_size = 2560;
  EXPECT_EQ(other.mlp_dim(), 6912);
}

TEST(Config, WhatIsWrittenIsReadBack) {
  ModelConfig config = preset("gla-tiny");
  config.set("clamp_min", "-0.125");
  config.set("num_kv_heads", "1");
  config.norm_eps = 3e-5;
  config.set("feature_map", "\"relu\"");
  config.set("expand_k", "0.75");
  config.initializer_range = 0.006;
  const std::string json = to_json(config);
  EXPECT_EQ(to_json(parse_config(json, "config.json")), json);
  EXPECT_THAT(json, HasSubstr("\"model_type\": \"gla\""));
  EXPECT_THAT(json, HasSubstr("\"intermediate_size\": 320"));
}

TEST(Config, OlderAndForeignKeysAreUnderstood) {
  const ModelConfig config = parse_config(
      R"({"rms_norm_eps": 1e-5, "attn_mode": "chunk", "fuse_norm": true, "use_cache": true, "attn": null,
          "num_kv_heads": null, "transformers_version": "4.40", "clamp_min": null, "use_gk": true})",
      "config.json");
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_THAT(to_json(config), HasSubstr("\"num_kv_heads\": null"));
  EXPECT_EQ(parse_config(R"({"rms_norm_eps": 1e-5, "norm_eps": 1e-4})", "config.json").norm_eps, 1e-4);
}

TEST(Config, UnknownKeysAreRefusedByName) {
  EXPECT_EQ(error_of(R"({"hiden_size": 64})"),
            "config.json: a gla has no field \"hiden_size\"; did you mean \"hidden_size\"? (where it says nothing of "
            "what the model computes, take it out)");
  EXPECT_THAT(error_of(R"({"num_headz": 2})"), HasSubstr("did you mean \"num_heads\"?"));
  EXPECT_EQ(error_of(R"({"mixture_of_experts": 8})"),
            "config.json: a gla has no field \"mixture_of_experts\" (where it says nothing of what the model computes, "
            "take it out)");
  // Fields of other models, and what flash-linear-attention's can do and ours cannot.
  EXPECT_THAT(error_of(R"({"model_type": "retnet", "gate_low_rank_dim": 8})"), HasSubstr("a retnet has no field"));
  EXPECT_THAT(error_of(R"({"attnres_block_size": 4})"), HasSubstr("\"attnres_block_size\""));
  EXPECT_THAT(error_of(R"({"model_type": "llama", "num_heads": 4})"), HasSubstr("has no field \"num_heads\""));
  EXPECT_THAT(error_of(R"({"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, "beta_fast": 32.0}})"),
              HasSubstr("\"rope_parameters.beta_fast\""));
  EXPECT_THAT(error_of(R"({"attn": {"layers": [1], "window": 8}})"),
              HasSubstr("config.json: attn: a layer of transformer has no field \"window\""));
  EXPECT_THAT(error_of(R"({"layer_mixers": [{"layers": [1], "model_type": "mamba", "norm_eps": 1e-5}]})"),
              HasSubstr("layer_mixers: a layer of mamba has no field \"norm_eps\""));
  EXPECT_THAT(error_of("{\"" + std::string(100000, 'x') + "\": 1}"), HasSubstr("has no field \"xxx"));
  // Nothing is asked for by null, a note, or what transformers writes into every file.
  EXPECT_EQ(error_of(R"({"attnres_block_size": null, "_": "a note", "_name_or_path": "x", "torch_dtype": "bfloat16",
                         "id2label": {"0": "LABEL_0"}, "quantization_config": {"quant_method": "flashgla"}})"),
            "no error");
}

// As the libraries of today write them, defaults included (flash-linear-attention 0.6.0, transformers 5.23).
TEST(Config, WhatLibrariesWriteIsRead) {
  const std::string fla = R"("attnres_block_size": null, "attn": null, "bos_token_id": 1, "dtype": "float32",
      "elementwise_affine": true, "eos_token_id": 2, "fuse_cross_entropy": true, "fuse_linear_cross_entropy": false,
      "fuse_norm": true, "fuse_swiglu": true, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 2048,
      "initializer_range": 0.02, "intermediate_size": null, "max_position_embeddings": 2048, "norm_eps": 1e-06,
      "num_hidden_layers": 24, "pad_token_id": null, "tie_word_embeddings": false, "transformers_version": "5.23.0",
      "use_cache": true, "use_l2warp": false, "vocab_size": 32000, )";
  for (const char* own :
       {R"("model_type": "gla", "attn_mode": "chunk", "clamp_min": null, "conv_size": 4, "expand_k": 0.5, "expand_v": 1,
           "feature_map": null, "num_heads": 4, "num_kv_heads": null, "use_gk": true, "use_gv": false,
           "use_output_gate": true, "use_short_conv": false)",
        R"("model_type": "transformer", "num_heads": 32, "num_kv_heads": null, "qk_norm": false, "qkv_bias": false,
           "rope_theta": 10000.0, "window_size": null)",
        R"("model_type": "retnet", "attn_mode": "chunk", "conv_size": 4, "expand_k": 1, "expand_v": 2,
           "feature_map": null, "num_heads": 8, "num_kv_heads": null, "use_output_gate": true,
           "use_short_conv": false)",
        R"("model_type": "linear_attn", "attn_mode": "fused_chunk", "expand_k": 1, "expand_v": 1,
           "feature_map": "elementwise_product", "norm_feature_map": false, "norm_k": false, "norm_q": false,
           "num_heads": 4, "num_kv_heads": null, "tie_feature_map_qk": false)",
        R"("model_type": "hgrn2", "attn_mode": "chunk", "conv_size": 4, "expand_ratio": 128, "num_heads": null,
           "use_lower_bound": true, "use_short_conv": false)",
        R"("model_type": "gsa", "clamp_max": null, "clamp_min": null, "conv_size": 4, "expand_k": 1, "expand_v": 1,
           "feature_map": "swish", "gate_logit_normalizer": 8, "num_heads": 4, "num_kv_heads": null, "num_slots": 64,
           "use_norm": true, "use_output_gate": false, "use_short_conv": false)"}) {
    EXPECT_EQ(error_of("{" + fla + own + "}"), "no error");
  }
  const std::string mamba = R"({"bos_token_id": 1, "conv_kernel": 4, "eos_token_id": 2, "expand": 2,
      "fuse_cross_entropy": true, "fuse_linear_cross_entropy": false, "fuse_norm": true, "hidden_act": "silu",
      "hidden_size": 2048, "initializer_range": 0.02, "norm_eps": 1e-05, "num_hidden_layers": 48, "pad_token_id": 0,
      "rescale_prenorm_residual": false, "residual_in_fp32": false, "tie_word_embeddings": false, "use_bias": false,
      "use_cache": true, "use_conv_bias": true, "use_l2warp": false, "vocab_size": 32000, )";
  const ModelConfig one =
      parse_config(mamba + R"("model_type": "mamba", "dt_init_floor": 0.0001, "dt_init_scheme": "random", "dt_max": 0.1,
                 "dt_min": 0.001, "dt_rank": 128, "dt_scale": 1.0, "intermediate_size": 4096, "state_size": 16})",
                   "config.json");
  ModelConfig hf = one;
  hf.layout = "hf";  // which says the width of the inner channels by expand
  EXPECT_EQ(parameter_count(parse_config(to_json(hf), "hf")), parameter_count(one));
  // dt_rank was time_step_rank once.
  EXPECT_EQ(
      to_json(parse_config(mamba + R"("model_type": "mamba", "time_step_rank": 64, "time_step_min": 0.001})", "c")),
      to_json(parse_config(mamba + R"("model_type": "mamba", "dt_rank": 64})", "c")));
  EXPECT_EQ(error_of(mamba + R"("model_type": "mamba2", "A_init_range": [1, 16], "D_has_hdim": false, "chunk_size": 256,
      "conv_init": null, "dt_init_floor": 0.0001, "dt_limit": [0.0, Infinity], "dt_max": 0.1, "dt_min": 0.001,
      "head_dim": 64, "n_groups": 1, "norm_before_gate": false, "num_heads": 64, "rmsnorm": true, "state_size": 128})"),
            "no error");
  EXPECT_EQ(error_of(R"({"model_type": "llama", "attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,
      "mlp_bias": false, "pretraining_tp": 1, "is_llama_config": true, "rope_interleaved": false,
      "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}})"),
            "no error");
  EXPECT_THAT(error_of(R"({"model_type": "llama", "rope_interleaved": true})"), HasSubstr("rope_interleaved is true"));
  EXPECT_EQ(error_of(R"({"model_type": "mamba2", "layer_norm_epsilon": 1e-05, "chunk_size": 256, "n_groups": 8,
      "intermediate_size": 8192,
      "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
      "time_step_rank": 256})"),
            "no error");
  // state-spaces' mamba-130m, as transformers' converter wrote it, with what its own config had.
  EXPECT_EQ(error_of(R"({"model_type": "mamba", "layer_norm_epsilon": 1e-05, "d_inner": 1536, "d_model": 768,
      "fused_add_norm": true, "n_layer": 24, "pad_vocab_size_multiple": 8, "rms_norm": true, "ssm_cfg": {},
      "use_mambapy": false, "use_associative_scan": true, "intermediate_size": 1536, "time_step_scale": 1.0})"),
            "no error");
}

constexpr const char* kLlama = R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
  "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
  "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size": 32000, "rope_scaling": null, "rope_theta": 10000.0,
  "tie_word_embeddings": false, "attention_bias": false, "max_position_embeddings": 2048})";

TEST(Config, BothLayoutsOfMambaAreReadAndWritten) {
  // As transformers writes state-spaces' mamba-130m.
  const ModelConfig hf = parse_config(R"({"architectures": ["MambaForCausalLM"], "model_type": "mamba",
      "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "expand": 2, "conv_kernel": 4,
      "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "time_step_rank": 48, "time_step_min": 0.001,
      "time_step_max": 0.1, "time_step_init_scheme": "random", "time_step_floor": 0.0001, "time_step_scale": 1.0,
      "use_bias": false, "use_conv_bias": true, "hidden_act": "silu", "residual_in_fp32": true, "vocab_size": 50280,
      "initializer_range": 0.1, "bos_token_id": 0, "eos_token_id": 0})",
                                      "config.json");
  EXPECT_EQ(hf.layout, "hf");
  EXPECT_FALSE(hf.use_mlp);
  EXPECT_TRUE(hf.tie_word_embeddings);
  EXPECT_EQ(parameter_count(hf), 129'135'360);
  const std::string written = to_json(hf);
  EXPECT_THAT(written, HasSubstr("\"time_step_rank\": 48"));
  EXPECT_EQ(to_json(parse_config(written, "again")), written);
  ModelConfig fla = hf;
  fla.layout = "fla";
  EXPECT_THAT(to_json(fla), HasSubstr("\"dt_rank\": 48"));
  EXPECT_EQ(parse_config(to_json(fla), "again").layout, "fla");
  const auto count = [](const char* sizes) {  // the published ones of mamba-370m and mamba-1.4b
    return parameter_count(parse_config(R"({"model_type": "mamba", "vocab_size": 50280, "num_hidden_layers": 48,
                                            "tie_word_embeddings": true, )" +
                                            std::string(sizes) + "}",
                                        "fla"));
  };
  EXPECT_EQ(count("\"hidden_size\": 1024"), 371'516'416);
  EXPECT_EQ(count("\"hidden_size\": 2048"), 1'372'178'432);
  EXPECT_THAT(to_json(parse_config(R"({"model_type": "mamba", "hidden_size": 200})", "fla")),
              HasSubstr("\"dt_rank\": 13"));
  EXPECT_THAT(error_of(R"({"model_type": "mamba", "conv_kernel": 5})"), HasSubstr("conv_kernel is 5"));
  EXPECT_THAT(error_of(R"({"model_type": "mamba", "state_size": 0})"), HasSubstr("state_size is 0"));
}

TEST(Config, BothLayoutsOfMamba2AreReadAndWritten) {
  // As transformers writes state-spaces' mamba2-130m, infinity included.
  const ModelConfig hf = parse_config(R"({"model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 24,
      "num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128, "expand": 2, "conv_kernel": 4,
      "layer_norm_epsilon": 1e-05, "vocab_size": 50288, "tie_word_embeddings": true, "hidden_act": "silu",
      "use_bias": false, "use_conv_bias": true, "time_step_limit": [0.0, Infinity], "residual_in_fp32": true,
      "bos_token_id": 0, "eos_token_id": 0})",
                                      "config.json");
  EXPECT_EQ(hf.layout, "hf");
  EXPECT_FALSE(hf.use_mlp);
  EXPECT_EQ(parameter_count(hf), 128'989'632);
  const std::string written = to_json(hf);
  EXPECT_THAT(written, HasSubstr("\"layer_norm_epsilon\": 1e-05"));
  EXPECT_THAT(written, HasSubstr("\"num_heads\": 24"));
  EXPECT_EQ(to_json(parse_config(written, "again")), written);
  ModelConfig fla = hf;
  fla.layout = "fla";
  EXPECT_THAT(to_json(fla), HasSubstr("\"norm_eps\": 1e-05"));
  EXPECT_EQ(parse_config(to_json(fla), "again").layout, "fla");
  EXPECT_EQ(parameter_count(parse_config(to_json(fla), "again")), 128'989'632);
  // What is absent is derived, and written as a number.
  EXPECT_THAT(to_json(parse_config(R"({"model_type": "mamba2", "hidden_size": 256})", "fla")),
              HasSubstr("\"num_heads\": 8"));
  EXPECT_THAT(error_of(R"({"model_type": "mamba2", "num_heads": 3})"),
              HasSubstr("num_heads is 3; expected expand * hidden_size / head_dim (64)"));
  EXPECT_THAT(error_of(R"({"model_type": "mamba2", "dt_limit": [0.0, 0.1]})"), HasSubstr("dt_limit is [0.0,0.1]"));
  EXPECT_THAT(error_of(R"({"model_type": "mamba2", "norm_before_gate": true})"), HasSubstr("norm_before_gate"));
  // Which transformers passes over.
  EXPECT_EQ(
      to_json(parse_config(R"({"model_type": "mamba2", "layer_norm_epsilon": 1e-5, "norm_before_gate": true})", "c")),
      to_json(parse_config(R"({"model_type": "mamba2", "layer_norm_epsilon": 1e-5})", "c")));
}

TEST(Config, LayoutsOfRwkvAreReadAndWritten) {
  // As transformers writes rwkv-4-169m-pile.
  const ModelConfig hf = parse_config(R"({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv",
      "attention_hidden_size": 768, "context_length": 1024, "hidden_size": 768, "intermediate_size": 3072,
      "layer_norm_epsilon": 1e-05, "num_hidden_layers": 12, "rescale_every": 6, "tie_word_embeddings": false,
      "use_cache": true, "vocab_size": 50277, "bos_token_id": 0, "eos_token_id": 0})",
                                      "config.json");
  EXPECT_EQ(hf.layout, "hf");
  EXPECT_EQ(hf.norm_type, "layer_norm");
  EXPECT_TRUE(hf.embedding_norm);
  EXPECT_EQ(parameter_count(hf), 169'342'464);
  const std::string written = to_json(hf);
  EXPECT_THAT(written, HasSubstr("\"context_length\": 1024"));
  EXPECT_THAT(written, HasSubstr("\"layer_norm_epsilon\": 1e-05"));
  EXPECT_EQ(to_json(parse_config(written, "again")), written);
  const ModelConfig authors =
      parse_config(R"({"model_type": "rwkv", "n_embd": 768, "n_layer": 12, "vocab_size": 50277})", "config.json");
  EXPECT_EQ(authors.layout, "authors");
  EXPECT_EQ(parameter_count(authors), 169'342'464);
  EXPECT_EQ(to_json(parse_config(to_json(authors), "again")), to_json(authors));
  ModelConfig own = hf;
  own.layout = "own";
  EXPECT_THAT(to_json(own), HasSubstr("\"norm_eps\": 1e-05"));
  EXPECT_EQ(parse_config(to_json(own), "again").layout, "own");
  EXPECT_EQ(parameter_count(parse_config(to_json(own), "again")), 169'342'464);
  ModelConfig without_a_place = hf;
  without_a_place.identity_mlp = true;
  EXPECT_THROW(to_json(without_a_place), Error);
  EXPECT_THAT(error_of(R"({"model_type": "rwkv", "n_embd": 768, "tiny_att_dim": 64})"),
              HasSubstr("tiny_att_dim is 64"));
  EXPECT_THAT(error_of(R"({"model_type": "rwkv", "n_embd": 768, "head_qk": 256})"), HasSubstr("head_qk is 256"));
  EXPECT_THAT(error_of(R"({"model_type": "rwkv", "attention_hidden_size": 0})"),
              HasSubstr("attention_hidden_size is 0"));
}

TEST(Config, WhatHyenaLacksIsRefusedByName) {
  const ModelConfig config = parse_config(R"({"model_type": "hyena", "l_max": 512, "num_inner_mlps": 2})", "hyena");
  EXPECT_EQ(to_json(parse_config(to_json(config), "again")), to_json(config));
  EXPECT_THAT(to_json(config), HasSubstr("\"l_max\": 512"));
  EXPECT_THAT(error_of(R"({"model_type": "hyena", "order": 3})"), HasSubstr("order is 3; expected 2"));
  EXPECT_THAT(error_of(R"({"model_type": "hyena", "num_blocks": 4})"), HasSubstr("num_blocks is 4"));
  EXPECT_THAT(error_of(R"({"model_type": "hyena", "emb_dim": 4})"), HasSubstr("emb_dim is 4; expected an odd number"));
}

TEST(Config, LayoutsOfTransformersAreReadAndWritten) {
  const ModelConfig llama = parse_config(kLlama, "config.json");
  EXPECT_EQ(llama.model_type, "transformer");
  EXPECT_EQ(llama.layout, "hf");
  EXPECT_EQ(llama.norm_eps, 1e-5);
  EXPECT_EQ(parameter_count(llama), 1'100'048'384);  // TinyLlama 1.1B
  const std::string written = to_json(llama);
  EXPECT_THAT(written, HasSubstr("\"num_key_value_heads\": 4"));
  EXPECT_EQ(to_json(parse_config(written, "again")), written);
  ModelConfig ours = llama;
  ours.layout = "fla";
  EXPECT_THAT(to_json(ours), HasSubstr("\"model_type\": \"transformer\""));
  EXPECT_THAT(to_json(ours), HasSubstr("\"num_kv_heads\": 4"));

  const ModelConfig newer = parse_config(R"({"model_type": "llama", "rope_parameters": {"rope_theta": 500000.0,
      "rope_type": "default"}, "attention_bias": true})",
                                         "config.json");
  EXPECT_THAT(to_json(newer), HasSubstr("\"rope_theta\": 500000.0"));
  EXPECT_THAT(to_json(newer), HasSubstr("\"attention_bias\": true"));
  EXPECT_THAT(error_of(R"({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}})"),
              HasSubstr("rope_scaling is {\"type\":\"linear\",\"factor\":2.0}; expected null"));
  EXPECT_THAT(error_of(R"({"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}})"),
              HasSubstr("rope_parameters.rope_type is \"yarn\"; expected \"default\""));
  EXPECT_THAT(error_of(R"({"model_type": "transformer", "attnres_block_size": 4})"),
              HasSubstr("attnres_block_size is 4; expected null"));

  const ModelConfig mistral = parse_config(R"({"model_type": "mistral", "sliding_window": 16})", "config.json");
  EXPECT_THAT(to_json(mistral), HasSubstr("\"sliding_window\": 16"));
  EXPECT_EQ(parameter_count(mistral), 7'241'732'096);
  ModelConfig without_a_place = mistral;
  without_a_place.layout = "hf";
  EXPECT_THROW(to_json(without_a_place), Error);
  without_a_place.layout = "authors";
  EXPECT_THROW(to_json(without_a_place), Error);
}

// transformers has no ratio of the MLP's width: its models cannot be made without the width itself.
TEST(Config, LayoutsWithoutARatioSayTheWidth) {
  for (const char* layout : {"hf", "mistral"}) {
    for (const char* ratio : {"4", "2"}) {
      ModelConfig config = preset("transformer-1.3b");
      config.set("hidden_ratio", ratio);
      config.layout = layout;
      const std::string written = to_json(config);
      EXPECT_THAT(written, HasSubstr("\"intermediate_size\": " + std::to_string(config.mlp_dim()))) << layout;
      EXPECT_EQ(parameter_count(parse_config(written, "again")), parameter_count(config)) << layout;
    }
  }
  ModelConfig rwkv = preset("rwkv-169m");
  rwkv.layout = "authors";
  rwkv.set("bos_token_id", "0");
  rwkv.set("eos_token_id", "0");
  EXPECT_THAT(to_json(rwkv), HasSubstr("\"dim_ffn\": 3072"));
  rwkv.layout = "hf";
  EXPECT_THAT(to_json(rwkv), HasSubstr("\"intermediate_size\": 3072"));
  EXPECT_THAT(to_json(preset("transformer-1.3b")), HasSubstr("\"intermediate_size\": null"));  // as it was said
}

TEST(Config, SomeLayersMayHaveAnotherMixer) {
  const ModelConfig hybrid = parse_config(
      R"({"hidden_size": 64, "num_hidden_layers": 4, "num_heads": 2, "attn": {"layers": [1, 3], "num_heads": 4,
          "window_size": 8}, "layer_mixers": [{"layers": [2], "model_type": "gla", "num_heads": 1}]})",
      "config.json");
  ASSERT_EQ(hybrid.others.size(), 2u);
  const std::string json = to_json(hybrid);
  EXPECT_EQ(to_json(parse_config(json, "again")), json);
  EXPECT_THAT(json, HasSubstr("\"attn\": {"));
  EXPECT_THAT(error_of(R"({"attn": {"layers": [24]}})"),
              HasSubstr("layers is 24; expected 0 to num_hidden_layers - 1"));
  EXPECT_THAT(error_of(R"({"attn": [{"layers": [1]}, {"layers": [1]}]})"), HasSubstr("layers is 1 twice"));
  EXPECT_THAT(error_of(R"({"attn": {"num_heads": 4}})"), HasSubstr("layers is absent; expected a list of layers"));
  EXPECT_THAT(error_of(R"({"attn": [[1]]})"), HasSubstr("expected an object"));
  EXPECT_THAT(error_of(R"({"layer_mixers": [{"layers": [1]}]})"), HasSubstr("has no model_type"));
}

TEST(Config, MistakesAreNamed) {
  EXPECT_EQ(error_of(R"({"hidden_size": "big"})"), "config.json: hidden_size is \"big\"; expected an integer");
  EXPECT_EQ(error_of(R"({"hidden_size": 1.5})"), "config.json: hidden_size is 1.5; expected an integer");
  EXPECT_EQ(error_of(R"({"hidden_size": null})"), "config.json: hidden_size is null; expected an integer");
  EXPECT_EQ(error_of(R"({"tie_word_embeddings": 1})"), "config.json: tie_word_embeddings is 1; expected true or false");
  EXPECT_EQ(error_of(R"({"num_heads": 3})"),
            "config.json: config: expand_k is 0.500000; expected hidden_size * expand_k to be a positive multiple of "
            "num_heads 3");
  EXPECT_EQ(error_of(R"({"num_kv_heads": 3})"),
            "config.json: config: num_kv_heads is 3; expected a divisor of num_heads 4");
  EXPECT_THAT(error_of(R"({"hidden_size": 0})"), HasSubstr("hidden_size is 0"));
  EXPECT_THAT(error_of(R"({"hidden_size": 9223372036854775807})"), HasSubstr("hidden_size is 9223372036854775807"));
  EXPECT_THAT(error_of(R"({"hidden_size": 18446744073709551615})"), HasSubstr("expected an integer"));
  EXPECT_THAT(error_of(R"({"hidden_act": "gelu"})"), HasSubstr("hidden_act is 'gelu'; expected 'swish' or 'silu'"));
  EXPECT_THAT(error_of(R"({"model_type": "h3"})"), HasSubstr("unknown 'h3'; known: gla"));
  EXPECT_THAT(error_of(R"({"feature_map": "tanh"})"), HasSubstr("tanh"));
  EXPECT_THAT(error_of(R"({"use_gv": true})"), HasSubstr("use_gv is true; expected false"));
  EXPECT_THAT(error_of("[1]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(error_of("{\"a\":"), HasSubstr("not JSON"));
  EXPECT_THAT(error_of("{\"attn\": " + std::string(50000, '[') + std::string(50000, ']') + "}"),
              HasSubstr("nested deeper than 100"));
  EXPECT_THROW(load_config("/nonexistent/config.json"), Error);
}

// Whatever the bytes: an Error or a valid config, never a crash.
TEST(Config, DamagedTextNeverCrashes) {
  ModelConfig config = preset("gla-tiny");
  config.others.push_back(
      {{1, 3}, &mixers::find_mixer("transformer"), mixers::find_mixer("transformer").make_config()});
  const std::string whole = to_json(config);
  for (std::size_t length = 0; length < whole.size() - 2; ++length) {
    EXPECT_NE(error_of(whole.substr(0, length)), "no error") << length;
  }
  int refused = 0;
  constexpr int kVariants = 4000;
  for (int variant = 0; variant < kVariants; ++variant) {
    std::string damaged = whole;
    const auto seed = static_cast<std::uint64_t>(variant);
    const int flips = 1 + variant % 3;
    for (int flip = 0; flip < flips; ++flip) {
      const auto at = static_cast<std::size_t>(testing::uniform(seed, static_cast<std::uint64_t>(2 * flip)) *
                                               static_cast<double>(damaged.size()));
      const auto bit = static_cast<int>(testing::uniform(seed, static_cast<std::uint64_t>(2 * flip + 1)) * 8.0);
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
    }
    if (error_of(damaged) != "no error") ++refused;
  }
  EXPECT_GT(refused, kVariants / 4);
  EXPECT_LT(refused, kVariants);
}

}  // namespace
}  // namespace flashgla::model
