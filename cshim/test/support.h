// Helpers for the shim's tests: handles that free themselves, errors as values, operator calls in
// one line, and a gate that holds a stream until the test opens it.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "torchstream.h"

inline bool operator==(ts_stream a, ts_stream b) { return a.id == b.id && a.device == b.device; }

namespace test {

// The outcome of a call.
struct Outcome {
  int32_t code = TS_ERROR_NONE;
  std::string message;
  std::string origin;

  // Takes ownership of the error.
  Outcome(ts_error* error) {  // NOLINT: implicit, since every call returns a ts_error*
    if (error == nullptr) return;
    code = ts_error_code(error);
    message = ts_error_message(error);
    origin = ts_error_origin(error);
    ts_error_free(error);
  }
  bool says(const std::string& text) const { return message.find(text) != std::string::npos; }
};

inline std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
  return out << "code " << outcome.code << " from " << outcome.origin << ": " << outcome.message;
}

#define EXPECT_OK(call)                                  \
  do {                                                   \
    const ::test::Outcome outcome_(call);                \
    EXPECT_EQ(outcome_.code, TS_ERROR_NONE) << outcome_; \
  } while (0)

#define ASSERT_OK(call)                                  \
  do {                                                   \
    const ::test::Outcome outcome_(call);                \
    ASSERT_EQ(outcome_.code, TS_ERROR_NONE) << outcome_; \
  } while (0)

// Expects the call to fail with the code and a message that contains the text.
#define EXPECT_FAILS(expected, text, call)          \
  do {                                              \
    const ::test::Outcome outcome_(call);           \
    EXPECT_EQ(outcome_.code, expected) << outcome_; \
    EXPECT_TRUE(outcome_.says(text)) << outcome_;   \
  } while (0)

#define NEEDS_GPUS(wanted)                                                                \
  do {                                                                                    \
    if (ts_device_count() < (wanted)) {                                                   \
      GTEST_SKIP() << "needs " << (wanted) << " GPU(s), there are " << ts_device_count(); \
    }                                                                                     \
  } while (0)

// Owns a reference to a tensor. Functions that return a new reference write it to out().
class Tensor {
 public:
  Tensor() = default;
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() { ts_tensor_free(handle_); }
  ts_tensor** out() { return &handle_; }
  operator ts_tensor*() const { return handle_; }  // NOLINT: as the C functions take it
  void free() { ts_tensor_free(std::exchange(handle_, nullptr)); }
  ts_tensor* release() { return std::exchange(handle_, nullptr); }

 private:
  ts_tensor* handle_ = nullptr;
};

using Sizes = std::vector<int64_t>;

inline int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

template <typename T>
constexpr int32_t dtype_of() {
  if constexpr (std::is_same_v<T, float>) return TS_DTYPE_FLOAT32;
  if constexpr (std::is_same_v<T, double>) return TS_DTYPE_FLOAT64;
  if constexpr (std::is_same_v<T, int64_t>) return TS_DTYPE_INT64;
  if constexpr (std::is_same_v<T, int32_t>) return TS_DTYPE_INT32;
  if constexpr (std::is_same_v<T, uint16_t>) return TS_DTYPE_FLOAT16;  // as its bits
  return TS_DTYPE_UINT8;
}

// Returns a CPU tensor with the values.
template <typename T>
Tensor make(const std::vector<T>& values, Sizes sizes) {
  Tensor tensor;
  EXPECT_OK(ts_tensor_from_data(reinterpret_cast<const uint8_t*>(values.data()),
                                values.size() * sizeof(T), sizes.data(),
                                static_cast<int32_t>(sizes.size()), dtype_of<T>(), tensor.out()));
  return tensor;
}

inline Tensor scalar(float value) { return make<float>({value}, {}); }

