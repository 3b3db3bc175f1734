// Package net replaces the standard library's net in code that simulated hosts run.
package net

import (
	"context"
	"net"
	"time"

	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Types that need no replacement.
type (
	Conn     = net.Conn
	Listener = net.Listener
)

// ErrClosed is the error of a closed connection.
var ErrClosed = net.ErrClosed

// Dialer connects to an address, which is the name of a host.
type Dialer struct{ Timeout time.Duration }

// DialContext connects. The context has no effect.
func (d *Dialer) DialContext(_ context.Context, _, address string) (Conn, error) {
	c, err := world.Current().Network.Dial(address, d.Timeout)
	if err != nil {
		return nil, err
	}
	return c, nil
}
