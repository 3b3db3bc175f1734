package hostmem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Memory is shared memory: flags, which are clear at first, and bytes, which are zero at first. It
// is safe for concurrent use. The garbage collector closes a Memory that is no longer reachable.
type Memory struct{ *shared }

// shared is the memory itself, and this process's part in passing it on. It is a separate object,
// because its goroutines must not keep the Memory reachable.
type shared struct {
	name  string
	file  *os.File
	flags []byte // mapped for reading and writing
	data  []byte // mapped for reading
	at    int64  // offset of data in file

	running sync.WaitGroup // goroutines
	mu      sync.Mutex
	closed  bool
	open    map[io.Closer]bool // sockets, closed by close
	ended   chan struct{}      // closed by close
}

const (
	greeting = "tsmem 1\n"
	// answerTime limits the wait for the process that holds the socket, which may be stopped.
	answerTime = 10 * time.Second
	// rounds limits how often a process tries to bind or to connect. Another round is needed only
	// if the holder of the socket ends between the two.
	rounds    = 20
	roundTime = 5 * time.Millisecond
)

// Join returns the memory with the name if a process of this user has it, and otherwise makes it.
// It fails where the system does not allow such memory or such sockets, if a process of another
// user or another container holds the socket, if the holder does not answer for 10 s, and when ctx
// ends. ctx counts only until Join returns.
func Join(ctx context.Context, c Config) (*Memory, error) {
	m, err := join(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("memory %q shared on this host: %w", c.Name, err)
	}
	return m, nil
}

func join(ctx context.Context, c Config) (*Memory, error) {
	page := int64(os.Getpagesize())
	at := (int64(c.Flags+63)/64*8 + page - 1) / page * page
	own, err := newFile(at + c.Bytes)
	if err != nil {
		return nil, err
	}
	s := &shared{name: fmt.Sprintf("@torchstream-%d-%s", os.Geteuid(), c.Name), file: own, at: at,
		open: map[io.Closer]bool{}, ended: make(chan struct{})}
	l, conn, file, err := s.bindOrFetch(ctx)
	if file != nil {
		_ = own.Close() // it is empty
		s.file = file
	} else if err == nil {
		_, err = own.WriteAt(make([]byte, at), 0) // a fault of the mapping without memory would kill the process
	}
	if err == nil {
		err = s.check(at + c.Bytes)
	}
	if err == nil {
		err = s.mapAll(c)
	}
	if err != nil {
		if l != nil {
			_ = l.Close() // err says more
		}
		s.close()
		return nil, err
	}
	m := &Memory{s}
	if l != nil {
		s.serve(l)
	} else {
		s.watch(conn)
	}
	runtime.AddCleanup(m, (*shared).close, s)
	return m, nil
}

// newFile makes an anonymous file whose size never changes: a process that used pages beyond its
// end would be killed.
func newFile(size int64) (*os.File, error) {
	const noExec = 0x8 // MFD_NOEXEC_SEAL, since Linux 6.3
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("torchstream", flags|noExec)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate("torchstream", flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	file := os.NewFile(uintptr(fd), "torchstream")
	err = file.Truncate(size)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, sizeSeals)
	}
	if err != nil {
		_ = file.Close() // err says more
		return nil, err
	}
	return file, nil
}

const sizeSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW

