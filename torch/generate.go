package torch

//go:generate go run ./internal/opgen
