package world

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Disk is a file system in memory. It knows what a loss of power may take: the writes and sizes of
// a file since its last Sync, and the names in a folder since the last Sync of the folder.
type Disk struct {
	Faults  Faults
	Network bool              // names and attributes may be a few seconds old, unless the file was opened since
	Torn    bool              // a loss of power has kept the removal of a renamed file's old name alone
	Away    bool              // a server has renamed a file and then has not answered some calls
	Other   map[string][]byte // other versions of files, which servers may have

	world   *World
	names   map[string]*inode // by clean absolute path
	durable map[string]*inode // the names after a loss of power
	pending []nameChange      // changes that are in names only, in order
}

// Faults says how rare faults are: one call in this number; 0: none.
type Faults struct {
	Read  int // EIO, at once or after some bytes, or a short read
	Write int // ENOSPC, EIO or a short write
	Name  int // errors of opening, creating and looking up
	Move  int // errors of renaming, removing and listing
	Sync  int // EIO
	Lock  int // EINTR, or no locks
	Fstat int // EIO

	Server int // of responses of a server
	Stop   int // the process is stopped for a while
}

type nameChange struct {
	path  string
	now   *inode // nil: the name is removed
	moved bool   // the change before gave the file another name
}

// inode is a file or a folder.
type inode struct {
	number  int
	dir     bool
	mode    fs.FileMode
	changed time.Time
	data    []byte
	synced  []byte
	pending []write // changes of data since the last sync, in order
	locks   map[*File]bool
	shared  bool // the locks are shared
}

// write is a change of a file's bytes. If cut is set, it sets the size to at instead.
type write struct {
	at   int
	data []byte
	cut  bool
}

func newDisk(w *World) *Disk {
	d := &Disk{world: w, names: map[string]*inode{}, durable: map[string]*inode{}}
	d.Mkdir("/")
	return d
}

func (d *Disk) inode(dir bool, mode fs.FileMode) *inode {
	d.world.next++
	return &inode{number: d.world.next, dir: dir, mode: mode, changed: time.Now(), locks: map[*File]bool{}}
}

// Mkdir makes a folder and its parents durably, without a fault.
func (d *Disk) Mkdir(name string) {
	for at := path.Clean(name); ; at = path.Dir(at) {
		if d.names[at] == nil {
			d.names[at] = d.inode(true, fs.ModeDir|0o755)
			d.durable[at] = d.names[at]
		}
		if at == "/" {
			return
		}
	}
}

// Write writes a whole file durably, without a fault, as a new inode.
func (d *Disk) Write(name string, data []byte) {
	d.Mkdir(path.Dir(name))
	n := d.inode(false, 0o644)
	n.data, n.synced = slices.Clone(data), slices.Clone(data)
	d.names[name], d.durable[name] = n, n
}

// Overwrite changes the bytes of a file in place, with a new time of change.
func (d *Disk) Overwrite(name string, data []byte) {
	n := d.names[name]
	n.data, n.synced, n.pending, n.changed = slices.Clone(data), slices.Clone(data), nil, time.Now()
}

// Age makes a file older.
func (d *Disk) Age(name string, by time.Duration) {
	d.names[name].changed = d.names[name].changed.Add(-by)
}

// Changed returns the time of a file's last change.
func (d *Disk) Changed(name string) time.Time { return d.names[name].changed }

// Delete removes a file durably, without a fault.
func (d *Disk) Delete(name string) {
	delete(d.names, name)
	delete(d.durable, name)
}

// Read returns the bytes of a file. ok is false if there is none.
func (d *Disk) Read(name string) (data []byte, ok bool) {
	n := d.names[name]
	if n == nil || n.dir {
		return nil, false
	}
	return n.data, true
}

// Clear removes all files durably.
func (d *Disk) Clear() {
	for _, names := range []map[string]*inode{d.names, d.durable} {
		maps.DeleteFunc(names, func(_ string, n *inode) bool { return !n.dir })
	}
	d.pending = nil
}

