// Command opgen generates package torch's operators: a typed method or function for each line of
// ops.txt, with the types and defaults of LibTorch's native_functions.yaml. ops.txt documents the
// notation of a line.
//
// opgen reads native_functions.yaml from TORCHSTREAM_NATIVE_FUNCTIONS, or from the LibTorch of
// `make libtorch-path`.
package main

import (
	"bytes"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/torchstream/torchstream/torch/internal/schema"
)

func main() {
	if err := run("ops.txt", "ops_gen.go"); err != nil {
		fmt.Fprintln(os.Stderr, "opgen:", err)
		os.Exit(1)
	}
}

func run(list, out string) error {
	functions, err := nativeFunctions()
	if err != nil {
		return err
	}
	text, err := os.ReadFile(list)
	if err != nil {
		return err
	}
	ops, err := parseList(list, string(text), functions)
	if err != nil {
		return err
	}
	source, err := generate(ops)
	if err != nil {
		return err
	}
	return os.WriteFile(out, source, 0o644)
}

// native is an entry of native_functions.yaml.
type native struct {
	schema string
	waits  bool // its result, or the result's shape, depends on values: the host waits for a GPU
}

// nativeFunctions returns LibTorch's operators by name and overload.
func nativeFunctions() (map[string]native, error) {
	path := os.Getenv("TORCHSTREAM_NATIVE_FUNCTIONS")
	if path == "" {
		root, err := exec.Command("make", "-s", "-C", "..", "libtorch-path").Output()
		if err != nil {
			return nil, fmt.Errorf("cannot find native_functions.yaml: set TORCHSTREAM_NATIVE_FUNCTIONS, "+
				"or fix `make libtorch-path`: %w", err)
		}
		path = filepath.Join(strings.TrimSpace(string(root)), "torchgen", "packaged", "ATen", "native",
			"native_functions.yaml")
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var entries []struct {
		Func string `yaml:"func"`
		Tags any    `yaml:"tags"` // a name, or a list
	}
	if err := yaml.Unmarshal(text, &entries); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	functions := make(map[string]native, len(entries))
	for _, e := range entries {
		name, _, _ := strings.Cut(e.Func, "(")
		tags := fmt.Sprint(e.Tags)
		// Linear algebra checks for singular matrices without a tag that says so.
		waits := strings.Contains(tags, "data_dependent_output") ||
			strings.Contains(tags, "dynamic_output_shape") || strings.HasPrefix(name, "linalg_")
		functions[name] = native{e.Func, waits}
	}
	return functions, nil
}

// op is one line of the list.
type op struct {
	method  string
	doc     string
	text    string // the schema as in the file
	schema  schema.Schema
	waits   bool
	group   string // the title above the line
	pkgFunc bool
	given   map[string]given // by the argument's name in the schema
	order   []string         // the names of parameters and fields in the order of the list
}

// given describes how the list exposes an argument.
type given struct {
	field    bool   // a field of the options struct
	pointer  bool   // a pointer, because the zero value is not the default
	integer  bool   // a Scalar that is an int64
	variadic bool   // a list of integers as variadic parameter
	fixed    string // a literal; the argument is not exposed
}

func parseList(file, text string, functions map[string]native) ([]op, error) {
	var ops []op
	seen := map[string]bool{}
	group := ""
	for i, line := range strings.Split(text, "\n") {
		if title, ok := strings.CutPrefix(line, "# ---- "); ok {
			group = title
		}
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		o, err := parseLine(line, functions)
		if err != nil {
			return nil, fmt.Errorf("%s:%d: %w", file, i+1, err)
		}
		if seen[o.method] {
			return nil, fmt.Errorf("%s:%d: duplicate method %s", file, i+1, o.method)
		}
		seen[o.method] = true
		o.group = group
		ops = append(ops, o)
	}
	return ops, nil
}

func parseLine(line string, functions map[string]native) (op, error) {
	o := op{given: map[string]given{}}
	decl, doc, ok := strings.Cut(line, "--")
	if !ok {
		return o, fmt.Errorf("no description after \"--\": %s", line)
	}
	o.doc = strings.TrimSpace(doc)
	name, decl, ok := strings.Cut(strings.TrimSpace(decl), " ")
	if !ok {
		return o, fmt.Errorf("no method: %s", line)
	}
	f, ok := functions[name]
	if !ok {
		return o, fmt.Errorf("LibTorch has no operator %s", name)
	}
	o.text, o.waits = f.schema, f.waits
	var err error
	if o.schema, err = schema.Parse(o.text); err != nil {
		return o, err
	}
	decl = strings.TrimSpace(decl)
	decl, o.pkgFunc = strings.CutPrefix(decl, "func ")
	method, args, ok := strings.Cut(decl, "(")
	if !ok || !strings.HasSuffix(args, ")") {
		return o, fmt.Errorf("no argument list: %s", decl)
	}
	o.method = method
	known := map[string]bool{}
	for _, a := range o.schema.Args {
		known[a.Name] = true
	}
	params, fields, hasFields := strings.Cut(strings.TrimSuffix(args, ")"), "{")
	take := func(text string, field bool) error {
		for a := range strings.SplitSeq(text, ",") {
			if a = strings.TrimSpace(a); a == "" {
				continue
			}
			g := given{field: field}
			a, g.fixed, _ = strings.Cut(a, "=")
			a, g.pointer = strings.CutSuffix(a, "?")
			a, g.variadic = strings.CutSuffix(a, "...")
			a, g.integer = strings.CutSuffix(a, " int")
			if !known[a] {
				return fmt.Errorf("%s has no argument %q", name, a)
			}
			o.given[a] = g
			if g.fixed == "" {
				o.order = append(o.order, a)
			}
		}
		return nil
	}
	if err := take(params, false); err != nil {
		return o, err
	}
	if hasFields {
		if err := take(strings.TrimSuffix(fields, "}"), true); err != nil {
			return o, err
		}
	}
	return o, nil
}

func (o op) arg(name string) schema.Arg {
	for _, a := range o.schema.Args {
		if a.Name == name {
			return a
		}
	}
	return schema.Arg{}
}

// receiver returns the name of the schema's first tensor, or "" for a package function.
func (o op) receiver() string {
	if o.pkgFunc {
		return ""
	}
	for _, a := range o.schema.Args {
		if a.Type == "Tensor" {
			return a.Name
		}
	}
	return ""
}

// goType returns the Go type of an argument.
func goType(a schema.Arg, g given) (string, error) {
	if a.Name == "reduction" && a.Type == "int" {
		return "Reduction", nil
	}
	switch base := strings.TrimSuffix(a.Type, "?"); {
	case base == "Tensor":
		return "*Tensor", nil
	case base == "Tensor[]", base == "Tensor?[]":
		return "[]*Tensor", nil
	case base == "Generator":
		return "*Generator", nil
	case base == "Scalar" && g.integer, base == "int":
		return "int64", nil
	case base == "Scalar", base == "float":
		return "float64", nil
	case base == "bool":
		return "bool", nil
	case base == "str":
		return "string", nil
	case base == "ScalarType":
		return "DType", nil
	case base == "MemoryFormat":
		return "MemoryFormat", nil
	case base == "Device":
		return "cuda.Device", nil
	case strings.HasPrefix(base, "int["):
		return "[]int64", nil
	case strings.HasPrefix(base, "float["), strings.HasPrefix(base, "Scalar["):
		return "[]float64", nil
	}
	return "", fmt.Errorf("an argument of type %s cannot be exposed", a.Type)
}

// camel converts "running_mean" to runningMean, or to RunningMean if exported.
func camel(name string, exported bool) string {
	parts := strings.Split(strings.Replace(name, "keepdim", "keep_dim", 1), "_")
	var b strings.Builder
	for i, p := range parts {
		if p == "" {
			continue
		}
		if i > 0 || exported {
			p = strings.ToUpper(p[:1]) + p[1:]
		} else {
			p = strings.ToLower(p[:1]) + p[1:] // the schema's A and B
		}
		b.WriteString(p)
	}
	switch s := b.String(); s {
	case "t", "in", "args", "ints", "text", "o", "func", "type", "range", "map", "var":
		return s + "Arg"
	default:
		return s
	}
}

func generate(ops []op) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString("// Code generated by torch/internal/opgen from ops.txt and LibTorch's " +
		"native_functions.yaml. DO NOT EDIT.\n\n")
	overview(&b, ops)
	b.WriteString("package torch\n\n")
	b.WriteString("import (\n\"github.com/torchstream/torchstream/cuda\"\n\"github.com/torchstream/torchstream/internal/capi\"\n)\n\n")
	b.WriteString("const (\n")
	for i, o := range ops {
		fmt.Fprintf(&b, "op%s", exported(o.method))
		if i == 0 {
			b.WriteString(" operator = iota")
		}
		b.WriteString("\n")
	}
	b.WriteString(")\n\nvar operators = [...]operatorInfo{\n")
	for _, o := range ops {
		fmt.Fprintf(&b, "op%s: {\n%q, %q, %q,\n%s,\n%v, %v,\n},\n", exported(o.method), o.method,
			"aten::"+o.schema.Name, o.schema.Overload,
			literal(o.text), strings.Contains(o.text, "Tensor?[]"), o.waits)
	}
	b.WriteString("}\n")
	options := map[string]string{}
	for _, o := range ops {
		if err := o.write(&b, options); err != nil {
			return nil, fmt.Errorf("%s: %w", o.method, err)
		}
	}
	source, err := format.Source(b.Bytes())
	if err != nil {
		return nil, fmt.Errorf("%w in:\n%s", err, b.Bytes())
	}
	return source, nil
}

