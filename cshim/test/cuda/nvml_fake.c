// A libnvidia-ml.so.1 for cuda_readings_test, with one GPU, "FAKE:00", and invented readings.
#include <string.h>

typedef struct gpu* device;
static struct gpu { int unused; } the_gpu;

typedef struct utilization {
  unsigned gpu;
  unsigned memory;
} utilization;

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };
static int initialised;
static int lost;

const char* nvmlErrorString(int result) {
  return result == GPU_IS_LOST ? "GPU is lost" : "another error";
}
int nvmlInit_v2(void) {
  ++initialised;
  return OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, device* found) {
  if (initialised != 1) return INVALID;  // initialised once in the process
  lost = strcmp(id, "LOST:00") == 0;
  if (!lost && strcmp(id, "FAKE:00") != 0) return NOT_FOUND;
  *found = &the_gpu;
  return OK;
}
int nvmlDeviceGetPowerUsage(device d, unsigned* milliwatts) {
  if (lost) return GPU_IS_LOST;
  *milliwatts = 412500;
  return d == &the_gpu ? OK : INVALID;
}
int nvmlDeviceGetEnforcedPowerLimit(device d, unsigned* milliwatts) {
  *milliwatts = 700000;
  return d == &the_gpu ? OK : INVALID;
}
int nvmlDeviceGetTotalEnergyConsumption(device d, unsigned long long* millijoules) {
  *millijoules = 5000000000000ULL;  // does not fit 32 bits
  return d == &the_gpu ? OK : INVALID;
}
int nvmlDeviceGetTemperature(device d, unsigned sensor, unsigned* celsius) {
  *celsius = 61;
  return d == &the_gpu && sensor == 0 ? OK : INVALID;
}
int nvmlDeviceGetClockInfo(device d, unsigned clock, unsigned* mhz) {
  *mhz = clock == 1 ? 1755 : 2619;
  return d == &the_gpu && (clock == 1 || clock == 2) ? OK : INVALID;
}
int nvmlDeviceGetMaxClockInfo(device d, unsigned clock, unsigned* mhz) {
  (void)clock;
  (void)mhz;
  return d == &the_gpu ? NOT_SUPPORTED : INVALID;
}
int nvmlDeviceGetUtilizationRates(device d, utilization* u) {
  u->gpu = 98;
  u->memory = 43;
  return d == &the_gpu ? OK : INVALID;
}
// The older name of nvmlDeviceGetCurrentClocksEventReasons.
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, unsigned long long* reasons) {
  *reasons = 0x4 | 0x40;
  return d == &the_gpu ? OK : INVALID;
}
