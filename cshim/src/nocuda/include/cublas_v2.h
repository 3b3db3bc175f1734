// The types of cuBLAS that LibTorch's headers name, for a build without CUDA.
#pragma once

using cublasHandle_t = struct cublasHandle_st*;
enum cublasStatus_t : int;
