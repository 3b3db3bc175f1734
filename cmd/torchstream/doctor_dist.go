//go:build linux && cgo

package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/collectives"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
)

// linkReport is the output of doctor -dist.
type linkReport struct {
	Ranks    []rankRow          `json:"ranks"`
	Links    []linkRow          `json:"links"`
	Reduce   []*collectives.Row `json:"all_reduce"`
	Findings []finding          `json:"findings"`
	Slow     int                `json:"slow"`
}

// rankRow is a rank and its speed without communication.
type rankRow struct {
	Rank     int     `json:"rank"`
	Host     string  `json:"host"`
	Device   string  `json:"device"`
	Place    string  `json:"place,omitempty"`    // PCI bus address of the GPU
	Throttle string  `json:"throttle,omitempty"` // why the GPU's clocks are low
	MS       float64 `json:"product_ms"`         // time of a matrix product
}

// linkRow is the connection of two ranks.
type linkRow struct {
	A         int     `json:"a"`
	B         int     `json:"b"`
	Kind      string  `json:"kind"`       // "NVLink x18", "PCI Express", "loopback", "network"
	LatencyUS float64 `json:"latency_us"` // half of a 4 KiB round trip
	GBps      float64 `json:"gb_s"`       // from a to b
	// Expected is the capacity of the hardware in one direction. For a loopback it is the measured
	// rate of plain TCP. 0 means unknown.
	Expected float64 `json:"expected_gb_s"`
}

const (
	maxAllPairs  = 8 // ranks; above this only neighbours are measured
	latencyCalls = 50
	// A link is slow below this share of its capacity. The limit is low, because one rank that
	// sends to one other does not fill every healthy link.
	slowLink  = 0.3
	slowLinks = 0.5 // a rank is slow if all its links are below this share of the others' median
	slowRank  = 1.3 // relative to the median of the other ranks' times
)

// doctorDist tests the links of a job's ranks. Outside of a job it starts the ranks itself.
func doctorDist(ctx context.Context, ranks int, cpu, asJSON bool, stdout, stderr io.Writer) error {
	environment, err := distributed.ReadEnvironment(os.Getenv)
	if err != nil {
		return err
	}
	if environment.Launcher != "none" {
		report, err := examineLinks(ctx, cpu)
		if err != nil || environment.Rank != 0 {
			return err
		}
		return report.print(asJSON, stdout)
	}
	if ranks == 0 {
		if ranks = cuda.DeviceCount(); cpu || ranks == 0 {
			ranks = 2
		}
	}
	if ranks < 2 {
		return fmt.Errorf("doctor -dist: %d rank has no links: -nproc is the number of processes to "+
			"start, and -cpu tests the CPU", ranks)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{"doctor", "-dist", "-json"}
	if cpu {
		args = append(args, "-cpu")
	}
	var out bytes.Buffer
	err = collectives.StartRanks(ctx, ranks,
		func(ctx context.Context) *exec.Cmd { return exec.CommandContext(ctx, self, args...) }, &out, stderr)
	var report linkReport
	if json.Unmarshal(out.Bytes(), &report) != nil { // err may be set although there is a report: rank 0 fails if it has findings
		return cmp.Or(err, fmt.Errorf("doctor -dist: cannot read what rank 0 printed: %q", out.String()))
	}
	return report.print(asJSON, stdout)
}

// examineLinks measures the links of a job. Every rank calls it. Rank 0 returns the complete
// report. The reports of other ranks lack expectations and findings, which only rank 0 computes.
func examineLinks(ctx context.Context, cpu bool) (_ *linkReport, err error) {
	world, err := distributed.Init(ctx, distributed.Options{CPU: cpu})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, world.Close()) }()
	if world.Size() < 2 {
		return nil, errors.New("doctor -dist: a job of one rank has no links: start two ranks or more")
	}
	b := linkBench{collectives.Bench{World: world, Device: world.Device(), Rounds: 3}}
	r := &linkReport{}
	mine, err := b.describeRank()
	if err != nil {
		return nil, err
	}
	if r.Ranks, err = distributed.AllGatherObject(world, mine); err != nil {
		return nil, err
	}
	largest := int64(16 << 20)
	if b.Device != cuda.CPU {
		largest = 256 << 20
	}
	for _, pair := range pairsOf(world.Size()) {
		row, err := b.link(pair[0], pair[1], largest)
		if err != nil {
			return nil, err
		}
		r.Links = append(r.Links, row)
	}
	for bytes := int64(4 << 10); bytes <= largest; bytes *= 64 {
		row, err := b.Measure(collectives.AllReduce(), bytes)
		if err != nil {
			return nil, err
		}
		r.Reduce = append(r.Reduce, row)
	}
	if world.Rank() == 0 {
		expect(ctx, r)
		r.judge()
	}
	return r, nil
}

