package distributed

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/control"
)

// Options are the options of [Init]. The zero value works. All ranks of a job use the same options.
type Options struct {
	// CPU keeps the job off the GPUs. By default a process uses the GPU whose number is its local
	// rank, or the CPU if the machine has no GPU.
	CPU bool
	// Timeout is the maximum duration of a collective. It also limits how long Init and a barrier
	// wait for the slowest rank. 0 means 5 minutes.
	Timeout time.Duration
	// Silence is the time without a message from a rank after which that rank counts as lost,
	// because its process is stopped or the network is broken. 0 means 30 seconds. The end of a
	// process is noticed at once.
	Silence time.Duration
	// Debug compares the name, operands and order of every collective on all ranks before the
	// collective starts. If they differ, the error names the lines of the program on both ranks.
	// Each collective then costs a round trip to rank 0.
	Debug bool
	// Environment replaces the process's environment variables.
	Environment *Environment
	// Log receives the connection's parameters and the reason why the job ended. nil logs nothing.
	Log *slog.Logger
}

const (
	defaultTimeout = 5 * time.Minute
	defaultSilence = 30 * time.Second
	// firstPause is the pause after the first failed attempt to connect or to read the store. Each
	// further pause is twice as long, up to a second.
	firstPause  = 10 * time.Millisecond
	worldName   = "world"
	storePrefix = "torchstream"
	controlKey  = "control"
)

// Group is a set of ranks that call collectives together. [Init] returns the group of all ranks of
// the job, and [Group.Subgroup] makes others.
//
// All ranks of a group make the same calls in the same order, with tensors of the same shapes and
// dtypes. On each rank, only one goroutine at a time may call a group's methods. Groups that share
// ranks must call their collectives in the same order on all shared ranks.
type Group struct {
	job   *job
	name  string
	ranks []int // the members, as ranks of the job
	rank  int   // this process's rank in the group; -1 if it is not a member

	comms communicators

	last  atomic.Pointer[control.Call]
	mu    sync.Mutex // held while a collective is launched, and until a blocking one returns
	freed bool       // comms is freed
	calls callNumbers

	besides besideBarriers
}

// communicators are LibTorch's objects of a group.
type communicators struct {
	cpu, gpu *capi.Group
	stream   *cuda.OwnedStream // for asynchronous collectives; nil without a GPU
	aborting sync.WaitGroup    // goroutines that are aborting cpu and gpu
}

// abort aborts the collectives of the group. It does not wait for LibTorch, which may hang.
func (c *communicators) abort() {
	for _, group := range []*capi.Group{c.cpu, c.gpu} {
		if group != nil {
			c.aborting.Go(func() { capi.AbortGroup(group) })
		}
	}
}

// callNumbers numbers the calls of a group. The group's mu guards it.
type callNumbers struct {
	collectives uint64
	pairs       map[string]uint64 // numbers of sends and receives, by call.key
	subgroups   int
}

// next returns the sequence number of the next collective.
func (n *callNumbers) next() uint64 {
	n.collectives++
	return n.collectives
}

// nextOf returns the sequence number of the next send and receive of a pair of ranks.
func (n *callNumbers) nextOf(pair string) uint64 {
	n.pairs[pair]++
	return n.pairs[pair]
}

// nextSubgroup returns the number of the next subgroup.
func (n *callNumbers) nextSubgroup() int {
	n.subgroups++
	return n.subgroups
}

// job is the state that all groups of a process share.
type job struct {
	env    Environment
	o      Options
	device cuda.Device
	connections

	stop    context.CancelCauseFunc
	ended   <-chan struct{} // closed when the job or the caller's context ends
	watched chan struct{}   // closed when watch returns
	running sync.WaitGroup  // calls of await, which use the store and the groups

	told    atomic.Bool // a call has returned the reason why the job ended
	closing sync.Mutex  // held by Close
	open    openGroups
}

// connections are the connections of a rank to the rest of the job.
type connections struct {
	member *control.Member
	hub    *control.Hub // set only on rank 0
	store  *capi.Store
	start  string // prefix of the groups' keys in the store, different each time that the job is started
}

