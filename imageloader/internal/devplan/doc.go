// Package devplan plans the images that a GPU decodes. A plan describes how to decode the required
// part of one JPEG: it has the JPEG's tables, its segments, and their positions.
//
// [EntryPoints] holds the entry points of an index's JPEGs, which are positions in their bit
// streams where decoding can start (docs/entry-points.md). Some images are planned without their
// bytes on the host. For these, EntryPoints also holds heads ([Head]: the segments from a file's
// start that a plan needs) and baseline copies of progressive JPEGs ([Copy]). A [Planner] makes
// plans for one goroutine. It writes them to a [Staging], the memory that the consumer lends with a
// slot.
//
// There are five ways to plan an image. All give the same pixels:
//
//   - [Planner.Plan]: a baseline JPEG whose bytes are on the host, by its entry points.
//   - [Planner.PlanScan]: a baseline JPEG without entry points. The device finds and returns them.
//   - [Planner.PlanCopy]: a progressive JPEG, from a baseline copy in memory.
//   - [Planner.PlanPart]: a JPEG in a local .tar, or stored in a local zip. Only the crop's share
//     of the file is read.
//   - [Planner.PlanMember]: a JPEG in a .tgz, or deflated in a zip. The device inflates the member.
//
// Package epoch decides which images are planned, and chooses one of these ways for each (plan.go
// there).
//
// If the device cannot decode an image, the host decodes it again: see [Redo].
package devplan