// Files returns the paths of all files, in order.
func (d *Disk) Files() []string {
	var list []string
	for name, n := range d.names {
		if !n.dir {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// setName changes a name.
func (d *Disk) setName(name string, now *inode) {
	if now == nil {
		delete(d.names, name)
	} else {
		d.names[name] = now
	}
	d.pending = append(d.pending, nameChange{path: name, now: now})
}

// syncFolder makes the names in a folder durable.
func (d *Disk) syncFolder(folder *inode) {
	d.pending = slices.DeleteFunc(d.pending, func(c nameChange) bool {
		in := d.names[path.Dir(c.path)] == folder
		if in {
			d.settle(c)
		}
		return in
	})
}

// settle makes a change of a name durable.
func (d *Disk) settle(c nameChange) {
	if c.now == nil {
		delete(d.durable, c.path)
	} else {
		d.durable[c.path] = c.now
	}
}

// crash keeps what was synced, and of the rest what the seed says.
func (d *Disk) crash() {
	w := d.world
	before := false
	for _, c := range d.pending {
		kept := w.Choose("crash name "+path.Base(c.path), 2) == 0
		if kept {
			d.settle(c)
		}
		d.Torn = d.Torn || c.moved && kept && !before
		before = kept
	}
	d.pending = nil
	d.names = maps.Clone(d.durable)
	for _, name := range slices.Sorted(maps.Keys(d.names)) {
		d.names[name].crash(w, path.Base(name))
	}
}

// crash applies the writes that reached the disk: each wholly, not at all, or its first sectors.
func (n *inode) crash(w *World, name string) {
	if n.dir {
		return
	}
	data := slices.Clone(n.synced)
	for _, c := range n.pending {
		switch w.Choose("crash write "+name, 3) {
		case 1:
			continue
		case 2:
			c.data = c.data[:len(c.data)/2&^511]
		}
		data = c.apply(data)
	}
	n.data, n.synced, n.pending = data, slices.Clone(data), nil
}

// apply returns data after a write.
func (c *write) apply(data []byte) []byte {
	if c.cut {
		if c.at <= len(data) {
			return data[:c.at]
		}
		return append(data, make([]byte, c.at-len(data))...)
	}
	if more := c.at + len(c.data) - len(data); more > 0 {
		data = append(data, make([]byte, more)...)
	}
	copy(data[c.at:], c.data)
	return data
}

func (n *inode) change(c write) {
	n.data = c.apply(n.data)
	n.pending = append(n.pending, c)
	n.changed = time.Now()
}

func (n *inode) unlock(f *File) { delete(n.locks, f) }

// Info describes a file, as os.Stat does.
type Info struct {
	name   string
	number int
	size   int64
	mode   fs.FileMode
	time   time.Time
}

// Name implements fs.FileInfo.
func (i *Info) Name() string { return i.name }

// Size implements fs.FileInfo.
func (i *Info) Size() int64 { return i.size }

// Mode implements fs.FileInfo.
func (i *Info) Mode() fs.FileMode { return i.mode }

// ModTime implements fs.FileInfo.
func (i *Info) ModTime() time.Time { return i.time }

// IsDir implements fs.FileInfo.
func (i *Info) IsDir() bool { return i.mode.IsDir() }

// Sys implements fs.FileInfo.
func (i *Info) Sys() any { return nil }

// SameFile reports whether two descriptions are of one file.
func SameFile(a, b fs.FileInfo) bool {
	x, ok := a.(*Info)
	y, ok2 := b.(*Info)
	return ok && ok2 && x.number == y.number
}

func (n *inode) info(name string) *Info {
	size := int64(len(n.data))
	if n.dir {
		size = 4096
	}
	return &Info{path.Base(name), n.number, size, n.mode, n.changed}
}

// remembered is an answer that a network disk may give again.
type remembered struct {
	info  *Info // nil: there was no file
	until time.Time
}

func failure(op, name string, err error) error { return &fs.PathError{Op: op, Path: name, Err: err} }

// find enters a call and looks a path up. n is nil if there is no file.
func (w *World) find(op, name string) (p *Process, at string, n *inode, err error) {
	p, at, ok := w.process(path.Clean(name))
	if !ok {
		return nil, "", nil, failure(op, name, fs.ErrNotExist)
	}
	if err := p.enter(op + " " + path.Base(at)); err != nil {
		return nil, "", nil, failure(op, name, err)
	}
	if p.away > 0 && !p.undisturbed() {
		p.away--
		w.faults++
		w.unanswered = append(w.unanswered, op)
		return nil, "", nil, failure(op, name, syscall.EIO)
	}
	return p, at, w.Disk.names[at], nil
}

// Stat describes the file at a path.
func (w *World) Stat(name string) (fs.FileInfo, error) {
	p, at, n, err := w.find("stat", name)
	if err != nil {
		return nil, err
	}
	if p.chance("fault stat "+path.Base(at), 10*w.Disk.Faults.Name, 1) != 0 {
		return nil, failure("stat", name, syscall.EIO)
	}
	if old, ok := p.attributes[at]; w.Disk.Network && ok && time.Now().Before(old.until) && !p.undisturbed() {
		if old.info == nil {
			return nil, failure("stat", name, syscall.ENOENT)
		}
		return old.info, nil
	}
	var info *Info
	if n != nil {
		info = n.info(name)
	}
	p.remember(at, info)
	if n == nil {
		return nil, failure("stat", name, w.missing(at))
	}
	return info, nil
}

// remember keeps an answer for a while, as a network disk does.
func (p *Process) remember(at string, info *Info) {
	if p.world.Disk.Network {
		p.attributes[at] = remembered{info, time.Now().Add(3 * time.Second)}
	}
}

// missing returns the error for a path without a file.
func (w *World) missing(at string) error {
	for up := path.Dir(at); up != "/"; up = path.Dir(up) {
		if n := w.Disk.names[up]; n != nil && !n.dir {
			return syscall.ENOTDIR
		}
	}
	return syscall.ENOENT
}

// Open flags, as in package os.
const (
	ReadOnly  = syscall.O_RDONLY
	WriteOnly = syscall.O_WRONLY
	ReadWrite = syscall.O_RDWR
	Create    = syscall.O_CREAT
	Exclusive = syscall.O_EXCL
	Truncate  = syscall.O_TRUNC
	Append    = syscall.O_APPEND
)

// File is an open file.
type File struct {
	name    string
	process *Process
	inode   *inode
	flags   int
	at      int64
	broken  bool // the next read fails
	closed  bool
}

// Open opens a file.
func (w *World) Open(name string, flags int, mode fs.FileMode) (*File, error) {
	p, at, n, err := w.find("open", name)
	if err != nil {
		return nil, err
	}
	switch p.chance("fault open "+path.Base(at), w.Disk.Faults.Name, 3) {
	case 1:
		return nil, failure("open", name, syscall.EIO)
	case 2:
		return nil, failure("open", name, syscall.EMFILE)
	case 3:
		if flags&(WriteOnly|ReadWrite) != 0 {
			return nil, failure("open", name, syscall.EACCES)
		}
	}
	switch {
	case n == nil && flags&Create == 0:
		return nil, failure("open", name, w.missing(at))
	case n != nil && flags&Create != 0 && flags&Exclusive != 0:
		return nil, failure("open", name, syscall.EEXIST)
	case n != nil && n.dir && flags&(WriteOnly|ReadWrite) != 0:
		return nil, failure("open", name, syscall.EISDIR)
	case n == nil:
		if up := w.Disk.names[path.Dir(at)]; up == nil || !up.dir {
			return nil, failure("open", name, w.missing(at))
		}
		n = w.Disk.inode(false, mode.Perm())
		w.Disk.setName(at, n)
	}
	if flags&Truncate != 0 {
		n.change(write{cut: true})
	}
	p.remember(at, n.info(name)) // opening asks the server
	f := &File{name: name, process: p, inode: n, flags: flags}
	p.open[f] = true
	return f, nil
}

// CreateTemp creates a file with a new name, in which the last * of the pattern is a number.
func (w *World) CreateTemp(folder, pattern string) (*File, error) {
	w.next++
	before, after, _ := strings.Cut(pattern, "*")
	name := path.Join(folder, before+itoa(w.next)+after)
	return w.Open(name, ReadWrite|Create|Exclusive, 0o600)
}

func itoa(n int) string {
	const digits = "0123456789"
	if n < 10 {
		return digits[n : n+1]
	}
	return itoa(n/10) + digits[n%10:n%10+1]
}

// Remove removes a name.
func (w *World) Remove(name string) error {
	p, at, n, err := w.find("remove", name)
	if err != nil {
		return err
	}
	if p.chance("fault remove "+path.Base(at), w.Disk.Faults.Move, 1) != 0 {
		return failure("remove", name, syscall.EIO)
	}
	if n == nil {
		return failure("remove", name, w.missing(at))
	}
	w.Disk.setName(at, nil)
	delete(p.attributes, at)
	return nil
}

// Rename moves a name. A loss of power may keep the new name, the removal of the old one, both or
// neither. A server may move the name and answer with an error.
func (w *World) Rename(from, to string) error {
	p, at, n, err := w.find("rename", from)
	if err != nil {
		return err
	}
	_, target, _ := w.process(path.Clean(to))
	fault := p.chance("fault rename "+path.Base(target), w.Disk.Faults.Move, 5)
	if fault == 1 || fault == 2 {
		return failure("rename", from, syscall.EIO)
	}
	if n == nil {
		return failure("rename", from, w.missing(at))
	}
	w.Disk.setName(target, n)
	w.Disk.setName(at, nil)
	w.Disk.pending[len(w.Disk.pending)-1].moved = true
	p.renames++
	if p.renames == p.killAfter {
		p.killAt = p.calls + 1
	}
	delete(p.attributes, at)
	switch fault {
	case 3: // the server has got the request twice
		return failure("rename", from, syscall.ENOENT)
	case 4: // the server's answer comes too late
		return failure("rename", from, syscall.EIO)
	case 5: // it answers none of the next calls either
		p.away, w.Disk.Away = 2+w.Choose("calls without an answer", 4), true
		return failure("rename", from, syscall.EIO)
	}
	p.remember(target, n.info(to))
	return nil
}

// MkdirAll makes a folder and its parents.
func (w *World) MkdirAll(name string, mode fs.FileMode) error {
	_, at, _, err := w.find("mkdir", name)
	if err != nil {
		return err
	}
	var missing []string
	for up := at; w.Disk.names[up] == nil; up = path.Dir(up) {
		missing = append(missing, up)
	}
	for _, up := range slices.Backward(missing) {
		w.Disk.setName(up, w.Disk.inode(true, fs.ModeDir|mode.Perm()))
	}
	return nil
}

// ReadDir lists a folder in the order of names.
func (w *World) ReadDir(name string) ([]fs.DirEntry, error) {
	p, at, n, err := w.find("readdir", name)
	if err != nil {
		return nil, err
	}
	if n == nil {
		return nil, failure("open", name, w.missing(at))
	}
	if p.chance("fault readdir "+path.Base(at), w.Disk.Faults.Move, 1) != 0 {
		return nil, failure("readdir", name, syscall.EIO)
	}
	var list []fs.DirEntry
	for name, n := range w.Disk.names {
		if name != "/" && path.Dir(name) == at {
			list = append(list, fs.FileInfoToDirEntry(n.info(name)))
		}
	}
	slices.SortFunc(list, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return list, nil
}

// enter enters a call on an open file.
func (f *File) enter(op string) error {
	if f.closed {
		return failure(op, f.name, fs.ErrClosed)
	}
	if err := f.process.enter(op + " " + path.Base(f.name)); err != nil {
		return failure(op, f.name, err)
	}
	if f.closed {
		return failure(op, f.name, fs.ErrClosed)
	}
	return nil
}

func (f *File) chance(what string, rarity, kinds int) int {
	return f.process.chance("fault "+what+" "+path.Base(f.name), rarity, kinds)
}

// Name returns the path with which the file was opened.
func (f *File) Name() string { return f.name }

// Read reads from the current offset. It may read fewer bytes.
func (f *File) Read(p []byte) (int, error) {
	if err := f.enter("read"); err != nil {
		return 0, err
	}
	if f.inode.dir {
		return 0, failure("read", f.name, syscall.EISDIR)
	}
	if len(p) == 0 {
		return 0, nil
	}
	left := f.inode.data[min(f.at, int64(len(f.inode.data))):]
	fault := f.chance("read", f.process.world.Disk.Faults.Read, 4)
	if fault == 1 || f.broken {
		f.broken = false
		return 0, failure("read", f.name, syscall.EIO)
	}
	if len(left) == 0 {
		return 0, io.EOF
	}
	switch fault {
	case 2: // the bytes after these are on a bad sector
		f.broken = true
		left = left[:1+f.process.world.Choose("bytes before a bad sector", len(left))]
	case 3, 4: // EINTR is the same: package os repeats the call
		left = left[:1+len(left)/3]
	}
	n := copy(p, left)
	f.at += int64(n)
	return n, nil
}

// ReadAt reads at an offset.
func (f *File) ReadAt(p []byte, at int64) (int, error) {
	if err := f.enter("readat"); err != nil {
		return 0, err
	}
	if f.chance("readat", f.process.world.Disk.Faults.Read, 1) != 0 {
		return 0, failure("read", f.name, syscall.EIO)
	}
	if at < 0 {
		return 0, failure("readat", f.name, errors.New("negative offset"))
	}
	if at >= int64(len(f.inode.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.inode.data[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// Write writes at the current offset.
func (f *File) Write(p []byte) (int, error) {
	n, err := f.WriteAt(p, f.at)
	f.at += int64(n)
	return n, err
}

// WriteAt writes at an offset. After an error it has written a part.
func (f *File) WriteAt(p []byte, at int64) (int, error) {
	if err := f.enter("write"); err != nil {
		return 0, err
	}
	if f.flags&(WriteOnly|ReadWrite) == 0 {
		return 0, failure("write", f.name, syscall.EBADF)
	}
	var err error
	switch f.chance("write", f.process.world.Disk.Faults.Write, 3) {
	case 1, 2:
		p, err = p[:len(p)/2], failure("write", f.name, syscall.ENOSPC)
	case 3:
		p, err = nil, failure("write", f.name, syscall.EIO)
	}
	if len(p) > 0 {
		f.inode.change(write{at: int(at), data: slices.Clone(p)})
	}
	return len(p), err
}

// Seek sets the current offset.
func (f *File) Seek(offset int64, whence int) (int64, error) {
	switch {
	case f.closed:
		return 0, failure("seek", f.name, fs.ErrClosed)
	case whence == io.SeekCurrent:
		offset += f.at
	case whence == io.SeekEnd:
		offset += int64(len(f.inode.data))
	}
	if offset < 0 {
		return 0, failure("seek", f.name, syscall.EINVAL)
	}
	f.at = offset
	return offset, nil
}

// Stat describes the open file.
func (f *File) Stat() (fs.FileInfo, error) {
	if err := f.enter("fstat"); err != nil {
		return nil, err
	}
	if f.chance("fstat", f.process.world.Disk.Faults.Fstat, 1) != 0 {
		return nil, failure("stat", f.name, syscall.EIO)
	}
	return f.inode.info(f.name), nil
}

// Sync makes the bytes of a file or the names of a folder durable.
func (f *File) Sync() error {
	if err := f.enter("sync"); err != nil {
		return err
	}
	if f.chance("sync", f.process.world.Disk.Faults.Sync, 1) != 0 {
		f.inode.pending = nil // Linux drops what it could not write, and the next fsync succeeds
		return failure("sync", f.name, syscall.EIO)
	}
	if f.inode.dir {
		f.process.world.Disk.syncFolder(f.inode)
		return nil
	}
	f.inode.synced, f.inode.pending = slices.Clone(f.inode.data), nil
	return nil
}

// Chmod changes the mode.
func (f *File) Chmod(mode fs.FileMode) error {
	if err := f.enter("chmod"); err != nil {
		return err
	}
	f.inode.mode = mode.Perm()
	if _, at, ok := f.process.world.process(path.Clean(f.name)); ok {
		f.process.remember(at, f.inode.info(f.name)) // the server's answer has them
	}
	return nil
}

// Truncate sets the size.
func (f *File) Truncate(size int64) error {
	if err := f.enter("truncate"); err != nil {
		return err
	}
	f.inode.change(write{at: int(size), cut: true})
	return nil
}

// Close closes the file and releases its lock.
func (f *File) Close() error {
	if f.closed {
		return failure("close", f.name, fs.ErrClosed)
	}
	f.closed = true
	if !f.process.dead {
		f.inode.unlock(f)
	}
	delete(f.process.open, f)
	return nil
}

// Lock locks the file without waiting, shared or exclusively. The error is EWOULDBLOCK if another
// open file has a lock.
func (f *File) Lock(shared bool) error {
	if err := f.enter("lock"); err != nil {
		return syscall.EIO
	}
	switch f.chance("lock", f.process.world.Disk.Faults.Lock, 2) {
	case 1:
		return syscall.EINTR
	case 2:
		return syscall.ENOLCK
	}
	n := f.inode
	for other := range n.locks {
		if other != f && !(shared && n.shared) {
			return syscall.EWOULDBLOCK
		}
	}
	n.locks[f], n.shared = true, shared
	return nil
}
