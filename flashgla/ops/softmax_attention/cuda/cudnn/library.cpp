#include "flashgla/ops/softmax_attention/cuda/cudnn/library.h"

// What follows of cuDNN is defined below, for this program's own parts alone.
#pragma GCC visibility push(hidden)
#include <cudnn.h>
#pragma GCC visibility pop

#include <cstdlib>
#include <filesystem>

#include "flashgla/base/error.h"
#include "flashgla/base/shared_library.h"

namespace flashgla::ops::softmax_attention::cuda::cudnn {

namespace {

constexpr const char* kFile = "libcudnn.so.9";
// The oldest that was tried. The frontend asks for 9.12, from which on sums are written in the layout asked for; what
// of its headers is newer than the library, it leaves out.
constexpr std::size_t kOldest = 91400;

struct Functions {
  decltype(&cudnnGetVersion) version;
  decltype(&cudnnGetErrorString) error_string;
  decltype(&cudnnGetLastErrorString) last_error_string;
  decltype(&cudnnCreate) create;
  decltype(&cudnnDestroy) destroy;
  decltype(&cudnnSetStream) set_stream;
  decltype(&cudnnGetStream) get_stream;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor;
  decltype(&cudnnBackendFinalize) finalize;
  decltype(&cudnnBackendSetAttribute) set_attribute;
  decltype(&cudnnBackendGetAttribute) get_attribute;
  decltype(&cudnnBackendExecute) execute;
};

Functions functions;

std::string text_of(std::size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// Throws Error where it is not there, or lacks something.
Functions functions_of(const std::string& path) {
  const SharedLibrary library(path);
  Functions f{};
  library.find(f.version, "cudnnGetVersion");
  library.find(f.error_string, "cudnnGetErrorString");
  library.find(f.last_error_string, "cudnnGetLastErrorString");
  library.find(f.create, "cudnnCreate");
  library.find(f.destroy, "cudnnDestroy");
  library.find(f.set_stream, "cudnnSetStream");
  library.find(f.get_stream, "cudnnGetStream");
  library.find(f.create_descriptor, "cudnnBackendCreateDescriptor");
  library.find(f.destroy_descriptor, "cudnnBackendDestroyDescriptor");
  library.find(f.finalize, "cudnnBackendFinalize");
  library.find(f.set_attribute, "cudnnBackendSetAttribute");
  library.find(f.get_attribute, "cudnnBackendGetAttribute");
  library.find(f.execute, "cudnnBackendExecute");
  return f;
}

}  // namespace

Library open_library(const std::string& said) {
  if (said == "off") return {"", "FLASHGLA_CUDNN is off"};
  std::string path = said.empty() ? kFile : said;
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) path = path + "/" + kFile;
  Functions found{};
  try {
    found = functions_of(path);
  } catch (const Error& error) {
    return {"", error.what()};
  }
  const std::size_t version = found.version();
  if (version < kOldest) return {"", path + " is cuDNN " + text_of(version) + ", older than " + text_of(kOldest)};
  functions = found;
  return {"cuDNN " + text_of(version), ""};
}

const Library& library() {
  static const Library opened = [] {
    const char* said = std::getenv("FLASHGLA_CUDNN");
    return open_library(said != nullptr ? said : "");
  }();
  return opened;
}

}  // namespace flashgla::ops::softmax_attention::cuda::cudnn

// What the frontend's headers call, each the library's function of that name. Nothing is called where library().name is
// empty.
namespace library_of_attention = flashgla::ops::softmax_attention::cuda::cudnn;
using library_of_attention::functions;

extern "C" {
size_t cudnnGetVersion() { return functions.version(); }
const char* cudnnGetErrorString(cudnnStatus_t status) { return functions.error_string(status); }
void cudnnGetLastErrorString(char* message, size_t bytes) { functions.last_error_string(message, bytes); }
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return functions.create(handle); }
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return functions.destroy(handle); }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) { return functions.set_stream(handle, stream); }
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  return functions.get_stream(handle, stream);
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor) {
  return functions.create_descriptor(type, descriptor);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  return functions.destroy_descriptor(descriptor);
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) { return functions.finalize(descriptor); }
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* elements) {
  return functions.set_attribute(descriptor, name, type, count, elements);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count,
                                       void* elements) {
  return functions.get_attribute(descriptor, name, type, wanted, count, elements);
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variants) {
  return functions.execute(handle, plan, variants);
}
}
