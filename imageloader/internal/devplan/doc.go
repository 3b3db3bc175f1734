// Package devplan plans the images that a GPU decodes. A plan has what the device needs to decode
// the wanted part of one JPEG: its tables, its segments, and where they are.
//
// [EntryPoints] holds what the loader knows of the JPEGs of an index: entry points into their bit
// streams (docs/entry-points.md), and, for images whose bytes are not on the host when they are
// planned, heads and baseline copies. A [Planner] plans for one goroutine. It writes a plan into
// the memory that the consumer lends with a slot, a [Staging].
//
// There are five ways to plan an image, which leave the pixels the same:
//
//   - [Planner.Plan]: a baseline JPEG whose bytes are on the host, by its entry points.
//   - [Planner.PlanScan]: one without entry points. The device finds them and hands them back.
//   - [Planner.PlanCopy]: a progressive JPEG, from a baseline copy in memory.
//   - [Planner.PlanPart]: a JPEG of a local .tar, of which only the crop's share is read.
//   - [Planner.PlanMember]: a JPEG of a .tgz, whose member the device inflates.
//
// Whatever the device cannot decode the host decodes again: see [Redo].
package devplan
