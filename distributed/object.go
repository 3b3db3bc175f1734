package distributed

import (
	"encoding/json"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// AllGatherBytes returns the data of every rank, indexed by rank. Lengths may differ. The data is
// sent between CPUs, and the call blocks.
func (g *Group) AllGatherBytes(data []byte) ([][]byte, error) {
	lengths, err := g.allGather([]int64{int64(len(data))})
	if err != nil {
		return nil, err
	}
	var longest int64
	for _, n := range lengths {
		longest = max(longest, n)
	}
	all := make([][]byte, len(g.ranks))
	if longest == 0 {
		return all, nil
	}
	padded := make([]byte, longest)
	copy(padded, data)
	in, err := torch.FromBytes(padded, longest)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	out, err := torch.Empty(cuda.CPU, torch.Uint8, int64(len(g.ranks)), longest)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	if err := g.AllGather(out, in); err != nil {
		return nil, err
	}
	bytes := make([]byte, int64(len(g.ranks))*longest)
	if err := out.ReadBytes(bytes); err != nil {
		return nil, err
	}
	for r, n := range lengths {
		if n < 0 || n > longest {
			return nil, fmt.Errorf("distributed: AllGatherBytes: rank %d says that it has %d bytes", r, n)
		}
		all[r] = bytes[int64(r)*longest:][:n:n]
	}
	return all, nil
}

// allGather gathers the same number of integers from every rank.
func (g *Group) allGather(numbers []int64) ([]int64, error) {
	in, err := torch.FromInt64s(numbers, int64(len(numbers)))
	if err != nil {
		return nil, err
	}
	defer in.Close()
	out, err := torch.Empty(cuda.CPU, torch.Int64, int64(len(g.ranks)*len(numbers)))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	if err := g.AllGather(out, in); err != nil {
		return nil, err
	}
	return out.Int64s()
}

// BroadcastBytes returns the root's data on every rank. The data of other ranks is ignored. The
// data is sent between CPUs, and the call blocks.
func (g *Group) BroadcastBytes(data []byte, root int) ([]byte, error) {
	if err := g.root("BroadcastBytes", root); err != nil {
		return nil, err
	}
	length, err := torch.FromInt64s([]int64{int64(len(data))}, 1)
	if err != nil {
		return nil, err
	}
	defer length.Close()
	if err := g.Broadcast(length, root); err != nil {
		return nil, err
	}
	n, err := length.Int64()
	if err != nil || n == 0 {
		return nil, err
	}
	if n < 0 {
		return nil, fmt.Errorf("distributed: BroadcastBytes: rank %d says that it has %d bytes", root, n)
	}
	bytes := make([]byte, n)
	if g.rank == root {
		copy(bytes, data)
	}
	t, err := torch.FromBytes(bytes, n)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	if err := g.Broadcast(t, root); err != nil {
		return nil, err
	}
	return bytes, t.ReadBytes(bytes)
}

// AllGatherObject returns the value of every rank, indexed by rank. Values are sent as JSON.
func AllGatherObject[T any](g *Group, value T) ([]T, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("distributed: AllGatherObject: %w", err)
	}
	texts, err := g.AllGatherBytes(text)
	if err != nil {
		return nil, err
	}
	all := make([]T, len(texts))
	for r, text := range texts {
		if err := json.Unmarshal(text, &all[r]); err != nil {
			return nil, fmt.Errorf("distributed: AllGatherObject: the value of rank %d: %w", r, err)
		}
	}
	return all, nil
}

// BroadcastObject returns the root's value on every rank. The values of other ranks are ignored.
// The value is sent as JSON.
func BroadcastObject[T any](g *Group, value T, root int) (T, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return value, fmt.Errorf("distributed: BroadcastObject: %w", err)
	}
	if text, err = g.BroadcastBytes(text, root); err != nil {
		return value, err
	}
	var received T
	if err := json.Unmarshal(text, &received); err != nil {
		return value, fmt.Errorf("distributed: BroadcastObject: the value of rank %d: %w", root, err)
	}
	return received, nil
}
