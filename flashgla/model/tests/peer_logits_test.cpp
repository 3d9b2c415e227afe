// Logits of small models against those of other libraries, in f32 on the CPU. scripts/transformers_goldens.py made the
// numbers, and scripts/mixer_goldens.py those of published formulas; the weights are a formula of their place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "flashgla/model/tests/cases.h"

namespace flashgla::model {
namespace {

struct Golden {
  std::int64_t token;
  std::array<double, 6> logits;  // the first six of the vocabulary
};

void fill_by_formula(LanguageModel& model) {
  double k = 0.0;
  for (const nn::Parameter* parameter : model.parameters().parameters()) {
    k += 1.0;
    const bool norm = parameter->name.find("norm") != std::string::npos;
    for (std::int64_t j = 0; j < parameter->value.numel(); ++j) {
      const double x = std::sin(static_cast<double>(j + 1) * 12.9898 + k * 78.233) * 43758.5453;
      const double value = (x - std::floor(x) - 0.5) * (norm ? 0.4 : 0.8) + (norm ? 1.0 : 0.0);
      parameter->value.as<float>()[j] = static_cast<float>(value);
    }
  }
}

// Token by token, and the last one by prefill.
void expect_logits(const std::string& config, const std::vector<Golden>& goldens) {
  LanguageModel model(parse_config(config, "config.json"), DType::f32, Device::cpu(), false);
  fill_by_formula(model);
  const std::vector<std::int32_t> tokens = {3, 14, 15, 9, 26, 5, 0, 28, 8, 17, 9, 3, 2, 3, 8, 4};
  const std::int64_t words = model.config().vocab_size;
  Context context(Device::cpu(), 2);
  const std::int64_t capacity = std::min(kCapacity, model.config().most_tokens().count);
  DecodeState state = model.make_state(1, capacity);
  const Tensor logits = Tensor::empty(Shape({1, words}), DType::f32);
  const auto expect = [&](const Golden& golden, const char* how) {
    double difference = 0.0, size = 0.0;
    for (std::size_t i = 0; i < golden.logits.size(); ++i) {
      difference += std::pow(static_cast<double>(logits.as<float>()[i]) - golden.logits[i], 2.0);
      size += golden.logits[i] * golden.logits[i];
    }
    EXPECT_LT(std::sqrt(difference / size), 1e-4) << how << ", token " << golden.token;
  };
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    model.step(context, int_tensor({tokens[t]}), state, logits);
    for (const Golden& golden : goldens) {
      if (golden.token == static_cast<std::int64_t>(t)) expect(golden, "steps");
    }
  }
  DecodeState filled = model.make_state(1, capacity);
  const Tensor bounds = int_tensor({0, static_cast<std::int32_t>(tokens.size())});
  model.prefill(context, int_tensor(tokens), {bounds, bounds}, filled, logits);
  expect(goldens.back(), "prefill");
}

TEST(PeerLogits, LlamaOfTransformers) {
  expect_logits(R"({"model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 29, "rms_norm_eps": 1e-5,
                    "attention_bias": true})",
                {{0, {-0.3879793, 1.0443628, 0.065654084, -0.32492247, 0.62953514, -0.13255396}},
                 {8, {0.69835484, 0.70467281, 0.88727897, 0.20378451, -0.58056992, -0.61918443}},
                 {15, {1.7271268, 1.5800705, 0.32569942, -0.64714569, -0.83346516, -0.37372839}}});
}

TEST(PeerLogits, MistralOfTransformers) {
  expect_logits(R"({"model_type": "mistral", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 29,
                    "rms_norm_eps": 1e-5, "sliding_window": 5})",
                {{0, {0.84796149, 0.3799631, 0.82334727, 1.9405026, 1.4055674, -1.4886651}},
                 {8, {0.90649879, -0.42573887, -0.93881899, -0.29264644, 0.5943737, 0.62262774}},
                 {15, {-0.33005002, 0.46555075, 0.93857259, 2.0803514, 1.1833107, -0.30812126}}});
}

