//go:build linux

package interrupt

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
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
		// Under nohup the children would ignore SIGHUP too. A signal that this process handles has
		// its default behaviour in a child.
		if signal.Ignored(syscall.SIGHUP) {
			signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
		}
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
	case "waits": // ends at the end of its input, after the first signal
		ctx, stop := Context(time.Hour)
		fmt.Println("ready")
		<-ctx.Done()
		fmt.Println("ending")
		io.Copy(io.Discard, os.Stdin)
		stop()
		os.Exit(7)
	case "pipe": // writes to a pipe that its reader closes after the signal
		ctx, stop := Context(time.Hour)
		fmt.Println("ready")
		<-ctx.Done()
		io.Copy(io.Discard, os.Stdin)
		if _, err := fmt.Println("saved"); !errors.Is(err, syscall.EPIPE) {
			os.Exit(1)
		}
		stop()
		os.Exit(7)
	case "queued": // a second signal arrived before the first one was handled
		signals := make(chan os.Signal, 1)
		signals <- syscall.SIGTERM
		exitAfter(time.Hour, signals, nil)
	case "stopped": // no longer handles signals
		ctx, stop := Context(time.Hour)
		stop()
		fmt.Println("ready")
		<-ctx.Done()
		io.Copy(io.Discard, os.Stdin)
	case "good": // ends by itself
		ctx, stop := Context(time.Hour)
		fmt.Println("ready")
		<-ctx.Done()
		stop()
		os.Exit(7)
	}
}

// process is a running program that has reported that it is ready.
type process struct {
	*exec.Cmd
	in    io.WriteCloser
	out   io.ReadCloser
	lines *bufio.Scanner
}

// child runs this test program in a mode and returns once it reports that it is ready.
func child(t *testing.T, mode string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	p := start(t, mode, os.Args[0])
	return p.Cmd, p.lines
}

// start runs a command line that starts this test program in a mode.
func start(t *testing.T, mode string, line ...string) process {
	t.Helper()
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // kills a child that hangs
	t.Cleanup(cancel)
	command := exec.CommandContext(ctx, line[0], line[1:]...)
	command.Env = append(os.Environ(), modeVariable+"="+mode, pipeVariable+"="+pipe)
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	says(t, lines, "ready")
	return process{command, in, out, lines}
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
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
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

// If the process was started with SIGHUP ignored, as by nohup, a SIGHUP does not count as the first
// signal. Otherwise the SIGTERM would be the second one and kill the process.
func TestIgnoredHangupStaysIgnored(t *testing.T) {
	p := start(t, "waits", "sh", "-c", `trap "" HUP; exec "$0"`, os.Args[0])
	interrupt(t, p.Cmd, syscall.SIGHUP)
	interrupt(t, p.Cmd, syscall.SIGTERM)
	says(t, p.lines, "ending")
	p.in.Close()
	if err := p.Wait(); p.ProcessState.ExitCode() != 7 {
		t.Errorf("%v, want status 7", err)
	}
}

// The shell and the kernel may each send a SIGHUP when a terminal is closed. The second one does
// not kill a program that is saving its work.
func TestSecondHangupKillsNothing(t *testing.T) {
	p := start(t, "waits", os.Args[0])
	interrupt(t, p.Cmd, syscall.SIGHUP)
	says(t, p.lines, "ending")
	interrupt(t, p.Cmd, syscall.SIGHUP)
	p.in.Close()
	if err := p.Wait(); p.ProcessState.ExitCode() != 7 {
		t.Errorf("%v, want status 7", err)
	}
}

// After the first signal a write to a closed pipe returns an error, so a program whose output is a
// pipe can save its work.
func TestClosedPipeAfterASignalIsAnError(t *testing.T) {
	p := start(t, "pipe", os.Args[0])
	interrupt(t, p.Cmd, syscall.SIGHUP)
	p.out.Close()
	p.in.Close()
	if err := p.Wait(); p.ProcessState.ExitCode() != 7 {
		t.Errorf("%v, want status 7", err)
	}
}

func TestProgramEndsByItself(t *testing.T) {
	command, _ := child(t, "good")
	interrupt(t, command, syscall.SIGTERM)
	if err := command.Wait(); command.ProcessState.ExitCode() != 7 {
		t.Error(err)
	}
}

// A second signal that arrives before signal.Stop is in the channel and kills nothing by itself.
func TestSecondSignalBeforeStopEndsTheProgram(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, os.Args[0])
	command.Env = append(os.Environ(), modeVariable+"=queued")
	if err := command.Run(); command.ProcessState.ExitCode() != Status {
		t.Errorf("got %v, want status %d", err, Status)
	}
}

// A SIGHUP that arrives before signal.Stop is no second signal either.
func TestSecondHangupBeforeStopEndsNothing(t *testing.T) {
	signals, stopped := make(chan os.Signal), make(chan struct{})
	go func() {
		signals <- syscall.SIGHUP
		close(stopped)
	}()
	exitAfter(time.Hour, signals, stopped) // a fault exits with Status, which the go command reports
}

// After stop, the context is cancelled and a signal has its default behaviour again.
func TestStopRestoresTheDefaultBehaviour(t *testing.T) {
	command, _ := child(t, "stopped")
	interrupt(t, command, syscall.SIGTERM)
	err := command.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("got %v, want the end by SIGTERM", err)
	}
}