// pairsOf returns the pairs of ranks to measure. Each rank is in the same number of pairs.
func pairsOf(ranks int) (pairs [][2]int) {
	for a := range ranks {
		for b := a + 1; b < ranks; b++ {
			if ranks <= maxAllPairs || b == a+1 || a == 0 && b == ranks-1 {
				pairs = append(pairs, [2]int{a, b})
			}
		}
	}
	return pairs
}

// linkBench measures ranks and the links between them.
type linkBench struct{ collectives.Bench }

// describeRank names this rank's device and measures a matrix product on it while the other ranks
// do the same.
func (b *linkBench) describeRank() (rankRow, error) {
	row := rankRow{Rank: b.World.Rank(), Device: b.Device.String()}
	row.Host, _ = os.Hostname()
	side, dtype := int64(512), torch.Float32
	if b.Device != cuda.CPU {
		side, dtype = 8192, torch.BFloat16
		p, err := b.Device.Properties()
		if err != nil {
			return row, err
		}
		row.Device = fmt.Sprintf("%s %s (%d.%d)", row.Device, p.Name, p.Major, p.Minor)
		if row.Place, err = b.Device.PCIBusID(); err != nil {
			return row, err
		}
	}
	x, err := torch.Ones(b.Device, dtype, side, side)
	if err != nil {
		return row, err
	}
	defer x.Close()
	product := func() error {
		y := x.MatMul(x)
		return errors.Join(y.Err(), y.Close())
	}
	if err := product(); err != nil {
		return row, err
	}
	for range b.Rounds {
		if err := errors.Join(b.Wait(), b.World.Barrier()); err != nil {
			return row, err
		}
		begun := time.Now()
		for range 20 {
			if err := product(); err != nil {
				return row, err
			}
		}
		if err := b.Wait(); err != nil {
			return row, err
		}
		if ms := time.Since(begun).Seconds() * 1e3 / 20; row.MS == 0 || ms < row.MS {
			row.MS = ms
		}
	}
	if b.Device != cuda.CPU {
		if readings, err := b.Device.Readings(); err == nil && readings.Throttle&^cuda.ThrottleIdle != 0 {
			row.Throttle = readings.Throttle.String()
		}
	}
	return row, nil
}