// openGroups are the groups of a job until the job is closed.
type openGroups struct {
	mu     sync.Mutex
	groups []*Group
	closed bool
}

func (o *openGroups) add(g *Group) {
	o.mu.Lock()
	o.groups = append(o.groups, g)
	o.mu.Unlock()
}

// all returns the groups in the order of their creation.
func (o *openGroups) all() []*Group {
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.groups)
}

// close marks the job as closed and returns its groups.
func (o *openGroups) close() []*Group {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	return o.groups
}

func (o *openGroups) isClosed() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.closed
}

// Init makes this process a rank of the job that its environment describes (see [ReadEnvironment]),
// and blocks until all ranks are connected. A process started alone is a job of one rank: it needs
// no variables, and every collective works.
//
// ctx is the context of the whole job. When it is cancelled, running and later collectives fail on
// all ranks, with [ErrLeft]. On the other ranks the error names this rank.
//
// If some ranks do not connect within Options.Timeout, the error names them. If a launcher restarts
// the job but keeps its store, the store may still contain what rank 0 announced at the earlier
// start. Ranks skip such an announcement and wait for the rank 0 of their own start. This works
// even if the hosts have counted different numbers of restarts.
//
// Ranks connect through LibTorch's TCPStore at MASTER_ADDR:MASTER_PORT, through a port of rank 0
// that the store announces, and through ports of Gloo and NCCL. Gloo and NCCL use the network
// interfaces named by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. Init does not change NCCL's
// variables, such as NCCL_NVLS_ENABLE.
//
// The caller closes the group.
func Init(ctx context.Context, o Options) (*Group, error) {
	env, err := ReadEnvironment(os.Getenv)
	if o.Environment != nil {
		env, err = *o.Environment, o.Environment.check()
	}
	if err != nil {
		return nil, err
	}
	if o.Timeout < 0 || o.Silence < 0 {
		return nil, fmt.Errorf("distributed.Init: Timeout is %v and Silence %v, and neither may be "+
			"negative: %w", o.Timeout, o.Silence, cuda.ErrInvalidArgument)
	}
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.Silence == 0 {
		o.Silence = defaultSilence
	}
	if err := capi.Check(); err != nil { // fail before this rank waits for another one
		return nil, err
	}
	j := &job{env: env, o: o, watched: make(chan struct{})}
	if j.device, err = deviceOf(env, o); err != nil {
		return nil, err
	}
	jobContext, stop := context.WithCancelCause(ctx)
	j.stop, j.ended = stop, jobContext.Done()
	if err := j.connect(jobContext); err != nil {
		stop(err)
		j.disconnect()
		return nil, fmt.Errorf("distributed.Init: rank %d of %d: %w", env.Rank, env.Size, err)
	}
	go j.watch(jobContext)
	world := make([]int, env.Size)
	for r := range world {
		world[r] = r
	}
	g, err := j.newGroup(jobContext, worldName, world)
	if err != nil {
		j.member.Abort(err.Error())
		j.close(false)
		return nil, fmt.Errorf("distributed.Init: rank %d of %d: %w", env.Rank, env.Size, err)
	}
	if o.Log != nil {
		if env.Warning != "" {
			o.Log.Warn("distributed: " + env.Warning)
		}
		o.Log.Info("distributed: connected", "rank", env.Rank, "size", env.Size, "device",
			j.device.String(), "launcher", env.Launcher)
	}
	return g, nil
}

func deviceOf(e Environment, o Options) (cuda.Device, error) {
	gpus := cuda.DeviceCount()
	if o.CPU || gpus == 0 {
		return cuda.CPU, nil
	}
	if e.LocalRank >= gpus {
		return 0, fmt.Errorf("distributed.Init: the process with local rank %d has no GPU: this machine "+
			"has %d; start as many processes as it has GPUs, "+
			"or set Options.CPU: %w", e.LocalRank, gpus, cuda.ErrNoDevice)
	}
	return cuda.Device(e.LocalRank), nil
}

// meeting is rank 0's announcement in the store.
type meeting struct {
	Addresses []string
	Token     string
	Start     string // different each time that the job is started; not secret
	Size      int
	Job       string // the launcher's name of the job, or ""
}

