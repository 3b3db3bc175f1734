package nn_test

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func TestLoadRemovesPrefixesOfAllNames(t *testing.T) {
	want := expectedLoads(t)["network"].State
	removed := func(what string) string { return `the prefix "` + what + `" is removed from the file's names` }
	wrapper := `"_orig_mod." is removed from the file's names`
	for file, notes := range map[string][]string{
		"data_parallel.pt":              {removed("module.")},
		"compiled.pt":                   {wrapper},
		"compiled_parallel.safetensors": {wrapper, removed("module.")},
		"compiled_layer.safetensors":    {wrapper},
		"lightning.ckpt":                {removed("model.")},
		"averaged_model.pt": {removed("module."),
			"the weights are averages of an AveragedModel, which counts them in n_averaged"},
		"dict_net.pt":            nil,
		"dict_weird_name.pt":     nil,
		"dict_params_ema.pt":     {`the weights are the averages "params_ema" of the file`},
		"dict_state_dict_ema.pt": {`the weights are the averages "state_dict_ema" of the file`},
	} {
		for _, partial := range []bool{false, true} {
			net := loadingNet(t)
			r, err := nn.LoadWith(loading(file), net, nn.LoadOptions{Partial: partial})
			if err != nil {
				t.Errorf("%s, partial %v: %v, want no error", file, partial, err)
				continue
			}
			checkState(t, file, net, want)
			if !slices.Equal(r.Notes, notes) || len(r.Unexpected) != 0 || r.Share() != 1 {
				t.Errorf("%s: got the notes %q, unexpected %q, share %v; want %q, none, 1", file, r.Notes,
					r.Unexpected, r.Share(), notes)
			}
		}
	}
}

// A network's names may look like a wrapper's.
func TestLoadKeepsPrefixesThatTheModuleHas(t *testing.T) {
	inner := loadingNet(t)
	parts := nn.Parts{Modules: []nn.Child{{Name: "module", Module: inner}}}
	whole := masked{parts: parts}
	r, err := nn.LoadWith(loading("data_parallel.pt"), whole, nn.LoadOptions{})
	if err != nil || len(r.Notes) != 0 {
		t.Fatalf("got %v, %v, want no notes", r, err)
	}
	checkState(t, "data_parallel.pt", inner, expectedLoads(t)["network"].State)
}

// A published base model lacks the prefix that it has inside a model with a head.
func TestLoadAddsAPrefixOfTheModule(t *testing.T) {
	for file, note := range map[string]string{
		"dict_net.pt":      `the prefix "transformer." is added to the file's names`,
		"data_parallel.pt": `the prefix "module." is removed from the file's names`,
	} {
		inner := loadingNet(t)
		whole := masked{parts: nn.Parts{Modules: []nn.Child{{Name: "transformer", Module: inner}}}}
		r, err := nn.LoadWith(loading(file), whole, nn.LoadOptions{})
		if err != nil || !slices.Contains(r.Notes, note) {
			t.Errorf("%s: got %v, %v, want the note %q", file, r, err, note)
			continue
		}
		checkState(t, file, inner, expectedLoads(t)["network"].State)
	}
}