// overview writes the part of the package documentation that lists the operators by group, because
// go doc sorts methods by name.
func overview(b *bytes.Buffer, ops []op) {
	b.WriteString("// # Operators by group\n")
	for i, o := range ops {
		if o.group == "" || i > 0 && o.group == ops[i-1].group {
			continue
		}
		var names []string
		for _, other := range ops {
			if other.group != o.group {
				continue
			}
			if name := other.method; other.pkgFunc {
				names = append(names, "["+name+"]")
			} else {
				names = append(names, "[Tensor."+name+"]")
			}
		}
		title, _, _ := strings.Cut(o.group, ";")
		b.WriteString("//\n" + comment(exported(title)+": "+strings.Join(names, ", ")+"."))
	}
}

func exported(name string) string { return strings.ToUpper(name[:1]) + name[1:] }

// write writes the method and its options struct. It omits a struct that known already has, because
// an operator and its in-place form share their options.
func (o op) write(b *bytes.Buffer, known map[string]string) error {
	var params []string
	options := false
	receiver := o.receiver()
	for _, name := range o.order {
		g, a := o.given[name], o.arg(name)
		if g.field {
			options = true
			continue
		}
		t, err := goType(a, g)
		if err != nil {
			return err
		}
		if g.variadic {
			t = "..." + strings.TrimPrefix(t, "[]")
		}
		params = append(params, camel(name, false)+" "+t)
	}
	if options {
		if err := o.writeOptions(b, known); err != nil {
			return err
		}
		params = append(params, "o "+o.optionsName())
	}
	results, how, err := o.results()
	if err != nil {
		return err
	}
	verb := "returns"
	switch how {
	case "truth":
		verb = "reports"
	case "self", "none":
		verb = "works in place:"
	}
	b.WriteString("\n" + comment(fmt.Sprintf("%s %s %s.", o.method, verb, o.doc)) + "//\n" +
		preformatted("aten::"+o.text))
	function := "func " + o.method
	if receiver != "" {
		function = "func (t *Tensor) " + o.method
	}
	b.WriteString(signature(function, params, results))
	return o.writeBody(b, receiver, how)
}

