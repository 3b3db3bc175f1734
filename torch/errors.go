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

// ErrClosed is in the error of every use of a tensor after the tensor or its scope was closed. It
// is the same value as cuda.ErrClosed.
var ErrClosed = cuda.ErrClosed

// Error is the first failure in a chain of operators.
type Error struct {
	Op       string   // the method or function, for example "MatMul"
	Operands []string // the tensors of Op, for example "float32[2 3] cpu"
	// File and Line are the location of the call, outside of this module's own tensor packages.
	File string
	Line int
	Err  error // the failure; errors.Is and errors.As unwrap it
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
		// LibTorch's own message needs no kind.
		b.WriteString(c.Message)
	default:
		// The operator's name replaces the name of the C function.
		b.WriteString(c.Code.Error() + ": " + c.Message)
	}
	return b.String()
}

func (e *Error) Unwrap() error { return e.Err }

// closedError names the closed tensor or scope.
type closedError string

func (e closedError) Error() string        { return string(e) }
func (e closedError) Is(target error) bool { return target == ErrClosed }

var errZero = closedError("the Tensor is zero: make tensors with this package's functions and operators")

func invalid(format string, args ...any) error {
	return &capi.Error{Code: capi.CodeInvalidArgument, Origin: "torch", Message: fmt.Sprintf(format, args...)}
}

// opError adds the operator, its operands and its caller to err.
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

// caller returns the first frame outside of the packages torch, nn and optim.
func caller() (file string, line int) {
	var pcs [32]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])]) // includes caller itself
	own, folder := "", ""
	for {
		f, more := frames.Next()
		if own == "" {
			// These are the module's path and folder, even in a fork with another path.
			own, folder = strings.TrimSuffix(f.Function, "torch.caller"), strings.TrimSuffix(f.File, "torch/errors.go")
		}
		// A closure of a function that was inlined has the name of a function of its caller, and
		// its own file.
		if !tensorPackage(f.Function, own, ".") &&
			(strings.HasSuffix(f.File, "_test.go") || !tensorPackage(f.File, folder, "/")) {
			return f.File, f.Line
		}
		if !more {
			return "", 0
		}
	}
}

// tensorPackage reports whether name is root, then torch, nn or optim, and then a separator.
func tensorPackage(name, root, separator string) bool {
	rest, inside := strings.CutPrefix(name, root)
	pkg, _, found := strings.Cut(rest, separator)
	return inside && found && (pkg == "torch" || pkg == "nn" || pkg == "optim")
}

// Fail returns a tensor that carries err. Modules and functions that return a tensor use it to
// report their own failures. The error gets the name op and the caller's location, unless it is
// already an [*Error]. A nil err is a mistake of the caller, and also makes a failed tensor.
func Fail(op string, err error) *Tensor {
	if err == nil {
		err = invalid("Fail was called with a nil error")
	}
	var e *Error
	if !errors.As(err, &e) {
		err = opError(op, nil, err)
	}
	return failed(err)
}

func failed(err error) *Tensor { return &Tensor{more: &more{err: err}} }
