// CUDA's runtime, and the functions of cuBLAS, cuDNN and NCCL that captures, products, convolutions
// and groups of one rank call, for null devices. Their memory is host memory, kernels and products
// write nothing, and a copy is done when its call returns. So everything that the host does for a
// GPU can run without one: the caching allocator, the current streams, events, captures, and the
// stream sanitizer. Results of computations are meaningless. tools/null-device.sh loads this
// library before the real one.
// During a capture it refuses the calls that CUDA refuses, and invalidates the capture when CUDA
// does.
// It records calls that allocate, free or wait, for tests that limit their number, and copies of
// pageable memory, which may wait.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

struct CUstream_st {
  int device = 0;
  int priority = 0;
  unsigned long long id = 0;       // unique, even among later streams at this address
  unsigned long long capture = 0;  // 0: the stream is not captured
};

struct CUevent_st {
  unsigned long long capture = 0;  // the capture of the latest record
};

struct CUgraphNode_st {
  cudaGraphNodeType type;
};

struct CUgraph_st {
  std::deque<CUgraphNode_st> nodes;
  bool broken = false;
};

struct CUgraphExec_st {};

namespace {

constexpr int kMaxDevices = 8;
constexpr size_t kPage = 4096;
constexpr size_t kSegment = size_t{2} << 20;  // the caching allocator's alignment

using Blocks = std::map<const char*, size_t>;  // bytes, by address

struct State {
  std::mutex mutex;
  std::deque<CUstream_st> streams;
  std::vector<CUstream_st*> destroyed;
  unsigned long long streams_made = 0;
  unsigned long long waits = 0;  // waits of streams for events
  std::map<unsigned long long, std::unique_ptr<CUgraph_st>> captures;  // running captures
  unsigned long long captures_begun = 0;
  Blocks device_memory;
  Blocks pinned_memory;
};

State& state() {
  static auto* here = new State;  // never destroyed: threads may outlive main
  return *here;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

int device_count() {
  static const int count = [] {
    const char* text = std::getenv("NULL_DEVICES");
    return std::clamp(text == nullptr ? 1 : std::atoi(text), 0, kMaxDevices);
  }();
  return count;
}

// A file in memory. A test finds it by name among its descriptors, and needs no symbol of this
// library.
const int calls = memfd_create("null_calls", MFD_CLOEXEC);

// Writes a line with the name of a function and of its thread to the file.
void note(const char* function) {
  char thread[16] = "";
  prctl(PR_GET_NAME, thread);
  char line[80];
  const int bytes = std::snprintf(line, sizeof line, "%s %s\n", function, thread);
  if (write(calls, line, static_cast<size_t>(bytes)) != bytes) std::abort();
}

// For the functions below the caller holds the mutex.

CUstream_st& stream_of(cudaStream_t stream) {
  static auto* defaults = new std::vector<CUstream_st>(kMaxDevices);
  if (stream != nullptr && stream != cudaStreamLegacy) return *stream;
  CUstream_st& found = (*defaults)[static_cast<size_t>(current_device)];
  found.device = current_device;
  found.id = static_cast<unsigned long long>(current_device) + 1;
  return found;
}

// Returns the graph that captures the stream's work, or NULL.
CUgraph_st* graph_of(cudaStream_t stream) {
  const auto found = state().captures.find(stream_of(stream).capture);
  return found == state().captures.end() ? nullptr : found->second.get();
}

// Invalidates the capture of a call that waits for captured work.
cudaError_t refuse_captured(unsigned long long capture) {
  const auto found = state().captures.find(capture);
  if (capture == 0 || found == state().captures.end()) return cudaSuccess;
  found->second->broken = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}

void* allocate(Blocks& blocks, size_t bytes) {
  const size_t alignment = bytes >= kSegment ? kSegment : kPage;
  void* memory = std::aligned_alloc(
      alignment, std::max(alignment, (bytes + alignment - 1) & ~(alignment - 1)));
  if (memory != nullptr) blocks[static_cast<char*>(memory)] = bytes;
  return memory;
}

void release(Blocks& blocks, void* memory) {
  if (blocks.erase(static_cast<char*>(memory)) != 0) std::free(memory);
}

bool contains(const Blocks& blocks, const void* address) {
  auto after = blocks.upper_bound(static_cast<const char*>(address));
  if (after == blocks.begin()) return false;
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

// Whether CUDA may make the host wait for a copy of the memory: it is neither device memory nor
// pinned.
bool pageable(const void* address) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return !contains(state().device_memory, address) && !contains(state().pinned_memory, address);
}

// Enqueues work on a stream. Returns true if the work happens now, and not at a replay, which does
// nothing.
bool enqueue(cudaStream_t stream, cudaGraphNodeType type) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  CUgraph_st* graph = graph_of(stream);
  if (graph != nullptr) graph->nodes.push_back({type});
  return graph == nullptr;
}

cudaError_t launch(cudaStream_t stream) {
  enqueue(stream, cudaGraphNodeTypeKernel);
  return cudaSuccess;
}

int active_context(int /*device*/, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  *active = 1;
  return 0;
}

int driver_success() { return 0; }

// Parts of the multiprocessors: an H100's, in multiples of eight.
constexpr unsigned kMultiprocessors = 132;
constexpr unsigned kPart = 8;

CUresult device_resource(CUdevice /*device*/, CUdevResource* resource, CUdevResourceType type) {
  *resource = {};
  resource->type = type;
  resource->sm = {kMultiprocessors, kPart, kPart};
  return CUDA_SUCCESS;
}

CUresult split(CUdevResource* result, unsigned* groups, const CUdevResource* input,
               CUdevResource* /*remaining*/, unsigned /*flags*/, unsigned count) {
  *result = *input;
  result->sm.smCount = (count + kPart - 1) / kPart * kPart;
  *groups = 1;
  return CUDA_SUCCESS;
}

CUresult green_context(CUgreenCtx* context, CUdevResourceDesc /*description*/, CUdevice /*device*/,
                       unsigned /*flags*/) {
  static char made = 0;
  *context = reinterpret_cast<CUgreenCtx>(&made);
  return CUDA_SUCCESS;
}

CUresult green_stream(CUstream* stream, CUgreenCtx /*context*/, unsigned flags, int priority) {
  return static_cast<CUresult>(cudaStreamCreateWithPriority(stream, flags, priority));
}

// Functions of the driver with an effect. All others do nothing.
void* driver_function(const char* symbol) {
  const std::pair<const char*, void*> functions[] = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&active_context)},
      {"cuDeviceGetDevResource", reinterpret_cast<void*>(&device_resource)},
      {"cuDevSmResourceSplitByCount", reinterpret_cast<void*>(&split)},
      {"cuGreenCtxCreate", reinterpret_cast<void*>(&green_context)},
      {"cuGreenCtxStreamCreate", reinterpret_cast<void*>(&green_stream)},
  };
  for (const auto& [name, function] : functions) {
    if (std::strcmp(symbol, name) == 0) return function;
  }
  return reinterpret_cast<void*>(&driver_success);
}

}  // namespace

