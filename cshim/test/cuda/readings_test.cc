// Names and sensors of GPUs.
#include <dlfcn.h>

#include <cstdlib>

#include "support.h"

namespace {

ts_readings sized() {
  ts_readings readings = {};
  readings.size = sizeof readings;
  return readings;
}

bool is_fake() { return std::getenv("TS_NVML_FAKE") != nullptr; }

TEST(Readings, ArgumentsAreChecked) {
  ts_readings readings = {};
  ts_device_identity identity = {};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_readings_get(nullptr, &readings));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "size", ts_readings_get("FAKE:00", &readings));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_readings_get("FAKE:00", nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "size", ts_device_get_identity(0, &identity));
  identity.size = sizeof identity;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_device_get_identity(1000, &identity));
}

TEST(Readings, ComeFromNvml) {
  if (!is_fake()) GTEST_SKIP() << "needs the library of nvml_fake.c: ctest sets it";
  ts_readings readings = sized();
  ASSERT_OK(ts_readings_get("FAKE:00", &readings));
  ASSERT_OK(ts_readings_get("FAKE:00", &readings));  // initialises nothing again
  EXPECT_EQ(readings.power_milliwatts, 412500);
  EXPECT_EQ(readings.power_limit_milliwatts, 700000);
  EXPECT_EQ(readings.energy_millijoules, 5000000000000);
  EXPECT_EQ(readings.temperature, 61);
  EXPECT_EQ(readings.sm_clock, 1755);
  EXPECT_EQ(readings.memory_clock, 2619);
  EXPECT_EQ(readings.max_sm_clock, -1);
  EXPECT_EQ(readings.max_memory_clock, -1);
  EXPECT_EQ(readings.busy_percent, 98);
  EXPECT_EQ(readings.memory_busy_percent, 43);
  EXPECT_EQ(readings.throttle_reasons, 0x44);
}

TEST(Readings, FailuresLeaveTheOutputAlone) {
  if (!is_fake()) GTEST_SKIP() << "needs the library of nvml_fake.c: ctest sets it";
  ts_readings readings = sized();
  readings.temperature = 7;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "no GPU 0000:00:00.0",
               ts_readings_get("0000:00:00.0", &readings));
  EXPECT_FAILS(TS_ERROR_CUDA, "nvmlDeviceGetPowerUsage: GPU is lost",
               ts_readings_get("LOST:00", &readings));
  EXPECT_EQ(readings.temperature, 7);
}

TEST(Readings, WithoutTheLibraryTheErrorSaysWhatToInstall) {
  if (is_fake()) GTEST_SKIP() << "the library is there";
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr) {
    dlclose(library);
    GTEST_SKIP() << "the driver's library is installed";
  }
  ts_readings readings = sized();
  EXPECT_FAILS(TS_ERROR_UNSUPPORTED, "install", ts_readings_get("0000:00:00.0", &readings));
}

TEST(ReadingsGpu, EveryGpuHasThem) {
  NEEDS_GPUS(1);
  for (int32_t i = 0; i < ts_device_count(); ++i) {
    ts_device_identity identity = {};
    identity.size = sizeof identity;
    ASSERT_OK(ts_device_get_identity(i, &identity));
    EXPECT_GE(std::strlen(identity.pci_bus_id), 12);
    ts_readings readings = sized();
    const test::Outcome outcome(ts_readings_get(identity.pci_bus_id, &readings));
    if (outcome.code == TS_ERROR_UNSUPPORTED) GTEST_SKIP() << outcome;
    ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome;
    EXPECT_LT(readings.temperature, 130);
  }
}

}  // namespace
