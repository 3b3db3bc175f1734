/* The functions of CUDA's driver that LibTorch looks up by name, for the null devices of
 * null_runtime.cc. */

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  static int only;
  *context = &only;
  return 0;
}
