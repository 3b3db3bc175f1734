package interrupt

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

const (
	modeVariable = "INTERRUPT_TEST_MODE"
	pipeVariable = "INTERRUPT_TEST_PIPE"
)

func TestMain(m *testing.M) {
	switch os.Getenv(modeVariable) {
	case "":
		os.Exit(m.Run())
	case "stuck": // blocks in a system call
		_, stop := Context(time.Millisecond)
		defer stop()
		fmt.Println("ready")
		os.Open(os.Getenv(pipeVariable)) // the pipe has no writer
	case "slow": // never ends after the first signal
		ctx, stop := Context(time.Hour)
		defer stop()
		fmt.Println("ready")
		<-ctx.Done()
		fmt.Println("ending")
		select {}
	case "good": // ends by itself
		ctx, stop := Context(time.Hour)
		fmt.Println("ready")
		<-ctx.Done()
		stop()
		os.Exit(7)
	}
}

// child runs this test program in a mode and returns once it says that it is ready.
func child(t *testing.T, mode string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // kills a child that hangs
	t.Cleanup(cancel)
	command := exec.CommandContext(ctx, os.Args[0])
	command.Env = append(os.Environ(), modeVariable+"="+mode, pipeVariable+"="+pipe)
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	says(t, lines, "ready")
	return command, lines
}

func says(t *testing.T, lines *bufio.Scanner, want string) {
	t.Helper()
	if !lines.Scan() || lines.Text() != want {
		t.Fatalf("the child says %q, want %q", lines.Text(), want)
	}
}

func interrupt(t *testing.T, command *exec.Cmd, s syscall.Signal) {
	t.Helper()
	if err := command.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func TestFirstSignalEndsAStuckProgram(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(s.String(), func(t *testing.T) {
			command, _ := child(t, "stuck")
			interrupt(t, command, s)
			if err := command.Wait(); command.ProcessState.ExitCode() != Status {
				t.Error(err)
			}
		})
	}
}

func TestSecondSignalKills(t *testing.T) {
	command, lines := child(t, "slow")
	interrupt(t, command, syscall.SIGINT)
	says(t, lines, "ending")
	interrupt(t, command, syscall.SIGTERM)
	err := command.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Error(err)
	}
}

func TestProgramEndsByItself(t *testing.T) {
	command, _ := child(t, "good")
	interrupt(t, command, syscall.SIGTERM)
	if err := command.Wait(); command.ProcessState.ExitCode() != 7 {
		t.Error(err)
	}
}