// link measures the connection between two ranks. The other ranks wait.
func (b *linkBench) link(one, two int, bytes int64) (linkRow, error) {
	row := linkRow{A: one, B: two}
	small, err := torch.Ones(b.Device, torch.Float32, 1<<10)
	if err != nil {
		return row, err
	}
	defer small.Close()
	large, err := torch.Ones(b.Device, torch.Float32, bytes/4)
	if err != nil {
		return row, err
	}
	defer large.Close()
	there := func(t *torch.Tensor) error {
		if b.World.Rank() == one {
			return b.World.Send(t, two)
		}
		return b.World.Receive(t, one)
	}
	back := func() error {
		if b.World.Rank() == two {
			return b.World.Send(small, one)
		}
		return b.World.Receive(small, two)
	}
	seconds := func(calls int, t *torch.Tensor, answered bool) (float64, error) {
		return b.Best(1, func() error {
			if r := b.World.Rank(); r != one && r != two {
				return nil
			}
			for call := range calls {
				if err := there(t); err != nil {
					return err
				}
				if answered || call == calls-1 {
					if err := back(); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}
	if _, err := seconds(1, large, true); err != nil { // connects
		return row, err
	}
	s, err := seconds(latencyCalls, small, true)
	if err != nil {
		return row, err
	}
	row.LatencyUS = s / latencyCalls / 2 * 1e6
	const calls = 5
	s, err = seconds(calls, large, false)
	row.GBps = float64(bytes) * calls / s / 1e9
	return row, err
}

// expect fills in each link's capacity. It examines the hardware of rank 0's host, so only links
// between ranks on that host get a value.
func expect(ctx context.Context, r *linkReport) {
	host := r.Ranks[0].Host
	var topology map[[2]string]string
	loopback := 0.0
	for i := range r.Links {
		l := &r.Links[i]
		a, b := r.Ranks[l.A], r.Ranks[l.B]
		switch {
		case a.Host != b.Host:
			l.Kind = "network"
		case a.Place == "" || b.Place == "":
			l.Kind = "loopback"
			if a.Host == host {
				if loopback == 0 {
					loopback = loopbackGBps()
				}
				l.Expected = loopback
			}
		default:
			l.Kind = "on one host"
			if a.Host == host {
				if topology == nil {
					topology = readTopology(ctx)
				}
				l.Kind, l.Expected = gpuLink(topology[[2]string{busID(a.Place), busID(b.Place)}], a, b)
			}
		}
	}
}

// gpuLink returns the kind and capacity of a link between two GPUs, from a cell of nvidia-smi's
// matrix.
func gpuLink(cell string, a, b rankRow) (kind string, expected float64) {
	var links int
	if _, err := fmt.Sscanf(cell, "NV%d", &links); err == nil {
		perLink := 25.0 // NVLink 2 to 4
		if m := capability.FindStringSubmatch(a.Device); m != nil {
			if major, _ := strconv.Atoi(m[1]); major >= 10 {
				perLink = 50
			}
		}
		return fmt.Sprintf("NVLink x%d", links), perLink * float64(links)
	}
	kind = "PCI Express"
	if cell != "" {
		kind += " " + cell
	}
	expected = min(pciGBps("/sys/bus/pci/devices", a.Place), pciGBps("/sys/bus/pci/devices", b.Place))
	if cell == "SYS" || cell == "NODE" { // through host memory
		expected /= 2
	}
	return kind, expected
}

var capability = regexp.MustCompile(`\((\d+)\.\d+\)$`)

// pciGBps returns the capacity of a device's PCI Express link in one direction, without the
// encoding overhead. It returns 0 if the system does not report the link.
func pciGBps(root, place string) float64 {
	read := func(name string) float64 {
		text, err := os.ReadFile(filepath.Join(root, strings.ToLower(place), name))
		if err != nil {
			return 0
		}
		number, _, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
		value, _ := strconv.ParseFloat(number, 64)
		return value
	}
	return read("max_link_speed") * read("max_link_width") * 128 / 130 / 8
}

// busID normalises a PCI bus ID. CUDA writes the domain with four digits, nvidia-smi with eight.
func busID(id string) string {
	domain, rest, _ := strings.Cut(strings.ToLower(strings.TrimSpace(id)), ":")
	return strings.TrimLeft(domain, "0") + ":" + rest
}

// nvidiaSMITime is the time limit for nvidia-smi. Without persistence mode it initialises all GPUs,
// and with a broken driver it hangs.
const nvidiaSMITime = time.Minute

// readTopology returns how GPUs are connected, keyed by their PCI bus addresses. The map is empty
// if nvidia-smi fails.
func readTopology(ctx context.Context) map[[2]string]string {
	ctx, cancel := context.WithTimeout(ctx, nvidiaSMITime)
	defer cancel()
	places, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=index,pci.bus_id",
		"--format=csv,noheader").Output()
	if err != nil {
		return map[[2]string]string{}
	}
	matrix, err := exec.CommandContext(ctx, "nvidia-smi", "topo", "-m").Output()
	if err != nil {
		return map[[2]string]string{}
	}
	return parseTopology(string(places), string(matrix))
}

var terminalCodes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// parseTopology parses the output of two nvidia-smi commands.
func parseTopology(places, matrix string) map[[2]string]string {
	byIndex := map[string]string{}
	for line := range strings.Lines(places) {
		if index, place, ok := strings.Cut(line, ","); ok {
			byIndex["GPU"+strings.TrimSpace(index)] = busID(place)
		}
	}
	topology := map[[2]string]string{}
	var columns []string
	for line := range strings.Lines(terminalCodes.ReplaceAllString(matrix, "")) {
		cells := strings.Fields(line)
		switch {
		case len(cells) == 0:
		case columns == nil:
			columns = cells
		case byIndex[cells[0]] != "":
			for i, cell := range cells[1:] {
				if i < len(columns) && byIndex[columns[i]] != "" {
					topology[[2]string{byIndex[cells[0]], byIndex[columns[i]]}] = cell
				}
			}
		}
	}
	return topology
}

// loopbackGBps measures a TCP connection of this process with itself. It returns 0 if it cannot
// connect.
func loopbackGBps() float64 {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0
	}
	defer l.Close()
	const bytes = 128 << 20
	go func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			l.Close()
			return
		}
		defer c.Close()
		chunk := make([]byte, 1<<20)
		for sent := 0; sent < bytes; sent += len(chunk) {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	}()
	c, err := l.Accept()
	if err != nil {
		return 0
	}
	defer c.Close()
	begun := time.Now()
	n, _ := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 1<<20))
	return float64(n) / time.Since(begun).Seconds() / 1e9
}

