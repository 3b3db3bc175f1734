package main

import (
	"context"
	"io"
)

func inspect(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	return usageError{"inspect is not there yet"}
}