TEST(PeerLogits, Mamba2OfTransformers) {
  expect_logits(R"({"model_type": "mamba2", "hidden_size": 24, "num_hidden_layers": 2, "head_dim": 8, "num_heads": 6,
                    "state_size": 10, "n_groups": 1, "vocab_size": 29, "layer_norm_epsilon": 1e-5,
                    "time_step_limit": [0.0, Infinity]})",
                {{0, {0.35629585, -0.48032281, 0.68740392, -1.4110647, 0.20612468, 0.51530856}},
                 {8, {-1.5445542, -0.043743886, 1.8099537, -0.76991218, 0.097448342, 0.50599402}},
                 {15, {-0.29898953, 0.26624036, 1.2220066, -3.7788849, -2.112294, 1.0448064}}});
  expect_logits(R"({"model_type": "mamba2", "hidden_size": 24, "num_hidden_layers": 2, "head_dim": 8, "num_heads": 6,
                    "state_size": 10, "n_groups": 2, "use_bias": true, "vocab_size": 29, "layer_norm_epsilon": 1e-5})",
                {{0, {-0.99400324, 1.8149755, 1.9651562, -0.45917478, 0.68459511, -0.55236185}},
                 {8, {-0.40767327, -0.74052548, 0.82467496, -2.2673557, 0.25351501, 0.65591687}},
                 {15, {-0.38329178, -1.3826903, -1.0843792, -0.48509434, 0.99711114, 0.67382151}}});
}

TEST(PeerLogits, GlaByItsFormulas) {
  const std::string common = R"("hidden_size": 24, "num_hidden_layers": 3, "num_heads": 2, "intermediate_size": 40,
                                 "vocab_size": 29, "norm_eps": 1e-6)";
  expect_logits(R"({"model_type": "gla", )" + common + "}",
                {{0, {-0.28418702, -1.2636658, 0.82843375, -0.39521037, -2.248203, 0.14115537}},
                 {8, {-0.20186376, 1.9398728, 1.2639419, -0.24152339, 0.32052414, -1.8496803}},
                 {15, {2.5559402, -1.0366591, 0.083024386, -0.27075411, -0.34322115, -0.19364666}}});
  expect_logits(R"({"model_type": "gla", "use_short_conv": true, )" + common + "}",
                {{0, {1.1144774, -0.22087779, 0.24626386, -0.94208514, -0.55622555, -0.36188373}},
                 {8, {-1.4720223, -1.7271311, -0.60398918, 0.60888771, -1.3171742, 0.49814207}},
                 {15, {-0.022248418, 1.5915306, -1.0580743, -0.4398117, -1.548883, 0.90818695}}});
  expect_logits(R"({"model_type": "gla_variant", "gate": "scalar", )" + common + "}",
                {{0, {-1.5663176, 0.68467592, -1.3282871, -0.48952731, -0.70573198, -0.37149976}},
                 {8, {0.25421637, 2.6533263, 1.5936893, 1.2147636, -1.2018806, -0.52212699}},
                 {15, {-0.80374432, -0.72362566, -0.25760743, -0.70565539, -0.83492494, -1.4713043}}});
}

TEST(PeerLogits, RetnetByItsFormulas) {
  expect_logits(R"({"model_type": "retnet", "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 2,
                    "intermediate_size": 40, "vocab_size": 29, "norm_eps": 1e-6})",
                {{0, {1.2277753, -1.4495373, -2.3222513, -2.9607294, 0.14970457, -0.7364035}},
                 {8, {-0.44377949, 0.58526443, 0.41606246, -0.99000625, 2.7924449, 0.82517052}},
                 {15, {0.072981854, 0.32002981, 0.82941465, -1.3422037, 1.8366877, 1.0268748}}});
}