// results returns the Go types of the operator's results, and the function of the body that returns
// them.
func (o op) results() (types, how string, err error) {
	tensors, list, truth := 0, false, false
	for _, r := range o.schema.Returns {
		switch {
		case r.Type == "bool" && len(o.schema.Returns) == 1:
			truth = true
		case r.Type == "Tensor":
			tensors++
		case r.Type == "Tensor[]" && len(o.schema.Returns) == 1:
			list = true
		default:
			return "", "", fmt.Errorf("results (%s) are not supported",
				o.text[strings.LastIndex(o.text, " -> ")+len(" -> "):])
		}
	}
	switch {
	case list:
		return "([]*Tensor, error)", "list", nil
	case truth:
		return "(bool, error)", "truth", nil
	case tensors == 0:
		return "error", "none", nil
	case tensors == 1 && o.schema.Returns[0].Written:
		return "*Tensor", "self", nil
	case tensors == 1:
		return "*Tensor", "one", nil
	case tensors == 2:
		return "(*Tensor, *Tensor)", "two", nil
	case tensors == 3:
		return "(*Tensor, *Tensor, *Tensor)", "three", nil
	case tensors == 4:
		return "(*Tensor, *Tensor, *Tensor, *Tensor)", "four", nil
	default:
		return "", "", fmt.Errorf("%d results are not supported", tensors)
	}
}

