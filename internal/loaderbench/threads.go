package loaderbench

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// threadsRow is the CPU time of all threads with the same name.
type threadsRow struct {
	Name        string  `json:"name"`
	Threads     int     `json:"threads"` // threads that used CPU time during the measurement
	UserCores   float64 `json:"user_cores"`
	SystemCores float64 `json:"system_cores"` // time in the kernel
}

// threadTime is the CPU time of one thread.
type threadTime struct {
	name         string
	user, system time.Duration
}

// threadTimes returns the CPU times of this process's threads, by thread ID.
func threadTimes() (map[int]threadTime, error) {
	const folder = "/proc/self/task"
	tasks, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	times := make(map[int]threadTime, len(tasks))
	for _, task := range tasks {
		id, err := strconv.Atoi(task.Name())
		if err != nil {
			return nil, err
		}
		stat, err := os.ReadFile(filepath.Join(folder, task.Name(), "stat"))
		if err != nil {
			continue // the thread has ended
		}
		if times[id], err = parseThreadTime(stat); err != nil {
			return nil, err
		}
	}
	return times, nil
}

// parseThreadTime parses a thread's stat file (proc_pid_stat(5)). The name is in parentheses, and
// may itself contain parentheses and spaces.
func parseThreadTime(stat []byte) (threadTime, error) {
	const tick = time.Second / 100 // USER_HZ is 100 on all architectures of Go
	begin, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if begin < 0 || end < begin {
		return threadTime{}, fmt.Errorf("the stat file of a thread has no name: %q", stat)
	}
	fields := strings.Fields(string(stat[end+1:])) // from the file's third field on
	if len(fields) < 13 {
		return threadTime{}, fmt.Errorf("the stat file of a thread has no times: %q", stat)
	}
	user, err := strconv.ParseInt(fields[11], 10, 64)
	if err != nil {
		return threadTime{}, err
	}
	system, err := strconv.ParseInt(fields[12], 10, 64)
	return threadTime{string(stat[begin+1 : end]), time.Duration(user) * tick, time.Duration(system) * tick}, err
}

// threadsSince returns the CPU time used since before, summed by thread name, largest first.
// Threads that have ended since are missing.
func threadsSince(before map[int]threadTime, elapsed time.Duration) ([]threadsRow, error) {
	now, err := threadTimes()
	if err != nil {
		return nil, err
	}
	rows := map[string]threadsRow{}
	for id, t := range now {
		was := before[id]
		user, system := (t.user - was.user).Seconds(), (t.system - was.system).Seconds()
		if user+system <= 0 {
			continue
		}
		row := rows[t.name]
		rows[t.name] = threadsRow{t.name, row.Threads + 1, row.UserCores + user/elapsed.Seconds(),
			row.SystemCores + system/elapsed.Seconds()}
	}
	return slices.SortedFunc(maps.Values(rows), func(a, b threadsRow) int {
		return cmp.Or(cmp.Compare(b.UserCores+b.SystemCores, a.UserCores+a.SystemCores),
			strings.Compare(a.Name, b.Name))
	}), nil
}
