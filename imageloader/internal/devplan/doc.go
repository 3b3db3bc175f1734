// Package devplan plans the images that a GPU decodes. A plan describes how to decode the wanted
// part of one JPEG: its tables, its segments, and their positions.
//
// [EntryPoints] holds the loader's knowledge of the JPEGs of an index: entry points into their bit
// streams (docs/entry-points.md). For images whose bytes are not on the host during planning, it
// also holds heads and baseline copies. A [Planner] plans for one goroutine. It writes plans into a
// [Staging], the memory that the consumer lends with a slot.
//
// There are five ways to plan an image. All give the same pixels:
//
//   - [Planner.Plan]: a baseline JPEG whose bytes are on the host, by its entry points.
//   - [Planner.PlanScan]: one without entry points. The device finds them and hands them back.
//   - [Planner.PlanCopy]: a progressive JPEG, from a baseline copy in memory.
//   - [Planner.PlanPart]: a JPEG of a local .tar, of which only the crop's share is read.
//   - [Planner.PlanMember]: a JPEG of a .tgz, whose member the device inflates.
//
// Package epoch decides which images are planned, and in which of these ways (plan.go there).
//
// The host decodes again every image that the device cannot decode: see [Redo].
package devplan