extern "C" {

// ---- Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

// The numbers by which LibTorch divides are an H100's.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof properties->name, "null device");
  properties->major = 9;
  properties->totalGlobalMem = size_t{80} << 30;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->asyncEngineCount = 3;
  properties->textureAlignment = 512;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  *value = attribute == cudaDevAttrClockRate ? 1980000 : 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int device) {
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* accessible, int /*device*/, int /*peer*/) {
  *accessible = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) { return cudaSuccess; }

cudaError_t cudaDeviceSynchronize() {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().captures.empty()) return cudaSuccess;
  for (const auto& [id, graph] : state().captures) graph->broken = true;
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  // As in the real driver, a function is missing for versions before its first one.
  constexpr unsigned kStreamsOfGreenContexts = 12050;
  const bool later = std::strcmp(symbol, "cuGreenCtxStreamCreate") == 0;
  *function = later && version < kStreamsOfGreenContexts ? nullptr : driver_function(symbol);
  if (result != nullptr) {
    *result = *function != nullptr ? cudaDriverEntryPointSuccess
                                   : cudaDriverEntryPointVersionNotSufficent;
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t /*error*/) { return "an error of the null device"; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorStreamCaptureUnsupported
             ? "the null device: operation not permitted when stream is capturing"
             : "the null device returned an error";
}

