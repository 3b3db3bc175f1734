// Package freeport finds a TCP port for a process that starts later.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
)

// first is the first port to try. Well-known services have the ports below.
const first = 10000

// Find returns a port that nobody listens at on any address of this host, and that the kernel gives
// to nobody who asks for any port: a connection or a listener of another process would take such a
// port (net.ipv4.ip_local_port_range) before the process that it is for starts. Choose another one
// for each job.
func Find() (int, error) {
	end := firstEphemeral()
	if end <= first {
		return 0, fmt.Errorf("the kernel gives away every port from %d on: lower bound of net.ipv4.ip_local_port_range", end)
	}
	var last error
	for range 100 {
		port := first + rand.IntN(end-first)
		l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
		if err != nil {
			last = err
			continue
		}
		return port, l.Close()
	}
	return 0, fmt.Errorf("no free port from %d to %d: %w", first, end-1, last)
}

// firstEphemeral returns the first port that the kernel gives to a socket without one, or Linux's
// default if the kernel does not say it.
func firstEphemeral() int {
	const linux = 32768
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return linux
	}
	var low, high int
	if _, err := fmt.Sscan(string(text), &low, &high); err != nil {
		return linux
	}
	return low
}