// connect connects to the store and the hub, and waits until all ranks have connected.
func (j *job) connect(ctx context.Context) error {
	server := "rank 0"
	if j.env.AgentStore {
		server = "the launcher"
	}
	serves := j.env.Rank == 0 && !j.env.AgentStore
	// LibTorch may retry even after its own timeout, so the context sets the limit.
	inTime, stop := context.WithTimeoutCause(ctx, j.o.Timeout,
		fmt.Errorf("%s did not serve it within %v: %w", server, j.o.Timeout, ErrTimeout))
	defer stop()
	var store *capi.Store
	var err error
	if j.env.Address != "" && !serves {
		err = reach(inTime, net.JoinHostPort(j.env.Address, strconv.Itoa(j.env.Port)))
	}
	if err == nil {
		store, err = await(inTime, j, func() (*capi.Store, error) {
			if j.env.Address == "" {
				return capi.LocalStore(j.o.Timeout)
			}
			return capi.ConnectStore(j.env.Address, j.env.Port, serves, storePrefix, j.o.Timeout)
		}, capi.FreeStore)
	}
	j.store = store
	if err != nil {
		if strings.Contains(err.Error(), "EADDRINUSE") {
			// c10d reports this cause only in the text of its error.
			return fmt.Errorf("the store at %s:%d: another process uses this port: set MASTER_PORT to a "+
				"free port: %w", j.env.Address, j.env.Port, syscall.EADDRINUSE)
		}
		if unknown := unresolved(ctx, j.env.Address); unknown != nil {
			err = fmt.Errorf("%w: %w", err, unknown)
		}
		return fmt.Errorf("the store at %s:%d: %w", j.env.Address, j.env.Port, err)
	}
	times := control.Options{Silence: j.o.Silence, Interval: min(time.Second, max(j.o.Silence/6, 20*time.Millisecond))}
	return j.meet(ctx, times)
}

