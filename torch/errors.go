package torch

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// ErrClosed is in the error of every use of a tensor after it was closed or after its scope was. It
// is the same value as cuda.ErrClosed.
var ErrClosed = cuda.ErrClosed

// Error is the first thing that went wrong in a chain of operators.
type Error struct {
	Op       string   // the method or function, for example "MatMul"
	Operands []string // its tensors, for example "float32[2 3] cpu"
	File     string   // who called it, outside of this module's own tensor packages
	Line     int
	Err      error // what was wrong; errors.Is and errors.As look into it
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "torch: %s(%s)", e.Op, strings.Join(e.Operands, ", "))
	if e.File != "" {
		fmt.Fprintf(&b, " at %s:%d", filepath.Base(e.File), e.Line)
	}
	b.WriteString(": ")
	c, ok := e.Err.(*capi.Error)
	switch {
	case !ok:
		b.WriteString(e.Err.Error())
	case c.Code == capi.CodeOperator:
		b.WriteString(c.Message) // LibTorch's own words need no kind
	default:
		b.WriteString(c.Code.Error() + ": " + c.Message) // the operator's name is there in place of the C function's
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// closedError says what was closed.
type closedError string

func (e closedError) Error() string        { return string(e) }
func (e closedError) Is(target error) bool { return target == ErrClosed }

var errZero = closedError("a zero Tensor: tensors come from this package's functions and operators")

func invalid(format string, args ...any) error {
	return &capi.Error{Code: capi.CodeInvalidArgument, Origin: "torch", Message: fmt.Sprintf(format, args...)}
}

// opError gives err its operator, operands and caller.
func opError(op string, in []*Tensor, err error) error {
	e := &Error{Op: op, Err: err}
	for i, t := range in {
		if i == 8 {
			e.Operands = append(e.Operands, fmt.Sprintf("... %d more", len(in)-i))
			break
		}
		e.Operands = append(e.Operands, t.describe())
	}
	e.File, e.Line = caller()
	return e
}

// caller is the first frame outside of the packages torch, nn and optim.
func caller() (file string, line int) {
	var pcs [32]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])]) // the first frame is this function
	own := ""
	for {
		f, more := frames.Next()
		if own == "" {
			own = strings.TrimSuffix(f.Function, "torch.caller") // the module's path, whatever it is after a fork
		}
		pkg, inside := strings.CutPrefix(f.Function, own)
		if !inside || !strings.HasPrefix(pkg, "torch.") && !strings.HasPrefix(pkg, "nn.") && !strings.HasPrefix(pkg, "optim.") {
			return f.File, f.Line
		}
		if !more {
			return "", 0
		}
	}
}

// Fail returns a tensor that carries err, for modules and functions that return a tensor and have
// found something wrong themselves. The error is given the name op and the caller's place, unless
// it is an [*Error] already. A nil err is a mistake of the caller, and is an error too.
func Fail(op string, err error) *Tensor {
	if err == nil {
		err = invalid("Fail was called without an error")
	}
	var e *Error
	if !errors.As(err, &e) {
		err = opError(op, nil, err)
	}
	return failed(err)
}

func failed(err error) *Tensor { return &Tensor{more: &more{err: err}} }