func TestLoadOptionsRename(t *testing.T) {
	net := loadingNet(t)
	_, err := nn.Load(loading("detector.safetensors"), net)
	for _, want := range []string{`10 tensors: "backbone.1.num_batches_tracked", "backbone.0.bias", "backbone.0.weight", `,
		`9 of its names are the module's behind "backbone.": remove it with LoadOptions.Rename`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	rename := func(name string) string {
		rest, ok := strings.CutPrefix(name, "backbone.")
		if !ok {
			return ""
		}
		return rest
	}
	r, err := nn.LoadWith(loading("detector.safetensors"), net, nn.LoadOptions{Rename: rename})
	if err != nil || len(r.Unexpected) != 0 || r.Share() != 1 {
		t.Fatalf("got %v, %v, want all numbers and nothing unexpected", r, err)
	}
	checkState(t, "detector", net, expectedLoads(t)["network"].State)

	// With Rename, only Rename changes names.
	same := func(name string) string { return name }
	if _, err := nn.LoadWith(loading("data_parallel.pt"), net, nn.LoadOptions{Rename: same}); err == nil {
		t.Error("Load of prefixed names with a Rename that keeps them: got no error, want one")
	}
	one := func(string) string { return "0.bias" }
	_, err = nn.LoadWith(loading("detector.safetensors"), net, nn.LoadOptions{Rename: one, Partial: true})
	if err == nil || !strings.Contains(err.Error(), "both become 0.bias") {
		t.Errorf("two tensors of one name: got %v, want an error with \"both become 0.bias\"", err)
	}
}

func TestLoadReportsAveragesItDoesNotLoad(t *testing.T) {
	net := loadingNet(t)
	r, err := nn.LoadWith(loading("raw_and_averages.pt"), net, nn.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const want = `the file also has averages, which are not loaded: "model_ema.module" (9 tensors): LoadOptions.Dict names them`
	if !slices.Equal(r.Notes, []string{want}) || !strings.Contains(r.String(), want) {
		t.Errorf("got the notes %q, want %q", r.Notes, want)
	}
	for name, v := range stateNumbers(t, net) {
		if v[0] != 0 {
			t.Errorf("%s is %v, want the zeros of state_dict", name, v)
		}
	}
	if _, err = nn.LoadWith(loading("raw_and_averages.pt"), net, nn.LoadOptions{Dict: "model_ema.module"}); err != nil {
		t.Fatal(err)
	}
	checkState(t, "model_ema.module", net, expectedLoads(t)["network"].State)
	_, err = nn.LoadWith(loading("raw_and_averages.pt"), net, nn.LoadOptions{Dict: "model_ema"})
	if err == nil || !strings.Contains(err.Error(),
		`there is no dict of tensors "model_ema"; the file has "state_dict" (9 tensors), "model_ema.module" (9 tensors)`) {
		t.Errorf("a dict without tensors: got %v", err)
	}
}

func TestNameErrorListsTheFilesTensors(t *testing.T) {
	for file, wants := range map[string][]string{
		"unrelated.safetensors": {"tensor 0.weight is not in the file",
			`the file has 7 tensors: "encoder.0.gain", "encoder.1.gain", "encoder.2.gain", "encoder.3.gain", "encoder.4.gain", ...`},
		"gan.pt": {`the file has no tensors by name outside of dicts; ` +
			`its dicts of tensors are "generator" (9 tensors), "critic" (1 tensors): LoadOptions.Dict names one`},
	} {
		_, err := nn.Load(loading(file), loadingNet(t))
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want %q", file, err, want)
			}
		}
	}
	net := loadingNet(t)
	if _, err := nn.LoadWith(loading("gan.pt"), net, nn.LoadOptions{Dict: "generator"}); err != nil {
		t.Fatal(err)
	}
	checkState(t, "gan.pt", net, expectedLoads(t)["network"].State)
}

// tiedNet is the network of tied.safetensors. It lists the tied tensor under the given names, one
// or both.
func tiedNet(t *testing.T, names ...string) nn.Module {
	t.Helper()
	m := nn.NewEmbedding(5, 3, nn.EmbeddingOptions{})
	t.Cleanup(func() { nn.Close(m) })
	fillState(t, m)
	var parts nn.Parts
	for _, name := range names {
		parts.Parameters = append(parts.Parameters, torch.Named{Name: name, Tensor: m.Weight})
	}
	return masked{parts: parts}
}

