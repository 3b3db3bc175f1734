// Sensor readings of a GPU, through NVML, a part of the driver. NVML is loaded when it is first
// needed: programs run without it, and CUDA's wheels do not contain its header.
#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "torchstream.h"

namespace ts {
namespace {

constexpr const char* kLibrary = "libnvidia-ml.so.1";

// The part of NVML's interface used here, stable since 2012. Newer functions are optional.
using Result = int;
using Handle = struct nvmlDevice_st*;
constexpr Result kSuccess = 0;
constexpr Result kNotSupported = 3;
constexpr Result kNoPermission = 4;
constexpr Result kNotFound = 6;
constexpr Result kDriverNotLoaded = 9;
constexpr Result kFunctionNotFound = 13;
constexpr Result kVersionMismatch = 18;
constexpr Result kNoData = 21;
constexpr unsigned kTemperatureOfGpu = 0;
constexpr unsigned kClockSm = 1;
constexpr unsigned kClockMemory = 2;

struct Utilization {
  unsigned gpu;
  unsigned memory;
};

std::string how_to_install() {
  return "install the library of the driver's version (libnvidia-compute in Ubuntu, libnvidia-ml1 "
         "in Debian), or give a container the driver's utilities "
         "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)";
}

class Nvml {
 public:
  Nvml() : library_(dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) {
      const char* reason = dlerror();
      throw Failure(TS_ERROR_UNSUPPORTED, std::string("NVML cannot be loaded (") +
                                              (reason == nullptr ? kLibrary : reason) +
                                              "): " + how_to_install());
    }
    try {
      load("nvmlErrorString", error_string_);
      Result (*init)() = nullptr;
      load("nvmlInit_v2", init);
      load("nvmlDeviceGetHandleByPciBusId_v2", by_pci_bus_id_);
      check(init(), "nvmlInit");
    } catch (...) {
      dlclose(library_);
      throw;
    }
    find("nvmlDeviceGetPowerUsage", power_);
    find("nvmlDeviceGetEnforcedPowerLimit", power_limit_);
    find("nvmlDeviceGetTotalEnergyConsumption", energy_);
    find("nvmlDeviceGetTemperature", temperature_);
    find("nvmlDeviceGetClockInfo", clock_);
    find("nvmlDeviceGetMaxClockInfo", max_clock_);
    find("nvmlDeviceGetUtilizationRates", utilization_);
    find("nvmlDeviceGetCurrentClocksEventReasons", throttle_);
    if (throttle_ == nullptr) find("nvmlDeviceGetCurrentClocksThrottleReasons", throttle_);
  }
  // Never unloaded, since NVML has its own threads.
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  ts_readings read(const char* pci_bus_id) const {
    Handle gpu = nullptr;
    const Result found = by_pci_bus_id_(pci_bus_id, &gpu);
    if (found == kNotFound) {
      throw Failure(TS_ERROR_NO_DEVICE, std::string("NVML knows no GPU ") + pci_bus_id);
    }
    check(found, "nvmlDeviceGetHandleByPciBusId");
    ts_readings result{};
    result.power_milliwatts = number<unsigned>(power_, "nvmlDeviceGetPowerUsage", gpu);
    result.power_limit_milliwatts =
        number<unsigned>(power_limit_, "nvmlDeviceGetEnforcedPowerLimit", gpu);
    result.energy_millijoules =
        number<unsigned long long>(energy_, "nvmlDeviceGetTotalEnergyConsumption", gpu);
    result.temperature =
        narrow(number<unsigned>(temperature_, "nvmlDeviceGetTemperature", gpu, kTemperatureOfGpu));
    result.sm_clock = narrow(number<unsigned>(clock_, "nvmlDeviceGetClockInfo", gpu, kClockSm));
    result.memory_clock =
        narrow(number<unsigned>(clock_, "nvmlDeviceGetClockInfo", gpu, kClockMemory));
    result.max_sm_clock =
        narrow(number<unsigned>(max_clock_, "nvmlDeviceGetMaxClockInfo", gpu, kClockSm));
    result.max_memory_clock =
        narrow(number<unsigned>(max_clock_, "nvmlDeviceGetMaxClockInfo", gpu, kClockMemory));
    Utilization utilization{};
    const bool used = has(utilization_, "nvmlDeviceGetUtilizationRates", gpu, &utilization);
    result.busy_percent = used ? static_cast<int32_t>(utilization.gpu) : -1;
    result.memory_busy_percent = used ? static_cast<int32_t>(utilization.memory) : -1;
    result.throttle_reasons =
        number<unsigned long long>(throttle_, "nvmlDeviceGetCurrentClocksEventReasons", gpu);
    return result;
  }

 private:
  template <typename Function>
  void find(const char* name, Function*& function) noexcept {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
  }

  template <typename Function>
  void load(const char* name, Function*& function) {
    find(name, function);
    if (function != nullptr) return;
    throw Failure(TS_ERROR_UNSUPPORTED,
                  std::string(kLibrary) + " has no function " + name + ": " + how_to_install());
  }

  void check(Result result, const char* call) const {
    if (result == kSuccess) return;
    const std::string message = std::string(call) + ": " + error_string_(result);
    if (result == kDriverNotLoaded || result == kVersionMismatch) {
      throw Failure(TS_ERROR_UNSUPPORTED, message + ": " + how_to_install());
    }
    throw Failure(TS_ERROR_CUDA, message);
  }

  // Returns whether the GPU reports the value, and writes it to `value`.
  template <typename Function, typename... Arguments>
  bool has(Function* function, const char* name, Arguments... arguments) const {
    if (function == nullptr) return false;
    const Result result = function(arguments...);
    if (result == kNotSupported || result == kNoPermission || result == kFunctionNotFound ||
        result == kNoData) {
      return false;
    }
    check(result, name);
    return true;
  }

  template <typename Value, typename Function, typename... Arguments>
  int64_t number(Function* function, const char* name, Arguments... arguments) const {
    Value value = 0;
    return has(function, name, arguments..., &value) ? static_cast<int64_t>(value) : -1;
  }

  static int32_t narrow(int64_t value) noexcept { return static_cast<int32_t>(value); }

  void* library_;
  const char* (*error_string_)(Result) = nullptr;
  Result (*by_pci_bus_id_)(const char*, Handle*) = nullptr;
  Result (*power_)(Handle, unsigned*) = nullptr;
  Result (*power_limit_)(Handle, unsigned*) = nullptr;
  Result (*energy_)(Handle, unsigned long long*) = nullptr;
  Result (*temperature_)(Handle, unsigned, unsigned*) = nullptr;
  Result (*clock_)(Handle, unsigned, unsigned*) = nullptr;
  Result (*max_clock_)(Handle, unsigned, unsigned*) = nullptr;
  Result (*utilization_)(Handle, Utilization*) = nullptr;
  Result (*throttle_)(Handle, unsigned long long*) = nullptr;
};

// If loading fails, the next call tries again.
const Nvml& nvml() {
  static std::mutex mutex;
  static const Nvml* loaded = nullptr;  // never destroyed: threads may outlive main
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) loaded = std::make_unique<Nvml>().release();
  return *loaded;
}

}  // namespace
}  // namespace ts

ts_error* ts_readings_get(const char* pci_bus_id, ts_readings* readings) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pci_bus_id != nullptr, "pci_bus_id is NULL");
    ts::require_size(readings, "readings");
    ts::fill(readings, ts::nvml().read(pci_bus_id));
  });
}
