package httpserve

import (
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

// Run serves until ctx ends. Then it accepts no more connections, waits until the started requests
// are answered, and returns nil. If that takes longer than drain, it closes their connections and
// returns an error.
func Run(ctx context.Context, listener net.Listener, handler http.Handler, drain time.Duration) error {
	// A stalled client must not delay the end of the program.
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute,
		WriteTimeout: 2 * time.Minute, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	ended := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
		defer cancel()
		ended <- server.Shutdown(limit)
	})
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		stop()
		return err
	}
	err := <-ended
	if err != nil {
		err = errors.Join(errors.New("requests were not answered in time"), err, server.Close())
	}
	return err
}
