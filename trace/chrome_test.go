package trace

import (
	"bytes"
	"encoding/json"
	"testing"
)

func TestChromeGolden(t *testing.T) {
	var b bytes.Buffer
	if err := overlapping().WriteChrome(&b); err != nil {
		t.Fatal(err)
	}
	var any struct {
		TraceEvents []map[string]any `json:"traceEvents"`
	}
	if err := json.Unmarshal(b.Bytes(), &any); err != nil || len(any.TraceEvents) < 200 {
		t.Errorf("%d events, %v, want at least 200, nil", len(any.TraceEvents), err)
	}
	golden(t, "overlapping.json", b.Bytes())
}