// signature returns the first line of a function, or as many lines as its parameters need in 100
// columns.
func signature(function string, params []string, results string) string {
	const columns = 100
	var b strings.Builder
	line := function + "("
	for i, p := range params {
		switch {
		case i == 0:
		case utf8.RuneCountInString(line)+len(", ")+utf8.RuneCountInString(p) > columns:
			b.WriteString(line + ",\n")
			line = "\t"
		default:
			line += ", "
		}
		line += p
	}
	return b.String() + line + ") " + results + " {\n"
}

// literal returns the text as a string literal, or as a sum of literals of at most 90 bytes.
func literal(text string) string {
	const most = 90
	var parts []string
	for len(text) > most {
		cut := strings.LastIndex(text[:most], " ") + 1
		if cut == 0 {
			break
		}
		parts = append(parts, strconv.Quote(text[:cut]))
		text = text[cut:]
	}
	return strings.Join(append(parts, strconv.Quote(text)), " +\n")
}

// comment returns the text as a comment of at most 100 columns.
func comment(text string) string { return wrap(text, "// ", "// ", 100) }

// preformatted returns the text as preformatted lines of a comment.
func preformatted(text string) string {
	// gofmt keeps a tab, of four columns here, in front of preformatted text.
	return wrap(text, "//\t", "//\t    ", 97)
}

// wrap breaks the text at spaces into lines of at most columns characters. The first line starts
// with first, and all other lines with next.
func wrap(text, first, next string, columns int) string {
	var b strings.Builder
	line, words := first, 0
	for word := range strings.FieldsSeq(text) {
		if words > 0 && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > columns {
			b.WriteString(line + "\n")
			line, words = next, 0
		}
		if words > 0 {
			line += " "
		}
		line += word
		words++
	}
	return b.String() + line + "\n"
}

func (o op) optionsName() string {
	return exported(strings.TrimSuffix(strings.TrimSuffix(o.method, "_"), "With")) + "Options"
}

func (o op) writeOptions(out *bytes.Buffer, known map[string]string) error {
	name := o.optionsName()
	var b strings.Builder
	for _, n := range o.order {
		g, a := o.given[n], o.arg(n)
		if !g.field {
			continue
		}
		t, err := goType(a, g)
		if err != nil {
			return err
		}
		if g.pointer {
			t = "*" + t
		}
		def := a.Default
		if !a.HasDefault {
			return fmt.Errorf("%s has no default, so it cannot be an option", n)
		}
		fmt.Fprintf(&b, "%s %s // default %s\n", camel(n, true), t, strings.ReplaceAll(def, "None", "none"))
	}
	if fields, ok := known[name]; ok {
		if fields != b.String() {
			return fmt.Errorf("another operator has other options of the name %s", name)
		}
		return nil
	}
	known[name] = b.String()
	fmt.Fprintf(out, "\n// %s are the options of %s. The zero value of a field selects its "+
		"default.\ntype %s struct {\n%s}\n",
		name, strings.TrimSuffix(o.method, "_"), name, &b)
	return nil
}

// body is the body of a generated method.
type body struct {
	o        op
	receiver string
	lists    bool     // an argument is a list of tensors, so the number of operands is not constant
	operands []string // the operands, if their number is constant
	before   []string // statements before the literal of the arguments
	literal  []string // the arguments; a statement in after sets those that may be absent
	after    []string // statements after the literal
	ints     bool     // an argument is a list of integers
	texts    bool     // an argument is a string
}

