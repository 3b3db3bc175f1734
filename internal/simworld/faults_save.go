package main

const (
	partsFile      = "checkpoint/parts.go"
	unfinishedFile = "checkpoint/unfinished.go"
	safeFile       = "internal/safefile/safefile.go"
)

// saveFaults are faults of checkpoints and of package safefile.
var saveFaults = []fault{
	// ---- a file replaces another
	{"a file is renamed before its bytes are on the disk", unfinishedFile,
		"	return f.file.Sync()\n", "	return nil\n", ""},
	{"the last bytes stay in the buffer", unfinishedFile,
		"	if err := w.Flush(); err != nil {\n		return err\n	}\n", "", ""},
	{"an error of writing is ignored", unfinishedFile,
		"	if err := w.Flush(); err != nil {\n		return err\n	}\n", "	w.Flush()\n", ""},
	{"the folder is not synced", unfinishedFile,
		"	if err := safefile.SyncFolder(f.path); err != nil {\n		return &notDurable{err}\n	}\n", "", ""},
	{"SyncFolder syncs nothing", safeFile,
		"		err = errors.Join(dir.Sync(), dir.Close())\n", "		err = dir.Close()\n", ""},
	// ---- parts
	{"an index forgets what it replaced", "checkpoint/sharded.go",
		"		index.Metadata[replacedKey] = strings.Join(replaced, \" \")\n", "", ""},
	{"a ranks' checkpoint forgets what it replaced", "checkpoint/pytorch_write.go",
		"		comment = replacesComment + strings.Join(replaced, \" \")\n", "", ""},
	{"a stale lookup decides that a file is abandoned", unfinishedFile,
		"names(name, file) && os.Rename(name, name+abandonedSuffix) == nil",
		"names(name, file) && (os.Rename(name, name+abandonedSuffix) == nil || true)", ""},
	{"an abandoned file goes although its parts cannot be removed", partsFile,
		"		left = left || err != nil && !errors.Is(err, fs.ErrNotExist)\n", "", ""},
}
