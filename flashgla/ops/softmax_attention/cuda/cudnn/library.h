// cuDNN, opened when attention first asks for it: a program links none of it.
#pragma once

#include <string>

namespace flashgla::ops::softmax_attention::cuda::cudnn {

struct Library {
  std::string name;     // "cuDNN 9.19.0"; empty where it cannot be used
  std::string missing;  // why
};

// said: what FLASHGLA_CUDNN says: "off", the library's file or its folder; empty: the loader finds it.
Library open_library(const std::string& said);

// Opened at the first call, for the program's life.
const Library& library();

}  // namespace flashgla::ops::softmax_attention::cuda::cudnn
