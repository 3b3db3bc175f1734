package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"unicode/utf8"

	"github.com/torchstream/torchstream/torch"
)

// text is a prefetcher source of token sequences. A token is the index of a byte among the text's
// distinct bytes.
type text struct {
	tokens  []int64
	symbols []byte // indexed by token
	context int    // tokens per sample
	batch   int    // samples per batch
	batches int    // per epoch
	seed    uint64
}

func newText(data []byte, context, batch, batches int, seed uint64) (*text, error) {
	if len(data) < context+2 {
		return nil, fmt.Errorf("the text has %d bytes, and a sample needs %d", len(data), context+1)
	}
	t := &text{context: context, batch: batch, batches: batches, seed: seed}
	t.symbols = slices.Clone(data)
	slices.Sort(t.symbols)
	t.symbols = slices.Compact(t.symbols)
	var place [256]int64
	for i, b := range t.symbols {
		place[b] = int64(i)
	}
	for _, b := range data {
		t.tokens = append(t.tokens, place[b])
	}
	return t, nil
}

// Fields returns the two tensors of a sample: its tokens, and the next token for each of them.
func (t *text) Fields() []torch.Spec {
	shape := []int64{int64(t.context)}
	return []torch.Spec{{Name: "tokens", DType: torch.Int64, Shape: shape},
		{Name: "next", DType: torch.Int64, Shape: shape}}
}

func (t *text) BatchSize() int { return t.batch }

// Fill writes batches from random positions in the text. The positions depend only on seed and
// epoch.
func (t *text) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	rng := rand.New(rand.NewPCG(t.seed, uint64(epoch)))
	for range t.batches {
		memory, err := lend(ctx) // waits for a free slot, or for the end of the epoch
		if err != nil {
			return err
		}
		for i := range t.batch {
			at := rng.IntN(len(t.tokens) - t.context)
			put(memory[0][i*t.context*8:], t.tokens[at:at+t.context])
			put(memory[1][i*t.context*8:], t.tokens[at+1:at+1+t.context])
		}
		if err := deliver(t.batch, nil); err != nil {
			return err
		}
	}
	return nil
}

func put(memory []byte, tokens []int64) {
	for i, v := range tokens {
		binary.NativeEndian.PutUint64(memory[i*8:], uint64(v))
	}
}

func (t *text) encode(s string) ([]int64, error) {
	var tokens []int64
	for len(s) > 0 {
		_, n := utf8.DecodeRuneInString(s)
		for _, b := range []byte(s[:n]) {
			i, ok := slices.BinarySearch(t.symbols, b)
			if !ok {
				return nil, fmt.Errorf("the prompt has %q, which is not in the text: name another with -prompt", s[:n])
			}
			tokens = append(tokens, int64(i))
		}
		s = s[n:]
	}
	return tokens, nil
}

func (t *text) decode(tokens []int64) string {
	var s []byte
	for _, i := range tokens {
		s = append(s, t.symbols[i])
	}
	return string(s)
}
