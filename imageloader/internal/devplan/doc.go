// Package devplan plans the images that a GPU decodes. A plan describes how to decode the required
// part of one JPEG: it has the JPEG's tables, its segments, and their positions.
//
// [EntryPoints] holds the loader's knowledge of an index's JPEGs: entry points into their bit
// streams (docs/entry-points.md). For images whose bytes are not on the host during planning, it
// also holds heads ([Head]: what a plan needs of a file's start) and baseline copies of progressive
// JPEGs ([Copy]). A [Planner] makes plans for one goroutine. It writes them to a [Staging], the
// memory that the consumer lends with a slot.
//
// There are five ways to plan an image. All give the same pixels:
//
//   - [Planner.Plan]: a baseline JPEG whose bytes are on the host, by its entry points.
//   - [Planner.PlanScan]: a baseline JPEG without entry points. The device finds and returns them.
//   - [Planner.PlanCopy]: a progressive JPEG, from a baseline copy in memory.
//   - [Planner.PlanPart]: a JPEG in a local .tar. Only the crop's share of the file is read.
//   - [Planner.PlanMember]: a JPEG in a .tgz. The device inflates the member.
//
// Package epoch decides which images are planned, and in which of these ways (plan.go there).
//
// If the device cannot decode an image, the host decodes it again: see [Redo].
package devplan