// judge fills in the findings: links and ranks that are slower than the hardware allows, or slower
// than the others.
func (r *linkReport) judge() {
	busy := map[int]bool{} // ranks that compute slowly, probably because something else runs there
	for _, row := range r.Ranks {
		var others []float64
		for _, other := range r.Ranks {
			if other.Rank != row.Rank {
				others = append(others, other.MS)
			}
		}
		if m := median(others); row.MS > slowRank*m {
			busy[row.Rank] = true
			f := finding{row.slow(), fmt.Sprintf("rank %d", row.Rank),
				fmt.Sprintf("computes %.1f times longer than the others: %.3f ms on %s of %s, and %.3f ms",
					row.MS/m, row.MS, row.Device, row.Host, m),
				"see what else runs there; every collective waits for this rank"}
			if row.Throttle != "" {
				f.ToDo = "its clocks are low: " + row.Throttle
			}
			r.add(f)
		}
	}
	named := r.judgeRanksByLinks()
	for _, l := range r.Links {
		what := fmt.Sprintf("link of the ranks %d and %d", l.A, l.B)
		switch {
		case named[l.A] || named[l.B]:
		case l.Kind == "loopback" && l.GBps < 0.1*l.Expected:
			r.add(finding{"note", what,
				fmt.Sprintf("%.1f GB/s, where plain TCP has %.1f", l.GBps, l.Expected),
				"see whether the CPUs are busy"})
		case l.Kind != "loopback" && l.GBps < slowLink*l.Expected && (busy[l.A] || busy[l.B]):
			r.add(finding{"note", what,
				fmt.Sprintf("%.1f GB/s over %s, which carries %.0f, beside a slow rank", l.GBps, l.Kind,
					l.Expected), "measure it again when the rank is as fast as the others"})
		case l.Kind != "loopback" && l.GBps < slowLink*l.Expected:
			r.add(finding{"slow", what, fmt.Sprintf("%.1f GB/s over %s, which carries %.0f", l.GBps, l.Kind,
				l.Expected),
				"NCCL_DEBUG=INFO shows the path that NCCL takes; nvidia-smi nvlink -s and lspci -vv the links"})
		}
	}
	if len(r.Findings) == 0 {
		r.add(finding{"ok", "links", fmt.Sprintf("none slower than it should be; links: %d, ranks: %d",
			len(r.Links), len(r.Ranks)), ""})
	}
}

