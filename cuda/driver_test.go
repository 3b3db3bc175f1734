//go:build linux

package cuda

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

// fakeDriver is the part of an NVIDIA driver that says for which CUDA it is. It has no GPU.
const fakeDriver = `
#include <string.h>
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long flags, int* status) {
  *function = NULL;
  if (strcmp(name, "cuDriverGetVersion") == 0) *function = (void*)cuDriverGetVersion;
  if (strcmp(name, "cuInit") == 0) *function = (void*)cuInit;
  if (strcmp(name, "cuGetProcAddress") == 0) *function = (void*)cuGetProcAddress_v2;
  if (status != NULL) *status = *function != NULL ? 0 : 1;
  return 0;
}
`

const driverVariable = "TORCHSTREAM_TEST_DRIVER"

// Without a usable GPU the error names the driver's purpose and the requirement.
func TestErrorsNameTheDriver(t *testing.T) {
	if os.Getenv(driverVariable) != "" {
		_, err := NewStream(0, StreamOptions{})
		t.Log(err)
		return
	}
	said := func(t *testing.T, environment ...string) string {
		t.Helper()
		c := exec.Command(os.Args[0], "-test.run=^TestErrorsNameTheDriver$", "-test.v", "-test.count=1")
		c.Env = append(append(os.Environ(), driverVariable+"=1"), environment...)
		text, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%v, want no error\n%s", err, text)
		}
		return string(text)
	}
	if capi.CUDAVersion() == "" {
		if text := said(t); !strings.Contains(text, "built for a LibTorch without CUDA") ||
			strings.Contains(text, "nvidia-smi") {
			t.Errorf("it says %s", text)
		}
		return
	}
	t.Run("too old", func(t *testing.T) {
		cc, err := exec.LookPath("cc")
		if err != nil {
			t.Skip("needs a C compiler: ", err)
		}
		folder := t.TempDir()
		c := exec.Command(cc, "-shared", "-fPIC", "-DVERSION=12040", "-x", "c", "-", "-o",
			filepath.Join(folder, "libcuda.so.1"))
		c.Stdin = strings.NewReader(fakeDriver)
		if text, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v, want no error\n%s", err, text)
		}
		path := strings.TrimSuffix(folder+":"+os.Getenv("LD_LIBRARY_PATH"), ":")
		if text := said(t, "LD_LIBRARY_PATH="+path); !strings.Contains(text,
			"too old: it is for CUDA 12.4, and CUDA 13.") || !strings.Contains(text, "driver 580 or newer") {
			t.Errorf("it says %s,"+
				" want it to contain \"too old: it is for CUDA 12.4, and CUDA 13.\", \"driver 580 or newer\"", text)
		}
	})
	t.Run("none", func(t *testing.T) {
		if _, err := os.Stat("/proc/driver/nvidia"); err == nil || DeviceCount() > 0 {
			t.Skip("this machine has an NVIDIA driver")
		}
		if text := said(t); !strings.Contains(text, "no NVIDIA driver, and CUDA 13.") ||
			!strings.Contains(text, "torchstream doctor") {
			t.Errorf("it says %s,"+
				" want it to contain \"no NVIDIA driver, and CUDA 13.\", \"torchstream doctor\"", text)
		}
	})
	t.Run("hidden GPUs", func(t *testing.T) {
		onGPU(t, 1)
		if text := said(t, "CUDA_VISIBLE_DEVICES="); !strings.Contains(text, "lists no GPU") ||
			!strings.Contains(text, "CUDA_VISIBLE_DEVICES") {
			t.Errorf("it says %s, want it to contain \"lists no GPU\", \"CUDA_VISIBLE_DEVICES\"", text)
		}
	})
}