// ---- Memory

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  *memory = allocate(state().device_memory, bytes);
  return *memory != nullptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* memory) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  release(state().device_memory, memory);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned /*flags*/) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  *memory = allocate(state().pinned_memory, bytes);
  return *memory != nullptr ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* memory) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  release(state().pinned_memory, memory);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned /*flags*/) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().pinned_memory[static_cast<char*>(memory)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().pinned_memory.erase(static_cast<char*>(memory));
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *attributes = cudaPointerAttributes{};
  attributes->type = contains(state().device_memory, address)   ? cudaMemoryTypeDevice
                     : contains(state().pinned_memory, address) ? cudaMemoryTypeHost
                                                                : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = size_t{70} << 30;
  *total = size_t{80} << 30;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  if (pageable(dst) || pageable(src)) note("cudaMemcpyAsync-pageable");
  if (enqueue(stream, cudaGraphNodeTypeMemcpy)) std::memmove(dst, src, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* dst, int /*to*/, const void* src, int /*from*/, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (enqueue(stream, cudaGraphNodeTypeMemset)) std::memset(memory, value, bytes);
  return cudaSuccess;
}

// Any handle except zeros belongs to another process, and each opening is new memory.
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned /*flags*/) {
  const auto zero = [](char byte) { return byte == 0; };
  if (std::all_of(std::begin(handle.reserved), std::end(handle.reserved), zero)) {
    return fail(cudaErrorInvalidValue);
  }
  return cudaMalloc(memory, kSegment);
}

cudaError_t cudaIpcCloseMemHandle(void* memory) { return cudaFree(memory); }

// ---- Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int priority) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().destroyed.empty()) {
    *stream = &state().streams.emplace_back();
  } else {
    *stream = state().destroyed.back();
    state().destroyed.pop_back();
  }
  **stream = {current_device, priority, kMaxDevices + ++state().streams_made, 0};
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  note(__func__);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().destroyed.push_back(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *id = stream_of(stream).id;
  return cudaSuccess;
}

// For tests, which find it by name.
unsigned long long null_stream_waits() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().waits;
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *device = stream_of(stream).device;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t /*stream*/, unsigned* flags) {
  *flags = cudaStreamNonBlocking;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return refuse_captured(stream_of(stream).capture);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  note(__func__);
  return cudaStreamQuery(stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  ++state().waits;
  CUgraph_st* graph = graph_of(stream);
  if (flags == cudaEventWaitExternal) {
    if (graph != nullptr) graph->nodes.push_back({cudaGraphNodeTypeWaitEvent});
    return cudaSuccess;
  }
  if (state().captures.count(event->capture) != 0) stream_of(stream).capture = event->capture;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (enqueue(stream, cudaGraphNodeTypeHost)) function(data);
  return cudaSuccess;
}

// ---- Captures

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  stream_of(stream).capture = ++state().captures_begun;
  state().captures[state().captures_begun] = std::make_unique<CUgraph_st>();
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* node_count) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  CUgraph_st* captured = graph_of(stream);
  *status = captured == nullptr ? cudaStreamCaptureStatusNone
            : captured->broken  ? cudaStreamCaptureStatusInvalidated
                                : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = stream_of(stream).capture;
  if (graph != nullptr) *graph = captured;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (node_count != nullptr) *node_count = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const unsigned long long id = stream_of(stream).capture;
  auto ended = std::move(state().captures[id]);
  state().captures.erase(id);
  for (CUstream_st& each : state().streams) {
    if (each.capture == id) each.capture = 0;
  }
  *graph = nullptr;
  if (ended == nullptr || ended->broken) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = ended.release();
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) {
    for (size_t i = 0; i < *count && i < graph->nodes.size(); ++i) nodes[i] = &graph->nodes[i];
  }
  *count = graph->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->type;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t /*graph*/,
                                          unsigned long long /*flags*/) {
  *exec = new CUgraphExec_st;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t /*exec*/, cudaStream_t /*stream*/) {
  return cudaSuccess;
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  note(__func__);
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  note(__func__);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  CUgraph_st* graph = graph_of(stream);
  if (flags == cudaEventRecordExternal) {
    if (graph != nullptr) graph->nodes.push_back({cudaGraphNodeTypeEventRecord});
    return cudaSuccess;
  }
  event->capture = graph != nullptr ? stream_of(stream).capture : 0;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return refuse_captured(event->capture);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  note(__func__);
  return cudaEventQuery(event);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t /*start*/, cudaEvent_t /*end*/) {
  *milliseconds = 0;
  return cudaSuccess;
}

// ---- Kernels. The stubs of compiled kernels call the functions that start with underscores.

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t /*kernel*/, dim3 /*grid*/, dim3 /*block*/,
                               void** /*arguments*/, size_t /*shared*/, cudaStream_t stream) {
  return launch(stream);
}

