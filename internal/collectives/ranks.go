package collectives

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"

	"github.com/torchstream/torchstream/internal/freeport"
)

// StartRanks runs n processes of the command on this machine, as the ranks of a job. The output of
// rank 0 is copied to stdout.
func StartRanks(ctx context.Context, n int, command func(context.Context) *exec.Cmd, stdout, stderr io.Writer) error {
	port, err := freeport.Find()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	errs := make(chan error, n)
	for rank := range n {
		c := command(ctx)
		c.Env = append(os.Environ(), fmt.Sprintf("RANK=%d", rank), fmt.Sprintf("LOCAL_RANK=%d", rank),
			fmt.Sprintf("WORLD_SIZE=%d", n),
			fmt.Sprintf("LOCAL_WORLD_SIZE=%d", n), "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port))
		c.Stderr = stderr
		if rank == 0 {
			c.Stdout = stdout
		}
		if err := c.Start(); err != nil {
			return err
		}
		go func() {
			err := c.Wait()
			if err != nil {
				stop() // the others would wait for this rank
				err = fmt.Errorf("rank %d: %w", rank, err)
			}
			errs <- err
		}()
	}
	var first error
	for range n {
		if err := <-errs; first == nil {
			first = err
		}
	}
	return first
}
