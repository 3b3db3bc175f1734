package imageloader

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"testing"
)

// The comment of a type that is an alias lists the fields of that type, which go doc does not show.
func TestCommentsOfAliasesListFields(t *testing.T) {
	for _, c := range []struct {
		file, name string
		of         reflect.Type
	}{
		{"batch.go", "Sample", reflect.TypeFor[Sample]()},
		{"options.go", "Part", reflect.TypeFor[Part]()},
		{"options.go", "ListFormat", reflect.TypeFor[ListFormat]()},
	} {
		text, err := os.ReadFile(c.file)
		if err != nil {
			t.Fatal(err)
		}
		comment := regexp.MustCompile(`(?m)((?:^//.*\n)+)type ` + c.name + ` = `)
		found := comment.FindSubmatch(text)
		if found == nil {
			t.Fatalf("%s: no comment of type %s = ..., want one", c.file, c.name)
		}
		var got, want []string
		for _, field := range regexp.MustCompile(`(?m)^//\t(\w+) +(\S+)`).FindAllSubmatch(found[1], -1) {
			got = append(got, fmt.Sprintf("%s %s", field[1], field[2]))
		}
		for i := range c.of.NumField() {
			field := c.of.Field(i)
			want = append(want, field.Name+" "+field.Type.String())
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: the comment lists %q, want %q", c.name, got, want)
		}
	}
}