inline Tensor empty(Sizes sizes, int32_t dtype = TS_DTYPE_FLOAT32, int32_t device = TS_DEVICE_CPU,
                    int32_t format = TS_MEMORY_FORMAT_CONTIGUOUS) {
  Tensor tensor;
  EXPECT_OK(ts_tensor_new(sizes.data(), static_cast<int32_t>(sizes.size()), dtype, device, format,
                          tensor.out()));
  return tensor;
}

// Returns a tensor filled with one value.
inline Tensor full(const Sizes& sizes, float value, int32_t device = TS_DEVICE_CPU) {
  Tensor host = make(std::vector<float>(static_cast<size_t>(product(sizes)), value), sizes);
  Tensor tensor;
  EXPECT_OK(ts_tensor_to(host, device, -1, false, tensor.out()));
  return tensor;
}

inline ts_tensor_info describe(const ts_tensor* tensor) {
  ts_tensor_info info{};
  EXPECT_OK(ts_tensor_get_info(tensor, &info));
  return info;
}

// Returns the elements in logical order.
template <typename T>
std::vector<T> read(const ts_tensor* tensor) {
  std::vector<T> values(static_cast<size_t>(describe(tensor).numel));
  EXPECT_OK(
      ts_tensor_read(tensor, reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(T)));
  return values;
}

inline Sizes shape(const ts_tensor* tensor) {
  Sizes sizes(static_cast<size_t>(describe(tensor).ndim));
  EXPECT_OK(ts_tensor_get_shape(tensor, sizes.data(), nullptr, static_cast<int32_t>(sizes.size())));
  return sizes;
}

inline int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Builds an operator call, argument by argument.
class Call {
 public:
  explicit Call(const char* name, const char* overload = "") {
    EXPECT_OK(ts_operator_find(name, overload, &op_));
  }
  Call& raw(int32_t kind, int32_t count, int64_t value) {
    args_.push_back({kind, count, value});
    return *this;
  }
  Call& fallback() { return raw(TS_ARG_KIND_DEFAULT, 0, 0); }
  Call& none() { return raw(TS_ARG_KIND_NONE, 0, 0); }
  Call& tensor(ts_tensor* tensor) {
    tensors_.push_back(tensor);
    return raw(TS_ARG_KIND_TENSOR, 0, static_cast<int64_t>(tensors_.size()) - 1);
  }
  Call& tensors(const std::vector<ts_tensor*>& list) {
    const auto first = static_cast<int64_t>(tensors_.size());
    tensors_.insert(tensors_.end(), list.begin(), list.end());
    return raw(TS_ARG_KIND_TENSORS, static_cast<int32_t>(list.size()), first);
  }
  Call& integer(int64_t value) { return raw(TS_ARG_KIND_INT, 0, value); }
  Call& real(double value) { return raw(TS_ARG_KIND_DOUBLE, 0, bits_of(value)); }
  Call& boolean(bool value) { return raw(TS_ARG_KIND_BOOL, 0, value ? 1 : 0); }
  Call& ints(const std::vector<int64_t>& list, int32_t kind = TS_ARG_KIND_INTS) {
    const auto first = static_cast<int64_t>(ints_.size());
    ints_.insert(ints_.end(), list.begin(), list.end());
    return raw(kind, static_cast<int32_t>(list.size()), first);
  }
  Call& doubles(const std::vector<double>& list) {
    std::vector<int64_t> bits;
    for (const double value : list) bits.push_back(bits_of(value));
    return ints(bits, TS_ARG_KIND_DOUBLES);
  }
  Call& device(int32_t index) { return raw(TS_ARG_KIND_DEVICE, 0, index); }
  Call& text(const std::string& value) {
    const auto first = static_cast<int64_t>(text_.size());
    text_ += value;
    return raw(TS_ARG_KIND_STRING, static_cast<int32_t>(value.size()), first);
  }
  Call& flags(int32_t value) {
    flags_ = value;
    return *this;
  }

