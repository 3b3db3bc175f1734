package world

import (
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Network connects hosts. Each connection is a TCP connection: bytes arrive in order or not at all.
// Connections are independent of each other.
type Network struct {
	world     *World
	mu        sync.Mutex // guards the connections
	listeners map[string]*Listener
	cut       map[[2]string]chan struct{} // closed when the link from one host to another works again
	open      []*Conn
	Buffer    int // bytes that one side of a connection holds
}

// NewNetwork returns a network.
func NewNetwork(w *World) *Network {
	return &Network{world: w, listeners: map[string]*Listener{}, cut: map[[2]string]chan struct{}{}, Buffer: 64 << 10}
}

// Cut cuts the link from one host to another, in this direction.
func (n *Network) Cut(from, to string) {
	n.world.Say("the link from %s to %s is cut", from, to)
	n.cut[[2]string{from, to}] = make(chan struct{})
}

// Heal ends Cut.
func (n *Network) Heal(from, to string) {
	n.world.Say("the link from %s to %s works again", from, to)
	if c := n.cut[[2]string{from, to}]; c != nil {
		close(c)
		delete(n.cut, [2]string{from, to})
	}
}

// Open returns the number of sockets that living processes have open.
func (n *Network) Open() (open int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.open {
		if !c.closed && !c.host.Dead() {
			open++
		}
	}
	return open + len(n.listeners)
}

// Shutdown ends the goroutines of all connections.
func (n *Network) Shutdown() {
	for _, c := range n.cut {
		close(c)
	}
	clear(n.cut)
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.open {
		c.end()
	}
}

// Listener accepts connections at an address.
type Listener struct {
	net     *Network
	host    *Host
	address string
	queue   chan *Conn
	closed  chan struct{}
}

// Listen listens at an address, which is the name of the current host.
func (n *Network) Listen() *Listener {
	h := Here()
	l := &Listener{net: n, host: h, address: h.Name, queue: make(chan *Conn, 64), closed: make(chan struct{})}
	n.listeners[h.Name] = l
	h.OnDeath(func(bool) { l.Close() })
	return l
}

// Accept returns the next connection.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case <-l.closed:
		return nil, net.ErrClosed
	case c := <-l.queue:
		l.host.Gate()
		l.net.world.delay("accept")
		return c, nil
	}
}

// Close ends Accept, and resets connections that nobody has accepted.
func (l *Listener) Close() error {
	if l.net.listeners[l.address] != l {
		return net.ErrClosed
	}
	delete(l.net.listeners, l.address)
	close(l.closed)
	for {
		select {
		case c := <-l.queue:
			l.net.mu.Lock()
			c.abort()
			l.net.mu.Unlock()
		default:
			return nil
		}
	}
}

// Addr returns nil.
func (l *Listener) Addr() net.Addr { return nil }

// Dial connects the current host to an address.
func (n *Network) Dial(address string, timeout time.Duration) (*Conn, error) {
	h := Here()
	h.Gate()
	n.world.delay("dial")
	for _, link := range [][2]string{{h.Name, address}, {address, h.Name}} {
		if cut := n.cut[link]; cut != nil {
			t := time.NewTimer(h.Real(timeout))
			select {
			case <-cut:
				t.Stop()
			case <-t.C:
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.ErrDeadlineExceeded}
			}
		}
	}
	l := n.listeners[address]
	if l == nil || h.Dead() {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	n.mu.Lock()
	mine, other := n.conn(h), n.conn(l.host)
	mine.peer, other.peer = other, mine
	n.mu.Unlock()
	go mine.pump()
	go other.pump()
	l.queue <- other
	return mine, nil
}

// segment is sent over a link. A segment without data ends the connection, or resets it.
type segment struct {
	data  []byte
	reset bool
}

// Conn is one side of a connection.
type Conn struct {
	net   *Network
	host  *Host
	peer  *Conn
	out   []segment     // sent, not arrived
	work  chan struct{} // has a place for one value: out has changed
	ended chan struct{} // closed when the pump must end
	in    []byte        // arrived, not read
	sides
	news   chan struct{} // closed and replaced at each change
	limits [2]limit      // of reading and writing
}

