// The part of CUDA's runtime that this library and LibTorch's headers name, for a build without
// CUDA: types, and functions that return cudaErrorNoDevice, as on a machine without a GPU. A build
// with CUDA uses NVIDIA's header, which checks the arguments. Enumerators have NVIDIA's numbers.
#pragma once

#include <cstddef>

#define CUDART_VERSION 13000  // the version of CUDA that these names are from
#define CUDART_CB

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureUnjoined = 904,
};

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaGraph_t = struct CUgraph_st*;
using cudaGraphExec_t = struct CUgraphExec_st*;
using cudaGraphNode_t = struct CUgraphNode_st*;
using cudaUserObject_t = struct CUuserObject_st*;
using cudaGraphConditionalHandle = unsigned long long;
using cudaHostFn_t = void (*)(void*);

inline const auto cudaStreamLegacy = reinterpret_cast<cudaStream_t>(1);
inline const auto cudaStreamPerThread = reinterpret_cast<cudaStream_t>(2);

enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed,
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone,
  cudaStreamCaptureStatusActive,
  cudaStreamCaptureStatusInvalidated,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault,
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered,
  cudaMemoryTypeHost,
  cudaMemoryTypeDevice,
  cudaMemoryTypeManaged,
};
enum cudaGraphNodeType {
  cudaGraphNodeTypeKernel = 0,
  cudaGraphNodeTypeMemcpy = 1,
  cudaGraphNodeTypeMemset = 2,
  cudaGraphNodeTypeHost = 3,
  cudaGraphNodeTypeEmpty = 5,
  cudaGraphNodeTypeWaitEvent = 6,
  cudaGraphNodeTypeEventRecord = 7,
  cudaGraphNodeTypeCount = 16,
};
enum cudaGraphConditionalNodeType { cudaGraphCondTypeIf };
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound,
};
enum cudaDeviceAttr {
  cudaDevAttrClockRate = 13,
  cudaDevAttrCanUseHostPointerForRegisteredMem = 91,
  cudaDevAttrHostRegisterReadOnlySupported = 113
};

inline constexpr unsigned int cudaStreamNonBlocking = 1;
inline constexpr unsigned int cudaEventDefault = 0;
inline constexpr unsigned int cudaEventBlockingSync = 1;
inline constexpr unsigned int cudaEventDisableTiming = 2;
inline constexpr unsigned int cudaEventInterprocess = 4;
inline constexpr unsigned int cudaEventRecordDefault = 0;
inline constexpr unsigned int cudaEventRecordExternal = 1;
inline constexpr unsigned int cudaEventWaitDefault = 0;
inline constexpr unsigned int cudaEventWaitExternal = 1;
inline constexpr unsigned int cudaHostAllocPortable = 1;
inline constexpr unsigned int cudaHostRegisterPortable = 1;
inline constexpr unsigned int cudaHostRegisterMapped = 2;
inline constexpr unsigned int cudaHostRegisterReadOnly = 8;
inline constexpr unsigned int cudaIpcMemLazyEnablePeerAccess = 1;
inline constexpr unsigned int cudaGraphInstantiateFlagAutoFreeOnLaunch = 1;
inline constexpr unsigned int cudaGraphInstantiateFlagUseNodePriority = 8;
inline constexpr unsigned int cudaGraphDebugDotFlagsVerbose = 1;
inline constexpr unsigned int cudaUserObjectNoDestructorSync = 1;
inline constexpr unsigned int cudaGraphUserObjectMove = 1;
inline constexpr unsigned long long cudaEnableDefault = 0;

struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaIpcEventHandle_t {
  char reserved[64];
};
struct cudaDeviceProp {
  char name[256];
  struct {
    char bytes[16];
  } uuid;
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount, asyncEngineCount;
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};

inline const char* cudaGetErrorString(cudaError_t) { return "built without CUDA"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// Returns cudaErrorNoDevice. Not inline: the compiler would warn about the code that follows a
// success.
cudaError_t ts_no_cuda() noexcept;

#define TS_ABSENT(name)                   \
  template <typename... Arguments>        \
  inline cudaError_t name(Arguments...) { \
    return ts_no_cuda();                  \
  }
TS_ABSENT(cudaDeviceCanAccessPeer)
TS_ABSENT(cudaDeviceGetAttribute)
TS_ABSENT(cudaDeviceGetPCIBusId)
TS_ABSENT(cudaDeviceGetStreamPriorityRange)
TS_ABSENT(cudaDeviceSynchronize)
TS_ABSENT(cudaEventCreate)
TS_ABSENT(cudaEventCreateWithFlags)
TS_ABSENT(cudaEventDestroy)
TS_ABSENT(cudaEventElapsedTime)
TS_ABSENT(cudaEventQuery)
TS_ABSENT(cudaEventRecord)
TS_ABSENT(cudaEventRecordWithFlags)
TS_ABSENT(cudaEventSynchronize)
TS_ABSENT(cudaFree)
TS_ABSENT(cudaFreeHost)
TS_ABSENT(cudaGetDevice)
TS_ABSENT(cudaGetDeviceProperties)
TS_ABSENT(cudaGetDriverEntryPointByVersion)
TS_ABSENT(cudaGraphDebugDotPrint)
TS_ABSENT(cudaGraphDestroy)
TS_ABSENT(cudaGraphExecDestroy)
TS_ABSENT(cudaGraphGetNodes)
TS_ABSENT(cudaGraphInstantiateWithFlags)
TS_ABSENT(cudaGraphLaunch)
TS_ABSENT(cudaGraphNodeGetType)
TS_ABSENT(cudaGraphRetainUserObject)
TS_ABSENT(cudaGraphUpload)
TS_ABSENT(cudaHostAlloc)
TS_ABSENT(cudaHostRegister)
TS_ABSENT(cudaHostUnregister)
TS_ABSENT(cudaIpcCloseMemHandle)
TS_ABSENT(cudaIpcGetEventHandle)
TS_ABSENT(cudaIpcOpenEventHandle)
TS_ABSENT(cudaIpcOpenMemHandle)
TS_ABSENT(cudaLaunchHostFunc)
TS_ABSENT(cudaMemGetInfo)
TS_ABSENT(cudaMemcpyAsync)
TS_ABSENT(cudaMemcpyPeerAsync)
TS_ABSENT(cudaMemsetAsync)
TS_ABSENT(cudaPointerGetAttributes)
TS_ABSENT(cudaRuntimeGetVersion)
TS_ABSENT(cudaSetDevice)
TS_ABSENT(cudaStreamBeginCapture)
TS_ABSENT(cudaStreamCreateWithPriority)
TS_ABSENT(cudaStreamDestroy)
TS_ABSENT(cudaStreamEndCapture)
TS_ABSENT(cudaStreamGetCaptureInfo)
TS_ABSENT(cudaStreamGetDevice)
TS_ABSENT(cudaStreamGetFlags)
TS_ABSENT(cudaStreamGetId)
TS_ABSENT(cudaStreamGetPriority)
TS_ABSENT(cudaStreamIsCapturing)
TS_ABSENT(cudaStreamQuery)
TS_ABSENT(cudaStreamSynchronize)
TS_ABSENT(cudaStreamWaitEvent)
TS_ABSENT(cudaThreadExchangeStreamCaptureMode)
TS_ABSENT(cudaUserObjectCreate)
TS_ABSENT(cudaUserObjectRelease)
#undef TS_ABSENT
