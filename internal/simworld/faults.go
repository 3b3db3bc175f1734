package main

// fault is a fault that is planted into a copy of the product: the simulation must find it.
type fault struct {
	name     string
	file     string // path in the repository
	old, new string // old occurs exactly once in the file
	missed   string // why no seed finds it; "": one must
}

// plantedFault is a fault that a scenario must find.
type plantedFault struct {
	fault
	scenario string
}

const (
	dealFile   = "internal/order/deal.go"
	resumeFile = "internal/order/resume.go"
	streamFile = "imageloader/internal/epoch/stream.go"
	httpFile   = "imageloader/internal/archive/http.go"
	remoteFile = "imageloader/internal/archive/remote.go"
)

// loaderFaults are faults of the loader.
var loaderFaults = []fault{
	// ---- the order and the deal
	{"a rank takes its neighbour's position in the last turn", dealFile,
		"	number := d.Rank + turn*d.World\n	return", "	number := (d.Rank + turn) * d.World\n	return", ""},
	{"the rest is dealt without the remainder", dealFile,
		"	if d.Left%s.World != 0 {\n		d.Turns++\n	}", "", ""},
	{"DropLast keeps a short batch of several ranks", dealFile,
		"		d.Turns -= short\n		return d", "		_ = short\n		return d", ""},
	{"PadLast fills one sample too few", dealFile,
		"d.Turns += s.Batch - short", "d.Turns += s.Batch - short - 1", ""},
	{"a stream forgets that positions were dealt before", dealFile,
		"		number += before * d.Left\n", "		number += before\n", ""},
	{"a second deal starts at the first position", dealFile,
		"		out.Next = d.Done.Without(first)", "		out.Next = first", ""},
	{"positions ahead are forgotten", dealFile,
		"			out.Ahead = append(out.Ahead, d.Done.Without(rank+i*d.World))", "", ""},
	{"the positions ahead are not sorted", dealFile, "	sort.Ints(out.Ahead)\n", "	_ = sort.Ints\n", ""},
	{"a rank resumes one turn early", resumeFile, "Turn: own.Turns, Batches", "Turn: max(0, own.Turns-1), Batches", ""},
	{"a rank forgets its batches when it resumes", resumeFile, "Batches: own.Batches, Before: own.Before}",
		"Before: own.Before}", ""},
	{"batches before a deal are counted twice", resumeFile, "Done: done, Before: first.all()}",
		"Done: done, Before: first.all() + first.Before}",
		""},
	{"other ranks' states are ignored", resumeFile, "byRank[rank]; given {\n			turns[rank] = m.Turns",
		"byRank[rank]; given {\n			_ = m", ""},
	{"skipped samples end an epoch early", resumeFile, "		return d.MaxTurns()\n", "		return d.Turns\n", ""},
	{"positions in the set are counted from zero", "internal/order/positions.go",
		"	return p - s.Next - k, k <", "	return p - s.Next, k <", ""},
	{"Without looks behind the position", "internal/order/positions.go",
		"s.Ahead[k]-s.Next-k > j", "s.Ahead[k]-s.Next-k >= j", ""},
	{"all epochs have one order", "internal/order/sequence.go", "	Seed(&g, seed, OfEpoch, epoch, 0)\n	rand.New(&g).Shuffle",
		"	Seed(&g, seed, OfEpoch, 0, 0)\n	rand.New(&g).Shuffle", ""},
	{"rounds have one order", "internal/order/sequence.go", "	if s.order == nil || s.round != round {",
		"	if s.order == nil {", ""},
	{"the shuffle buffer holds one sample more", "internal/order/shuffler.go", "n >= s.max ||", "n > s.max ||", ""},
	{"a shuffle buffer ignores its bytes", "internal/order/shuffler.go", "s.bytes+bytes > s.maxBytes ||", "", ""},
	{"weighted draws repeat in each epoch", "internal/order/weights.go", "OfDraw, epoch, position)", "OfDraw, 0, position)", ""},
	// ---- an epoch
	{"padding repeats the crop", "imageloader/internal/epoch/random.go", "again+uint64(before)*repeated", "again+uint64(before)*0", ""},
	{"a crop forgets the epoch", "imageloader/internal/epoch/decode.go",
		"d.config.Order.Seed, order.OfSample, it.Draw.Epoch,", "d.config.Order.Seed, order.OfSample, 0,", ""},
	{"a stream's second pass may be over another archive", streamFile,
		"	if err := a.Changed(p.archive.Info()); err != nil {", "	if err := a.Changed(a.Info()); err != nil {", ""},
	{"samples left in the buffer move the state", streamFile,
		"		p.flow.stray.Store(int64(p.flow.next))\n", "", ""},
	{"a read error loses the buffer", streamFile,
		"	if stopped := flush(); stopped != nil {",
		"	if err != nil {\n		return err\n	}\n	if stopped := flush(); stopped != nil {",
		"the samples after the last state are lost for this process, as a kill loses them, and the next process has them"},
	{"a stream resumes at its start", streamFile, "!mine || turn < p.start.Turn || turn >= end", "!mine || turn >= end", ""},
	{"an epoch reads an archive that has changed", "imageloader/internal/epoch/run.go",
		"		if err := source.Known.Changed(a); err != nil {\n			return err\n		}", "", ""},
	{"a short batch under an error is a whole one", "imageloader/internal/epoch/deliver.go",
		"d.hand(&r, n == size || err == nil && d.samples+n >= p.asm.Wanted())", "d.hand(&r, true)", ""},
	{"a batch that bad samples cut short is a whole one", "imageloader/internal/epoch/deliver.go",
		"err == nil && d.samples+n >= p.asm.Wanted())", "err == nil)", ""},
	{"a read error is lost if the buffer has enough samples", "imageloader/internal/epoch/deliver.go",
		"	if d.stray { // there", "	if false { // there", ""},
	{"a state counts the batch before", "imageloader/internal/epoch/deliver.go", "		d.place.Batches++\n		d.place.Turns = turns",
		"		d.place.Batches++", ""},
	{"DropLast delivers a short batch", "imageloader/internal/epoch/deliver.go",
		"if n == size || n > 0 && !p.config.Batch.Share.DropLast {", "if n == size || n > 0 {", ""},
	{"labels are not written", "imageloader/internal/epoch/deliver.go", "putLabel(memory.labels[8*row:], r.Samples[row].Label)",
		"_ = row", "Loader.Epoch takes the labels from the samples, not from the memory that it has lent"},
	// ---- batches
	{"a bad sample's row stays", "internal/assembly/assembly.go", "		s.Memory.Substitute(row, from)\n", "", ""},
	{"a substitute keeps the bad sample's name", "internal/assembly/assembly.go", "		samples[row] = samples[from]\n", "", ""},
	{"rows are not exchanged", "internal/assembly/assembly.go",
		"		s.Memory.Exchange(row, from.Memory, fromRow, other != noOwner)\n", "", ""},
	{"exchanged rows are only copied", "internal/assembly/assembly.go", "fromRow, other != noOwner)", "fromRow, false)", ""},
	{"a batch is delivered while a worker writes", "internal/assembly/assembly.go",
		"p != noOwner && a.sequence.flight(p).state == Pending {", "p != noOwner && false {", ""},
	// ---- states
	{"a state of another archive is accepted", "imageloader/restore.go",
		"	case have.Bytes != was.Bytes:", "	case false:", "a digest of the samples tells the archives apart as well"},
	{"an epoch after a restored one keeps its start", "imageloader/fill.go",
		"	if l.resume != nil && l.resume.Epoch == number {\n		return *l.resume, l.order",
		"	if l.resume != nil {\n		at := *l.resume\n		at.Epoch = number\n		return at, l.order", ""},
	// ---- the index
	{"the index is renamed before it is synced", "internal/safefile/safefile.go",
		"	if err := f.Sync(); err != nil {\n		return nil, err\n	}\n	if err := Check(path, kind); err != nil { // again",
		"	if err := Check(path, kind); err != nil { // again", ""},
	{"a temporary file stays after an error", "internal/safefile/safefile.go",
		"			_ = f.Close() // err says more\n			_ = os.Remove(f.Name())\n", "			_ = f.Close() // err says more\n",
		"a process that met a fault may leave a temporary file: its removal may fail too"},
	{"an index is written in place", "internal/safefile/safefile.go",
		"os.CreateTemp(filepath.Dir(path), filepath.Base(path)+\".*.tmp\")", "os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)", ""},
	{"an index of another version of the archive is used", "imageloader/internal/index/sidecar_load.go",
		"	if int64(le.Uint64(item)) != now.Info.Size() || name", "	if name", ""},
	{"the time of a copied archive is not compared", "imageloader/internal/index/sidecar_load.go",
		"	if int64(le.Uint64(item[8:])) == now.Info.ModTime().UnixNano() && !now.Info.ModTime().IsZero() {", "	if true {", ""},
	{"the first bytes of a copied archive are not compared", "imageloader/internal/index/sidecar_load.go",
		"	if digest != le.Uint32(item[16:]) {", "	if false && digest != le.Uint32(item[16:]) {", ""},
	{"a damaged section is used", "imageloader/internal/index/section.go",
		"n < len(b) || s.checked && crc32.ChecksumIEEE(b) != s.crc {", "n < len(b) {", ""},
	{"a damaged section of members is used", "imageloader/internal/index/section.go",
		"			if r.s.checked && r.crc != r.s.crc {", "			if false {", ""},
	{"a damaged header of an index is used", "imageloader/internal/index/sidecar.go",
		"	if crc32.ChecksumIEEE(head[:28]) != le.Uint32(head[28:]) || n", "	if n", ""},
	{"the file that a process writes into stays open", "imageloader/internal/index/making.go",
		"	_ = m.file.Close() // no data to lose\n", "", ""},
	{"the lock's file stays", "imageloader/internal/index/making.go",
		"	m.removeName()     // if the name stays, the next process locks the file\n", "", ""},
	{"a process waits for one that has failed", "imageloader/internal/index/making.go",
		"		m.say(makingFailed)\n", "		_ = makingFailed\n",
		"a waiting process then makes the index itself, which only takes longer"},
	{"the goroutine that writes into the lock stays", "imageloader/internal/index/making.go",
		"	close(m.stop)\n	m.beating.Wait()\n", "", ""},
	// ---- servers
	{"a server's other version is read", httpFile, "	if err := changed(s.url, answer.info, s.info); err != nil {",
		"	if err := error(nil); err != nil {", ""},
	{"a compressed answer is read", httpFile, "		err = answer.refuseEncoded(r)\n", "", ""},
	{"a compressed answer of the same length is read", httpFile, " || inflatesTo(body, a.left) {", " {", ""},
	{"a short answer is taken for the whole", httpFile, "err == io.EOF && a.left > 0 {", "false {", ""},
	{"an answer of another range is read", httpFile, "err != nil || first != offset || last", "err != nil || last", ""},
	{"an answer that ends early is not asked again", remoteFile, "	for n < len(p) {\n		got, err := f.response(",
		"	if n < len(p) {\n		got, err := f.response(", ""},
	{"a retry starts at the first byte again", remoteFile, "		got, err := f.once(ctx, p[n:], at+int64(n))",
		"		got, err := f.once(ctx, p[n:], at)", ""},
	{"a stalled server is waited for without end", remoteFile,
		"		cancel(fmt.Errorf(\"less than", "		_ = (fmt.Errorf(\"less than", ""},
	{"an error of a server is not repeated", remoteFile, "q.tries >= sourceTries &&", "", ""},
}

// faults returns all planted faults.
func faults() (list []plantedFault) {
	for _, of := range []struct {
		scenario string
		faults   []fault
	}{{"loader", loaderFaults}, {"save", saveFaults}, {"control", controlFaults}} {
		for _, f := range of.faults {
			list = append(list, plantedFault{f, of.scenario})
		}
	}
	return list
}
