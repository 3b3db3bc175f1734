// Package decodeplan is what a source of images and the prefetcher share when the prefetcher's GPU
// decodes the images. The two do not import each other.
package decodeplan

// Plans holds the plans of one slot's images. The consumer owns it, and lends it together with the
// slot; the source fills it in until it delivers the batch.
type Plans struct {
	// Memory is where the source writes plans (imagecapi.PlanSegments): pinned memory, aligned to
	// Align bytes.
	Memory []byte
	// Rows has the place of each row's plan, for BatchSize rows.
	Rows []Row
	// Used is the number of bytes from the beginning of Memory that hold plans.
	Used int
}

// Row is the place of a row's plan in Plans.Memory. The zero value is that of a row whose pixels
// the source has written. Two rows may have one plan.
type Row struct{ At, Bytes int }

// Align is the alignment of a plan, in bytes.
const Align = 16
