// The frontend's headers, such that who includes them calls CUDA's runtime and cuDNN by name (library.cpp defines the
// latter) and links no NVRTC: what in the headers is compiled at run time is for norms, and never asked for.
#pragma once

#include <cstring>
#pragma GCC visibility push(hidden)
#include <cudnn.h>
#pragma GCC visibility pop
#include <cudnn_frontend_shim.h>
#include <dlfcn.h>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define HMODULE void*
#include <cudnn_frontend/experimental/nvrtc_shim.h>
#undef NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#undef HMODULE

#include <cudnn_frontend.h>
