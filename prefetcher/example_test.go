package prefetcher_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// squares is a source of numbers and their squares. Host memory holds bytes; the consumer gets
// float32.
type squares struct{ samples int }

func (squares) BatchSize() int { return 4 }

func (squares) Fields() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Uint8, Shape: []int64{1}}, {Name: "labels", DType: torch.Int64}}
}

func (squares) Outputs() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Float32, Shape: []int64{1}}, {Name: "labels", DType: torch.Int64}}
}

// On a GPU Finish queues its work behind the copy; here, on the CPU, the work is done at once.
func (squares) Finish(dst, src []*torch.Tensor) error {
	return dst[0].CopyFrom(src[0], torch.CopyOptions{NonBlocking: true}) // uint8 to float32
}

func (s squares) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for first := 0; first < s.samples; first += s.BatchSize() {
		slot, err := lend(ctx) // waits until the copy of an earlier batch has read the slot
		if err != nil {
			return err
		}
		n := min(s.BatchSize(), s.samples-first)
		for i := range n {
			x := first + i
			slot[0][i] = byte(x)
			binary.NativeEndian.PutUint64(slot[1][8*i:], uint64(x*x))
		}
		if err := deliver(n, nil); err != nil {
			return err
		}
	}
	return nil
}

func Example() {
	// The zero Device would select the first GPU, if there is one.
	feed, err := prefetcher.New(squares{samples: 10}, prefetcher.Options{Device: cuda.CPU})
	if err != nil {
		log.Fatal(err)
	}
	defer feed.Close()
	for batch, err := range feed.Epoch(context.Background(), 0) {
		if err != nil {
			log.Fatal(err)
		}
		numbers, err := batch.Images.Sum().Float64() // the end of the turn frees the sum
		if err != nil {
			log.Fatal(err)
		}
		labels, err := batch.Labels.Int64s()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("batch", batch.Index, "of", batch.N, "sum", numbers, "squares", labels)
	}
	fmt.Println(feed.Stats().Batches, "batches")
	// Output:
	// batch 0 of 4 sum 6 squares [0 1 4 9]
	// batch 1 of 4 sum 22 squares [16 25 36 49]
	// batch 2 of 2 sum 17 squares [64 81]
	// 3 batches
}

// A table in memory becomes batches of float32 features and int64 labels.
func ExampleSamples() {
	heights := []float32{1.62, 1.81, 1.7, 1.58, 1.93}
	people, err := prefetcher.Samples(len(heights), []torch.Spec{
		{Name: "height", DType: torch.Float32, Shape: []int64{1}},
		{Name: "labels", DType: torch.Int64},
	}, func(i int, s *prefetcher.Sample) error {
		s.Float32("height")[0] = heights[i]
		if heights[i] > 1.75 {
			s.Int64("labels")[0] = 1
		}
		return nil
	}, prefetcher.SamplesOptions{BatchSize: 2}) // Shuffle: true for training
	if err != nil {
		log.Fatal(err)
	}
	feed, err := prefetcher.New(people, prefetcher.Options{Device: cuda.CPU})
	if err != nil {
		log.Fatal(err)
	}
	defer feed.Close()
	for batch, err := range feed.Epoch(context.Background(), 0) {
		if err != nil {
			log.Fatal(err)
		}
		labels, err := batch.Labels.Int64s()
		if err != nil {
			log.Fatal(err)
		}
		info := batch.Info.(prefetcher.SampleInfo)
		fmt.Println("samples", info.Indices, "labels", labels, "state", info.State.Batches())
	}
	// Output:
	// samples [0 1] labels [0 1] state 1
	// samples [2 3] labels [0 0] state 2
	// samples [4] labels [1] state 3
}
