package distributed

import (
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/cuda"
)

// Environment is a process's place in a job. [Init] reads it from the variables that launchers set.
type Environment struct {
	Rank      int // 0 to Size - 1
	Size      int // number of processes
	LocalRank int // the rank among the processes of this host
	LocalSize int // number of processes of this host; 0 if the launcher does not say
	// Address and Port are where rank 0, or the launcher, serves the store. They are empty only for
	// a job of one process.
	Address string
	Port    int
	// AgentStore says that the launcher runs the store's server (torchrun does), so rank 0 does
	// not. That store may outlive the ranks, and serve those that the launcher starts after them.
	AgentStore bool
	Launcher   string // "torchrun", "slurm", "openmpi", or "none" for a process that was started alone
	// Job tells jobs apart that meet at one port by mistake; "" if the launcher does not name them.
	Job string
	// Warning says why a job of one process may not be what was meant, and what to do; "" for all
	// other jobs. Init writes it to Options.Log.
	Warning string
}

// ReadEnvironment returns the place in the job that the variables give:
//
//   - RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK and LOCAL_WORLD_SIZE, which
//     torchrun, Kubernetes' training operators and shell loops set. Without LOCAL_RANK, it is 0 if
//     every process has a host of its own, which the launcher then promises.
//   - Under Open MPI, OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE. A job of several
//     hosts also needs MASTER_ADDR. The port is 29500, unless MASTER_PORT names another.
//   - Under srun, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE with
//     SLURM_NODEID, and SLURM_STEP_NODELIST, whose first host serves, unless MASTER_ADDR names
//     another. A step on one host needs no name of it, and meets at 127.0.0.1. The port is 20000
//     and SLURM_JOB_ID modulo 20000, unless MASTER_PORT names another.
//   - None of these: a job of one process. Under SLURM, but not under srun, as in a batch script,
//     Warning is set if SLURM_NTASKS says that the allocation is for several tasks.
//
// The job's name is in TORCHSTREAM_JOB, which a shell loop may set, or else TORCHELASTIC_RUN_ID,
// SLURM_JOB_ID and SLURM_STEP_ID, or PMIX_NAMESPACE.
//
// An incomplete or contradictory set is an error that names the variable. getenv is os.Getenv, or a
// test's.
func ReadEnvironment(getenv func(string) string) (Environment, error) {
	r := variables{getenv: getenv}
	var e Environment
	switch {
	case getenv("RANK") != "" || getenv("WORLD_SIZE") != "":
		e = Environment{Launcher: "torchrun", Rank: r.number("RANK", -1), Size: r.number("WORLD_SIZE", -1), LocalRank: r.number("LOCAL_RANK", 0),
			LocalSize: r.number("LOCAL_WORLD_SIZE", 0), AgentStore: getenv("TORCHELASTIC_USE_AGENT_STORE") == "True",
			Address: getenv("MASTER_ADDR"), Port: r.number("MASTER_PORT", 0)}
	// Before SLURM, because mpirun starts its daemons with srun in an allocation.
	case getenv("OMPI_COMM_WORLD_SIZE") != "":
		e = Environment{Launcher: "openmpi", Rank: r.number("OMPI_COMM_WORLD_RANK", -1), Size: r.number("OMPI_COMM_WORLD_SIZE", -1),
			LocalRank: r.number("OMPI_COMM_WORLD_LOCAL_RANK", -1), LocalSize: r.number("OMPI_COMM_WORLD_LOCAL_SIZE", 0),
			Address: getenv("MASTER_ADDR"), Port: r.number("MASTER_PORT", 29500)}
		if e.Address == "" && e.LocalSize == e.Size {
			e.Address = "127.0.0.1"
		}
	case getenv("SLURM_STEP_NUM_TASKS") != "" && getenv("SLURM_PROCID") != "", r.number("SLURM_STEP_NUM_TASKS", 0) > 1, r.number("SLURM_PROCID", 0) > 0:
		e = Environment{Launcher: "slurm", Rank: r.number("SLURM_PROCID", -1), Size: r.number("SLURM_STEP_NUM_TASKS", -1),
			LocalRank: r.number("SLURM_LOCALID", -1), LocalSize: tasksOf(getenv("SLURM_STEP_TASKS_PER_NODE"), r.number("SLURM_NODEID", 0)),
			Address: getenv("MASTER_ADDR"),
			Port:    r.number("MASTER_PORT", 20000+r.number("SLURM_JOB_ID", 0)%20000)}
		switch {
		case e.Address != "":
		case e.LocalSize == e.Size:
			e.Address = "127.0.0.1"
		default:
			e.Address = firstHost(getenv("SLURM_STEP_NODELIST"))
		}
	default:
		e = Environment{Launcher: "none", Size: 1, LocalSize: 1}
		if tasks := r.number("SLURM_NTASKS", 0); tasks > 1 {
			e.Warning = fmt.Sprintf("SLURM_NTASKS is %d, but without srun's SLURM_PROCID and SLURM_STEP_NUM_TASKS this process is a job of one rank: "+
				"start the ranks with srun, or unset SLURM_NTASKS", tasks)
		}
		return e, r.err
	}
	e.Job = jobName(getenv, e.Launcher)
	if r.err != nil {
		return e, r.err
	}
	return e, e.check()
}

