package freeport

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// A port is free on every address, and is none that the kernel gives to sockets that ask for any
// port.
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

// Until a process that has found a port ends, no other process finds that port.
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

// Find never draws a port that the kernel may give to another socket, whatever range an
// administrator has set.
func TestDrawAvoidsTheKernelsPorts(t *testing.T) {
	for name, c := range map[string]struct{ low, high int }{
		"Linux's defaults":            {32768, 60999},
		"starts below the first port": {1024, 65000},
		"leaves half of the ports":    {1024, 40000},
		"up to the last port":         {20000, 65535},
		"all but the first port":      {10001, 65535},
		"all but the last port":       {10000, 65534},
		"only ports below the first":  {1024, 5000},
		"all ports":                   {1024, 65535},
		"all ports from the first on": {10000, 65535},
	} {
		avoidable := c.low > first || c.high < last
		for range 10000 {
			port := draw(c.low, c.high)
			if port < first || port > last || avoidable && port >= c.low && port <= c.high {
				t.Errorf("%s, %d to %d: got port %d, want one from %d to %d outside of them", name, c.low, c.high, port,
					first, last)
				break
			}
		}
	}
}

// Every port outside of the kernel's range can be drawn.
func TestDrawReachesBothSidesOfTheKernelsPorts(t *testing.T) {
	drawn := map[int]bool{}
	for range 1000 {
		drawn[draw(first+2, last-1)] = true
	}
	for _, want := range []int{first, first + 1, last} {
		if !drawn[want] {
			t.Errorf("1,000 draws outside of %d to %d: got %v, want %d among them", first+2, last-1, drawn, want)
		}
	}
}

func TestPortRangeIsTheKernelsOrLinuxsDefault(t *testing.T) {
	for text, want := range map[string][2]int{
		"20000\t30000\n": {20000, 30000},
		"":               {32768, 60999},
		"20000\n":        {32768, 60999},
		"none at all":    {32768, 60999},
	} {
		if low, high := portRange(text); low != want[0] || high != want[1] {
			t.Errorf("%q: got %d to %d, want %d to %d", text, low, high, want[0], want[1])
		}
	}
}

// Find passes over a port with a listener and a port that another process has reserved.
func TestFindPassesOverUsedPorts(t *testing.T) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	listening := l.Addr().(*net.TCPAddr).Port
	reserved, err := Find() // by this process: a second reservation fails as another process's would
	if err != nil {
		t.Fatal(err)
	}
	next := []int{listening, reserved}
	port, err := find(func() int {
		if len(next) == 0 {
			return draw(ephemeral())
		}
		port := next[0]
		next = next[1:]
		return port
	})
	if err != nil || port == listening || port == reserved {
		t.Errorf("got port %d, error %v, want neither %d, which is listened at, nor %d, which is reserved", port, err,
			listening, reserved)
	}
	if _, err := find(func() int { return listening }); !errors.Is(err, syscall.EADDRINUSE) ||
		!strings.Contains(err.Error(), "no free port from 10000 to 65535") {
		t.Errorf("only port %d: got error %v, want EADDRINUSE", listening, err)
	}
	if _, err := find(func() int { return reserved }); err == nil ||
		!strings.Contains(err.Error(), "is another process's") {
		t.Errorf("only port %d: got error %v, want one that says whose it is", reserved, err)
	}
}
