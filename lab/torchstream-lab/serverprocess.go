package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/httpload"
)

// maxStart is the longest time in which a server answers first. torch.compile takes minutes.
const maxStart = 5 * time.Minute

// serverProcess is a server in a separate process group.
type serverProcess struct {
	command *exec.Cmd
	log     *os.File
	ended   chan error
	target  *httpload.Target
}

// startServer starts a program, whose arguments have {port} where the port belongs, and waits until
// it answers a photograph at the path.
func startServer(ctx context.Context, args []string, path string, images [][]byte, timeout time.Duration) (*serverProcess, error) {
	number, err := freeport.Find()
	if err != nil {
		return nil, err
	}
	port := strconv.Itoa(number)
	s := &serverProcess{ended: make(chan error, 1)}
	if s.log, err = os.CreateTemp("", "server-*.log"); err != nil {
		return nil, err
	}
	if err := os.Remove(s.log.Name()); err != nil {
		return nil, errors.Join(err, s.log.Close())
	}
	for i, arg := range args {
		args[i] = strings.ReplaceAll(arg, "{port}", port)
	}
	s.command = exec.Command(args[0], args[1:]...)
	s.command.Dir = os.TempDir() // in a clone of this project Python would import the folder torch
	s.command.Stdout, s.command.Stderr = s.log, s.log
	s.command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.command.Start(); err != nil {
		return nil, errors.Join(err, s.log.Close())
	}
	go func() { s.ended <- s.command.Wait() }()
	s.target = httpload.NewTarget("http://127.0.0.1:"+port+path, images, timeout)
	if err := s.waitForAnswer(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// waitForAnswer waits until the server answers.
func (s *serverProcess) waitForAnswer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, maxStart)
	defer cancel()
	pause := time.NewTicker(100 * time.Millisecond)
	defer pause.Stop()
	for {
		_, err := s.target.Classify(ctx, 0)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w: %s", err, s.lastLine())
		case end := <-s.ended:
			s.ended <- end
			return fmt.Errorf("the server has ended (%v): %s", end, s.lastLine())
		case <-pause.C:
		}
	}
}

// outputFrom returns the server's output after so many bytes.
func (s *serverProcess) outputFrom(start int64) (string, error) {
	text, err := io.ReadAll(io.NewSectionReader(s.log, start, math.MaxInt64-start))
	return string(text), err
}

// lastLine returns the end of the server's output.
func (s *serverProcess) lastLine() string {
	text, err := s.outputFrom(0)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return printable.Text(lines[len(lines)-1])
}

// usage returns the use of the server's processes.
func (s *serverProcess) usage() (httpload.Usage, error) {
	return httpload.UsageOf(s.command.Process.Pid)
}

// signal sends a signal to the server's processes.
func (s *serverProcess) signal(which syscall.Signal) error {
	return syscall.Kill(-s.command.Process.Pid, which)
}

// maxEnd is the longest time in which a server ends after SIGTERM.
const maxEnd = 20 * time.Second

// end ends the server with SIGTERM. A server that ends before, with another status than 0 or not in
// time is an error.
func (s *serverProcess) end() error {
	select {
	case end := <-s.ended:
		s.ended <- end
		return fmt.Errorf("the server has ended (%v): %s", end, s.lastLine())
	default:
	}
	if err := s.signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case end := <-s.ended:
		s.ended <- end
		if end != nil {
			return fmt.Errorf("after SIGTERM the server ended with %w: %s", end, s.lastLine())
		}
		return nil
	case <-time.After(maxEnd):
		return fmt.Errorf("the server did not end in %v after SIGTERM", maxEnd)
	}
}

// close ends the server: first with SIGTERM, and after 20 seconds with SIGKILL.
func (s *serverProcess) close() error {
	s.target.Close()
	_ = s.signal(syscall.SIGCONT) // fails if it has ended, as the next signals do
	_ = s.signal(syscall.SIGTERM)
	select {
	case end := <-s.ended:
		s.ended <- end
	case <-time.After(maxEnd):
	}
	_ = s.signal(syscall.SIGKILL) // workers may outlive the first process
	return s.log.Close()
}