// meet connects to rank 0, which announces itself in the store, and waits until all ranks have
// connected.
//
// A launcher's store keeps rank 0's announcement of an earlier start until the new rank 0
// overwrites it. The launcher sets no variable that identifies a start: torchrun counts restarts
// for each host separately, and does not count restarts caused by another host. Therefore rank 0
// decides which ranks belong to its start, by admitting them. A rank that is not admitted waits for
// the next announcement.
func (j *job) meet(ctx context.Context, times control.Options) error {
	const doing = "meeting rank 0 through the store"
	if j.env.Rank == 0 {
		m, err := j.serve(times)
		if err == nil {
			var text []byte
			if text, err = json.Marshal(m); err == nil {
				err = capi.SetStore(j.store, controlKey, text)
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
		_, err = j.join(ctx, m, times)
		return err
	}
	inTime, stop := context.WithTimeoutCause(ctx, j.o.Timeout,
		fmt.Errorf("rank 0 did not announce itself within %v: %w", j.o.Timeout, ErrTimeout))
	defer stop()
	var earlier []byte
	var refused error
	for pause := firstPause; ; pause = min(2*pause, time.Second) {
		text, err := await(inTime, j, func() ([]byte, error) { return capi.GetStore(j.store, controlKey) },
			func([]byte) {})
		if err == nil && !bytes.Equal(text, earlier) {
			var m meeting
			if err = json.Unmarshal(text, &m); err == nil {
				var decided bool
				if decided, err = j.join(inTime, m, times); decided {
					return err
				}
				if j.o.Log != nil {
					j.o.Log.Info("distributed: rank 0 of this start has not announced itself yet", "rank",
						j.env.Rank, "found", err)
				}
				earlier, refused, err = text, err, nil
			}
		}
		if err == nil {
			err = wait(inTime, pause)
		}
		if err != nil && refused != nil {
			err = fmt.Errorf("%w (the last announcement: %v)", err, refused)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
	}
}

// join connects to the rank 0 that m announces, and waits until all ranks have connected. After an
// error, decided is false if the cause may be that m is the announcement of an earlier start.
func (j *job) join(ctx context.Context, m meeting, times control.Options) (decided bool, err error) {
	if mine := j.env.Job; mine != "" && m.Job != "" && mine != m.Job {
		return true, fmt.Errorf("the store at %s:%d is of the job %q, and this process is of the job %q: "+
			"set MASTER_PORT to a free port for each job: %w",
			j.env.Address, j.env.Port, m.Job, mine, ErrMismatch)
	}
	if j.env.AgentStore && m.Size != j.env.Size {
		return false, fmt.Errorf("it is of a start of %d ranks, and this process is of one of %d: %w",
			m.Size, j.env.Size, ErrMismatch)
	}
	member, err := control.Dial(ctx, m.Addresses, m.Token, j.env.Rank, times)
	if err != nil {
		return !j.env.AgentStore, err
	}
	j.member, j.start = member, m.Start
	what := fmt.Sprintf("%d ranks on %s, timeout %v, silence %v, debug %v", j.env.Size, j.kind(),
		j.o.Timeout, j.o.Silence, j.o.Debug)
	all := make([]int, j.env.Size)
	for r := range all {
		all[r] = r
	}
	err = member.Arrive("job", all, control.Call{Seq: 1, Name: "Init", What: what, Line: caller()}, true, j.o.Timeout)
	var v *control.Verdict
	if errors.As(err, &v) {
		err = verdict{v}
	}
	if j.env.AgentStore && member.Refused() {
		member.Close()
		j.member = nil
		return false, err
	}
	return true, err
}

// unresolved returns an error if this host cannot resolve the address. A cluster may register host
// names after it starts the processes, so the name is looked up only after a failure.
func unresolved(ctx context.Context, address string) error {
	if ctx.Err() != nil || address == "" {
		return nil
	}
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	if _, err := net.DefaultResolver.LookupHost(ctx, address); err != nil {
		return fmt.Errorf("set MASTER_ADDR to an address of the host of rank 0 that every host can resolve: %w", err)
	}
	return nil
}

// reach blocks until the address accepts connections or the context ends. LibTorch connects
// afterwards: it would print a warning with a C++ stack for every failed attempt.
func reach(ctx context.Context, address string) error {
	var failed error
	var dialer net.Dialer
	for pause := firstPause; ; pause = min(2*pause, time.Second) {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			return conn.Close()
		}
		if failed == nil || ctx.Err() == nil {
			failed = err
		}
		if err := wait(ctx, pause); err != nil {
			return fmt.Errorf("%w (the last attempt: %v)", err, failed)
		}
	}
}

// wait returns nil after the pause. If the context ends first it returns the context's cause.
func wait(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (j *job) kind() string {
	if j.device == cuda.CPU {
		return "CPUs"
	}
	return "GPUs"
}

// serve starts the hub. It listens only on the loopback interface if all ranks are on this host.
func (j *job) serve(times control.Options) (meeting, error) {
	at := ":0"
	if j.env.Address == "" || j.env.oneHost() {
		at = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", at)
	if err != nil {
		return meeting{}, err
	}
	random := make([]byte, 24)
	if _, err := rand.Read(random); err != nil {
		listener.Close()
		return meeting{}, err
	}
	m := meeting{Token: hex.EncodeToString(random[:16]), Start: hex.EncodeToString(random[16:]),
		Size: j.env.Size, Job: j.env.Job}
	port := strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
	if at != ":0" {
		m.Addresses = []string{net.JoinHostPort("127.0.0.1", port)}
	} else {
		if !j.env.AgentStore {
			m.Addresses = append(m.Addresses, net.JoinHostPort(j.env.Address, port))
		}
		m.Addresses = append(m.Addresses, ownAddresses(port)...)
	}
	j.hub = control.NewHub(listener, j.env.Size, m.Token, times)
	return m, nil
}

// ownAddresses returns the addresses at which other hosts may reach this one.
func ownAddresses(port string) (addresses []string) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			addresses = append(addresses, net.JoinHostPort(n.IP.String(), port))
		}
	}
	return addresses
}

// await runs a call that cannot be cancelled. If the context or the job ends first, await returns
// without waiting for the call. When the call then returns, drop gets its result. The store and the
// groups that the call uses are freed only after that.
func await[T any](ctx context.Context, j *job, call func() (T, error), drop func(T)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done, abandoned := make(chan result), make(chan struct{})
	j.running.Go(func() {
		value, err := call()
		select {
		case done <- result{value, err}:
		case <-abandoned:
			if err == nil {
				drop(value)
			}
		}
	})
	var failed <-chan struct{}
	if j.member != nil {
		failed = j.member.Failed()
	}
	var none T
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		close(abandoned)
		return none, context.Cause(ctx)
	case <-failed:
		close(abandoned)
		return none, verdict{j.member.Verdict()}
	}
}

