// What the files of this folder share: llama.cpp's context, with a pool for its scratch memory.
#pragma once
#include "common.cuh"

ggml_backend_cuda_context& llama_context();
