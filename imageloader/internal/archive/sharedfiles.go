package archive

import (
	"slices"
	"sync"
)

// maxIdleShards is the maximum number of open shards that no reader uses. Each reader may have one
// more shard open. The limit matters for archives with thousands of shards.
const maxIdleShards = 32

// sharedFiles are the shards of an archive that readers have opened, by number.
type sharedFiles struct {
	mu    sync.Mutex
	files map[int]*sharedFile
	idle  []int // shards without a user, the least recently used first
}

type sharedFile struct {
	open   sync.Once // runs without holding mu, because a server may be slow
	file   File
	mapped *mapping // nil: not mapped
	err    error
	users  int
}

// acquire opens and maps a shard, unless it is already open. Any number of goroutines may read the
// file until they call release.
func (s *sharedFiles) acquire(shard int, open func(shard int) (File, error), maps *Mappings) (*sharedFile, error) {
	s.mu.Lock()
	f := s.files[shard]
	if f == nil {
		f = &sharedFile{}
		if s.files == nil {
			s.files = map[int]*sharedFile{}
		}
		s.files[shard] = f
	}
	f.users++
	if k := slices.Index(s.idle, shard); k >= 0 {
		s.idle = slices.Delete(s.idle, k, k+1)
	}
	s.mu.Unlock()
	f.open.Do(func() {
		if f.file, f.err = open(shard); f.err == nil {
			f.mapped = maps.of(shard, f.file)
		}
	})
	if f.err != nil {
		s.release(shard)
		return nil, f.err
	}
	return f, nil
}

// release ends the use of a shard. It must be called once for each successful acquire, and before
// close.
func (s *sharedFiles) release(shard int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[shard]
	if f.users--; f.users > 0 {
		return
	}
	if f.err != nil { // the next acquire tries again
		delete(s.files, shard)
		return
	}
	s.idle = append(s.idle, shard)
	if len(s.idle) > maxIdleShards {
		_ = s.files[s.idle[0]].file.Close() // only read
		delete(s.files, s.idle[0])
		s.idle = slices.Delete(s.idle, 0, 1)
	}
}

func (s *sharedFiles) close() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.files {
		if f.file == nil {
			continue
		}
		if e := f.file.Close(); err == nil {
			err = e
		}
	}
	s.files, s.idle = nil, nil
	return err
}
