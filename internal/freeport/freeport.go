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

// Find returns a port on which nobody listens, on any address of this host. It avoids the ephemeral
// ports (net.ipv4.ip_local_port_range), because the kernel could give such a port to another
// process before the process that needs it starts. No other call of Find on this host returns the
// port before this process ends. If all ports are ephemeral, Find returns any free port, which may
// be taken before it is used.
func Find() (int, error) {
	low, high := ephemeral()
	return find(func() int { return draw(low, high) })
}

// draw returns a random port between first and last that is not in the range from low to high. If
// that range contains all or none of these ports, draw returns any of them.
func draw(low, high int) int {
	low, high = max(low, first), min(high, last)
	given, all := high+1-low, last+1-first
	if given <= 0 || given == all {
		return first + rand.IntN(all)
	}
	port := first + rand.IntN(all-given)
	if port >= low {
		port += given
	}
	return port
}

// find returns the first free port among 100 that next returns.
func find(next func() int) (int, error) {
	var failed error
	for range 100 {
		port := next()
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

// ephemeral returns the first and the last ephemeral port: the kernel gives these ports to sockets
// that ask for no particular port. If the kernel does not report the range, ephemeral returns
// Linux's default.
func ephemeral() (low, high int) {
	text, _ := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range") // without a text, portRange returns the defaults
	return portRange(string(text))
}

// portRange reads the text of ip_local_port_range.
func portRange(text string) (low, high int) {
	if _, err := fmt.Sscan(text, &low, &high); err != nil {
		return 32768, 60999
	}
	return low, high
}