cudaError_t cudaLaunchKernel(const void* /*function*/, dim3 /*grid*/, dim3 /*block*/,
                             void** /*arguments*/, size_t /*shared*/, cudaStream_t stream) {
  return launch(stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* /*function*/,
                                void** /*arguments*/) {
  return launch(config->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  *attributes = cudaFuncAttributes{};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;  // CUB chooses its kernels by these
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/,
                                 int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks,
                                                                   const void* /*function*/,
                                                                   int /*block*/, size_t /*shared*/,
                                                                   unsigned /*flags*/) {
  *blocks = 2;
  return cudaSuccess;
}

// ---- cuBLAS: a handle for each thread that captures or multiplies

int cublasCreate_v2(void** handle) {
  *handle = std::malloc(1);
  return 0;
}

int cublasDestroy_v2(void* handle) {
  std::free(handle);
  return 0;
}

int cublasGetMathMode(void* /*handle*/, int* mode) {
  *mode = 0;
  return 0;
}

int cublasSetMathMode(void* /*handle*/, int /*mode*/) { return 0; }
int cublasSetPointerMode_v2(void* /*handle*/, int /*mode*/) { return 0; }
int cublasSetStream_v2(void* /*handle*/, cudaStream_t /*stream*/) { return 0; }
int cublasSetWorkspace_v2(void* /*handle*/, void* /*memory*/, size_t /*bytes*/) { return 0; }

// Nobody reads the arguments of a product, so these functions have none.
int cublasGemmEx() { return 0; }
int cublasGemmStridedBatchedEx() { return 0; }
int cublasSgemm_v2() { return 0; }
int cublasSgemmStridedBatched() { return 0; }
int cublasLtMatmul() { return 0; }

int cublasLtMatmulAlgoGetHeuristic(void* /*handle*/, void* /*product*/, void* /*a*/, void* /*b*/,
                                   void* /*c*/, void* /*d*/, void* /*preference*/,
                                   int /*requested*/, void* /*results*/, int* count) {
  *count = 1;
  return 0;
}

// ---- NCCL: groups of one rank, without collectives. NULL_NCCL_ABORT=fails makes their end fail.

int ncclGetUniqueId(void* id) {
  std::memset(id, 1, 128);
  return 0;
}

int ncclCommInitRankConfig(void** communicator, int /*size*/, ...) {
  *communicator = std::malloc(1);
  return 0;
}

int ncclCommGetAsyncError(void* /*communicator*/, int* result) {
  *result = 0;
  return 0;
}

int ncclCommAbort(void* communicator) {
  std::free(communicator);
  constexpr int kSystemError = 2;
  const char* text = std::getenv("NULL_NCCL_ABORT");
  return text != nullptr && std::strcmp(text, "fails") == 0 ? kSystemError : 0;
}

// ---- cuDNN: every convolution has one plan, which needs no workspace and computes nothing

int cudnnCreate(cudaStream_t** handle) {
  *handle = new cudaStream_t();
  return 0;
}

int cudnnSetStream(cudaStream_t* handle, cudaStream_t stream) {
  *handle = stream;
  return 0;
}

int cudnnGetStream(const cudaStream_t* handle, cudaStream_t* stream) {
  *stream = *handle;
  return 0;
}

int cudnnBackendCreateDescriptor(int /*type*/, void** descriptor) {
  *descriptor = std::malloc(1);
  return 0;
}

int cudnnBackendDestroyDescriptor(void* descriptor) {
  std::free(descriptor);
  return 0;
}

int cudnnBackendSetAttribute(void* /*descriptor*/, int /*name*/, int /*type*/, int64_t /*count*/,
                             const void* /*elements*/) {
  return 0;
}

int cudnnBackendGetAttribute(void* /*descriptor*/, int /*name*/, int type, int64_t requested,
                             int64_t* count, void* elements) {
  constexpr int kInt64 = 3;        // CUDNN_TYPE_INT64
  constexpr int kDescriptor = 15;  // CUDNN_TYPE_BACKEND_DESCRIPTOR
  if (count != nullptr) *count = type == kInt64 || type == kDescriptor ? 1 : 0;
  if (type == kInt64 && requested > 0 && elements != nullptr) *static_cast<int64_t*>(elements) = 0;
  return 0;
}

int cudnnBackendFinalize(void* /*descriptor*/) { return 0; }
int cudnnBackendExecute(void* /*handle*/, void* /*plan*/, void* /*pointers*/) { return 0; }

}  // extern "C"