  ts_error* run(ts_tensor** results, int64_t capacity, int64_t* count) const {
    return ts_operator_call(op_, arguments(), tensors_.data(),
                            static_cast<int64_t>(tensors_.size()), flags_, results, capacity,
                            count);
  }
  ts_error* run_one(ts_tensor** result) const {
    const ts_call_counts counts{static_cast<uint16_t>(flags_), static_cast<uint8_t>(args_.size()),
                                static_cast<uint8_t>(tensors_.size()),
                                static_cast<uint32_t>(ints_.size())};
    return ts_operator_call_one(op_, args_.data(), tensors_.data(), ints_.data(), counts, result);
  }
  bool has_text() const { return !text_.empty(); }
  // Runs a call that must fail, or whose results are not needed.
  ts_error* drop() const {
    int64_t count = 0;
    return run(nullptr, 0, &count);
  }
  // Returns the only result.
  Tensor one() const {
    Tensor result;
    int64_t count = 0;
    EXPECT_OK(run(result.out(), 1, &count));
    EXPECT_EQ(count, 1);
    return result;
  }
  Call& complex(double real, double imaginary) {
    const auto first = static_cast<int64_t>(ints_.size());
    ints_.push_back(bits_of(real));
    ints_.push_back(bits_of(imaginary));
    return raw(TS_ARG_KIND_COMPLEX, 0, first);
  }
  Call& generator(const ts_generator* own) {
    return raw(TS_ARG_KIND_GENERATOR, 0, static_cast<int64_t>(reinterpret_cast<intptr_t>(own)));
  }
  ts_error* run_results(ts_results** results, ts_results_size* size) const {
    return ts_operator_call_results(op_, arguments(), tensors_.data(),
                                    static_cast<int64_t>(tensors_.size()), flags_, results, size);
  }
  ts_error* run_list(ts_tensor** results, int64_t capacity, ts_tensor_list** list,
                     int64_t* count) const {
    return ts_operator_call_list(op_, arguments(), tensors_.data(),
                                 static_cast<int64_t>(tensors_.size()), flags_, results, capacity,
                                 list, count);
  }
  // Returns all results, including the elements of lists.
  std::vector<Tensor> all() const {
    ts_tensor_list* list = nullptr;
    int64_t count = 0;
    EXPECT_OK(run_list(nullptr, 0, &list, &count));
    if (list == nullptr) return {};
    std::vector<ts_tensor*> handles(static_cast<size_t>(count), nullptr);
    ts_tensor_list_take(list, handles.data());
    std::vector<Tensor> results(static_cast<size_t>(count));
    for (size_t i = 0; i < results.size(); ++i) *results[i].out() = handles[i];
    return results;
  }

 private:
  ts_arguments arguments() const {
    return {args_.data(), static_cast<int64_t>(args_.size()),
            ints_.data(), static_cast<int64_t>(ints_.size()),
            text_.data(), text_.size()};
  }

  const ts_operator* op_ = nullptr;
  std::vector<ts_arg> args_;
  std::vector<ts_tensor*> tensors_;
  std::vector<int64_t> ints_;
  std::string text_;
  int32_t flags_ = 0;
};

inline ts_stream pool_stream(int32_t device = 0, int32_t priority = 0) {
  ts_stream stream{};
  EXPECT_OK(ts_stream_from_pool(device, priority, &stream));
  return stream;
}

inline ts_stream current_stream(int32_t device = 0) {
  ts_stream stream{-1, -1};
  EXPECT_OK(ts_get_current_cuda_stream(device, &stream));
  return stream;
}

inline bool idle(ts_stream stream) {
  bool done = false;
  EXPECT_OK(ts_stream_query(stream, &done));
  return done;
}

inline bool complete(ts_event* event) {
  bool done = false;
  EXPECT_OK(ts_event_query(event, &done));
  return done;
}

