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
	// Address and Port are the address of the TCPStore through which the ranks connect. Rank 0
	// serves the store, or the launcher does if AgentStore is set. Only a job of one process may
	// have no address.
	Address string
	Port    int
	// AgentStore is set if the launcher serves the store, as torchrun does. Rank 0 then serves no
	// store. The launcher's store may outlive the ranks: if the launcher restarts the job, the new
	// ranks use the same store.
	AgentStore bool
	Launcher   string // "torchrun", "slurm", "openmpi", or "none" for a process started alone
	// Job is the launcher's name for the job. If two jobs use the same store by mistake, a rank
	// that finds the other job's name in the store fails with an error. Job is "" if the launcher
	// sets no name.
	Job string
	// Warning says why a job of one process may be unintended, and what to do. It is "" for all
	// other jobs. Init writes it to Options.Log.
	Warning string
}

// ReadEnvironment returns the process's place in the job, from the variables that launchers set:
//
//   - torchrun, Kubernetes' training operators and shell loops set RANK, WORLD_SIZE, MASTER_ADDR,
//     MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE. LOCAL_RANK defaults to 0, which is right if
//     every process has a separate host.
//   - Open MPI sets OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE. A job on several
//     hosts also needs MASTER_ADDR. The port is MASTER_PORT, by default 29500.
//   - srun sets SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE,
//     SLURM_NODEID and SLURM_STEP_NODELIST. The address is MASTER_ADDR, by default the first host
//     of SLURM_STEP_NODELIST. A step on one host needs no host name: it uses 127.0.0.1. The port is
//     MASTER_PORT, by default 20000 plus SLURM_JOB_ID modulo 20000.
//   - Without any of these variables, the job has one process. In a SLURM allocation without srun,
//     such as a batch script, Warning is set if SLURM_NTASKS is more than one.
//
// The job's name is TORCHSTREAM_JOB, which a shell loop may set. By default it is
// TORCHELASTIC_RUN_ID, SLURM_JOB_ID with SLURM_STEP_ID, or PMIX_NAMESPACE.
//
// ReadEnvironment returns an error if variables are missing or contradict each other. getenv is
// os.Getenv, except in tests.
func ReadEnvironment(getenv func(string) string) (Environment, error) {
	r := variables{getenv: getenv}
	var e Environment
	switch {
	case getenv("RANK") != "" || getenv("WORLD_SIZE") != "":
		e = Environment{Launcher: "torchrun", Rank: r.number("RANK", -1), Size: r.number("WORLD_SIZE", -1),
			LocalRank: r.number("LOCAL_RANK", 0),
			LocalSize: r.number("LOCAL_WORLD_SIZE", 0), AgentStore: getenv("TORCHELASTIC_USE_AGENT_STORE") == "True",
			Address: getenv("MASTER_ADDR"), Port: r.number("MASTER_PORT", 0)}
	// Look for Open MPI before SLURM, because mpirun starts its daemons with srun in an allocation.
	case getenv("OMPI_COMM_WORLD_SIZE") != "":
		e = Environment{Launcher: "openmpi", Rank: r.number("OMPI_COMM_WORLD_RANK", -1),
			Size:      r.number("OMPI_COMM_WORLD_SIZE", -1),
			LocalRank: r.number("OMPI_COMM_WORLD_LOCAL_RANK", -1), LocalSize: r.number("OMPI_COMM_WORLD_LOCAL_SIZE", 0),
			Address: getenv("MASTER_ADDR"), Port: r.number("MASTER_PORT", 29500)}
		if e.Address == "" && e.LocalSize == e.Size {
			e.Address = "127.0.0.1"
		}
	case getenv("SLURM_STEP_NUM_TASKS") != "" && getenv("SLURM_PROCID") != "",
		r.number("SLURM_STEP_NUM_TASKS", 0) > 1, r.number("SLURM_PROCID", 0) > 0:
		e = Environment{Launcher: "slurm", Rank: r.number("SLURM_PROCID", -1),
			Size:      r.number("SLURM_STEP_NUM_TASKS", -1),
			LocalRank: r.number("SLURM_LOCALID", -1),
			LocalSize: tasksOf(getenv("SLURM_STEP_TASKS_PER_NODE"), r.number("SLURM_NODEID", 0)),
			Address:   getenv("MASTER_ADDR"),
			Port:      r.number("MASTER_PORT", 20000+r.number("SLURM_JOB_ID", 0)%20000)}
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
			e.Warning = fmt.Sprintf("SLURM_NTASKS is %d, but without srun's SLURM_PROCID and "+
				"SLURM_STEP_NUM_TASKS this process is a job of one rank: "+
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
		return fmt.Errorf("distributed: the environment of %s: %s: %w", e.Launcher,
			fmt.Sprintf(format, args...), cuda.ErrInvalidArgument)
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

// variables reads environment variables as numbers and keeps the first error.
type variables struct {
	getenv func(string) string
	err    error
}

// number returns the value of a variable, or the default if the variable is unset. The default
// is the parameter without. If without is negative, an unset variable is an error.
func (r *variables) number(name string, without int) int {
	text := r.getenv(name)
	n, err := strconv.Atoi(text)
	switch {
	case text == "" && without >= 0:
		return without
	case text == "":
		err = fmt.Errorf("distributed: %s is not set, though the other variables of its launcher are: "+
			"set it: %w", name, cuda.ErrInvalidArgument)
	case err != nil || n < 0:
		err = fmt.Errorf("distributed: %s is %q, and must be a whole number from 0 on: %w", name, text,
			cuda.ErrInvalidArgument)
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

// tasksOf returns a node's number of tasks from one of SLURM's lists, such as "4(x2),3". It is 0 if
// the list does not contain the node.
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
