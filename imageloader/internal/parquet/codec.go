package parquet

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/snappy"
	"github.com/klauspost/compress/zstd"
)

// The codecs (compressions) of pages.
const (
	codecNone   = 0
	codecSnappy = 1
	codecGzip   = 2
	codecZstd   = 6
)

var codecNames = []string{"UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW"}

func codecName(codec int32) string {
	if codec < 0 || int(codec) >= len(codecNames) {
		return fmt.Sprintf("codec %d", codec)
	}
	return codecNames[codec]
}

// checkCodec returns an error if the package cannot decompress the codec.
func checkCodec(codec int32) error {
	switch codec {
	case codecNone, codecSnappy, codecGzip, codecZstd:
		return nil
	}
	return fmt.Errorf("it is compressed with %s: write the file again with snappy, zstd, gzip or no compression",
		codecName(codec))
}

const (
	// maxPageBytes is the maximum size of a decompressed page. Writers put up to a whole row group
	// into a page.
	maxPageBytes = 1 << 30
	// maxSnappyRatio is the largest compression ratio of snappy: three bytes can stand for 64.
	maxSnappyRatio = 22
	maxZstdWindow  = 128 << 20
)

var errPageSize = errors.New("its page has another size than its header declares")

// decompress returns the size bytes of a page. It uses the memory of room if they fit. The memory
// that it allocates grows with the number of bytes that packed contains, not with the size that the
// page declares.
func decompress(codec int32, packed []byte, size int, room []byte) ([]byte, error) {
	if size < 0 || size > maxPageBytes {
		return nil, fmt.Errorf("its page has %d bytes, over the limit of %d: write the file again with smaller row groups",
			size, maxPageBytes)
	}
	switch codec {
	case codecNone:
		if len(packed) != size {
			return nil, errPageSize
		}
		return packed, nil
	case codecSnappy:
		n, err := snappy.DecodedLen(packed)
		switch {
		case err != nil:
			return nil, fmt.Errorf("its page is damaged: %w", err)
		case n != size || n/maxSnappyRatio > len(packed):
			return nil, errPageSize
		}
		data, err := snappy.Decode(slices.Grow(room[:0], n)[:n], packed)
		if err != nil {
			return nil, fmt.Errorf("its page is damaged: %w", err)
		}
		return data, nil
	}
	var in io.Reader
	if codec == codecGzip {
		z, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			return nil, fmt.Errorf("its page is damaged: %w", err)
		}
		in = z
	} else {
		z, err := zstd.NewReader(bytes.NewReader(packed), zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxZstdWindow))
		if err != nil {
			return nil, fmt.Errorf("its page is damaged: %w", err)
		}
		defer z.Close()
		in = z
	}
	return inflate(in, size, room[:0])
}

// inflate reads size bytes into the memory of data. It is an error if in has fewer or more bytes.
func inflate(in io.Reader, size int, data []byte) ([]byte, error) {
	const first = 1 << 20
	for {
		if len(data) == cap(data) {
			data = slices.Grow(data, min(max(first, len(data)), size-len(data)+1))
		}
		n, err := in.Read(data[len(data):min(cap(data), size+1)])
		data = data[:len(data)+n]
		switch {
		case len(data) > size, err == io.EOF && len(data) < size:
			return nil, errPageSize
		case err == io.EOF:
			return data, nil
		case err != nil:
			return nil, fmt.Errorf("its page is damaged: %w", err)
		}
	}
}
