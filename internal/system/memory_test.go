package system

import (
	"testing"
	"testing/fstest"
)

// Half of the smallest of the available memory and the limits of the cgroup and its parents.
func TestPinnableMemory(t *testing.T) {
	const meminfo = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"
	for name, c := range map[string]struct {
		cgroup string
		files  map[string]string
		want   int64
	}{
		"no limit":         {"0::/job\n", map[string]string{"job/memory.max": "max\n"}, 4000 << 10},
		"no cgroup":        {"", nil, 4000 << 10},
		"version 2":        {"0::/job\n", map[string]string{"job/memory.max": "1048576\n"}, 512 << 10},
		"version 2, above": {"0::/a/b\n", map[string]string{"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 2048},
		"version 2, more than is available": {"0::/job\n", map[string]string{"job/memory.max": "1048576000\n"},
			4000 << 10},
		"version 2, in use, without cached files": {"0::/job\n", map[string]string{"job/memory.max": "1048576\n",
			"job/memory.current": "900000\n",
			"job/memory.stat":    "anon 300000\nfile 700000\nactive_file 200000\ninactive_file 400000\n"}, (1048576 - 300000) / 2},
		"version 2, full": {"0::/job\n", map[string]string{"job/memory.max": "1000\n", "job/memory.current": "2000\n"}, 0},
		"version 1, in use": {"4:memory:/m\n", map[string]string{"memory/m/memory.limit_in_bytes": "65536\n",
			"memory/m/memory.usage_in_bytes": "50000\n",
			"memory/m/memory.stat":           "active_file 1\ntotal_active_file 10000\ntotal_inactive_file 20000\n"},
			(65536 - 20000) / 2},
		"version 1": {"4:memory:/m\n2:cpu:/job\n", map[string]string{"memory/m/memory.limit_in_bytes": "65536\n"},
			32768},
		"version 1, no limit": {"4:memory:/m\n",
			map[string]string{"memory/m/memory.limit_in_bytes": "9223372036854771712\n"}, 4000 << 10},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(c.cgroup)}, "proc/meminfo": {Data: []byte(meminfo)}}
		for path, text := range c.files {
			root["sys/fs/cgroup/"+path] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := PinnableMemory(root); got != c.want {
			t.Errorf("%s: %d bytes, want %d", name, got, c.want)
		}
	}
	if got := PinnableMemory(fstest.MapFS{}); got != 0 {
		t.Errorf("without /proc: %d bytes, want 0", got)
	}
}
