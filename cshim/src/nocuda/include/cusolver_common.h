// The types of cuSOLVER that LibTorch's headers name, for a build without CUDA.
#pragma once

enum cusolverStatus_t : int;