class Event {
 public:
  explicit Event(int32_t flags = 0) { EXPECT_OK(ts_event_new(flags, &handle_)); }
  ~Event() { ts_event_free(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator ts_event*() const { return handle_; }  // NOLINT: as the C functions take it

 private:
  ts_event* handle_ = nullptr;
};

class Pinned {
 public:
  explicit Pinned(size_t bytes) { EXPECT_OK(ts_pinned_new(bytes, &handle_)); }
  ~Pinned() { EXPECT_OK(ts_pinned_destroy(handle_)); }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  uint8_t* data() const { return ts_pinned_data(handle_); }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  // Returns a tensor over the whole memory.
  Tensor tensor(Sizes sizes, int32_t dtype = TS_DTYPE_FLOAT32) const {
    Tensor tensor;
    EXPECT_OK(ts_tensor_from_memory(data(), ts_pinned_size(handle_), sizes.data(),
                                    static_cast<int32_t>(sizes.size()), dtype, tensor.out()));
    return tensor;
  }

 private:
  ts_pinned* handle_ = nullptr;
};

// Returns a new stream of a GPU, or the CPU's.
inline ts_stream stream_on(int32_t device) {
  return device == TS_DEVICE_CPU ? ts_stream{0, device} : pool_stream(device);
}

// Waits for all work of the device; the CPU has none to wait for.
inline void synchronize(int32_t device) {
  if (device != TS_DEVICE_CPU) EXPECT_OK(ts_device_synchronize(device));
}

// Host memory for calls with a device: pinned, or for TS_DEVICE_CPU any aligned memory.
class HostMemory {
 public:
  HostMemory(int32_t device, size_t bytes) {
    if (device != TS_DEVICE_CPU) {
      pinned_ = std::make_unique<Pinned>(bytes);
    } else {
      own_.resize(bytes / sizeof(Unit) + 1);
    }
  }
  uint8_t* data() const {
    return pinned_ ? pinned_->data() : reinterpret_cast<uint8_t*>(const_cast<Unit*>(own_.data()));
  }

 private:
  struct alignas(64) Unit {
    uint8_t bytes[64];
  };
  std::unique_ptr<Pinned> pinned_;
  std::vector<Unit> own_;
};

// Returns a stream that runs while other streams wait. Its priority differs from theirs, so that it
// shares no hardware queue with them. (The driver distributes streams over few queues, in which
// waiting work blocks the work after it.)
inline ts_stream free_stream() { return pool_stream(0, -1); }

// Returns a function of the CUDA runtime that the library loads. The tests do not link the runtime.
template <typename Function>
Function* cuda_function(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  EXPECT_NE(function, nullptr) << name;
  return function;
}

// Holds a stream of device 0: work that is enqueued on the stream after the gate does not start
// before open(). The gate opens by itself after 10 seconds, so that a failing test ends. Only one
// gate can be closed at a time, because the driver calls back on one thread. While it is closed,
// the test must not allocate or free driver memory, or load a kernel, since each can wait for the
// whole device.
class Gate {
 public:
  explicit Gate(ts_stream stream) {
    using Launch = int(void*, void (*)(void*), void*);
    uintptr_t handle = 0;
    EXPECT_OK(ts_stream_get_handle(stream, &handle));
    EXPECT_EQ(
        cuda_function<Launch>("cudaLaunchHostFunc")(reinterpret_cast<void*>(handle), &wait, this),
        0);
  }
  ~Gate() {
    open();
    // The callback uses this object, so wait for it. The wait is not on the stream, which the test
    // may have released.
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(left_.wait_for(lock, std::chrono::seconds(20), [&] { return passed_; }));
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  static void wait(void* self) {
    auto* gate = static_cast<Gate*>(self);
    std::unique_lock<std::mutex> lock(gate->mutex_);
    gate->opened_.wait_for(lock, std::chrono::seconds(10), [&] { return gate->open_; });
    gate->passed_ = true;
    gate->left_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable opened_;
  std::condition_variable left_;
  bool open_ = false;
  bool passed_ = false;
};

}  // namespace test
