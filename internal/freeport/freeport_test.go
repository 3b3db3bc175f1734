package freeport

import (
	"net"
	"strconv"
	"testing"
)

// A port is free on every address, and not one that the kernel gives to a socket without a port.
func TestFind(t *testing.T) {
	for range 100 {
		port, err := Find()
		if err != nil {
			t.Fatal(err)
		}
		if port < first || port >= firstEphemeral() {
			t.Fatalf("port %d, want %d to %d", port, first, firstEphemeral()-1)
		}
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
