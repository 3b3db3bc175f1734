package trace

import (
	"image/png"
	"os"
	"path/filepath"
	"testing"
)

// The PNG shows the same shapes as the SVG. The test samples pixels, because compressors change.
func TestPNGShowsTheShapes(t *testing.T) {
	name := filepath.Join(t.TempDir(), "timeline.PNG")
	tr := overlapping()
	if err := tr.WriteFile(name, PictureOptions{Title: "a title"}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	picture, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	p := tr.draw(PictureOptions{Title: "a title"})
	if size := picture.Bounds().Size(); float64(size.X) != 2*p.width || float64(size.Y) != 2*p.height {
		t.Errorf("got %v pixels for a picture of %g × %g, want twice as many", size, p.width, p.height)
	}
	checked := 0
	for i, s := range p.shapes {
		if r := s.rect; r != nil && r.w > 20 && r.h > 10 && i > 0 && r.tip != "" {
			red, green, blue, _ := picture.At(int(2*(r.x+3)), int(2*(r.y+2))).RGBA()
			if uint8(red>>8) != r.fill.R || uint8(green>>8) != r.fill.G || uint8(blue>>8) != r.fill.B {
				t.Errorf("the pixel at %g, %g is not %v", r.x, r.y, r.fill)
			}
			checked++
		}
	}
	if checked < 20 {
		t.Errorf("only %d rectangles were checked, want 20", checked)
	}
}
