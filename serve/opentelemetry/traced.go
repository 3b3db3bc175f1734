// Package opentelemetry traces the requests of a serve.Batcher. It is a separate module, so that
// programs that do not use it do not depend on OpenTelemetry.
//
//	b, err := serve.NewBatcher(serve.BatcherOptions{...})
//	...
//	traced := opentelemetry.New(b, nil)
//	answer, err := traced.Do(ctx, serve.Request{Image: upload}) // instead of b.Do
package opentelemetry

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/serve"
)

// Doer answers requests: a *serve.Batcher.
type Doer interface {
	Do(ctx context.Context, r serve.Request) (serve.Answer, error)
}

// Batcher calls a Doer in spans. It is safe for concurrent use.
type Batcher struct {
	doer   Doer
	tracer trace.Tracer
}

// New returns a Batcher whose spans go to the provider. nil stands for the global provider.
func New(doer Doer, provider trace.TracerProvider) *Batcher {
	if provider == nil {
		provider = otel.GetTracerProvider()
	}
	return &Batcher{doer, provider.Tracer("github.com/torchstream/torchstream/serve")}
}

// Do calls the Doer's Do in a span "serve.Do", a child of ctx's span. The span has the request's
// class and size. An answered request has the number of requests in its batch, the device, and two
// child spans: "wait", until a worker took the request, and "run".
//
// An error sets the attribute error.type: "queue_full", "cancelled", "faulty" (the request's own
// image or row), "device_lost", "closed" or "failed". The last three, and "queue_full", set the
// span's status.
func (b *Batcher) Do(ctx context.Context, r serve.Request) (serve.Answer, error) {
	class := "interactive"
	if r.Priority == serve.Background {
		class = "background"
	}
	began := time.Now()
	ctx, span := b.tracer.Start(ctx, "serve.Do", trace.WithTimestamp(began), trace.WithAttributes(
		attribute.String("torchstream.priority", class), attribute.Int("torchstream.request.bytes", len(r.Image)+len(r.Row))))
	defer span.End()
	answer, err := b.doer.Do(ctx, r)
	if err != nil {
		kind := kindOf(ctx, err)
		span.SetAttributes(attribute.String("error.type", kind))
		span.RecordError(err)
		if kind != "faulty" && kind != "cancelled" {
			span.SetStatus(codes.Error, err.Error())
		}
		return answer, err
	}
	span.SetAttributes(attribute.Int("torchstream.batch.requests", answer.Batch),
		attribute.String("torchstream.device", answer.Device.String()))
	taken := began.Add(answer.Waited)
	b.child(ctx, "wait", began, taken)
	b.child(ctx, "run", taken, taken.Add(answer.Ran))
	return answer, nil
}

// child records a span that has ended.
func (b *Batcher) child(ctx context.Context, name string, from, to time.Time) {
	_, span := b.tracer.Start(ctx, name, trace.WithTimestamp(from))
	span.End(trace.WithTimestamp(to))
}

// kindOf returns the error.type of a request.
func kindOf(ctx context.Context, err error) string {
	var faults decode.Errors
	switch {
	case errors.Is(err, serve.ErrQueueFull):
		return "queue_full"
	case errors.Is(err, serve.ErrDeviceLost):
		return "device_lost"
	case errors.Is(err, serve.ErrClosed):
		return "closed"
	case ctx.Err() != nil && errors.Is(err, context.Cause(ctx)):
		return "cancelled"
	case errors.As(err, &faults), errors.Is(err, serve.ErrRequest):
		return "faulty"
	}
	return "failed"
}