// check refuses a file that is not of newFile, or has another size.
func (s *shared) check(size int64) error {
	info, err := s.file.Stat()
	if err != nil {
		return err
	}
	seals, err := unix.FcntlInt(s.file.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || seals&sizeSeals != sizeSeals || info.Size() != size {
		return fmt.Errorf("another process has memory of %d bytes (seals %#x), want %d: it runs another version of this "+
			"program", info.Size(), seals, size)
	}
	return nil
}

func (s *shared) mapAll(c Config) (err error) {
	if s.at > 0 {
		s.flags, err = unix.Mmap(int(s.file.Fd()), 0, int(s.at), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil && c.Bytes > 0 {
		s.data, err = unix.Mmap(int(s.file.Fd()), s.at, int(c.Bytes), unix.PROT_READ, unix.MAP_SHARED)
	}
	return os.NewSyscallError("mmap", err)
}

// bindOrFetch binds the socket, or gets the memory from the process that has bound it. close closes
// the connection to that process.
func (s *shared) bindOrFetch(ctx context.Context) (l *net.UnixListener, c *net.UnixConn, file *os.File, err error) {
	address := &net.UnixAddr{Name: s.name, Net: "unix"}
	for range rounds {
		l, err = net.ListenUnix("unix", address)
		if err == nil {
			return l, nil, nil, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, nil, nil, err
		}
		c, err = net.DialUnix("unix", nil, address)
		if err == nil {
			if !s.keep(c) {
				return nil, nil, nil, net.ErrClosed
			}
			stop := context.AfterFunc(ctx, func() { _ = c.Close() }) // a socket has nothing to lose
			file, err = receive(c)
			if !stop() {
				err = errors.Join(context.Cause(ctx), closeFile(file))
				s.drop(c)
				return nil, nil, nil, err
			}
			if err == nil {
				return nil, c, file, nil
			}
			s.drop(c)
		}
		if !holderEnded(err) {
			return nil, nil, nil, err
		}
		time.Sleep(roundTime)
	}
	return nil, nil, nil, err
}

// closeFile closes a file, unless it is nil.
func closeFile(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

// holderEnded reports whether an error of connecting or receiving may say that the process that had
// the socket has just ended.
func holderEnded(err error) bool {
	for _, e := range []error{syscall.ECONNREFUSED, syscall.ECONNRESET, io.EOF, fs.ErrNotExist, syscall.ESRCH} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// receive reads the file that the holder of the socket sends.
func receive(c *net.UnixConn) (*os.File, error) {
	if err := sameUser(c); err != nil {
		return nil, err
	}
	if err := c.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return nil, err
	}
	text, control := make([]byte, 200), make([]byte, unix.CmsgSpace(4))
	n, controls, _, _, err := c.ReadMsgUnix(text, control)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF // the holder has ended
	}
	messages, err := unix.ParseSocketControlMessage(control[:controls])
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil || len(fds) != 1 {
			for _, fd := range fds { // control has room for two
				_ = unix.Close(fd) // the error below says more
			}
			continue
		}
		file := os.NewFile(uintptr(fds[0]), "torchstream")
		if string(text[:n]) != greeting {
			_ = file.Close() // the error says more
			break
		}
		return file, c.SetReadDeadline(time.Time{})
	}
	return nil, fmt.Errorf("the process that has the socket sent %q without the memory", text[:n])
}

// sameUser returns an error unless the process at the other end is this user's and in the same
// container.
func sameUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if peerErr != nil {
		return os.NewSyscallError("getsockopt", peerErr)
	}
	if int(peer.Uid) != os.Geteuid() {
		return fmt.Errorf("process %d of user %d has the socket: %w", peer.Pid, peer.Uid, os.ErrPermission)
	}
	return sameContainer(int(peer.Pid))
}

// errOtherContainer refuses a process whose user only has the same number: it may be anybody.
var errOtherContainer = fmt.Errorf("a process of another container has the socket: %w", os.ErrPermission)

// sameContainer returns an error if the process is not in the PID namespace and the user namespace
// of this process. A pid of 0 stands for a process that this one does not see. A process outside of
// a container sees the processes in it, so a pid alone proves nothing.
func sameContainer(pid int) error {
	if pid == 0 {
		return errOtherContainer
	}
	// The /proc of another PID namespace numbers the processes in another way.
	if self, err := os.Readlink("/proc/self"); err != nil || self != strconv.Itoa(os.Getpid()) {
		return errors.Join(fmt.Errorf("/proc does not show this process's container: %w", os.ErrPermission), err)
	}
	for _, namespace := range []string{"pid", "user"} {
		own, err := os.Stat("/proc/self/ns/" + namespace)
		if err != nil {
			return err
		}
		other, err := os.Stat(fmt.Sprintf("/proc/%d/ns/%s", pid, namespace))
		if err != nil {
			return err
		}
		if !os.SameFile(own, other) {
			return errOtherContainer
		}
	}
	return nil
}

// keep notes a socket that close must close. It returns false, and closes the socket, if the memory
// is closed.
func (s *shared) keep(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		_ = c.Close() // a socket has nothing to lose
		return false
	}
	s.open[c] = true
	return true
}

// drop closes a socket.
func (s *shared) drop(c io.Closer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c)
	_ = c.Close() // a socket has nothing to lose
}

// acceptPause is the time before another try to accept a process, for example after the system had
// no descriptors left.
const acceptPause = 100 * time.Millisecond

// serve sends the memory to each process that connects.
func (s *shared) serve(l *net.UnixListener) {
	if !s.keep(l) {
		return
	}
	s.running.Go(func() {
		defer s.drop(l)
		for {
			c, err := l.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				select {
				case <-s.ended:
				case <-time.After(acceptPause):
				}
				continue
			}
			s.pass(c)
		}
	})
}

