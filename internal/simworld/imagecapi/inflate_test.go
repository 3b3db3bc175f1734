package imagecapi

import (
	"bytes"
	"compress/flate"
	"math/rand/v2"
	"testing"
)

// The oracle is compress/flate: streams of every level, with flushes, in pieces of input and
// output.
func TestInflateEqualsFlate(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 1))
		var text []byte
		for size := 1 + r.IntN(120_000); len(text) < size; {
			if n := len(text); n > 0 && r.IntN(3) > 0 {
				from := r.IntN(n)
				text = append(text, text[from:min(n, from+r.IntN(300))]...)
			} else {
				text = append(text, byte(r.IntN(1+r.IntN(256))))
			}
		}
		var packed bytes.Buffer
		w, err := flate.NewWriter(&packed, int(seed%11)-2)
		if err != nil {
			t.Fatal(err)
		}
		for rest := text; len(rest) > 0; {
			n := min(len(rest), 1+r.IntN(40_000))
			w.Write(rest[:n])
			if rest = rest[n:]; r.IntN(2) == 0 {
				w.Flush()
			}
		}
		w.Close()
		i, _ := NewInflater(16 << 10)
		ResetInflater(i, 0, 0)
		in := packed.Bytes()
		got, marks := inflateAll(t, i, in, make([]byte, InflateWindow+100_000), 0, r)
		if !bytes.Equal(got, text) {
			t.Fatalf("seed %d: got %d bytes, want %d", seed, len(got), len(text))
		}
		for _, m := range marks {
			ResetInflater(i, int(m.Bit&7), InflateWindow)
			buffer := make([]byte, InflateWindow+100_000)
			for k := range InflateWindow {
				if m.Used[k/64]>>(k%64)&1 == 1 {
					buffer[k] = m.Window[k]
				}
			}
			got, _ := inflateAll(t, i, in[m.Bit>>3:], buffer, InflateWindow, r)
			if want := text[m.Output:]; !bytes.Equal(got, want) {
				t.Fatalf("seed %d, from a checkpoint at %d: got %d bytes, want %d", seed, m.Output, len(got), len(want))
			}
		}
	}
}

// inflateAll inflates a stream into a buffer that has earlier output before at.
func inflateAll(t *testing.T, i *Inflater, in, buffer []byte, at int, r *rand.Rand) (out []byte, marks []InflateCheckpoint) {
	t.Helper()
	for {
		if at+1000 > len(buffer) {
			at = copy(buffer, buffer[at-InflateWindow:at])
		}
		n := min(len(in), 1024+r.IntN(5000))
		room := buffer[:min(len(buffer), at+500+r.IntN(30_000))]
		consumed, produced, done, err := Inflate(i, in[:n], n == len(in), room, at)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, buffer[at:at+produced]...)
		at += produced
		in = in[consumed:]
		for {
			c, found, _ := NextInflateCheckpoint(i)
			if !found {
				break
			}
			marks = append(marks, c)
		}
		if done {
			if len(in) > 0 {
				t.Fatalf("%d bytes of input are left, want 0", len(in))
			}
			return out, marks
		}
	}
}