// watch ends the job when the context ends or NCCL fails. When the job has ended, it aborts the
// collectives of the groups.
func (j *job) watch(ctx context.Context) {
	defer close(j.watched)
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			if !j.open.isClosed() {
				j.member.Abort(context.Cause(ctx).Error())
				j.abort()
			}
			return
		case <-j.member.Failed():
			if j.o.Log != nil {
				j.o.Log.Error("distributed: the job has ended", "rank", j.env.Rank, "reason", j.member.Verdict().Text)
			}
			j.abort()
			return
		case <-ticker.C:
			j.checkFaults()
		}
	}
}

// checkFaults reports failures of NCCL that occur after the calls have returned.
func (j *job) checkFaults() {
	j.open.mu.Lock()
	defer j.open.mu.Unlock()
	for _, g := range j.open.groups {
		if g.comms.gpu == nil {
			continue
		}
		fault, err := capi.GroupFault(g.comms.gpu)
		if err != nil || fault == capi.FaultNone {
			continue
		}
		text := "NCCL failed"
		if fault == capi.FaultTimeout {
			text = fmt.Sprintf("work of NCCL did not end within %v", j.o.Timeout)
		}
		j.member.Report(g.name, g.ranks, g.latest(), text)
	}
}

// abort aborts the collectives of all groups. It does not wait for LibTorch, which may hang.
func (j *job) abort() {
	j.open.mu.Lock()
	defer j.open.mu.Unlock()
	for _, g := range j.open.groups {
		g.comms.abort()
	}
}

// failure returns why the job has ended, or nil.
func (j *job) failure() error {
	if v := j.member.Verdict(); v != nil {
		return verdict{v}
	}
	if j.open.isClosed() {
		return ErrClosed
	}
	return nil
}

// newGroup connects this rank to the other ranks of the group.
func (j *job) newGroup(ctx context.Context, name string, ranks []int) (*Group, error) {
	g := &Group{job: j, name: name, ranks: ranks, rank: slices.Index(ranks, j.env.Rank),
		calls: callNumbers{pairs: map[string]uint64{}}, besides: besideBarriers{last: map[string]besidePlace{}}}
	if g.rank < 0 {
		return g, nil
	}
	j.member.Enter(name, control.Call{Name: "Subgroup", Line: caller(), Done: true})
	members := make([]int32, len(ranks))
	for i, r := range ranks {
		members[i] = int32(r)
	}
	// A connection attempt cannot be cancelled, so it starts only when all ranks have arrived here.
	if err := j.member.Arrive(name+"#connect", ranks,
		control.Call{Seq: 1, Name: "Subgroup", Line: caller()}, true, j.o.Timeout); err != nil {
		return nil, j.reason(err)
	}
	connect := func(device cuda.Device) (*capi.Group, error) {
		return await(ctx, j, func() (*capi.Group, error) {
			return capi.NewGroup(j.store, j.start+"/"+name, g.rank, len(ranks), members, int32(device), j.o.Timeout)
		}, capi.FreeGroup)
	}
	var err error
	if g.comms.cpu, err = connect(cuda.CPU); err == nil && j.device != cuda.CPU {
		if g.comms.gpu, err = connect(j.device); err == nil {
			g.comms.stream, err = cuda.NewOwnedStream(j.device, cuda.StreamOptions{Priority: -1})
		}
	}
	j.open.add(g)
	if err != nil {
		return nil, j.reason(err)
	}
	return g, nil
}