func median(of []float64) float64 {
	slices.Sort(of)
	return of[len(of)/2]
}

// slow returns the state of a finding about a slow rank. Ranks on the CPU share cores with each
// other and with other programs, so a slow one is not an error.
func (r rankRow) slow() string {
	if r.Device == cuda.CPU.String() {
		return "note"
	}
	return "slow"
}

// judgeRanksByLinks finds ranks whose links are all slow compared with other ranks' links.
func (r *linkReport) judgeRanksByLinks() (named map[int]bool) {
	named = map[int]bool{}
	for _, row := range r.Ranks {
		var own, others []float64
		for _, l := range r.Links {
			if l.A == row.Rank || l.B == row.Rank {
				own = append(own, l.GBps)
			} else {
				others = append(others, l.GBps)
			}
		}
		if len(own) == 0 || len(others) == 0 {
			continue
		}
		if m := median(others); slices.Max(own) < slowLinks*m {
			named[row.Rank] = true
			r.add(finding{row.slow(), fmt.Sprintf("rank %d", row.Rank),
				fmt.Sprintf("has %.1f GB/s on its best link, and the others have %.1f: %s of %s",
					slices.Max(own), m, row.Device, row.Host),
				"see its network, its PCI Express slot, and what else runs on its host"})
		}
	}
	return named
}

func (r *linkReport) add(f finding) {
	r.Findings = append(r.Findings, f)
	if f.State == "slow" {
		r.Slow++
	}
}

// print writes the report. It returns cli.ErrFound if something is slow.
func (r *linkReport) print(asJSON bool, out io.Writer) error {
	var err error
	if asJSON {
		err = cli.WriteJSON(out, r)
	} else {
		err = r.table(out)
	}
	if err == nil && r.Slow > 0 {
		err = cli.ErrFound
	}
	return err
}

func (r *linkReport) table(out io.Writer) error {
	w := printable.NewTable(out, 0)
	fmt.Fprintln(w, "rank\thost\tdevice\tproduct, ms")
	for _, row := range r.Ranks {
		fmt.Fprintf(w, "%d\t%s\t%s\t%.3f\n", row.Rank, row.Host, strings.TrimSpace(row.Device+" "+row.Place), row.MS)
	}
	fmt.Fprintln(w, "\nranks\tlink\tlatency, us\tGB/s\tcan carry")
	for _, l := range r.Links {
		carries := "unknown"
		if l.Expected > 0 {
			carries = fmt.Sprintf("%.0f", l.Expected)
		}
		if l.Kind == "loopback" && l.Expected > 0 {
			carries = fmt.Sprintf("%.1f (plain TCP)", l.Expected)
		}
		fmt.Fprintf(w, "%d-%d\t%s\t%.1f\t%.2f\t%s\n", l.A, l.B, l.Kind, l.LatencyUS, l.GBps, carries)
	}
	fmt.Fprintln(w, "\nall-reduce, KiB\tms\tbus GB/s")
	for _, row := range r.Reduce {
		fmt.Fprintf(w, "%d\t%.3f\t%.2f\n", row.Bytes>>10, row.MS, row.BusGBps)
	}
	fmt.Fprintln(w)
	for _, f := range r.Findings {
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.State, f.What, f.Found)
		if f.ToDo != "" {
			fmt.Fprintf(w, "\t\t-> %s\n", f.ToDo)
		}
	}
	return w.Flush()
}