// sides says which sides of a connection are closed.
type sides struct {
	fin    bool // the peer's
	half   bool // CloseWrite was called
	closed bool
	reset  bool
}

// limit is a deadline.
type limit struct {
	at    time.Time // of the host's clock; zero: none
	timer *time.Timer
}

func (n *Network) conn(h *Host) *Conn {
	c := &Conn{net: n, host: h, work: make(chan struct{}, 1), ended: make(chan struct{}), news: make(chan struct{})}
	n.open = append(n.open, c)
	h.OnDeath(func(power bool) {
		n.mu.Lock()
		defer n.mu.Unlock()
		switch {
		case power:
			c.end()
		case !c.closed:
			c.close()
		}
	})
	return c
}

func (c *Conn) end() {
	select {
	case <-c.ended:
	default:
		close(c.ended)
		c.changed()
	}
}

func (c *Conn) changed() {
	news := c.news
	c.news = make(chan struct{})
	close(news)
}

func (c *Conn) send(s segment) {
	c.out = append(c.out, s)
	select {
	case c.work <- struct{}{}:
	default:
	}
}

// pump carries segments to the peer, one after another.
func (c *Conn) pump() {
	for {
		c.net.mu.Lock()
		idle := len(c.out) == 0
		c.net.mu.Unlock()
		if idle {
			select {
			case <-c.work:
				continue
			case <-c.ended:
				return
			}
		}
		if !c.travel() || c.deliver() {
			return
		}
	}
}

// deliver gives the peer a segment, and often those that follow, as TCP joins small writes. It
// returns true after the last one.
func (c *Conn) deliver() (last bool) {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	for n := 1 + c.net.world.small("joined", 3); n > 0 && len(c.out) > 0; n-- { // 0 segments: reset meanwhile
		s := c.out[0]
		c.out = c.out[1:]
		c.peer.arrive(s)
		last = s.data == nil
	}
	c.changed()
	return last
}

// travel waits until the next segment has arrived. It returns false if the connection has ended.
func (c *Conn) travel() bool {
	w := c.net.world
	h := w.hash(w.key("packet"))
	d := time.Duration(50+h%400) * time.Microsecond
	if h>>32%16 == 0 {
		d *= 200
	}
	if !c.wait(time.After(d)) {
		return false
	}
	for {
		cut := c.net.cut[[2]string{c.host.Name, c.peer.host.Name}]
		if cut == nil {
			break
		}
		began := time.Now()
		select {
		case <-cut:
		case <-c.ended:
			return false
		}
		// TCP doubles the pause between its attempts.
		if !c.wait(time.After(time.Since(began) * time.Duration(h>>40%100) / 100)) {
			return false
		}
	}
	for {
		c.net.mu.Lock()
		full, news := len(c.peer.in) >= c.net.Buffer && !c.peer.closed && !c.peer.reset, c.peer.news
		c.net.mu.Unlock()
		if !full {
			return true
		}
		select {
		case <-news:
		case <-c.ended:
			return false
		}
	}
}

func (c *Conn) wait(until <-chan time.Time) bool {
	select {
	case <-until:
		return true
	case <-c.ended:
		return false
	}
}

// arrive receives a segment.
func (c *Conn) arrive(s segment) {
	select {
	case <-c.ended: // the host is off
		return
	default:
	}
	switch {
	case s.reset:
		c.reset = true
		c.out = nil
	case c.closed && s.data != nil: // nobody will read it: what is on its way to the peer is lost too
		if c.net.cut[[2]string{c.host.Name, c.peer.host.Name}] == nil {
			c.out = nil
			c.peer.reset, c.peer.out = true, nil
			c.peer.changed()
		}
	case s.data == nil:
		c.fin = true
	default:
		c.in = append(c.in, s.data...)
	}
	c.changed()
}