// reason returns the job's verdict if there is one, and otherwise err.
func (j *job) reason(err error) error {
	if v := j.member.Verdict(); v != nil {
		return verdict{v}
	}
	return err
}

// close disconnects this rank from the job. orderly means that no call of LibTorch is running.
func (j *job) close(orderly bool) {
	groups := j.open.close()
	j.stop(ErrClosed)
	<-j.watched
	// After this, no goroutine starts to abort the groups.
	for _, g := range groups {
		if orderly && j.member.Verdict() == nil {
			g.free()
		} else { // a thread of Gloo may stay in a collective until the collective's timeout
			go g.free()
		}
	}
	j.disconnect()
}

// free frees the group's LibTorch objects when no call uses them any more.
func (g *Group) free() {
	g.comms.aborting.Wait()
	g.job.running.Wait()
	g.mu.Lock()
	cpu, gpu := g.comms.cpu, g.comms.gpu
	g.comms.cpu, g.comms.gpu, g.freed = nil, nil, true
	g.mu.Unlock()
	for _, c := range []*capi.Group{cpu, gpu} {
		if c != nil {
			capi.FreeGroup(c)
		}
	}
	if g.comms.stream != nil {
		g.comms.stream.Close()
	}
}

// lock locks g.mu for a call, or returns ErrClosed if the group is freed.
func (g *Group) lock() error {
	g.mu.Lock()
	if g.freed {
		g.mu.Unlock()
		return fmt.Errorf("distributed: group %s: %w", g.name, ErrClosed)
	}
	return nil
}

func (j *job) disconnect() {
	if j.member != nil {
		j.member.Close()
	}
	if j.hub != nil {
		j.hub.Close()
	}
	if j.store != nil {
		// Free the store in a goroutine. Freeing a server waits for the server's thread, and
		// freeing a client of a stopped server waits for a reply. A call that await gave up on may
		// still read the store.
		go func() {
			j.running.Wait()
			capi.FreeStore(j.store)
		}()
	}
}

// Close ends this rank's membership in the job and in all subgroups. It waits until all ranks have
// called Close, so that no rank loses data that is still being sent. All ranks must call Close
// within Options.Timeout of the first call. If a rank does not, the job fails, and the error names
// that rank. A rank that waits for this rank in a collective fails with an error that names this
// rank.
//
// If the job failed, Close returns the reason. If another call on this rank has already returned
// the reason, the text of Close's error is short, so a program may join both errors. Close may be
// called on any group, any number of times.
func (g *Group) Close() error {
	j := g.job
	j.closing.Lock()
	defer j.closing.Unlock()
	if j.open.isClosed() {
		return nil
	}
	told := j.told.Load()
	err := j.reason(nil)
	if err == nil {
		err = j.shutdown()
	}
	j.close(err == nil)
	if err != nil {
		if told {
			err = known{err}
		}
		return &Error{Call: "Close at " + caller(), Group: g.name, Rank: j.env.Rank, Culprit: culprit(err), Err: err}
	}
	return nil
}

// shutdown leaves the job together with the other ranks.
func (j *job) shutdown() error {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	go func() {
		select {
		case <-j.ended:
			stop()
		case <-ctx.Done():
		}
	}()
	if err := j.member.Part(ctx, caller(), j.o.Timeout); err != nil {
		return j.reason(err)
	}
	for _, g := range slices.Backward(j.open.all()) {
		if g.comms.gpu != nil {
			shutdown := func() (none struct{}, err error) { return none, capi.ShutdownGroup(g.comms.gpu) }
			if _, err := await(ctx, j, shutdown, func(struct{}) {}); err != nil {
				return err
			}
		}
	}
	return nil
}

func culprit(err error) int {
	var v verdict
	if errors.As(err, &v) {
		return v.Rank
	}
	return -1
}

// tell records whether a call has returned the reason for the job's end. Only an error that names
// the rank at fault does.
func (j *job) tell(err error) {
	if culprit(err) >= 0 {
		j.told.Store(true)
	}
}

// Rank returns the process's rank in the group, 0 to Size() - 1, or -1 if it is not a member.
func (g *Group) Rank() int { return g.rank }