// writeBody writes the operands, the arguments and the call of the operator.
func (o op) writeBody(b *bytes.Buffer, receiver, how string) error {
	args, err := o.usedArgs(receiver)
	if err != nil {
		return err
	}
	c := body{o: o, receiver: receiver}
	for _, a := range args {
		if g, ok := o.given[a.Name]; ok &&
			(strings.HasPrefix(a.Type, "Tensor[]") || strings.HasPrefix(a.Type, "Tensor?[]")) && g.fixed == "" {
			c.lists = true
		}
	}
	if c.lists {
		c.before = append(c.before, "in := make([]*Tensor, 0, 16)\n")
	}
	for i, a := range args {
		if err := c.argument(i, a); err != nil {
			return err
		}
	}
	c.write(b, how)
	return nil
}

// usedArgs returns the schema's arguments up to the last one that the list names. LibTorch supplies
// the defaults of the later ones.
func (o op) usedArgs(receiver string) ([]schema.Arg, error) {
	last := -1
	for i, a := range o.schema.Args {
		if _, ok := o.given[a.Name]; ok || a.Name == receiver {
			last = i
		}
	}
	for _, a := range o.schema.Args[last+1:] {
		if !a.HasDefault {
			return nil, noDefault(a)
		}
	}
	return o.schema.Args[:last+1], nil
}

func noDefault(a schema.Arg) error {
	return fmt.Errorf("argument %s has no default and must be in the list", a.Name)
}

// operand adds an operand and returns its index as an expression.
func (c *body) operand(name string) string {
	if c.lists {
		// The index is read before later operands follow.
		index := fmt.Sprintf("at%d", len(c.literal))
		c.before = append(c.before, fmt.Sprintf("%s := len(in)\nin = append(in, %s)\n", index, name))
		return index
	}
	c.operands = append(c.operands, name)
	return strconv.Itoa(len(c.operands) - 1)
}

func (c *body) add(format string, args ...any) {
	c.literal = append(c.literal, fmt.Sprintf(format, args...))
}

// setLater gives argument i its default and adds a statement that may replace it.
func (c *body) setLater(literal, condition, statement string) {
	c.add("%s", literal)
	if condition != "" {
		statement = fmt.Sprintf("if %s {\n%s}\n", condition, statement)
	}
	c.after = append(c.after, statement)
}

// argument adds argument i.
func (c *body) argument(i int, a schema.Arg) error {
	g, given := c.o.given[a.Name]
	switch {
	case a.Name == c.receiver:
		c.add("tensorArg(%s)", c.operand("t"))
		return nil
	case !given && !a.HasDefault:
		return noDefault(a)
	case !given:
		c.add("defaultArg()")
		return nil
	case g.fixed != "":
		literal, err := fixed(g.fixed)
		if err != nil {
			return err
		}
		c.add("%s", literal)
		return nil
	}
	t, err := goType(a, g)
	if err != nil {
		return err
	}
	value := camel(a.Name, false)
	if g.field {
		value = "o." + camel(a.Name, true)
	}
	switch t {
	case "*Tensor":
		c.tensor(a, value)
	case "[]*Tensor":
		start := fmt.Sprintf("at%d", i)
		c.before = append(c.before, fmt.Sprintf("%s := len(in)\nin = append(in, %s...)\n", start, value))
		c.add("tensorsArg(%s, len(%s))", start, value)
	case "[]int64":
		c.list(i, a, g, value, "intsArg")
	case "[]float64":
		c.list(i, a, g, value, "floatsArg")
	case "*Generator":
		c.generator(i, a, value)
	case "string":
		c.text(i, g, value)
	default:
		return c.scalar(i, a, g, t, value)
	}
	return nil
}

func (c *body) tensor(a schema.Arg, value string) {
	if strings.HasSuffix(a.Type, "?") {
		c.add("optionalArg(%s, %s)", c.operand(value), value)
		return
	}
	c.add("tensorArg(%s)", c.operand(value))
}

// generator adds a Generator?. The generator stays open until the call has returned.
func (c *body) generator(i int, a schema.Arg, value string) {
	c.before = append(c.before, fmt.Sprintf("use, err := %s.arg()\nif err != nil {\nreturn "+
		"failed(opError(%q, nil, err))\n}\ndefer %s.release()\n",
		value, c.o.method, value))
	c.add("use")
}

