package trace

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"testing"
)

func TestSVGGolden(t *testing.T) {
	var b bytes.Buffer
	if err := overlapping().WriteSVG(&b, PictureOptions{Title: "two devices, <one> gap"}); err != nil {
		t.Fatal(err)
	}
	golden(t, "overlapping.svg", b.Bytes())
	decoder := xml.NewDecoder(&b)
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}
