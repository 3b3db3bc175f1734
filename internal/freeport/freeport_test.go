package freeport

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
)

// A port is free on every address, and not one that the kernel gives to a socket without a port.
func TestFind(t *testing.T) {
	low, high := ephemeral()
	found := map[int]bool{}
	for range 10 { // the process holds them
		port, err := Find()
		if err != nil {
			t.Fatal(err)
		}
		if port < first || port > last || port >= low && port <= high && (low > first || high < last) || found[port] {
			t.Fatalf("port %d, want another one from %d to %d, and none from %d to %d", port, first, last, low, high)
		}
		found[port] = true
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

const portVariable = "TORCHSTREAM_FREEPORT_TEST"

// A port that a process has found is no other process's until the process ends.
func TestPortsAreReserved(t *testing.T) {
	if text := os.Getenv(portVariable); text != "" {
		port, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := reserve(port); err != nil {
			t.Log(err)
			os.Exit(7)
		}
		return
	}
	port, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	child := func(port int) int {
		c := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		c.Env = append(os.Environ(), portVariable+"="+strconv.Itoa(port))
		if out, err := c.CombinedOutput(); err != nil && c.ProcessState == nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return c.ProcessState.ExitCode()
	}
	if status := child(port); status != 7 {
		t.Errorf("another process has reserved the port too: status %d, want 7", status)
	}
	free := last + os.Getpid() // no port, and no other test's number
	for range 2 {
		if status := child(free); status != 0 {
			t.Errorf("a port of a process that has ended is not free: status %d, want 0", status)
		}
	}
}
