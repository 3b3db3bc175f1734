package system

import (
	"io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
)

// CPUQuota returns how many CPUs the cgroups let this process use at a time. The quotas of the
// process's cgroup and of all its parents apply, so the limit is the smallest of them. CPUQuota
// returns 0 if there is no quota. root is the machine's root directory.
func CPUQuota(root fs.FS) float64 {
	quota := math.Inf(1)
	eachGroup(root, "cpu", func(group string, v2 bool) {
		read := quotaOfV1
		if v2 {
			read = quotaOfV2
		}
		if q := read(root, group); q > 0 {
			quota = min(quota, q)
		}
	})
	if math.IsInf(quota, 1) {
		return 0
	}
	return quota
}

// eachGroup calls use for the folder of the process's cgroup, and of each of its parents, that may
// limit what a controller controls.
func eachGroup(root fs.FS, controller string, use func(group string, v2 bool)) {
	text, err := fs.ReadFile(root, "proc/self/cgroup")
	if err != nil {
		return
	}
	for line := range strings.Lines(string(text)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3) // number, controllers, path
		if len(parts) != 3 {
			continue
		}
		mount := "sys/fs/cgroup"
		if controllers := strings.Split(parts[1], ","); slices.Contains(controllers, controller) {
			mount += "/" + controller
		} else if parts[1] != "" {
			continue
		}
		for group := path.Join("/", parts[2]); ; group = path.Dir(group) {
			use(mount+group, parts[1] == "")
			if group == "/" {
				break
			}
		}
	}
}

// WithinQuota returns the number of threads, and at most a quota of CPUs, rounded up. A quota of 0
// is none.
func WithinQuota(threads int, quota float64) int {
	if most := math.Ceil(quota); quota > 0 && most < float64(threads) {
		return int(most)
	}
	return threads
}

// quotaOfV2 reads "QUOTA PERIOD", or "max PERIOD" for no quota.
func quotaOfV2(root fs.FS, group string) float64 {
	quota, period, _ := strings.Cut(firstLine(root, group, "cpu.max"), " ")
	return ratio(quota, period)
}

// quotaOfV1 reads two files. A quota of -1 means none.
func quotaOfV1(root fs.FS, group string) float64 {
	return ratio(firstLine(root, group, "cpu.cfs_quota_us"), firstLine(root, group, "cpu.cfs_period_us"))
}

// firstLine returns the first line of a file of a cgroup, or "".
func firstLine(root fs.FS, group, name string) string {
	text, err := fs.ReadFile(root, path.Join(group, name))
	if err != nil {
		return "" // a container may not be able to see its cgroup
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return line
}

// ratio returns a quota as a number of CPUs, or 0 for none.
func ratio(quota, period string) float64 {
	q, err := strconv.ParseFloat(quota, 64)
	if err != nil || q <= 0 {
		return 0
	}
	p, err := strconv.ParseFloat(period, 64)
	if err != nil || p <= 0 {
		return 0
	}
	return q / p
}
