package trace

import "io"

// WriteSVG draws the timeline: a row per stream, the copies that are hidden under compute and the
// exposed copies, the work of the host, and the figures of [Trace.Summary]. The file is
// self-contained, and shows the name of the event under the mouse.
func (t *Trace) WriteSVG(w io.Writer, o PictureOptions) error {
	p := t.draw(o)
	return p.WriteSVG(w)
}
