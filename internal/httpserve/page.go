package httpserve

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"github.com/torchstream/torchstream/serve"
)

//go:embed page.html
var page []byte

// Page answers with a page on which a photograph can be dropped. It posts the photograph to the
// page's address and shows the classes of the JSON answer, its times and the time that the browser
// measures. It loads nothing else.
func Page(w http.ResponseWriter, _ *http.Request) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy",
		"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob:; connect-src 'self'")
	_, _ = w.Write(page) // fails if the client is gone
}

// Class is one class of an Answer.
type Class struct {
	Class       string  `json:"class"`
	Label       int     `json:"label"`       // the class's number in the network
	Probability float64 `json:"probability"` // from 0 to 1
}

// Answer is the JSON answer to an upload.
type Answer struct {
	Classes []Class `json:"classes"`  // the most probable first
	Batch   int     `json:"batch"`    // requests in the batch
	QueueMS float64 `json:"queue_ms"` // until a worker took the request, decoding included
	ModelMS float64 `json:"model_ms"` // in the worker
}

// NewAnswer returns the most probable classes, at most top of them, from the probabilities that are
// the first output of a. A class without a name has its number as its name.
func NewAnswer(a serve.Answer, classes []string, top int) Answer {
	answer := Answer{Batch: a.Batch, QueueMS: 1e3 * a.Waited.Seconds(), ModelMS: 1e3 * a.Ran.Seconds()}
	for _, label := range mostProbable(a.Outputs[0].Values, top) {
		c := Class{Class: strconv.Itoa(label), Label: label, Probability: float64(a.Outputs[0].Values[label])}
		if label < len(classes) {
			c.Class = classes[label]
		}
		answer.Classes = append(answer.Classes, c)
	}
	return answer
}

// mostProbable returns at most top labels with the largest probabilities, in descending order.
// Labels with the same probability are in ascending order.
func mostProbable(probabilities []float32, top int) []int {
	top = min(top, len(probabilities))
	labels := make([]int, 0, top)
	for label, p := range probabilities {
		if len(labels) == top {
			if top == 0 || cmp.Compare(p, probabilities[labels[top-1]]) <= 0 {
				continue
			}
			labels = labels[:top-1]
		}
		at, _ := slices.BinarySearchFunc(labels, p, func(other int, p float32) int {
			if cmp.Compare(probabilities[other], p) >= 0 {
				return -1
			}
			return 1
		})
		labels = slices.Insert(labels, at, label)
	}
	return labels
}

// WriteAnswer answers a request with JSON. JSON has no NaN, so a NaN that the model computed is an
// error of the server, as in WriteError.
func WriteAnswer(w http.ResponseWriter, r *http.Request, a Answer) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(a); err != nil {
		WriteError(w, r, fmt.Errorf("the model's probabilities: %w", err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(text.Bytes()) // fails if the client is gone
}
