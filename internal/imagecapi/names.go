package imagecapi

import (
	"path"
	"runtime"
	"strings"
	"unicode"
	"unicode/utf8"
)

// callName returns the exported function or method of this module that the program called, for
// example "cuda.Event.Record". It is the innermost such call outside internal packages. In a
// goroutine started by the module there is none, and callName returns the exported function of an
// internal package without the package name, for example "EventElapsed".
func callName() string {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])]) // includes callName itself
	module, within := "", ""
	for {
		f, more := frames.Next()
		if module == "" {
			module = strings.TrimSuffix(f.Function, "internal/imagecapi.callName")
		}
		if rest, ours := strings.CutPrefix(f.Function, module); ours && !strings.HasSuffix(f.File, "_test.go") {
			folder, name := exported(rest)
			switch {
			case name == "":
			case !strings.Contains("/"+folder, "/internal/"):
				return path.Base(folder) + "." + name
			case within == "" && name != "NewFailure" && name != "TakeError" && name != "NotLoaded":
				within = name
			}
		}
		if !more {
			return within
		}
	}
}

// exported splits a function's name without its module into the package's folder and the name as a
// program writes it: "Event.Elapsed" for "cuda.(*Event).Elapsed". The name is empty if a part of it
// is not exported. A closure has no name; its enclosing function has one.
func exported(function string) (folder, name string) {
	if at := strings.IndexByte(function, '['); at >= 0 { // the types of a generic function
		function = function[:at] + function[strings.LastIndexByte(function, ']')+1:]
	}
	at := strings.LastIndexByte(function, '/') + 1
	pkg, name, _ := strings.Cut(function[at:], ".")
	name = strings.NewReplacer("(*", "", ")", "").Replace(name)
	for part := range strings.SplitSeq(name, ".") {
		if first, _ := utf8.DecodeRuneInString(part); !unicode.IsUpper(first) {
			return function[:at] + pkg, ""
		}
	}
	return function[:at] + pkg, name
}

// goWords replaces C header names in an error message with their Go equivalents.
func goWords(message string) string {
	var b strings.Builder
	for {
		start, end := cName(message)
		if start < 0 {
			b.WriteString(message)
			return b.String()
		}
		b.WriteString(message[:start])
		b.WriteString(goName(message[start:end]))
		message = message[end:]
	}
}

// cName returns the position of the first C header name in a text, or -1.
func cName(text string) (start, end int) {
	for at := 0; at+3 <= len(text); at++ {
		if prefix := text[at : at+3]; prefix != "ts_" && prefix != "TS_" || at > 0 && inName(text[at-1]) {
			continue
		}
		for end = at + 3; end < len(text) && inName(text[end]); end++ {
		}
		return at, end
	}
	return -1, -1
}

func inName(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}

// goName returns the Go equivalent of a C header name. A test compares the names with the messages
// in the C++ sources.
func goName(c string) string {
	switch c {
	case "TS_EVENT_FLAG_TIMING":
		return "cuda.EventOptions{Timing: true}"
	case "TS_EVENT_FLAG_INTERPROCESS":
		return "cuda.EventOptions{Interprocess: true}"
	case "TS_MEMORY_FORMAT_CONTIGUOUS":
		return "torch.Contiguous"
	case "TS_MEMORY_FORMAT_CHANNELS_LAST":
		return "torch.ChannelsLast"
	case "TS_INTERPOLATION_":
		return "transform.Interpolation"
	case "TS_IMAGE_DAMAGE_":
		return "decode.DamagePolicy"
	case "ts_graph_keep_for_dump":
		return "cuda.CaptureOptions{Debug: true}"
	case "ts_capture_wait":
		return "cuda.Capture"
	case "ts_image_plan_scan":
		return "PlanScan"
	case "ts_image_plan_segments":
		return "PlanSegments"
	case "ts_operator_call_list":
		return "torch.Call"
	case "ts_stream_acquire":
		return "cuda.NewOwnedStream"
	case "ts_stream_release":
		return "cuda.OwnedStream.Close"
	case "ts_tensor_backward":
		return "torch.Tensor.Backward"
	}
	return c
}
