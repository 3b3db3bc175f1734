package archive

import "io"

// ReadForward skips to the content of a later member and fills p with it, without reading headers.
// m has the member's name, shard and offset from an index, and position is its ordinal, from 1.
// Name and position are for errors. ReadForward inflates all bytes from the last read to the end of
// p, so that checksums are verified.
func (a *Archive) ReadForward(position int, m *Member, p []byte) error {
	a.position, a.name = position, m.Name
	if err := a.skipTo(m.Shard, m.Offset); err != nil {
		return err
	}
	if _, err := io.ReadFull(a.in, p); err != nil {
		return a.Fail(err)
	}
	return nil
}

// ReadToEnd reads to the end of the last shard, to verify all remaining checksums.
func (a *Archive) ReadToEnd() error {
	for a.shard+1 < len(a.shards) {
		if err := a.finishShard(); err != nil {
			return err
		}
	}
	return a.finishShard()
}

// skipTo skips to an offset of a shard's tar stream, without reading headers.
func (a *Archive) skipTo(shard int, offset int64) error {
	for a.shard < shard {
		if err := a.finishShard(); err != nil {
			return err
		}
	}
	for a.in.offset < offset {
		n := min(skipBytes, offset-a.in.offset)
		if _, err := io.ReadFull(a.in, a.room()[:n]); err != nil {
			return a.Fail(err)
		}
	}
	return nil
}

// finishShard reads to the end of the shard, for its checksum, and moves to the next shard, if any.
func (a *Archive) finishShard() error {
	for {
		if _, err := a.in.Read(a.room()); err == io.EOF {
			break
		} else if err != nil {
			return a.Fail(err)
		}
	}
	if err := a.advance(); err != io.EOF {
		return err
	}
	return nil
}
