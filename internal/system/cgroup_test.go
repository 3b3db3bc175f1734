package system

import (
	"testing"
	"testing/fstest"
)

// The quota is the smallest quota of the process's cgroup and that cgroup's parents, in both cgroup
// versions.
func TestCPUQuota(t *testing.T) {
	for name, c := range map[string]struct {
		cgroup string
		files  map[string]string
		want   float64
	}{
		"version 2":       {"0::/job\n", map[string]string{"job/cpu.max": "150000 100000\n"}, 1.5},
		"version 2, none": {"0::/job\n", map[string]string{"job/cpu.max": "max 100000\n"}, 0},
		"version 2, above": {"0::/a/b/c\n",
			map[string]string{"a/b/c/cpu.max": "max 100000\n", "a/b/cpu.max": "400000 100000\n",
				"a/cpu.max": "300000 100000\n"}, 3},
		"version 2, container": {"0::/\n", map[string]string{"cpu.max": "200000 100000\n"}, 2},
		"version 2, unseen":    {"0::/../other\n", map[string]string{"cpu.max": "200000 100000\n"}, 2},
		"version 1": {"4:memory:/m\n2:cpu,cpuacct:/job\n0::/\n",
			map[string]string{"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0.5},
		"version 1, none": {"2:cpu,cpuacct:/job\n",
			map[string]string{"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0},
		"version 1, another": {"2:cpuset:/job\n",
			map[string]string{"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0},
		"no file":                 {"0::/job\n", nil, 0},
		"text that is no numbers": {"0::/job\nfoo\n", map[string]string{"job/cpu.max": "x y\n"}, 0},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(c.cgroup)}}
		for path, text := range c.files {
			root["sys/fs/cgroup/"+path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := CPUQuota(root); got != c.want {
			t.Errorf("%s: a quota of %g CPUs, want %g", name, got, c.want)
		}
	}
	if got := CPUQuota(fstest.MapFS{}); got != 0 {
		t.Errorf("without /proc: a quota of %g CPUs, want 0", got)
	}
}

// A quota bounds the number of threads, rounded up: a quota of less than a CPU leaves one thread.
func TestThreadsWithinAQuota(t *testing.T) {
	for _, c := range []struct {
		threads int
		quota   float64
		want    int
	}{{8, 0, 8}, {8, 2.5, 3}, {2, 1, 1}, {2, 0.5, 1}, {2, 1.5, 2}, {4, 16, 4}} {
		if got := WithinQuota(c.threads, c.quota); got != c.want {
			t.Errorf("%d threads with a quota of %g CPUs: got %d, want %d", c.threads, c.quota, got, c.want)
		}
	}
}
