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
	if size := picture.Bounds().Size(); float64(size.X) != 2*p.Width || float64(size.Y) != 2*p.Height {
		t.Errorf("got %v pixels for a picture of %g × %g, want twice as many", size, p.Width, p.Height)
	}
	checked := 0
	for i, s := range p.Shapes {
		if r := s.Rect; r != nil && r.W > 20 && r.H > 10 && i > 0 && r.Tip != "" {
			red, green, blue, _ := picture.At(int(2*(r.X+3)), int(2*(r.Y+2))).RGBA()
			if uint8(red>>8) != r.Fill.R || uint8(green>>8) != r.Fill.G || uint8(blue>>8) != r.Fill.B {
				t.Errorf("the pixel at %g, %g is not %v, want the rectangle's fill", r.X, r.Y, r.Fill)
			}
			checked++
		}
	}
	if checked < 20 {
		t.Errorf("only %d rectangles were checked, want 20", checked)
	}
}
