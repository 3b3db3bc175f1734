// The types of cuSPARSE that LibTorch's headers name, for a build without CUDA.
#pragma once

using cusparseHandle_t = struct cusparseHandle_st*;
enum cusparseStatus_t : int;