func TestLoadReadsTiedWeights(t *testing.T) {
	want := expectedLoads(t)["tied.safetensors"].State
	const head, tokens = "a_head.weight", "tokens.weight"
	for _, file := range []string{"tied.safetensors", "tied.pt"} {
		for _, names := range [][]string{{head}, {tokens}, {head, tokens}} {
			for _, partial := range []bool{false, true} {
				net := tiedNet(t, names...)
				r, err := nn.LoadWith(loading(file), net, nn.LoadOptions{Partial: partial})
				if err != nil || r.Share() != 1 || r.Parameters != 1 || r.AllParameters != 1 ||
					r.Elements != 15 || r.AllElements != 15 || !slices.Equal(r.Loaded, names) ||
					len(r.Unexpected) != 0 {
					t.Errorf("%s into %q, partial %v: got %v, %v, want all loaded and nothing unexpected",
						file, names, partial, r, err)
					continue
				}
				var notes []string
				if file == "tied.safetensors" && slices.Contains(names, tokens) {
					notes = []string{"tokens.weight is the tied tensor a_head.weight of the file"}
				}
				if !slices.Equal(r.Notes, notes) {
					t.Errorf("%s into %q: got the notes %q, want %q", file, names, r.Notes, notes)
				}
				got := stateNumbers(t, net)[names[0]]
				if !slices.Equal(got, want[names[0]]) {
					t.Errorf("%s into %q: got %v, want %v", file, names, got, want[names[0]])
				}
			}
		}
	}
	// A network that lists both names of one tensor needs only one of them.
	path := filepath.Join(t.TempDir(), "one.safetensors")
	one := tiedNet(t, tokens)
	if err := nn.Save(path, one, nil); err != nil {
		t.Fatal(err)
	}
	if r, err := nn.LoadWith(path, tiedNet(t, head, tokens), nn.LoadOptions{}); err != nil ||
		!slices.Equal(r.Loaded, []string{head, tokens}) {
		t.Errorf("one of two names: got %v, %v, want %s and %s loaded, nil", r, err, head, tokens)
	}
	// Tensors of equal values are not tied.
	value, err := torch.FromSlice([]float32{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	defer value.Close()
	copied := value.Clone()
	defer copied.Close()
	path = filepath.Join(t.TempDir(), "copies.pt")
	if err := checkpoint.Save(path, []torch.Named{{Name: "a", Tensor: value}, {Name: "b", Tensor: copied}},
		nil); err != nil {
		t.Fatal(err)
	}
	single := masked{parts: nn.Parts{Parameters: []torch.Named{{Name: "a", Tensor: value}}}}
	for _, file := range []string{path, loading("halves.pt")} {
		if _, err := nn.Load(file, single); err == nil ||
			!strings.Contains(err.Error(), "tensor b is not in the module") {
			t.Errorf("%s: got %v, want an error that names b", file, err)
		}
	}
}

func TestLoadReadsAnIndexOfPyTorchFiles(t *testing.T) {
	net := loadingNet(t)
	if _, err := nn.Load(loading("pytorch_model.bin.index.json"), net); err != nil {
		t.Fatal(err)
	}
	checkState(t, "pytorch_model.bin.index.json", net, expectedLoads(t)["network"].State)
}

// vectors returns a module of parameters [2] with these names.
func vectors(t *testing.T, value float32, names ...string) masked {
	t.Helper()
	var parts nn.Parts
	for _, name := range names {
		x, err := torch.FromSlice([]float32{value, value})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		parts.Parameters = append(parts.Parameters, torch.Named{Name: name, Tensor: x})
	}
	return masked{parts: parts}
}

// A prefix is removed only if more names fit without it.
func TestLoadKeepsNamesThatFitAsWell(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net.safetensors")
	if err := nn.Save(path, vectors(t, 1, "a.w", "a.x"), nil); err != nil {
		t.Fatal(err)
	}
	net := vectors(t, 9, "w", "a.w")
	r, err := nn.LoadWith(path, net, nn.LoadOptions{Partial: true})
	if err != nil || !slices.Equal(r.Loaded, []string{"a.w"}) || len(r.Notes) != 0 {
		t.Errorf("got %v, %v, want a.w alone and no note", r, err)
	}
}

// The keys of training programs take precedence, whatever the order in the file.
func TestLoadPrefersKnownDicts(t *testing.T) {
	for _, c := range []struct{ first, second, want string }{
		{"net", "state_dict", "state_dict"}, {"net", "model_state_dict", "model_state_dict"}, {"net", "model", "model"},
		{"ema", "net", "net"}, {"teacher", "params", "params"},
	} {
		path := filepath.Join(t.TempDir(), "net.pt")
		value := map[string]any{}
		for _, key := range []string{c.first, c.second} {
			number := map[bool]float32{true: 1, false: 2}[key == c.want]
			value[key] = nn.State(vectors(t, number, "w"))
		}
		if err := checkpoint.SavePyTorch(path, value); err != nil {
			t.Fatal(err)
		}
		net := vectors(t, 9, "w")
		if _, err := nn.Load(path, net); err != nil {
			t.Errorf("%s and %s: %v, want no error", c.first, c.second, err)
			continue
		}
		if got := stateNumbers(t, net)["w"]; got[0] != 1 {
			t.Errorf("%s and %s: got %v, want the numbers of %s", c.first, c.second, got, c.want)
		}
	}
}

// An error names a weight that cannot be read, with the reason.
func TestErrorNamesWeightsThatAreNotRead(t *testing.T) {
	_, err := nn.Load("../checkpoint/internal/ptfile/testdata/quantized.pt", vectors(t, 9, "w"))
	if err == nil || !strings.Contains(err.Error(), "is not read") {
		t.Errorf("got %v, want what is not read", err)
	}
}