// jobName returns the launcher's name of the job, or "".
func jobName(getenv func(string) string, launcher string) string {
	name := getenv("TORCHSTREAM_JOB")
	if name != "" {
		return name
	}
	switch launcher {
	case "torchrun":
		if name = getenv("TORCHELASTIC_RUN_ID"); name == "none" { // torchrun's default
			name = ""
		}
	case "slurm":
		name = getenv("SLURM_JOB_ID")
		if step := getenv("SLURM_STEP_ID"); name != "" && step != "" {
			name += "." + step
		}
	case "openmpi":
		name = getenv("PMIX_NAMESPACE")
	}
	return name
}

func (e Environment) check() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("distributed: the environment of %s: %s: %w", e.Launcher, fmt.Sprintf(format, args...), cuda.ErrInvalidArgument)
	}
	switch {
	case e.Size < 1 || e.Rank < 0 || e.Rank >= e.Size:
		return bad("rank %d of %d processes: ranks are 0 to the number of processes - 1", e.Rank, e.Size)
	case e.LocalRank < 0 || e.LocalRank > e.Rank:
		return bad("local rank %d of rank %d: it must be 0 to the rank", e.LocalRank, e.Rank)
	case e.LocalSize != 0 && e.LocalRank >= e.LocalSize:
		return bad("local rank %d of %d processes of this host", e.LocalRank, e.LocalSize)
	case e.Size > 1 && e.Address == "":
		return bad("it has %d processes and no address where they meet: set MASTER_ADDR to the host of rank 0", e.Size)
	case e.Size > 1 && (e.Port < 1 || e.Port > 65535):
		return bad("port %d: set MASTER_PORT to a free port of the host of rank 0, 1 to 65535", e.Port)
	}
	return nil
}

// oneHost reports whether all processes are on this host.
func (e Environment) oneHost() bool {
	if e.LocalSize == e.Size || e.Address == "localhost" {
		return true
	}
	ip := net.ParseIP(e.Address)
	return ip != nil && ip.IsLoopback()
}

// variables reads numbers, and keeps the first error.
type variables struct {
	getenv func(string) string
	err    error
}

// number returns the value of a variable. Without the variable it is the default, and an error if
// that is negative.
func (r *variables) number(name string, without int) int {
	text := r.getenv(name)
	n, err := strconv.Atoi(text)
	switch {
	case text == "" && without >= 0:
		return without
	case text == "":
		err = fmt.Errorf("distributed: %s is not set, though the other variables of its launcher are: set it: %w", name, cuda.ErrInvalidArgument)
	case err != nil || n < 0:
		err = fmt.Errorf("distributed: %s is %q, and must be a whole number from 0 on: %w", name, text, cuda.ErrInvalidArgument)
	default:
		return n
	}
	if r.err == nil {
		r.err = err
	}
	return 0
}

var hostRange = regexp.MustCompile(`^([^,\[]*)\[([0-9]+)[^\]]*\]([^,]*)`)

// firstHost returns the first host of one of SLURM's lists, such as "gpu[003-007,9],cpu1".
func firstHost(list string) string {
	if m := hostRange.FindStringSubmatch(list); m != nil {
		return m[1] + m[2] + m[3]
	}
	first, _, _ := strings.Cut(list, ",")
	return first
}

var tasksOfNodes = regexp.MustCompile(`^([0-9]+)(?:\(x([0-9]+)\))?$`)

// tasksOf returns the number of tasks of a node in one of SLURM's lists, such as "4(x2),3". It is 0
// if the list does not say.
func tasksOf(list string, node int) int {
	for part := range strings.SplitSeq(list, ",") {
		m := tasksOfNodes.FindStringSubmatch(part)
		if m == nil {
			return 0
		}
		nodes := 1
		if m[2] != "" {
			nodes, _ = strconv.Atoi(m[2])
		}
		if node < nodes {
			tasks, _ := strconv.Atoi(m[1])
			return tasks
		}
		node -= nodes
	}
	return 0
}