func failed(op string, err error) error { return &net.OpError{Op: op, Net: "tcp", Err: err} }

func (c *Conn) over(op string, l *limit) error {
	switch {
	case c.closed || c.host.Dead():
		return failed(op, net.ErrClosed)
	case !l.at.IsZero() && !c.host.Now().Before(l.at):
		return failed(op, os.ErrDeadlineExceeded)
	}
	return nil
}

// try calls f until it is done, after each change.
func (c *Conn) try(f func() (n int, done bool, err error)) (int, error) {
	for {
		c.host.Gate()
		c.net.mu.Lock()
		n, done, err := f()
		news := c.news
		c.net.mu.Unlock()
		if done || err != nil {
			return n, err
		}
		<-news
	}
}

// Read reads bytes that have arrived, sometimes not all.
func (c *Conn) Read(p []byte) (int, error) {
	return c.try(func() (n int, done bool, err error) {
		if err := c.over("read", &c.limits[0]); err != nil {
			return 0, true, err
		}
		switch {
		case len(c.in) > 0:
			n = copy(p, c.in)
			if c.net.world.small("short read", 4) == 3 {
				n = 1 + c.net.world.small("bytes read", n)
			}
			c.in = slices.Clone(c.in[n:])
			c.changed()
			return n, true, nil
		case c.reset:
			return 0, true, failed("read", syscall.ECONNRESET)
		case c.fin:
			return 0, true, io.EOF
		}
		return 0, false, nil
	})
}

// Write sends bytes. It blocks while too many are on their way.
func (c *Conn) Write(p []byte) (int, error) {
	c.net.world.delay("write")
	return c.try(func() (n int, done bool, err error) {
		if err := c.over("write", &c.limits[1]); err != nil {
			return 0, true, err
		}
		if c.reset || c.half {
			return 0, true, failed("write", syscall.EPIPE)
		}
		waiting := 0
		for _, s := range c.out {
			waiting += len(s.data)
		}
		if waiting >= c.net.Buffer {
			return 0, false, nil
		}
		c.send(segment{data: slices.Clone(p)})
		return len(p), true, nil
	})
}

// Close closes the connection. Bytes on their way still arrive, unless some were not read here.
func (c *Conn) Close() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.close()
	return nil
}

func (c *Conn) close() {
	if len(c.in) > 0 {
		c.abort()
		return
	}
	c.closed = true
	if !c.half {
		c.send(segment{})
	}
	c.changed()
}

// CloseWrite ends the bytes to the peer.
func (c *Conn) CloseWrite() error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if err := c.over("close", &limit{}); err != nil {
		return err
	}
	c.half = true
	c.send(segment{})
	return nil
}

// abort resets the connection.
func (c *Conn) abort() {
	c.closed = true
	c.out = nil
	c.send(segment{reset: true}) // lost if the pump has ended: the peer has been told
	c.changed()
}

// LocalAddr returns nil.
func (c *Conn) LocalAddr() net.Addr { return nil }

// RemoteAddr returns nil.
func (c *Conn) RemoteAddr() net.Addr { return nil }

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline sets the deadline of Read.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.limit(&c.limits[0], t) }

// SetWriteDeadline sets the deadline of Write.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.limit(&c.limits[1], t) }

func (c *Conn) limit(l *limit, t time.Time) error {
	c.net.mu.Lock()
	defer c.net.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	l.at = t
	if !t.IsZero() {
		c.arm(l)
	}
	c.changed()
	return nil
}

// arm wakes the calls when the host's clock reaches the deadline, which is later if the clock
// stands still meanwhile.
func (c *Conn) arm(l *limit) {
	const rounding = 2 // the host's clock and Real round down
	at := l.at
	l.timer = time.AfterFunc(c.host.Real(max(0, at.Sub(c.host.Now())))+rounding, func() {
		c.host.Gate()
		c.net.mu.Lock()
		defer c.net.mu.Unlock()
		if l.at.Equal(at) && c.host.Now().Before(at) {
			c.arm(l)
			return
		}
		c.changed()
	})
}