// pass sends the memory to a process that has connected.
func (s *shared) pass(c *net.UnixConn) {
	err := sameUser(c)
	if err != nil {
		_, _ = io.WriteString(c, "refused: "+err.Error()) // the other process may have ended
	}
	if err != nil || s.send(c) != nil || !s.keep(c) {
		_ = c.Close() // the other process reads the end
		return
	}
	s.running.Go(func() {
		defer s.drop(c)
		_, _ = c.Read(make([]byte, 1)) // returns when one of the two processes closes the memory, or ends
	})
}

// send sends the memory. It never blocks: the socket's buffer is empty.
func (s *shared) send(c *net.UnixConn) error {
	_, _, err := c.WriteMsgUnix([]byte(greeting), unix.UnixRights(int(s.file.Fd())), nil)
	return err
}

// watch waits for the end of the process that holds the socket, and then takes the socket over,
// unless another process has been faster.
func (s *shared) watch(c *net.UnixConn) {
	s.running.Go(func() {
		for c != nil {
			_, _ = c.Read(make([]byte, 1)) // returns when one of the two processes closes the memory, or ends
			s.drop(c)
			c = s.takeOver()
		}
	})
}

// takeOver binds the socket and serves. If another process has bound it, takeOver returns the
// connection to that process. It returns nil if there is nothing more to watch.
func (s *shared) takeOver() *net.UnixConn {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil
	}
	l, c, file, err := s.bindOrFetch(context.Background()) // close ends it
	if err != nil {
		return nil // this process keeps the memory; later processes make their own
	}
	if l != nil {
		s.serve(l)
		return nil
	}
	same := sameFile(s.file, file)
	_ = file.Close() // this process has the memory already
	if !same {       // a new process has been faster, and has made other memory
		s.drop(c)
		return nil
	}
	return c
}

func sameFile(a, b *os.File) bool {
	infoA, errA := a.Stat()
	infoB, errB := b.Stat()
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

func (s *shared) word(i int) *uint64 { return (*uint64)(unsafe.Pointer(&s.flags[i/64*8])) }

// Flag reports whether flag i is set. If it is, the bytes that were written before it was set can
// be read.
func (m *Memory) Flag(i int) bool {
	defer runtime.KeepAlive(m)
	return atomic.LoadUint64(m.word(i))>>(i%64)&1 != 0
}

// SetFlag sets flag i.
func (m *Memory) SetFlag(i int) {
	defer runtime.KeepAlive(m)
	atomic.OrUint64(m.word(i), 1<<(i%64))
}

// Data returns the data, which is read-only. It is valid until Close, and as long as the Memory is
// reachable. It changes when a process writes.
func (m *Memory) Data() []byte { return m.data }

// Write writes to the data. Processes may write the same bytes to the same place at the same time.
func (m *Memory) Write(at int64, p []byte) error {
	defer runtime.KeepAlive(m)
	_, err := m.file.WriteAt(p, m.at+at)
	return err
}

// lockTime is the interval at which a process that waits for the lock tries again.
const lockTime = 10 * time.Millisecond

// Lock waits until nobody else has the lock of the memory. It fails when ctx ends; if ctx has ended
// before, Lock tries once. unlock releases the lock, and so does the end of the process.
func (m *Memory) Lock(ctx context.Context) (unlock func(), err error) {
	defer runtime.KeepAlive(m)
	// The lock belongs to an open file, and all processes share the one of m.file.
	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", m.file.Fd()), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(lockTime)
	defer tick.Stop()
	for {
		err := unix.Flock(int(again.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = again.Close() }, nil // it is in memory, so nothing is lost
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			_ = again.Close() // err says more
			return nil, os.NewSyscallError("flock", err)
		}
		select {
		case <-ctx.Done():
			_ = again.Close() // ctx says more
			return nil, context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// Close gives this process's part of the memory back. The slices of Data must not be used any more.
// It may be called more than once.
func (m *Memory) Close() { m.shared.close() }

func (s *shared) close() {
	s.mu.Lock()
	first := !s.closed
	if first {
		close(s.ended)
	}
	s.closed = true
	for c := range s.open {
		_ = c.Close() // a socket has nothing to lose
	}
	s.mu.Unlock()
	s.running.Wait()
	if !first {
		return
	}
	for _, p := range [][]byte{s.flags, s.data} {
		if p != nil {
			_ = unix.Munmap(p) // fails only for addresses that are not mapped
		}
	}
	_ = s.file.Close() // it is in memory, so nothing is lost
	s.flags, s.data = nil, nil
}
