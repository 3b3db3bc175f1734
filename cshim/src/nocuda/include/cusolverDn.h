// The types of cuSOLVER that LibTorch's headers name, for a build without CUDA.
#pragma once

using cusolverDnHandle_t = struct cusolverDnHandle_st*;
