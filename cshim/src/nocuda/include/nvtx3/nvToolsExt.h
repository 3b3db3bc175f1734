// What cuda/nvtx.cc names of NVTX, for a build without CUDA: no tool is ever attached.
#pragma once

#include <cstdint>

#define NVTX_VERSION 3
#define NVTX_EVENT_ATTRIB_STRUCT_SIZE sizeof(nvtxEventAttributes_t)
#define NVTX_MESSAGE_TYPE_ASCII 1
#define NVTX_VERSIONED_IDENTIFIER(name) name

struct nvtxEventAttributes_t {
  uint16_t version;
  uint16_t size;
  int32_t messageType;
  struct {
    const char* ascii;
  } message;
};
using nvtxRangeId_t = uint64_t;
struct nvtxGlobals_t {
  void* nvtxRangeStartEx_impl_fnptr;
};
inline constexpr nvtxGlobals_t nvtxGlobals = {nullptr};

inline void nvtxInitialize(const void*) {}
inline nvtxRangeId_t nvtxRangeStartEx(const nvtxEventAttributes_t*) { return 0; }
inline void nvtxRangeEnd(nvtxRangeId_t) {}
inline void nvtxMarkEx(const nvtxEventAttributes_t*) {}
