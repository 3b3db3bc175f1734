package opentelemetry

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// fixed answers every request in the same way.
type fixed struct {
	answer serve.Answer
	err    error
}

func (f fixed) Do(context.Context, serve.Request) (serve.Answer, error) { return f.answer, f.err }

// spansOf returns the spans of a call of Do.
func spansOf(ctx context.Context, doer Doer, r serve.Request) (tracetest.SpanStubs, error) {
	exporter := tracetest.NewInMemoryExporter()
	provider := trace.NewTracerProvider(trace.WithSyncer(exporter))
	_, err := New(doer, provider).Do(ctx, r)
	return exporter.GetSpans(), err
}

func attributes(s tracetest.SpanStub) map[attribute.Key]string {
	all := map[attribute.Key]string{}
	for _, a := range s.Attributes {
		all[a.Key] = a.Value.Emit()
	}
	return all
}

func TestAnsweredRequestHasSpansOfItsParts(t *testing.T) {
	answer := serve.Answer{Device: cuda.CPU, Batch: 7, Waited: 3 * time.Millisecond, Ran: 5 * time.Millisecond}
	spans, err := spansOf(t.Context(), fixed{answer: answer}, serve.Request{Image: make([]byte, 12),
		Priority: serve.Background})
	if err != nil || len(spans) != 3 {
		t.Fatalf("%d spans, error %v, want 3, no error", len(spans), err)
	}
	wait, run, whole := spans[0], spans[1], spans[2]
	got := fmt.Sprint(wait.Name, wait.EndTime.Sub(wait.StartTime), run.Name, run.StartTime.Sub(wait.EndTime),
		run.EndTime.Sub(run.StartTime), whole.Name, wait.StartTime.Sub(whole.StartTime), attributes(whole))
	want := fmt.Sprint("wait", answer.Waited, "run", time.Duration(0), answer.Ran, "serve.Do", time.Duration(0),
		map[string]string{"torchstream.priority": "background", "torchstream.request.bytes": "12",
			"torchstream.batch.requests": "7", "torchstream.device": "cpu"})
	if got != want {
		t.Errorf("the spans are %s, want %s", got, want)
	}
	for _, child := range []tracetest.SpanStub{wait, run} {
		if child.Parent.SpanID() != whole.SpanContext.SpanID() {
			t.Errorf("the parent of %s is %v, want serve.Do's %v", child.Name, child.Parent.SpanID(),
				whole.SpanContext.SpanID())
		}
	}
}

func TestErrorsHaveTheirType(t *testing.T) {
	gone := errors.New("the client has left")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	for _, c := range []struct {
		ctx    context.Context
		err    error
		kind   string
		status codes.Code
	}{
		{t.Context(), serve.ErrQueueFull, "queue_full", codes.Error},
		{t.Context(), fmt.Errorf("cuda:0: %w", serve.ErrDeviceLost), "device_lost", codes.Error},
		{t.Context(), serve.ErrClosed, "closed", codes.Error},
		{ended, gone, "cancelled", codes.Unset},
		{t.Context(), decode.Errors{&decode.Error{Kind: decode.ErrNotImage}}, "faulty", codes.Unset},
		{t.Context(), gone, "failed", codes.Error},
	} {
		spans, err := spansOf(c.ctx, fixed{err: c.err}, serve.Request{})
		if err == nil || len(spans) != 1 {
			t.Fatalf("%s: %d spans, error %v, want 1, an error", c.kind, len(spans), err)
		}
		if kind := attributes(spans[0])["error.type"]; kind != c.kind || spans[0].Status.Code != c.status {
			t.Errorf("%v: type %s, status %v, want %s, %v", c.err, kind, spans[0].Status.Code, c.kind, c.status)
		}
	}
}

func TestBatcherIsADoer(t *testing.T) {
	b, err := serve.NewBatcher(serve.BatcherOptions{Devices: []cuda.Device{cuda.CPU},
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{1}},
		Model: func(cuda.Device) (serve.Run, error) {
			return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) { return []*torch.Tensor{x}, nil }, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close(t.Context())
	spans, err := spansOf(t.Context(), b, serve.Request{Row: []byte{4}})
	if len(spans) != 1 || attributes(spans[0])["error.type"] != "faulty" || spans[0].Status.Code != codes.Unset {
		t.Errorf("a row of 1 byte: the spans are %v, error %v, want one of type faulty without a status", spans, err)
	}
	answer, err := New(b, nil).Do(t.Context(), serve.Request{Row: serve.RowOf([]float32{4})})
	if err != nil || answer.Outputs[0].Values[0] != 4 {
		t.Errorf("the answer is %v, %v, want 4, no error", answer, err)
	}
}