func (c *body) list(i int, a schema.Arg, g given, value, make string) {
	c.ints = true
	set := fmt.Sprintf("args[%d], ints = %s(ints, %s)\n", i, make, value)
	switch {
	case g.field && a.Default != "None" || a.HasDefault && g.field:
		c.setLater("defaultArg()", value+" != nil", set)
	case strings.HasSuffix(a.Type, "?"):
		c.setLater("noneArg()", value+" != nil", set)
	default:
		c.setLater("defaultArg()", "", set)
	}
}

func (c *body) text(i int, g given, value string) {
	c.texts = true
	condition := ""
	if g.field {
		condition = value + ` != ""`
	}
	c.setLater("defaultArg()", condition, fmt.Sprintf("args[%d], text = stringArg(text, %s)\n", i, value))
}

// scalar adds an argument of a type that is no tensor, list or string. The zero value of a field
// selects the schema's default.
func (c *body) scalar(i int, a schema.Arg, g given, t, value string) error {
	zero := ""
	switch {
	case t == "Reduction":
	case g.pointer:
		zero, value = value+" == nil", "*"+value
	case g.field && (t == "int64" || t == "float64"):
		zero = value + " == 0"
	}
	var expr string
	switch t {
	case "Reduction":
		expr = fmt.Sprintf("intArg(%s.libtorch())", value)
	case "int64":
		expr = fmt.Sprintf("intArg(%s)", value)
	case "float64":
		expr = fmt.Sprintf("floatArg(%s)", value)
	case "bool":
		expr = fmt.Sprintf("boolArg(%s)", value)
		if g.field && !g.pointer && a.Default != "False" {
			return fmt.Errorf("the default of %s is %s, so false cannot stand for it", a.Name, a.Default)
		}
	case "DType", "MemoryFormat":
		expr = fmt.Sprintf("intArg(int64(%s))", value)
	case "cuda.Device":
		expr = fmt.Sprintf("deviceArg(int32(%s))", value)
	}
	if zero != "" {
		c.setLater("defaultArg()", "!("+zero+")", fmt.Sprintf("args[%d] = %s\n", i, expr))
		return nil
	}
	c.add("%s", expr)
	return nil
}

// write writes the statements and the call.
func (c *body) write(b *bytes.Buffer, how string) {
	b.WriteString(strings.Join(c.before, ""))
	in, args, lists := "in", fmt.Sprintf("[]capi.Arg{%s}", strings.Join(c.literal, ", ")), "nil"
	var fields []string
	if !c.lists {
		in = fmt.Sprintf("[]*Tensor{%s}", strings.Join(c.operands, ", "))
	}
	if c.ints {
		b.WriteString("ints := make([]int64, 0, 16)\n")
		fields = append(fields, "Ints: ints")
	}
	if c.texts {
		b.WriteString("text := make([]byte, 0, 32)\n")
		fields = append(fields, "Text: text")
	}
	if fields != nil {
		lists = fmt.Sprintf("&capi.Lists{%s}", strings.Join(fields, ", "))
	}
	call := fmt.Sprintf("op%s.%s(%s, %s, %s)", exported(c.o.method), how, in, args, lists)
	const columns = 100
	if len(c.after) > 0 || len("\treturn ")+len(call) > columns {
		if len("\targs := ")+len(args) > columns {
			args = fmt.Sprintf("[]capi.Arg{\n%s,\n}", strings.Join(c.literal, ",\n"))
		}
		fmt.Fprintf(b, "args := %s\n", args)
		args = "args"
		b.WriteString(strings.Join(c.after, ""))
	}
	fmt.Fprintf(b, "return op%s.%s(%s, %s, %s)\n}\n", exported(c.o.method), how, in, args, lists)
}

func fixed(text string) (string, error) {
	switch text {
	case "true", "false":
		return fmt.Sprintf("boolArg(%s)", text), nil
	case "none":
		return "noneArg()", nil
	}
	if _, err := strconv.ParseInt(text, 10, 64); err == nil {
		return fmt.Sprintf("intArg(%s)", text), nil
	}
	if _, err := strconv.ParseFloat(text, 64); err == nil {
		return fmt.Sprintf("floatArg(%s)", text), nil
	}
	return "", fmt.Errorf("a fixed value %q is not supported", text)
}
