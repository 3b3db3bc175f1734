package distributed

import (
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

func TestReadEnvironment(t *testing.T) {
	torchrun := map[string]string{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1",
		"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1234",
		"TORCHELASTIC_USE_AGENT_STORE": "True"}
	slurm := map[string]string{"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
		"SLURM_STEP_NODELIST": "gpu[003-004,7],cpu1", "SLURM_JOB_ID": "61234"}
	mpi := map[string]string{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
		"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
	without := func(m map[string]string, names ...string) map[string]string {
		m = maps.Clone(m)
		for _, n := range names {
			delete(m, n)
		}
		return m
	}
	with := func(m map[string]string, name, value string) map[string]string {
		m = maps.Clone(m)
		m[name] = value
		return m
	}
	for name, c := range map[string]struct {
		variables map[string]string
		want      Environment
		says      string // expected text in the error
	}{
		"alone": {map[string]string{}, Environment{Launcher: "none", Size: 1, LocalSize: 1}, ""},
		"torchrun": {torchrun, Environment{Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2, Address: "node0",
			Port: 1234, AgentStore: true, Launcher: "torchrun"}, ""},
		"a shell loop of four variables": {without(torchrun, "LOCAL_RANK", "LOCAL_WORLD_SIZE",
			"TORCHELASTIC_USE_AGENT_STORE"),
			Environment{Rank: 3, Size: 4, Address: "node0", Port: 1234, Launcher: "torchrun"}, ""},
		"slurm": {slurm, Environment{Rank: 5, Size: 8, LocalRank: 1, Address: "gpu003",
			Port: 21234, Launcher: "slurm", Job: "61234"}, ""},
		"slurm with plain names": {with(slurm, "SLURM_STEP_NODELIST", "a1,b[1-2]"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, Address: "a1", Port: 21234, Launcher: "slurm",
				Job: "61234"}, ""},
		"slurm on nodes of other numbers of tasks": {with(with(slurm, "SLURM_STEP_TASKS_PER_NODE",
			"3(x2),2"), "SLURM_NODEID", "1"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, LocalSize: 3, Address: "gpu003", Port: 21234,
				Launcher: "slurm", Job: "61234"}, ""},
		"slurm's last node": {with(with(slurm, "SLURM_STEP_TASKS_PER_NODE", "3(x2),2"), "SLURM_NODEID", "2"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, LocalSize: 2, Address: "gpu003", Port: 21234,
				Launcher: "slurm", Job: "61234"}, ""},
		"slurm on one node whose name does not resolve": {with(with(slurm, "SLURM_STEP_TASKS_PER_NODE",
			"8"), "SLURM_NODEID", "0"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, LocalSize: 8, Address: "127.0.0.1", Port: 21234,
				Launcher: "slurm", Job: "61234"}, ""},
		"slurm on one node with an address": {with(with(slurm, "SLURM_STEP_TASKS_PER_NODE", "8"),
			"MASTER_ADDR", "gpu9"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, LocalSize: 8, Address: "gpu9", Port: 21234,
				Launcher: "slurm", Job: "61234"}, ""},
		"slurm with a list of tasks of another form": {with(slurm, "SLURM_STEP_TASKS_PER_NODE", "8x1"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, Address: "gpu003", Port: 21234, Launcher: "slurm",
				Job: "61234"}, ""},
		"slurm's batch script of one task": {map[string]string{"SLURM_PROCID": "0",
			"SLURM_NTASKS": "1"}, Environment{Launcher: "none", Size: 1, LocalSize: 1}, ""},
		"slurm's step of one task without a rank": {map[string]string{"SLURM_STEP_NUM_TASKS": "1"},
			Environment{Launcher: "none", Size: 1, LocalSize: 1}, ""},
		"slurm's batch script": {map[string]string{"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
			Environment{Launcher: "none", Size: 1, LocalSize: 1,
				Warning: "SLURM_NTASKS is 8, but without srun's SLURM_PROCID and SLURM_STEP_NUM_TASKS this " +
					"process is a job of one rank: " +
					"start the ranks with srun, or unset SLURM_NTASKS"}, ""},
		"torchrun in slurm's batch script": {with(with(torchrun, "SLURM_PROCID", "0"), "SLURM_NTASKS", "8"),
			Environment{Rank: 3, Size: 4, LocalRank: 1, LocalSize: 2, Address: "node0", Port: 1234,
				AgentStore: true, Launcher: "torchrun"}, ""},
		"slurm without a rank": {without(slurm, "SLURM_PROCID"), Environment{},
			"SLURM_PROCID is not set"},
		"slurm without a size": {without(slurm, "SLURM_STEP_NUM_TASKS"), Environment{},
			"SLURM_STEP_NUM_TASKS is not set"},
		"slurm without a local rank": {without(slurm, "SLURM_LOCALID"), Environment{},
			"SLURM_LOCALID is not set"},
		"slurm with a rank that is no number": {with(slurm, "SLURM_PROCID", "x"), Environment{}, `SLURM_PROCID is "x"`},
		"slurm with tasks that are no number": {map[string]string{"SLURM_NTASKS": "x"}, Environment{},
			`SLURM_NTASKS is "x"`},
		"openmpi": {mpi,
			Environment{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Address: "127.0.0.1", Port: 29500,
				Launcher: "openmpi"}, ""},
		"slurm's step": {with(slurm, "SLURM_STEP_ID", "3"),
			Environment{Rank: 5, Size: 8, LocalRank: 1, Address: "gpu003", Port: 21234, Launcher: "slurm",
				Job: "61234.3"}, ""},
		"torchrun's job": {without(with(torchrun, "TORCHELASTIC_RUN_ID", "a1"), "LOCAL_RANK",
			"LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"),
			Environment{Rank: 3, Size: 4, Address: "node0", Port: 1234, Launcher: "torchrun", Job: "a1"}, ""},
		"a job's own name": {with(mpi, "TORCHSTREAM_JOB", "mine"),
			Environment{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Address: "127.0.0.1", Port: 29500,
				Launcher: "openmpi", Job: "mine"}, ""},
		"openmpi whose daemon srun has started": {with(with(mpi, "SLURM_PROCID", "1"), "SLURM_STEP_NUM_TASKS", "2"),
			Environment{Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2, Address: "127.0.0.1", Port: 29500,
				Launcher: "openmpi"}, ""},
		"openmpi on several hosts":  {with(mpi, "OMPI_COMM_WORLD_SIZE", "4"), Environment{}, "set MASTER_ADDR"},
		"no rank":                   {without(torchrun, "RANK"), Environment{}, "RANK is not set"},
		"no size":                   {without(torchrun, "WORLD_SIZE"), Environment{}, "WORLD_SIZE is not set"},
		"no address":                {without(torchrun, "MASTER_ADDR"), Environment{}, "set MASTER_ADDR"},
		"no port":                   {without(torchrun, "MASTER_PORT"), Environment{}, "set MASTER_PORT"},
		"a rank beyond the size":    {with(torchrun, "RANK", "4"), Environment{}, "rank 4 of 4"},
		"a rank that is no number":  {with(torchrun, "RANK", "x"), Environment{}, `RANK is "x"`},
		"a negative local rank":     {with(torchrun, "LOCAL_RANK", "-1"), Environment{}, `LOCAL_RANK is "-1"`},
		"a local rank over the sum": {with(torchrun, "LOCAL_RANK", "2"), Environment{}, "local rank 2 of 2"},
		"a port beyond the last":    {with(torchrun, "MASTER_PORT", "65536"), Environment{}, "port 65536"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ReadEnvironment(func(name string) string { return c.variables[name] })
			switch {
			case c.says != "":
				if err == nil || !strings.Contains(err.Error(), c.says) || !errors.Is(err, cuda.ErrInvalidArgument) {
					t.Errorf("%v, want %q", err, c.says)
				}
			case err != nil || got != c.want:
				t.Errorf("%+v, %v, want %+v", got, err, c.want)
			}
		})
	}
}