// Size returns the number of ranks of the group.
func (g *Group) Size() int { return len(g.ranks) }

// place returns the rank and the size for String methods, for example "rank 0 of 4".
func (g *Group) place() string { return fmt.Sprintf("rank %d of %d", g.rank, len(g.ranks)) }

// String returns the group's name, rank, size and device, for example "Group(world, rank 0 of 4,
// cuda:0)".
func (g *Group) String() string {
	return fmt.Sprintf("Group(%s, %s, %v)", g.name, g.place(), g.Device())
}

// Ranks returns the members' ranks in the job, in the order of their ranks in the group.
func (g *Group) Ranks() []int { return slices.Clone(g.ranks) }

// Device returns the device of this process: the GPU of its local rank, or the CPU.
func (g *Group) Device() cuda.Device { return g.job.device }

// Environment returns the process's place in the job.
func (g *Group) Environment() Environment { return g.job.env }

// Err returns the reason why the job ended, or nil while it runs. On a GPU, collectives return
// before they are done. If one fails later, Err reports the failure.
func (g *Group) Err() error {
	if err := g.job.failure(); err != nil {
		g.job.tell(err)
		return &Error{Call: g.latest().String(), Group: g.name, Rank: g.job.env.Rank, Culprit: culprit(err), Err: err}
	}
	return nil
}

// Subgroup makes a group of the given ranks of g. They become ranks 0, 1, ... of the new group, in
// the order given. Every rank of g calls it with the same ranks, and the members wait for each
// other. On ranks that are not members, the result has rank -1, and its collectives return
// [ErrNotMember]. The new group exists until the job is closed.
func (g *Group) Subgroup(ranks ...int) (*Group, error) {
	if err := g.member(); err != nil {
		return nil, err
	}
	inJob := make([]int, len(ranks))
	for i, r := range ranks {
		if r < 0 || r >= len(g.ranks) || slices.Contains(ranks[:i], r) {
			return nil, fmt.Errorf("distributed: Subgroup(%v): ranks must be distinct, from 0 to %d: %w",
				ranks, len(g.ranks)-1, cuda.ErrInvalidArgument)
		}
		inJob[i] = g.ranks[r]
	}
	if len(ranks) == 0 {
		return nil, fmt.Errorf("distributed: Subgroup without ranks: %w", cuda.ErrInvalidArgument)
	}
	if err := g.lock(); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("%s/%d", g.name, g.calls.nextSubgroup())
	g.mu.Unlock()
	sub, err := g.job.newGroup(context.Background(), name, inJob)
	if err != nil {
		g.job.tell(err)
		return nil, &Error{Call: "Subgroup at " + caller(), Group: g.name, Rank: g.job.env.Rank,
			Culprit: culprit(err), Err: err}
	}
	return sub, nil
}

func (g *Group) member() error {
	if g.rank < 0 {
		return fmt.Errorf("%w %s of the ranks %v: this process is rank %d", ErrNotMember, g.name, g.ranks,
			g.job.env.Rank)
	}
	return nil
}

// abort ends the job after an error that occurred only on this rank, and returns the error. If the
// job continued, the other ranks would wait for this rank in a collective, or would pair that
// collective with this rank's next one.
func (g *Group) abort(name string, err error) error {
	g.job.member.Abort(fmt.Sprintf("%s at %s failed: %v", name, caller(), err))
	return err
}

// caller returns the file and line of the program's call. It skips the packages cuda, distributed,
// nn and torch of this module.
func caller() string {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	own := [...]string{"cuda.", "distributed.", "nn.", "torch."}
	for {
		f, more := frames.Next()
		name, ours := strings.CutPrefix(f.Function, "github.com/torchstream/torchstream/")
		ours = ours && slices.ContainsFunc(own[:], func(p string) bool { return strings.HasPrefix(name, p) })
		if f.Function != "" && !ours && !strings.HasPrefix(f.Function, "runtime.") ||
			strings.HasSuffix(f.File, "_test.go") {
			return fmt.Sprintf("%s:%d", filepath.Base(f.File), f.Line)
		}
		if !more {
			return "?"
		}
	}
}
