// The types of cuBLASLt that LibTorch's headers name, for a build without CUDA.
#pragma once

using cublasLtHandle_t = struct cublasLtHandle_st*;