TEST(PeerLogits, TransformerByItsFormulas) {
  expect_logits(R"({"model_type": "transformer", "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 4,
                    "num_kv_heads": 2, "qkv_bias": true, "qk_norm": true, "window_size": 5, "intermediate_size": 40,
                    "vocab_size": 29, "norm_eps": 1e-6})",
                {{0, {-0.47933878, 0.91611933, -0.11605102, 1.0831858, 1.6745556, 0.82577483}},
                 {8, {-0.42428445, 2.4134161, -1.4911064, 1.9267988, 1.1229144, 1.7502891}},
                 {15, {1.2051704, 1.0334577, 0.11732398, -1.1155104, -0.57882282, 2.5997813}}});
}

TEST(PeerLogits, Hgrn2ByItsFormulas) {
  const std::string common = R"({"model_type": "hgrn2", "hidden_size": 24, "num_hidden_layers": 3, "expand_ratio": 8,
                                 "intermediate_size": 40, "vocab_size": 29, "norm_eps": 1e-6)";
  expect_logits(common + "}", {{0, {-0.65948247, -0.71448337, 3.4195095, 0.064235566, -0.62705953, -0.44859869}},
                               {8, {0.73736716, 0.83688079, 1.3864763, -1.1086052, -0.30182885, -0.58329399}},
                               {15, {-0.32806714, -0.025579124, 1.5688523, 1.0593421, 0.00079993972, 1.4213579}}});
  expect_logits(common + R"(, "use_short_conv": true})",
                {{0, {-0.97038867, 0.82443137, -0.045093989, -2.1214617, 1.0749958, 2.0085675}},
                 {8, {0.65137409, 0.48392399, 1.5005012, -0.58892433, -1.2456899, -0.47079723}},
                 {15, {0.37125378, -0.87832114, 1.0689177, -0.17102824, -1.6094793, -0.89468514}}});
}

TEST(PeerLogits, MambaOfTransformers) {
  expect_logits(R"({"model_type": "mamba", "hidden_size": 24, "num_hidden_layers": 2, "state_size": 16,
                    "vocab_size": 29, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": false})",
                {{0, {1.1426655, 0.41896531, -1.4461309, -0.0025939473, -2.049145, -0.59719861}},
                 {8, {-0.89078724, 0.3919602, -0.20439173, 0.23765108, -0.24603626, 1.3224373}},
                 {15, {-0.80348271, 0.50103909, 1.8418686, -1.465421, 2.1620579, 0.32065374}}});
  expect_logits(R"({"model_type": "mamba", "hidden_size": 24, "num_hidden_layers": 2, "state_size": 5,
                    "time_step_rank": 3, "use_bias": true, "vocab_size": 29, "layer_norm_epsilon": 1e-5})",
                {{0, {-0.65967989, 0.69764787, 0.76705384, 2.1900303, 0.31934741, 0.44162282}},
                 {8, {-1.7528605, -0.72562504, 1.460863, -0.074165799, 0.9087826, -0.90708494}},
                 {15, {-0.64275604, 0.092988402, 2.2165546, -0.65943551, 3.2284701, -1.9205679}}});
}

TEST(PeerLogits, RwkvOfTransformers) {
  expect_logits(R"({"model_type": "rwkv", "hidden_size": 24, "num_hidden_layers": 2, "vocab_size": 29,
                    "layer_norm_epsilon": 1e-5})",
                {{0, {-0.57100827, 2.1277642, -1.619462, 1.1627828, -1.4800814, 0.25017568}},
                 {8, {-0.15792264, -0.64385825, 0.011141127, -0.69380039, -0.096697599, 1.538069}},
                 {15, {-0.32099339, -0.17020915, 0.2023427, -0.47815144, 0.48821691, 0.95219815}}});
  expect_logits(R"({"model_type": "rwkv", "hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 29,
                    "attention_hidden_size": 20, "intermediate_size": 40, "rescale_every": 2,
                    "layer_norm_epsilon": 1e-5})",
                {{0, {-2.2604413, -1.0080827, 1.8948693, -1.5654877, -0.87500483, 1.8438052}},
                 {8, {-2.3987386, -0.26557893, 1.5019796, -0.23052244, -3.2053661, 0.36309668}},
                 {15, {-2.435329, 0.6124115, 0.3310014, 0.10768222, -2.8378475, 1.2814045}}});
}

