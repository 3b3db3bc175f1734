/* Devices: GPUs, their sensors and their memory. */
#ifndef TS_DEVICE_H_
#define TS_DEVICE_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A device is an index: 0 to count - 1 for a GPU, TS_DEVICE_CPU for the host. TS_DEVICE_CURRENT
 * means the calling thread's current GPU; functions that accept it say so. */
#define TS_DEVICE_CPU (-1)
#define TS_DEVICE_CURRENT (-2)

/* Returns the number of GPUs: 0 without a GPU or driver. Cannot fail. */
TS_API int32_t ts_device_count(void);

typedef struct ts_device_info {
  size_t size;    /* sizeof(ts_device_info), set by the caller */
  char name[256]; /* ends with NUL */
  int32_t major;  /* compute capability */
  int32_t minor;
  int32_t multiprocessors;
  int32_t async_engines; /* copy engines */
  size_t total_bytes;
} ts_device_info;

TS_API ts_error* ts_device_get_info(int32_t device, ts_device_info* info);

#define TS_UUID_BYTES 16

typedef struct ts_device_identity {
  size_t size; /* sizeof(ts_device_identity), set by the caller */
  uint8_t uuid[TS_UUID_BYTES];
  char pci_bus_id[32]; /* "0000:1B:00.0"; ends with NUL */
} ts_device_identity;

/* Returns the GPU's identity, which is the same in every process, whatever its index. */
TS_API ts_error* ts_device_get_identity(int32_t device, ts_device_identity* identity);

/* Sensor readings of a GPU. A value that the GPU does not report is -1. */
typedef struct ts_readings {
  size_t size; /* sizeof(ts_readings), set by the caller */
  int64_t power_milliwatts;
  int64_t power_limit_milliwatts;
  int64_t energy_millijoules; /* since the driver was loaded */
  int32_t temperature;        /* of the die, in degrees Celsius */
  int32_t sm_clock;           /* MHz, as are all clocks */
  int32_t memory_clock;
  int32_t max_sm_clock;
  int32_t max_memory_clock;
  int32_t busy_percent;        /* share of the last sample period in which a kernel ran */
  int32_t memory_busy_percent; /* share in which device memory was read or written */
  int64_t throttle_reasons;    /* NVML's nvmlClocksEventReason values, combined with "or" */
} ts_readings;

/* Reads the GPU's sensors through the driver's library libnvidia-ml.so.1 (NVML), which the first
 * call loads. Returns TS_ERROR_UNSUPPORTED if that library is missing or too old, with a message
 * that says what to install. Needs no CUDA context and does not wait for the device. */
TS_API ts_error* ts_readings_get(const char* pci_bus_id, ts_readings* readings);

typedef struct ts_device_memory {
  size_t size;                 /* sizeof(ts_device_memory), set by the caller */
  size_t allocated_bytes;      /* in live tensors, by LibTorch's caching allocator */
  size_t peak_allocated_bytes; /* since the start or the last ts_device_reset_peak_memory */
  size_t reserved_bytes;       /* held from the driver by the caching allocator */
  size_t peak_reserved_bytes;
  size_t free_bytes; /* free for all processes */
  size_t total_bytes;
} ts_device_memory;

TS_API ts_error* ts_device_get_memory(int32_t device, ts_device_memory* memory);

/* Sets the peaks of ts_device_memory to the current values. */
TS_API ts_error* ts_device_reset_peak_memory(int32_t device);

/* Reports whether `device` can read and write the memory of `peer` directly (NVLink, or PCI Express
 * where the machine allows it). If not, copies between the two pass through the host. */
TS_API ts_error* ts_device_can_access_peer(int32_t device, int32_t peer, bool* accessible);

/* Blocks until all work enqueued on the device is done. Waits for a running capture to end. */
TS_API ts_error* ts_device_synchronize(int32_t device);

#ifdef __cplusplus
}
#endif

#endif /* TS_DEVICE_H_ */
