// Package freeport finds a TCP port for a process that starts later.
package freeport

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
)

const (
	// first is the first port to try. Well-known services have the ports below.
	first = 10000
	last  = 65535
)

// Find returns a port that nobody listens at on any address of this host, and that the kernel gives
// to nobody who asks for any port: a connection or a listener of another process would take such a
// port (net.ipv4.ip_local_port_range) before the process that it is for starts. No other call of
// Find on this host returns the port before this process ends. Where the kernel gives away all
// ports, it returns any free one, which may be taken before it is used.
func Find() (int, error) {
	low, high := ephemeral()
	below, above := max(low-first, 0), max(last-high, 0)
	var failed error
	for range 100 {
		port := first + rand.IntN(last+1-first)
		if below+above > 0 {
			if port = first + rand.IntN(below+above); port >= low {
				port += high + 1 - low
			}
		}
		l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
		if err != nil {
			failed = err
			continue
		}
		if err := errors.Join(reserve(port), l.Close()); err != nil {
			failed = err
			continue
		}
		return port, nil
	}
	return 0, fmt.Errorf("no free port from %d to %d: %w", first, last, failed)
}

// ephemeral returns the first and the last port that the kernel gives to a socket without one, or
// Linux's defaults if the kernel does not say them.
func ephemeral() (low, high int) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return 32768, 60999
	}
	if _, err := fmt.Sscan(string(text), &low, &high); err != nil {
		return 32768, 60999
	}
	return low, high
}