TEST(PeerLogits, GsaByItsFormulas) {
  const std::string common = R"({"model_type": "gsa", "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 4,
                                 "num_kv_heads": 2, "num_slots": 5, "intermediate_size": 40, "vocab_size": 29,
                                 "norm_eps": 1e-6)";
  expect_logits(common + "}", {{0, {1.4831883, -0.88642861, -1.7848181, -0.18976133, -0.0097679402, -0.44257119}},
                               {8, {0.97717866, 1.6222118, -0.87467214, -1.1393495, 0.030734877, 0.24617604}},
                               {15, {0.98968262, 0.12620585, -1.444315, 0.77269618, 0.47917645, -0.50530506}}});
  expect_logits(common + R"(, "use_short_conv": true})",
                {{0, {1.2868428, -0.50974272, -0.60570017, -1.2448401, -0.92934061, -2.1223852}},
                 {8, {-0.12368552, 1.0991348, -0.00358641, 1.4393972, 0.50683968, -0.44234965}},
                 {15, {-0.10893794, 1.2517101, -1.520679, 1.6723935, 0.42905416, 0.90059896}}});
}

TEST(PeerLogits, LinearAttentionByItsFormulas) {
  const std::string common = R"({"model_type": "linear_attn", "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 3,
                                 "intermediate_size": 40, "vocab_size": 29, "norm_eps": 1e-6, )";
  expect_logits(common + R"("feature_map": "elementwise_product"})",
                {{0, {-1.8218045, 0.80548029, -0.13844011, 0.84327923, 0.93363988, 1.703281}},
                 {8, {1.0553647, -0.79505494, -0.8228239, 0.26949705, -0.49687105, -1.086218}},
                 {15, {2.3588869, -0.86676338, 1.8203135, -1.8023015, -1.7745482, -0.4238343}}});
  expect_logits(common + R"("feature_map": "hedgehog", "tie_feature_map_qk": true, "norm_feature_map": true})",
                {{0, {0.30497392, 2.4759945, -1.6557865, 0.37604124, 0.75983893, 1.7860477}},
                 {8, {-0.91096204, -0.74091318, -1.65355, 0.3426384, 0.9848756, 0.8780246}},
                 {15, {0.025912391, 0.90327672, -1.6175429, 0.75657458, 2.0997038, 0.75511826}}});
  expect_logits(common + R"("feature_map": "t2r", "norm_q": true, "norm_k": true})",
                {{0, {0.39578557, 2.4708864, -1.6288088, 0.44413421, 0.76467039, 1.7057137}},
                 {8, {-0.84814782, 0.4768129, -0.084370715, -0.85198663, -0.18144578, 1.1634574}},
                 {15, {-1.575442, -1.3663518, 1.4327527, -0.89092505, 0.57858053, 1.0624685}}});
  expect_logits(common + R"("feature_map": "dpfp", "norm_k": true})",
                {{0, {0.80578851, 0.71903983, -0.78563593, 0.15078851, 1.459393, 0.92654035}},
                 {8, {-0.059474288, 2.016968, 0.09471016, -0.62576969, 0.19318127, -0.22864356}},
                 {15, {-0.1775272, 2.3250072, -1.0719712, 0.3323872, 0.40232431, 1.0174195}}});
}

TEST(PeerLogits, HyenaByItsFormulas) {
  expect_logits(R"({"model_type": "hyena", "hidden_size": 24, "num_hidden_layers": 3, "l_max": 20, "filter_order": 6,
                    "emb_dim": 5, "shift": 0.1, "intermediate_size": 40, "vocab_size": 29, "norm_eps": 1e-6})",
                {{0, {-0.93659343, 0.86041269, -0.58777825, -0.030209531, -1.0327834, 1.2958778}},
                 {8, {1.4920149, 1.6192446, -0.4071929, -1.4250744, 1.785977, -0.48344234}},
                 {15, {1.6198345, 1.3413194, 0.022078452, 0.1950545, 1.7653226, -0.25550478}}});
}

}  // namespace
}  // namespace flashgla::model
